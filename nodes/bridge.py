"""ComfyUI's own types to the core's and back.

LATENT is ``{"samples": [B, C, F, h, w]}`` in un-normalised VAE space; the core works on normalised latents.
CONDITIONING is ``[[embedding [B, L, D], {...}], ...]``; the core takes one padded embedding per prompt.
"""

import logging
from typing import Any

import comfy.latent_formats
import torch
from torch import Tensor

from flashforward_core.model.roles import Backbone
from flashforward_core.model.vae import denormalise, normalise
from flashforward_core.specs import LATENT_CHANNELS

log = logging.getLogger(__name__)
SCENES = "flashforward_scenes"
"""Key of a LATENT with the latent frames at which hard cuts begin scenes, and the length that this is true of."""


def to_latent(latents_BCFHW: Tensor, backbone: Backbone) -> dict[str, Tensor]:
    """Wrap normalised latents as ComfyUI's LATENT, in the space of the backbone's VAE: its own, or Wan 2.1's."""
    if backbone.vae is None:
        return {"samples": comfy.latent_formats.Wan21().process_out(latents_BCFHW.float())}
    return {"samples": denormalise(backbone.vae, latents_BCFHW)}


def video_samples(samples: dict[str, Tensor]) -> Tensor:
    """Take un-normalised latents [1, 16, F, h, w] out of a LATENT; ``ValueError`` says what does not fit."""
    tensor = samples["samples"]
    if tensor.ndim != 5:
        raise ValueError(
            f"samples has {tensor.ndim} axes {tuple(tensor.shape)}; video latents have 5 (batch, channels, frames, "
            "height, width): connect Wavefront Render"
        )
    batch, channels = tensor.shape[:2]
    if channels != LATENT_CHANNELS:
        raise ValueError(f"samples has {channels} channels; Wan 2.1 latents have {LATENT_CHANNELS}")
    if batch != 1:
        raise ValueError(f"samples holds a batch of {batch} videos; this node takes 1: use Latent From Batch first")
    if not tensor.numel():
        raise ValueError(f"samples is empty {tuple(tensor.shape)}; connect Wavefront Render")
    if not torch.isfinite(tensor).all():
        raise ValueError("samples holds numbers that are not finite; look at what made it")
    return tensor


def scene_starts(samples: dict[str, Any]) -> list[int]:
    """Return where a LATENT's scenes begin, but the first; none for latents whose length has changed since."""
    told = samples.get(SCENES)
    known = told is not None and told["latent_frames"] == samples["samples"].shape[2]
    return list(told["starts"]) if known else []


def from_latent(samples: dict[str, Tensor], backbone: Backbone) -> Tensor:
    """Take normalised latents [1, 16, F, h, w] out of a LATENT."""
    if backbone.vae is None:
        return comfy.latent_formats.Wan21().process_in(video_samples(samples).float())  # type: ignore[no-any-return]
    return normalise(backbone.vae, video_samples(samples))


def prompt_text(embedding: Tensor, backbone: Backbone) -> Tensor:
    """Make a CONDITIONING's embedding [1, tokens, text_dim] what the core takes, [1, text_len, text_dim].

    Short ones are padded with zero rows, as Wan is trained; long ones are cut with a warning. Raises ``ValueError``
    for embeddings of another text encoder.
    """
    width, length = backbone.config.text_dim, backbone.config.text_len
    if embedding.ndim != 3 or embedding.shape[-1] != width:
        raise ValueError(
            f"positive has embeddings of width {embedding.shape[-1]}; this backbone reads width {width}: "
            "use the text encoder that belongs to it"
        )
    if embedding.shape[1] > length:
        log.warning("positive has %d tokens; the last %d are cut", embedding.shape[1], embedding.shape[1] - length)
    embedding = embedding[:1, :length]
    missing = length - embedding.shape[1]
    return torch.nn.functional.pad(embedding, (0, 0, 0, missing))
