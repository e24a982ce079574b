"""The Wan autoencoder over a whole clip at once, for training.

diffusers' cached, chunk-by-chunk path is bound by kernel launches; one pass over the full sequence is not, and its
numbers are the same (``model/vae_layers.py`` says why). It works under autocast and ``torch.compile``.
"""

from diffusers import AutoencoderKLWan
from torch import Tensor

from flashforward_core.model.vae_layers import Options, decode_raw, encode_moments, require_wan21
from flashforward_core.specs import TEMPORAL_FACTOR


def encode_moments_whole(
    vae: AutoencoderKLWan, video_BCFHW: Tensor, *, as_conv2d: bool = False, recompute: bool = False
) -> Tensor:
    """Encode a clip of 4n+1 frames in [-1, 1] to its moments [B, 2z, n+1, H/8, W/8] (mean, then log variance).

    ``as_conv2d`` computes the 3D convolutions as 2D ones over stacked frames in channels-last memory: the same sums,
    often faster where channels are few. ``recompute`` keeps only the activations between resolution levels and
    recomputes the rest in the backward pass. Raises ``ValueError`` for another frame count or an autoencoder other
    than Wan 2.1's.
    """
    require_wan21(vae)
    frames = video_BCFHW.shape[2]
    if frames % TEMPORAL_FACTOR != 1:
        raise ValueError(f"frames={frames} is not 4n+1; use frames={frames // TEMPORAL_FACTOR * TEMPORAL_FACTOR + 1}")
    return encode_moments(vae, video_BCFHW, Options(as_conv2d=as_conv2d, recompute=recompute))


def decode_whole(vae: AutoencoderKLWan, z_BCFHW: Tensor, *, as_conv2d: bool = False, recompute: bool = False) -> Tensor:
    """Decode un-normalised latents [B, z, n+1, h, w] to a clip [B, 3, 4n+1, 8h, 8w], not clamped.

    The flags and errors are those of ``encode_moments_whole``.
    """
    require_wan21(vae)
    return decode_raw(vae, z_BCFHW, Options(as_conv2d=as_conv2d, recompute=recompute))
