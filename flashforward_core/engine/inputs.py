"""Checks that a backbone, a specification, prompts and given latents fit together, before anything runs."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..graph.schedules import spec_for
from ..graph.task import Slot, Space
from ..model.roles import Backbone
from ..specs import LATENT_CHANNELS, RolloutSpec
from .ops import RunInputs


def checked_inputs(
    backbone: Backbone, spec: RolloutSpec, texts: Sequence[Tensor], *, start: Tensor | None = None
) -> RunInputs:
    """Return what a rollout is given; raise ``ValueError`` that says what does not fit.

    ``start`` holds the first latent frames, normalised [B, C, F, h, w]. The chunks that it covers become inputs.
    """
    frames = 0 if start is None else start.shape[2]
    assert spec.start_frames in (0, frames), (
        f"the spec has a start of {spec.start_frames}, but {frames} frames are given"
    )
    spec = spec_for(replace(spec, start_frames=frames))
    _check_texts(backbone, spec, texts)
    shape = spec.shape
    if backbone.size is not None and backbone.size != (shape.width, shape.height):
        width, height = backbone.size
        raise ValueError(
            f"size={shape.width}x{shape.height} does not fit the backbone, which makes {width}x{height} only; "
            f"use width={width}, height={height}"
        )
    inputs = RunInputs(spec=spec, texts=texts, start=start)
    return inputs if start is None else replace(inputs, given=_start_slots(inputs, start))


def _start_slots(inputs: RunInputs, start: Tensor) -> dict[Slot, Tensor]:
    """Return the clean latents of the chunks that the start covers; a start of another size raises ``ValueError``."""
    spec, level = inputs.spec, inputs.spec.stages.num_stages
    expected = (inputs.batch, LATENT_CHANNELS, spec.shape.latent_height, spec.shape.latent_width)
    found = (*start.shape[:2], *start.shape[3:])
    if found != expected:
        raise ValueError(
            f"start has latents of {found}, but the plan needs {expected} (batch, channels, height, width); use a "
            "start of the plan's size"
        )
    chunks = ((index, spec.chunk(index)) for index in range(spec.start_chunks))
    return {
        Slot(space=Space.LATENT, index=index, level=level): start[:, :, frames.start : frames.stop]
        for index, frames in chunks
    }


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
