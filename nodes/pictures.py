"""Pictures to the core's latents, with the backbone's own encoder or a native VAE."""

from typing import Any

import comfy.utils
import torch
from torch import Tensor

from flashforward_core.model.roles import Backbone
from flashforward_core.model.vae import encode_frames
from flashforward_core.specs import TEMPORAL_FACTOR, VideoShape

from .bridge import from_latent

MOST_ELONGATED = 100  # times as long as wide; cropping leaves nothing of what is much longer


def _checked(image: Tensor, *, name: str, shape: VideoShape) -> Tensor:
    """Return RGB of pictures that can be scaled to the plan's size: grey becomes RGB, an alpha channel is dropped."""
    _, height, width, channels = image.shape
    if min(height, width) * MOST_ELONGATED < max(height, width) or not min(height, width, channels):
        raise ValueError(f"{name} is {width}x{height}; use a picture more like {shape.width}x{shape.height}")
    if not torch.isfinite(image).all():
        raise ValueError(f"{name} holds numbers that are not finite; look at what made it")
    return image[..., :3] if channels >= 3 else image[..., :1].expand(-1, -1, -1, 3)


def encode_pictures(image: Tensor, *, name: str, shape: VideoShape, backbone: Backbone, vae: Any) -> Tensor:
    """Encode an IMAGE [N, H, W, 3], scaled and cropped to the plan's size, as normalised latents [1, 16, F, h, w].

    One picture gives one latent frame; 4n+1 pictures are a video of n+1. Raises ``ValueError``, with the input's
    ``name``, for other numbers, and when there is no VAE.
    """
    count = image.shape[0]
    if count % TEMPORAL_FACTOR != 1:
        nearest = max(1, count - (count - 1) % TEMPORAL_FACTOR)
        raise ValueError(f"{name} holds {count} pictures; use 1, or 4n+1 pictures of a video, such as {nearest}")
    pixels = _checked(image, name=name, shape=shape).movedim(-1, 1)
    frames = comfy.utils.common_upscale(pixels, shape.width, shape.height, "bilinear", "center").movedim(1, -1)
    if vae is not None:
        try:
            return from_latent({"samples": vae.encode(frames)}, backbone).cpu()
        except ValueError as error:
            raise ValueError(f"vae: what it makes of {name} does not fit ({error}); use Wan 2.1's VAE") from error
    if backbone.vae is None:
        raise ValueError("vae is unconnected and the backbone has none of its own; connect Load VAE with Wan's VAE")
    return encode_frames(backbone.vae, frames[None]).cpu()
