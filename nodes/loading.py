"""The backbone from files, and prompts for the embedded one."""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io

import flashforward_core
from flashforward_core.model.loading import load_backbone, load_embedded
from flashforward_core.model.roles import Backbone
from flashforward_core.prompts import parse

from .devices import default_device
from .events import show_text
from .model_files import EMBEDDED, backbone_files, backbone_path, stamp
from .prompts import encode_schedule, encode_with_backbone
from .roles import DTYPES, attention_input, compute_dtype, describe_backbone, role_inputs, role_paths
from .sockets import CATEGORY, BackboneSocket, expert

log = logging.getLogger(__name__)


def assets_folder() -> Path:
    """Where the embedded model's files are: FLASHFORWARD_ASSETS, or the pack's own folder."""
    own = Path(str(flashforward_core.__file__)).resolve().parent / "assets"
    return Path(os.environ.get("FLASHFORWARD_ASSETS", own))


def check_size(backbone: Backbone, *, width: int, height: int) -> None:
    """Raise ``ValueError`` for a size that the backbone cannot make."""
    if backbone.size is None or backbone.size == (width, height):
        return
    name, value, other = ("width", width, 0) if width != backbone.size[0] else ("height", height, 1)
    raise ValueError(
        f"{name}={value} does not fit the embedded backbone, which makes {backbone.size[0]}x{backbone.size[1]} only; "
        f"use {name}={backbone.size[other]}"
    )


class LoadBackbone(io.ComfyNode):
    """Load a causal video model with its two roles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardLoadBackbone",
            display_name="Load Backbone",
            category=CATEGORY,
            description="Loads the video model: the small embedded one that comes with the pack (192x128 landscapes, "
            "quick enough for a CPU), or a Wan 2.1 text-to-video model from ComfyUI's model folders.",
            inputs=[
                io.Combo.Input(
                    "backbone",
                    options=[EMBEDDED, *backbone_files()],
                    default=EMBEDDED,
                    tooltip="The model to load: embedded, or a file of models/diffusion_models or models/checkpoints "
                    "(safetensors, pt, GGUF) or a diffusers folder.",
                ),
                *role_inputs(),
                expert(
                    io.Combo,
                    "weight_dtype",
                    options=["auto", *DTYPES, "fp8"],
                    default="auto",
                    tooltip="Precision of the weights; auto: bf16 on a GPU (fp8 for an fp8 file), fp32 on a CPU. fp8 "
                    "keeps the blocks' weights in 8 bits: half the memory.",
                ),
                attention_input(),
            ],
            outputs=[BackboneSocket.Output("model", display_name="backbone", tooltip="For the other nodes.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls, backbone: str | None = None, planner_lora: str | None = None, renderer_lora: str | None = None
    ) -> bool:
        if backbone not in (None, EMBEDDED):  # a linked value is known, and checked, when the node runs
            backbone_path(str(backbone))
        role_paths(planner_lora, renderer_lora)
        return True

    @classmethod
    def fingerprint_inputs(
        cls,
        *,
        backbone: str | None = None,
        planner_lora: str | None = None,
        renderer_lora: str | None = None,
        **inputs: Any,
    ) -> str:
        """Change when a file that decides the weights does, as far as names are no links."""
        main = assets_folder() if backbone in (None, EMBEDDED) else backbone_path(str(backbone))
        return "\n".join(stamp(path) for path in (main, *role_paths(planner_lora, renderer_lora).values()))

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
        options = {"dtype": compute_dtype(weight_dtype, device), "device": device, "attention": attention}
        loras = role_paths(planner_lora, renderer_lora)
        if backbone == EMBEDDED:
            made = _embedded(preset, loras=bool(loras), fp8=weight_dtype == "fp8", **options)
        else:
            options["device"] = "cpu"  # each device copies from there when it is first used
            made = load_backbone(
                backbone_path(backbone),
                role_loras=loras,
                preset=preset,
                fp8=_fp8(weight_dtype, device),
                mapped=device.type != "cpu",
                **options,
            )
        text = describe_backbone(made)
        log.info("%s", text)
        show_text(text, node_id=cls.hidden.unique_id)
        return io.NodeOutput(made, ui={"text": [text]})


def _fp8(name: str, device: torch.device) -> bool | None:
    """``auto`` leaves an fp8 file in 8 bits on a GPU; a CPU would be slow with it."""
    if name == "auto":
        return None if device.type != "cpu" else False
    return name == "fp8"


def _embedded(preset: str, *, loras: bool, fp8: bool, **options: Any) -> Backbone:
    if loras:
        raise ValueError(
            "planner_lora and renderer_lora do not go with backbone='embedded', which brings its own; use 'none', or "
            "Apply LoRA"
        )
    if fp8:
        raise ValueError("weight_dtype=fp8 does not go with backbone='embedded', which is small; use weight_dtype=auto")
    made = load_embedded(assets_folder(), **options)
    return made if preset == "auto" else replace(made, preset=preset, preset_reason="chosen by hand")


class EncodePrompt(io.ComfyNode):
    """Encode a prompt with the backbone's own text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardEncodePrompt",
            display_name="Encode Prompt (embedded)",
            category=CATEGORY,
            description="Encodes a prompt for the embedded backbone: a sky (dawn, noon, dusk, night), hills, and one "
            "or two moving things (ball, boat, balloon, bird). Prompts may follow each other: noon [5s] | night.",
            inputs=[
                BackboneSocket.Input("backbone", tooltip="The embedded backbone; it brings the text encoder."),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="a red balloon drifts right over green hills at dusk",
                    tooltip="What to show, in the words of the model's captions. Over time: a [5s] | b [10s] | c, in "
                    "seconds or frames (80f); [10s#] starts with a hard cut.",
                ),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="For Plan Anchors and the render.")
            ],
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool:
        if isinstance(inputs.get("text"), str):  # a linked text is known, and read, when the node runs
            parse(inputs["text"])
        return True

    @classmethod
    def execute(cls, *, backbone: Backbone, text: str) -> io.NodeOutput:
        return io.NodeOutput(encode_schedule(parse(text), encode=partial(encode_with_backbone, backbone)))
