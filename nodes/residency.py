"""Weights on devices, as ComfyUI's memory management knows them: it can ask for them back, as for its own models."""

import weakref
from collections.abc import Iterable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from flashforward_core.engine.replicas import drop_replicas_of
from flashforward_core.graph.task import Role
from flashforward_core.model.config import WanConfig
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import RolloutSpec

from .sockets import PlanValue


class Residency(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """A backbone's copy on one device. ComfyUI may drop it whenever nothing runs; the next run copies it again."""

    def __init__(self, backbone: Backbone, device: torch.device) -> None:
        super().__init__(
            torch.nn.Module(), load_device=device, offload_device=torch.device("cpu"), size=weight_bytes(backbone)
        )
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
        """Drop the copy."""
        renderer = self._renderer() if self._held else None
        if renderer is not None:
            drop_replicas_of(renderer)
        self._held, self.model.device = False, self.offload_device
        return self.model


_known: "weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.device, Residency]]" = weakref.WeakKeyDictionary()
"""By renderer: ComfyUI itself keeps only weak references."""


def weight_bytes(backbone: Backbone) -> int:
    """Count the bytes of a backbone's weights, shared ones once."""
    tensors = {t.data_ptr(): t for model in backbone.models.values() for t in model.parameters()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def kv_bytes(spec: RolloutSpec, config: WanConfig, *, element_bytes: int = 2) -> int:
    """Estimate the banks' bytes when every stage's is on one device: a window, and the anchors that a chunk reads."""
    frames = (spec.history.chunks + 1) * spec.chunk_frames + (spec.anchors.context if spec.anchors else 0)
    per_frame = config.kv_bytes_per_frame(spec.shape.tokens_per_frame, element_bytes=element_bytes)
    return frames * spec.stages.num_stages * per_frame


def make_resident(backbone: Backbone, plan: PlanValue) -> None:
    """Have ComfyUI make room on every device of ``plan``, before the engine copies weights there."""
    if plan.devices.ray_address:
        return  # other processes' memory
    devices = {torch.device(name) for name in plan.devices.resolve()}
    room = kv_bytes(plan.spec, backbone.config, element_bytes=backbone.dtype.itemsize)
    hold(backbone, devices, memory_required=room // max(1, len(devices)))


def hold(backbone: Backbone, devices: Iterable[torch.device], *, memory_required: int = 0) -> None:
    """Register the copies of ``backbone`` on ``devices``; where its weights are already, there is none."""
    renderer = backbone.models[Role.RENDERER]
    own = next(renderer.parameters()).device
    by_device = _known.setdefault(renderer, {})
    for device in devices:
        if device != own and device not in by_device:
            by_device[device] = Residency(backbone, device)
    wanted = [by_device[device] for device in devices if device in by_device]
    if wanted:
        comfy.model_management.load_models_gpu(wanted, memory_required=memory_required, force_full_load=True)
