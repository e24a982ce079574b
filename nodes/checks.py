"""Values of widgets, checked by our own schema.

ComfyUI leaves all checks of a node's inputs to the node as soon as it has any of its own, and passes on a null that a
client sent; so every node is checked here, as it is validated and again when it runs.
"""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from flashforward_core.engine.rollout import Anchors, DevicePlan
from flashforward_core.model.roles import Backbone

from .sockets import AnchorsSocket, BackboneSocket, DevicesSocket, KVPolicySocket, PlanSocket, PlanValue, PolicyValue

SOCKETS = {
    BackboneSocket.io_type: Backbone,
    PlanSocket.io_type: PlanValue,
    AnchorsSocket.io_type: Anchors,
    DevicesSocket.io_type: DevicePlan,
    KVPolicySocket.io_type: PolicyValue,
    io.Image.io_type: Tensor,
    io.Latent.io_type: dict,
    io.Conditioning.io_type: list,
}
"""What comes through a socket; a client can send anything in a link's place."""
FILES = ("backbone", "planner_lora", "renderer_lora", "lora", "decoder")
"""Combos of files: what is there now may differ from what was listed, so the node itself looks."""


def checked(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """Check widgets' values around the node's own ``validate_inputs`` and before its ``execute``; return the node."""
    own = vars(node)
    if "validate_inputs" in own:
        node.validate_inputs = _validating(own["validate_inputs"].__func__)
    node.execute = _executing(own["execute"].__func__)
    return node


def _validating(method: Callable[..., Any]) -> Any:
    """The node's own check comes before that of the bounds, for its words tell more."""
    parameters = inspect.signature(method).parameters.values()
    takes = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)

    @wraps(method)
    def run(cls: type[io.ComfyNode], **values: Any) -> Any:
        entries = {entry.id: entry for entry in cls.define_schema().inputs}
        known = {name: value for name, value in values.items() if value is not None}  # None: another node brings it
        typed = {name: of_type(entries[name], value) for name, value in known.items() if name in entries}
        own = {name: value for name, value in {**values, **typed}.items() if takes_all or name in takes}
        answer = method(cls, **own)
        if answer is True:
            for name, value in typed.items():
                check_bounds(entries[name], value)
        return answer

    return classmethod(run)


def _executing(method: Callable[..., Any]) -> Any:
    @wraps(method)
    def run(cls: type[io.ComfyNode], **values: Any) -> Any:
        entries = {entry.id: entry for entry in cls.define_schema().inputs}
        typed = {name: of_type(entries[name], value) for name, value in values.items() if name in entries}
        for name, value in typed.items():
            check_bounds(entries[name], value)
        return method(cls, **{**values, **typed})

    return classmethod(run)


def of_type(entry: Any, value: Any) -> Any:
    """Return a widget's value in its type, and what comes through a socket as it is; ``ValueError`` names the input."""
    shown = f"{entry.id}={_short(value)}"
    if isinstance(entry, io.Int.Input | io.Float.Input):
        return _number(entry, value, shown)
    if isinstance(entry, io.Boolean.Input) and not isinstance(value, bool):
        raise ValueError(f"{shown} is neither true nor false; use {entry.id}={entry.default}")
    if isinstance(entry, io.String.Input | io.Combo.Input) and (not isinstance(value, str) or "\0" in value):
        raise ValueError(f"{shown} is not a text; use the value of the node's widget")
    kind = SOCKETS.get(entry.get_io_type())
    if kind is not None and value is not None and not isinstance(value, kind):
        raise ValueError(f"{shown} is no {entry.get_io_type()}; connect a node to {entry.id}")
    return value


def check_bounds(entry: Any, value: Any) -> None:
    """Raise ``ValueError`` for a number outside its bounds and a choice that is none."""
    shown = f"{entry.id}={_short(value)}"
    if isinstance(entry, io.Int.Input | io.Float.Input) and not entry.min <= value <= entry.max:
        raise ValueError(f"{shown} is outside {entry.min} to {entry.max}; use {entry.id}={entry.default}")
    if isinstance(entry, io.Combo.Input) and entry.id not in FILES and value not in entry.options:
        raise ValueError(f"{shown} is unknown; use one of: {', '.join(map(str, entry.options))}")


def _number(entry: Any, value: Any, shown: str) -> int | float:
    whole = isinstance(entry, io.Int.Input)
    try:
        number = int(value) if whole else float(value)  # clients may send numbers as texts, as ComfyUI allows
        if math.isfinite(float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{shown} is not a {'whole ' if whole else ''}number; use {entry.id}={entry.default}")


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
