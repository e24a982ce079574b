"""A look at what is being trained."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from flashforward_core.engine.rollout import DevicePlan, render, stream_decode
from flashforward_core.model.loading import load_embedded
from flashforward_core.scenes import HEIGHT, WIDTH
from flashforward_core.specs import RolloutSpec, VideoShape

SAMPLE_LATENTS = 21


def sample_video(
    folder: Path, *, captions: Sequence[str], device: torch.device, latents: int = SAMPLE_LATENTS
) -> np.ndarray:
    """Render the first caption with an exported model; every second frame, uint8 [F, H, W, 3]."""
    backbone = load_embedded(folder, device=device)
    spec = RolloutSpec(shape=VideoShape(width=WIDTH, height=HEIGHT, latent_frames=latents))
    prompt = backbone.text_encoder.encode(list(captions[:1]))
    made = render(backbone, spec, [prompt], devices=DevicePlan(devices=(str(device),)))
    found: np.ndarray = torch.cat(list(stream_decode(backbone, made.latents_BCFHW))).numpy()[::2]
    return found
