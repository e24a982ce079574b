"""What the editor's page asks the server: a plan's timeline, before anything runs."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web
from comfy_api.latest import io
from server import PromptServer

from flashforward_core.model.config import EMBEDDED, WAN_1_3B, WAN_14B, WanConfig
from flashforward_core.model.presets import choose_preset, fit_spec
from flashforward_core.prompts import PromptTime, parse, spans
from flashforward_core.specs import RolloutSpec, VideoShape

from .checks import of_type
from .devices import Devices, default_devices, device_plan
from .loading import EMBEDDED as EMBEDDED_CHOICE
from .planning import PLAN_VALUES, Plan, build_spec
from .policies import KVPolicyNode, policy_value
from .prompts import PromptSchedule, at_fps
from .sockets import PolicyValue
from .summary import predict_plan, to_page

PATH = "/flashforward/plan"
DEVICES_VALUES = ("devices", "layout", "order", "decode", "ray_address", "kv", "offload")
_KINDS = {
    io.Int.Input: (int, "whole number"),
    io.Float.Input: (int | float, "number"),
    io.Combo.Input: (str, "text"),
}


def register() -> None:
    """Add the route to ComfyUI's server, once; the server takes it up after the packs have loaded.

    Without a server (the pack is only imported) this does nothing.
    """
    server = getattr(PromptServer, "instance", None)
    if server is not None and all(getattr(known, "path", None) != PATH for known in server.routes):
        server.routes.post(PATH)(plan_route)


async def plan_route(request: web.Request) -> web.Response:
    """Answer with the graph and timeline of a plan; 400 and ``error`` for what cannot work."""
    try:
        body = await request.json()
        return web.json_response(await asyncio.to_thread(answer, body))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return web.json_response({"error": "the request's body is not JSON"}, status=400)
    except ValueError as error:
        return web.json_response({"error": str(error)}, status=400)


def answer(body: Any) -> dict[str, Any]:
    """Simulate what the page asks for.

    ``body`` holds the Plan node's values by name, and where they are known: ``backbone`` and ``kv_policy`` (objects
    with Load Backbone's and KV Policy's values), the Devices node's values,
    ``given_anchors`` (whether Plan Anchors runs first), ``prompts`` (``text`` and ``fps`` of a prompt's node) and
    ``start`` (see ``_start_frames``). Raises ``ValueError`` for what cannot work.
    """
    if not isinstance(body, dict):
        raise ValueError("the request's body is no JSON object; send the Plan node's values by name")
    backbone = body.get("backbone", {})
    if not isinstance(backbone, dict):
        raise ValueError(f"backbone={backbone!r} is no JSON object; send Load Backbone's values by name")
    file_name = _text(backbone, "backbone", EMBEDDED_CHOICE)
    spec, note = _fitted(build_spec(**_plan_values(body)), backbone, mode=_text(body, "preset", "auto"))
    if "kv_policy" in body:
        policy = _policy(body["kv_policy"])
        spec = replace(spec, kv_policy=policy.kv_policy, sparse=policy.sparse)
    if "prompts" in body:
        spec = replace(spec, prompts=spans(_prompt_times(body["prompts"]), spec.shape))
    start = _start_frames(body["start"]) if "start" in body else 0
    spec = replace(spec, start_frames=start or 0)
    chosen: dict[str, Any] = {name: _text(body, name, "") for name in DEVICES_VALUES if name in body}
    if "budget_gib" in body:
        chosen["budget_gib"] = _checked(_devices_entry("budget_gib"), body["budget_gib"], node="Devices")
    if "batch_diagonal" in body:
        chosen["batch_diagonal"] = of_type(_devices_entry("batch_diagonal"), body["batch_diagonal"])
    found = predict_plan(
        spec,
        devices=device_plan(**chosen) if chosen else default_devices(),
        config=_config(file_name),
        given_anchors=body.get("given_anchors") is True,
    )
    return {**to_page(found, start_known=start is not None), "note": note}


def _prompt_times(values: Any) -> list[PromptTime]:
    """Read when which prompt holds; hard cuts among them change what chunks read."""
    if not isinstance(values, dict):
        raise ValueError(f"prompts={values!r} is no JSON object; send the prompt node's values by name")
    times = [prompt.time for prompt in parse(_text(values, "text", ""))]
    if "fps" not in values:
        return times
    (entry,) = [entry for entry in PromptSchedule.define_schema().inputs if entry.id == "fps"]
    fps = _checked(entry, values["fps"], node="Prompt Schedule")
    return [at_fps(time, fps) for time in times]


def _start_frames(start: Any) -> int | None:
    """Count the latent frames that a video begins with; None where that shows only when it runs.

    ``start`` is ``{"frames": n}``, ``{"plan": {...}}`` with the values of the Plan whose whole video goes on, or
    ``{"unknown": true}``.
    """
    if isinstance(start, dict) and start.get("unknown") is True:
        return None
    if isinstance(start, dict) and isinstance(start.get("plan"), dict):
        entries = {entry.id: entry for entry in Plan.define_schema().inputs}
        known = {
            name: _checked(entries[name], start["plan"].get(name), node="Plan")
            for name in ("seconds", "width", "height", "fps")
        }
        return VideoShape.from_seconds(**known).latent_frames
    frames = start.get("frames") if isinstance(start, dict) else None
    if not isinstance(frames, int) or isinstance(frames, bool) or frames < 0:
        raise ValueError(f"start={start!r} is no start; send frames, plan or unknown, or leave it out")
    return frames


def _fitted(spec: RolloutSpec, backbone: Mapping[str, Any], *, mode: str) -> tuple[RolloutSpec, str]:
    """Follow the backbone's preset as Plan does when it runs, as far as the backbone's values tell it."""
    file_name = _text(backbone, "backbone", EMBEDDED_CHOICE)
    loras = [_text(backbone, name, "none") for name in ("planner_lora", "renderer_lora")]
    has_roles = file_name == EMBEDDED_CHOICE or any(lora != "none" for lora in loras)
    choice = choose_preset(_text(backbone, "preset", "auto"), file_name=file_name, has_roles=has_roles)
    return fit_spec(spec, name=choice.name, reason=choice.reason, mode=mode)


def _plan_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """Take the Plan node's values, checked as ComfyUI checks them before a run."""
    entries = {entry.id: entry for entry in Plan.define_schema().inputs}
    return {name: _checked(entries[name], body.get(name), node="Plan") for name in PLAN_VALUES}


def _devices_entry(name: str) -> Any:
    return next(entry for entry in Devices.define_schema().inputs if entry.id == name)


def _policy(values: Any) -> PolicyValue:
    if not isinstance(values, dict):
        raise ValueError(f"kv_policy={values!r} is no JSON object; send KV Policy's values by name")
    entries = [entry for entry in KVPolicyNode.define_schema().inputs if entry.id in values or not entry.optional]
    return policy_value(**{entry.id: _checked(entry, values.get(entry.id), node="KV Policy") for entry in entries})


def _checked(entry: Any, value: Any, *, node: str) -> Any:
    kind, name = _KINDS[type(entry)]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{entry.id}={value!r} is not a {name}; send the value of {node}'s widget")
    if isinstance(value, int | float) and not entry.min <= value <= entry.max:  # NaN fails too
        raise ValueError(
            f"{entry.id}={value:g} is outside {entry.min:g} to {entry.max:g}; use {entry.id}={entry.default:g}"
        )
    return value


def _text(body: Mapping[str, Any], name: str, otherwise: str) -> str:
    value = body.get(name, otherwise)
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not a text; leave it out or send the node's value")
    return value


def _config(backbone: str) -> WanConfig:
    """Whose KV to count. A file's size shows only in its name before it is loaded; Wan has two sizes."""
    if backbone == EMBEDDED_CHOICE:
        return EMBEDDED
    return WAN_14B if "14b" in backbone.lower() else WAN_1_3B
