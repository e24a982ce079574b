"""What the nodes that make a backbone share: role LoRAs, presets, precision, room in memory."""

from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import io

from flashforward_core.graph.task import Role
from flashforward_core.model.attention import ATTENTION
from flashforward_core.model.presets import FLASHFORWARD, PRESETS
from flashforward_core.model.roles import Backbone

from .model_files import NONE, lora_names, lora_path
from .sockets import expert

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def role_inputs() -> list[Any]:
    """Declare the two roles' LoRAs and the preset."""
    return [
        io.Combo.Input(
            "planner_lora",
            options=[NONE, *lora_names()],
            default=NONE,
            tooltip="The planner role's LoRA; the embedded model brings its own.",
        ),
        io.Combo.Input(
            "renderer_lora",
            options=[NONE, *lora_names()],
            default=NONE,
            tooltip="The renderer role's LoRA; the embedded model brings its own.",
        ),
        io.Combo.Input(
            "preset",
            options=["auto", *PRESETS],
            default="auto",
            tooltip="What the weights were trained for: schedule, chunk, window, sink and steps, which Plan "
            "takes over. auto: by role LoRAs, then by the file's name.",
        ),
    ]


def attention_input() -> Any:
    """Declare the choice of the attention kernel."""
    return expert(
        io.Combo,
        "attention",
        options=["auto", *ATTENTION],
        default="auto",
        tooltip="The attention kernel; auto takes the fastest that the device has.",
    )


def role_paths(planner_lora: str | None, renderer_lora: str | None) -> dict[Role, Path]:
    """Return the chosen files; ``ValueError`` names one that is not there."""
    chosen = {Role.PLANNER: ("planner_lora", planner_lora), Role.RENDERER: ("renderer_lora", renderer_lora)}
    return {role: lora_path(name, field=field) for role, (field, name) in chosen.items() if name not in (None, NONE)}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return what to compute with; ``auto`` is float32 on a CPU, where half precision is slow, else bfloat16."""
    if name in ("auto", "fp8"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def fits_again(backbone: Backbone) -> bool:
    """Whether the weights' device has room for a second copy of them."""
    device = next(backbone.models[Role.RENDERER].parameters()).device
    tensors = {t.data_ptr(): t for model in backbone.models.values() for t in model.parameters()}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return bool(comfy.model_management.get_free_memory(device) > 1.2 * size)


def describe_backbone(backbone: Backbone) -> str:
    """Say what was loaded from where, and which preset Plan takes over, unless another schedule is chosen there."""
    config = backbone.config
    size = f"{config.name}: {config.num_layers} blocks of width {config.dim}"
    chosen = f"preset {backbone.preset} ({backbone.preset_reason})"
    # with FlashForward's own roles all values are Plan's; no other preset's hold either where Plan has its schedule
    if backbone.preset != FLASHFORWARD:
        chosen += f": {PRESETS[backbone.preset].describe()}, where Plan's schedule is flashforward and its preset auto"
    return "\n".join(filter(None, (size, backbone.report, chosen)))
