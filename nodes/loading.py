"""The backbone, and prompts for the embedded one."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io

import flashforward_core
from flashforward_core.model.attention import ATTENTION
from flashforward_core.model.loading import load_embedded
from flashforward_core.model.roles import Backbone
from flashforward_core.model.vae import Preview, load_preview

from .bridge import to_conditioning
from .devices import default_device
from .sockets import CATEGORY, BackboneSocket, expert

EMBEDDED = "embedded"
NONE = "none"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def assets_folder() -> Path:
    """Where the embedded model's files are: FLASHFORWARD_ASSETS, or the pack's own folder."""
    own = Path(str(flashforward_core.__file__)).resolve().parent / "assets"
    return Path(os.environ.get("FLASHFORWARD_ASSETS", own))


def preview_of(backbone: Backbone) -> Preview:
    """Give the projection that shows a backbone's latents."""
    return load_preview(assets_folder() / "vae")


def check_size(backbone: Backbone, *, width: int, height: int) -> None:
    """Raise ``ValueError`` for a size that the backbone cannot make."""
    if backbone.size is None or backbone.size == (width, height):
        return
    name, value, other = ("width", width, 0) if width != backbone.size[0] else ("height", height, 1)
    raise ValueError(
        f"{name}={value} does not fit the embedded backbone, which makes {backbone.size[0]}x{backbone.size[1]} only; "
        f"use {name}={backbone.size[other]}"
    )


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU, where half precision is slow, and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


class LoadBackbone(io.ComfyNode):
    """Load a causal video model with its two roles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardLoadBackbone",
            display_name="Load Backbone",
            category=CATEGORY,
            description="Loads the video model. The embedded one comes with the pack: small, made for 192x128 "
            "landscapes, and quick enough for a CPU.",
            inputs=[
                io.Combo.Input("backbone", options=[EMBEDDED], default=EMBEDDED, tooltip="The model to load."),
                io.Combo.Input(
                    "planner_lora",
                    options=[NONE],
                    default=NONE,
                    tooltip="The planner role's LoRA; the embedded model brings its own.",
                ),
                io.Combo.Input(
                    "renderer_lora",
                    options=[NONE],
                    default=NONE,
                    tooltip="The renderer role's LoRA; the embedded model brings its own.",
                ),
                io.Combo.Input(
                    "preset", options=["auto"], default="auto", tooltip="What the weights were trained for."
                ),
                expert(
                    io.Combo,
                    "weight_dtype",
                    options=["auto", *DTYPES],
                    default="auto",
                    tooltip="Precision of the weights; auto: bf16 on a GPU, fp32 on a CPU.",
                ),
                expert(
                    io.Combo,
                    "attention",
                    options=["auto", *ATTENTION],
                    default="auto",
                    tooltip="The attention kernel; auto takes the fastest that the device has.",
                ),
            ],
            outputs=[BackboneSocket.Output("model", display_name="backbone", tooltip="For the other nodes.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Change when a file of the embedded model does."""
        digest = hashlib.sha256()
        for path in sorted(assets_folder().rglob("*")):
            if path.is_file():
                found = os.stat(path)
                digest.update(f"{path.name}|{found.st_size}|{found.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    @classmethod
    def execute(
        cls,
        *,
        backbone: str,
        planner_lora: str,
        renderer_lora: str,
        preset: str,
        weight_dtype: str,
        attention: str,
    ) -> io.NodeOutput:
        device = default_device()
        dtype = _dtype(weight_dtype, device)
        return io.NodeOutput(load_embedded(assets_folder(), dtype=dtype, device=device, attention=attention))


class EncodePrompt(io.ComfyNode):
    """Encode a prompt with the backbone's own text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardEncodePrompt",
            display_name="Encode Prompt (embedded)",
            category=CATEGORY,
            description="Encodes a prompt for the embedded backbone: a sky (dawn, noon, dusk, night), hills, and one "
            "or two moving things (ball, boat, balloon, bird).",
            inputs=[
                BackboneSocket.Input("backbone", tooltip="The embedded backbone; it brings the text encoder."),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="a red balloon drifts right over green hills at dusk",
                    tooltip="What to show, in the words of the model's captions.",
                ),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="For Plan Anchors and the render.")
            ],
        )

    @classmethod
    def execute(cls, *, backbone: Backbone, text: str) -> io.NodeOutput:
        if backbone.text_encoder is None:
            raise ValueError("backbone has no text encoder of its own; use CLIP Text Encode with Wan's text encoder")
        return io.NodeOutput(to_conditioning(backbone.text_encoder.encode([text])))
