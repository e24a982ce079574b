"""Checks that a backbone, a specification, prompts and given latents fit together, before anything runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..graph.schedules import spec_for
from ..model.roles import Backbone
from ..specs import RolloutSpec
from .ops import RunInputs


def checked_inputs(backbone: Backbone, spec: RolloutSpec, texts: Sequence[Tensor]) -> RunInputs:
    """Return what a rollout is given; raise ``ValueError`` that says what does not fit."""
    spec = spec_for(spec)
    _check_texts(backbone, spec, texts)
    shape = spec.shape
    if backbone.size is not None and backbone.size != (shape.width, shape.height):
        width, height = backbone.size
        raise ValueError(
            f"size={shape.width}x{shape.height} does not fit the backbone, which makes {width}x{height} only; "
            f"use width={width}, height={height}"
        )
    return RunInputs(spec=spec, texts=texts)


def empty_latents(backbone: Backbone, inputs: RunInputs, *, frames: int) -> Tensor:
    """Return room for ``frames`` latent frames, float32 [B, C, F, h, w] on the CPU."""
    shape = inputs.spec.shape
    size = (inputs.batch, backbone.config.channels, frames, shape.latent_height, shape.latent_width)
    with torch.inference_mode(False):  # callers may write into the result
        return torch.empty(size, dtype=torch.float32)


def _check_texts(backbone: Backbone, spec: RolloutSpec, texts: Sequence[Tensor]) -> None:
    needed = max(span.prompt for span in spec.prompts)
    if needed >= len(texts):
        raise ValueError(f"prompts use prompt {needed}, but texts hold {len(texts)}; give one embedding per prompt")
    rows = (backbone.config.text_len, backbone.config.text_dim)
    for index, text in enumerate(texts):
        if text.ndim != 3 or tuple(text.shape[1:]) != rows or text.shape[0] != texts[0].shape[0]:
            raise ValueError(
                f"texts[{index}] has shape {tuple(text.shape)}; the backbone takes "
                f"({texts[0].shape[0]}, {rows[0]}, {rows[1]}): encode the prompt with this backbone's text encoder"
            )
