"""Weights on devices, as ComfyUI's memory management knows them: it can ask for them back, as for its own models."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from flashforward_core.engine.budget import sizes_of
from flashforward_core.engine.replicas import drop_replicas_of
from flashforward_core.graph.task import Role
from flashforward_core.model.roles import Backbone

from .sockets import PlanValue
from .summary import predict_plan


class Residency(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """A backbone's copy on one device. ComfyUI may drop it whenever nothing runs; the next run copies it again."""

    def __init__(self, backbone: Backbone, device: torch.device) -> None:
        super().__init__(torch.nn.Module(), load_device=device, offload_device=torch.device("cpu"), size=1)
        self._renderer = weakref.ref(backbone.models[Role.RENDERER])
        self._held = False

    def loaded_size(self) -> int:
        return int(self.model_size()) if self._held else 0

    def partially_load(self, device_to: torch.device, *args: Any, **options: Any) -> int:
        """Note that the engine is about to copy the weights."""
        self._held, self.model.device = True, device_to
        return 0

    def partially_unload(self, *args: Any, **options: Any) -> int:
        """Free nothing: a rollout needs all of the weights. ComfyUI then drops all of them."""
        return 0

    def detach(self, *args: Any, **options: Any) -> torch.nn.Module:
        """Drop the backbone's copies, those on other devices and in host memory too: `/free` asks one device only."""
        renderer = self._renderer() if self._held else None
        if renderer is not None:
            drop_replicas_of(renderer)
            for other in _known.get(renderer, {}).values():
                other.forget()
        self.forget()
        return self.model

    def forget(self) -> None:
        """Note that the copy is gone."""
        self._held, self.model.device = False, self.offload_device


_known: "weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.device, Residency]]" = weakref.WeakKeyDictionary()
"""By renderer: ComfyUI itself keeps only weak references."""


def make_resident(backbone: Backbone, plan: PlanValue, *, decodes: bool = False) -> None:
    """Have ComfyUI make room on every device of ``plan``, before the engine copies weights there.

    ``decodes`` says that frames are decoded there too. A cluster's devices are not ComfyUI's to manage.
    """
    if plan.devices.ray_address:
        return
    sizes, shape = sizes_of(backbone), plan.spec.shape
    found = predict_plan(plan.spec, devices=plan.devices, config=backbone.config, sizes=sizes).render
    weights = {torch.device(memory.device): memory.weights_bytes for memory in found.memory}
    room = max(memory.peak_bytes - memory.weights_bytes for memory in found.memory)
    room += shape.width * shape.height * sizes.vae_frame_bytes if decodes else 0
    streams = plan.devices.memory.offload == "on"
    hold(backbone, weights, memory_required=room, weights=weights, streams=streams)


def hold(
    backbone: Backbone,
    devices: Iterable[torch.device],
    *,
    memory_required: int = 0,
    weights: Mapping[torch.device, int] | None = None,
    streams: bool = False,
) -> None:
    """Register the copies of ``backbone`` on ``devices``; where its weights are already, there is none.

    ``weights`` are their bytes, if not all are copied. Where there are copies, ComfyUI's own device has an entry too,
    since `/free` asks only there; with ``streams`` there are some in host memory.
    """
    renderer = backbone.models[Role.RENDERER]
    own = next(renderer.parameters()).device
    by_device = _known.setdefault(renderer, {})
    sizes = sizes_of(backbone)
    whole = sizes.outer_bytes + sizes.blocks_bytes + sizes.vae_bytes
    needed = {device: (weights or {}).get(device, whole) for device in devices if device != own}
    if needed or streams:
        needed.setdefault(torch.device(comfy.model_management.get_torch_device()), 1)
    for device, size in needed.items():
        entry = by_device.setdefault(device, Residency(backbone, device))
        entry.size = max(1, size)  # 0 would mean that nobody has counted yet
    if needed:
        wanted = [by_device[device] for device in needed]
        comfy.model_management.load_models_gpu(wanted, memory_required=memory_required, force_full_load=True)
