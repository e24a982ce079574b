"""Weights on the devices that need them: moved once per device and kept for as long as the original lives."""

import copy
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.task import Role
from ..model.roles import Backbone
from .offload import HostBlock


@dataclass(frozen=True, slots=True)
class _Replica:
    """Copies of one backbone's modules, and of which."""

    originals: tuple[Any, ...]
    """Weak references to the planner and the autoencoder (None without one) that were copied."""
    models: dict[Role, Any]
    vae: Any
    resident: int | None
    """How many blocks of each model are on the device, the others being host blocks; None: all."""


_lock = threading.Lock()
_replicas: "weakref.WeakKeyDictionary[nn.Module, dict[torch.device, _Replica]]" = weakref.WeakKeyDictionary()
"""By renderer: a cache of the process, as weights on a device are, so that a second rollout moves nothing."""


def device_of(backbone: Backbone) -> torch.device:
    """Return the device of the transformer's weights."""
    return next(backbone.models[Role.RENDERER].parameters()).device


def backbone_on(backbone: Backbone, device: torch.device, *, resident: int | None = None) -> Backbone:
    """Return ``backbone`` with weights on ``device``: itself when they are there, else a copy, made once.

    With ``resident``, only so many blocks of each model are there; the others are ``HostBlock``s, which run through
    ``offload.streamed`` alone.
    """
    if device_of(backbone) == device and resident is None:
        return backbone
    planner, vae = backbone.models[Role.PLANNER], backbone.vae
    with _lock:
        of_device = _replicas.setdefault(backbone.models[Role.RENDERER], {})
        found = of_device.get(device)
        originals = None if found is None else [part and part() for part in found.originals]
        if found is None or originals != [planner, vae] or found.resident != resident:
            of_device.pop(device, None)
            found = None  # its memory is needed for the new one
            models, copied = copy_modules((dict(backbone.models), vae), device=device, resident=resident)
            references = (weakref.ref(planner), vae and weakref.ref(vae))
            found = of_device[device] = _Replica(references, models, copied, resident)
    return replace(backbone, models=found.models, vae=found.vae)


def weights_on(backbone: Backbone, device: torch.device) -> int:
    """Return the bytes of ``backbone``'s weights that are on ``device``, as its own or as a copy, whole or in part."""
    parts: Any = (dict(backbone.models), backbone.vae)
    if device_of(backbone) != device:
        with _lock:
            found = _replicas.get(backbone.models[Role.RENDERER], {}).get(device)
        if found is None:
            return 0
        parts = (found.models, found.vae)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(_modules(parts))}.values())


def blocks_on(backbone: Backbone, device: torch.device) -> int | None:
    """Return how many blocks of each model are on ``device`` while the others wait in host memory; None if none do."""
    with _lock:
        found = _replicas.get(backbone.models[Role.RENDERER], {}).get(device)
    return None if found is None else found.resident


def drop_replicas(backbone: Backbone) -> None:
    """Forget the copies of ``backbone``'s weights, so that their memory can be used for something else."""
    drop_replicas_of(backbone.models[Role.RENDERER])


def drop_replicas_of(renderer: nn.Module) -> None:
    """Forget the copies of the backbone that has ``renderer``, for those who must not keep the backbone alive."""
    with _lock:
        _replicas.pop(renderer, None)
    empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_host_cache is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty_host_cache()  # pinned memory is kept for the next one who asks


def copy_modules(
    parts: tuple[dict[Role, nn.Module], nn.Module | None], *, device: torch.device, resident: int | None = None
) -> Any:
    """Copy modules to ``device``. What they share, as parameter or as memory, their copies share too.

    With ``resident``, each transformer's later blocks become ``HostBlock``s.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    memo: dict[int, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for block in _blocks_from(parts, resident):
            memo[id(block)] = HostBlock(block, pinned=device.type == "cuda")
        for tensor in tensors_in(_modules(parts), besides=memo):
            key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if key not in moved:
                moved[key] = tensor.detach().to(device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved[key], requires_grad=False) if is_parameter else moved[key]
        copied = copy.deepcopy(parts, memo)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # lanes have streams of their own, which know nothing of these copies
    return copied


def _blocks_from(parts: tuple[dict[Role, nn.Module], nn.Module | None], first: int | None) -> Iterable[nn.Module]:
    if first is not None:
        for model in dict.fromkeys(parts[0].values()):
            yield from list(model.get_submodule("blocks").children())[first:]


def _modules(parts: tuple[Mapping[Role, nn.Module], nn.Module | None]) -> list[nn.Module]:
    models, vae = parts
    return [*models.values(), *([] if vae is None else [vae])]


def tensors_in(
    modules: Iterable[nn.Module], *, besides: Mapping[int, object] = MappingProxyType({})
) -> Iterable[Tensor]:
    """Yield parameters and buffers, but not those of the modules whose ids are in ``besides``; shared ones repeat."""
    pending = list(modules)
    while pending:
        module = pending.pop()
        if id(module) not in besides:  # Module.parameters takes two to four times as long, and every rollout asks
            own = (*module._parameters.values(), *module._buffers.values())
            yield from (tensor for tensor in own if tensor is not None)
            pending += [child for child in module._modules.values() if child is not None]
