"""Pictures to the core's latents, with the backbone's own encoder or a native VAE."""

from typing import Any

import comfy.utils
from torch import Tensor

from flashforward_core.model.roles import Backbone
from flashforward_core.model.vae import encode_frames
from flashforward_core.specs import TEMPORAL_FACTOR, VideoShape

from .bridge import from_latent


def encode_pictures(image: Tensor, *, name: str, shape: VideoShape, backbone: Backbone, vae: Any) -> Tensor:
    """Encode an IMAGE [N, H, W, 3], scaled and cropped to the plan's size, as normalised latents [1, 16, F, h, w].

    One picture gives one latent frame; 4n+1 pictures are a video of n+1. Raises ``ValueError``, with the input's
    ``name``, for other numbers, and when there is no VAE.
    """
    count = image.shape[0]
    if count % TEMPORAL_FACTOR != 1:
        nearest = max(1, count - (count - 1) % TEMPORAL_FACTOR)
        raise ValueError(f"{name} holds {count} pictures; use 1, or 4n+1 pictures of a video, such as {nearest}")
    pixels = image[..., :3].movedim(-1, 1)
    frames = comfy.utils.common_upscale(pixels, shape.width, shape.height, "bilinear", "center").movedim(1, -1)
    if vae is not None:
        return from_latent({"samples": vae.encode(frames)}, backbone).cpu()
    if backbone.vae is None:
        raise ValueError("vae is unconnected and the backbone has none of its own; connect Load VAE with Wan's VAE")
    return encode_frames(backbone.vae, frames[None]).cpu()
