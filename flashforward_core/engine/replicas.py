"""Weights on the devices that need them: moved once per device and kept for as long as the original lives."""

import copy
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.task import Role
from ..model.roles import Backbone


@dataclass(frozen=True, slots=True)
class _Replica:
    """Copies of one backbone's modules, and of which."""

    originals: tuple[Any, ...]
    """Weak references to the planner and the autoencoder (None without one) that were copied."""
    models: dict[Role, Any]
    vae: Any


_lock = threading.Lock()
_replicas: "weakref.WeakKeyDictionary[nn.Module, dict[torch.device, _Replica]]" = weakref.WeakKeyDictionary()
"""By renderer: a cache of the process, as weights on a device are, so that a second rollout moves nothing."""


def device_of(backbone: Backbone) -> torch.device:
    """Return the device of the transformer's weights."""
    return next(backbone.models[Role.RENDERER].parameters()).device


def backbone_on(backbone: Backbone, device: torch.device) -> Backbone:
    """Return ``backbone`` with weights on ``device``: itself when they are there, else a copy, made once."""
    if device_of(backbone) == device:
        return backbone
    planner, vae = backbone.models[Role.PLANNER], backbone.vae
    with _lock:
        of_device = _replicas.setdefault(backbone.models[Role.RENDERER], {})
        found = of_device.get(device)
        if found is None or [part and part() for part in found.originals] != [planner, vae]:
            models, copied = copy_modules((dict(backbone.models), vae), device=device)
            originals = (weakref.ref(planner), vae and weakref.ref(vae))
            found = of_device[device] = _Replica(originals, models, copied)
    return replace(backbone, models=found.models, vae=found.vae)


def drop_replicas(backbone: Backbone) -> None:
    """Forget the copies of ``backbone``'s weights, so that their memory can be used for something else."""
    drop_replicas_of(backbone.models[Role.RENDERER])


def drop_replicas_of(renderer: nn.Module) -> None:
    """Forget the copies of the backbone that has ``renderer``, for those who must not keep the backbone alive."""
    with _lock:
        _replicas.pop(renderer, None)


def copy_modules(parts: tuple[dict[Role, nn.Module], nn.Module | None], *, device: torch.device) -> Any:
    """Copy modules to ``device``. What they share, as parameter or as memory, their copies share too."""
    moved: dict[tuple[object, ...], Tensor] = {}
    memo: dict[int, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for tensor in _tensors(parts):
            key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if key not in moved:
                moved[key] = tensor.detach().to(device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved[key], requires_grad=False) if is_parameter else moved[key]
        copied = copy.deepcopy(parts, memo)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # lanes have streams of their own, which know nothing of these copies
    return copied


def _tensors(parts: tuple[dict[Role, nn.Module], nn.Module | None]) -> Iterable[Tensor]:
    models, vae = parts
    for module in (*models.values(), *([] if vae is None else [vae])):
        yield from module.parameters()
        yield from module.buffers()
