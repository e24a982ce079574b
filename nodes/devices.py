"""Where rollouts run when no Devices node says so."""

import comfy.model_management
import torch

from flashforward_core.engine.rollout import DevicePlan


def default_device() -> torch.device:
    """The device that ComfyUI itself computes on; the CPU when it was started with --cpu."""
    return torch.device(comfy.model_management.get_torch_device())


def default_devices() -> DevicePlan:
    """Run on ComfyUI's own device."""
    return DevicePlan(devices=(str(default_device()),))
