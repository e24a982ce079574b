"""A tiny decoder for Wan 2.1's latents, for previews and quick results: files like ``taew2_1``.

Some 10 million weights instead of 73, plain 2D convolutions; time goes through blocks that also see the frame before.
So it streams: one latent frame and the nine blocks' last inputs give four frames. It takes normalised latents, or
un-normalised ones if its file is ``lighttaew2_1``, and gives pixels in [0, 1]. The first latent frame's first three
frames have no past and are dropped.

Sources: the public TAEHV project for the layout (a file's weights are named by layer number); ComfyUI, which hands the
latents of a VAE to ``lighttaew2_1`` as they are, for what that file takes.
Shape letters: B batch, T frames, C channels, H height, W width.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..specs import LATENT_CHANNELS, TEMPORAL_FACTOR
from .formats import read_state
from .vae import Decoder, StreamingDecoder, VaeState

LEVELS = ((256, 1, 128), (128, 2, 64), (64, 2, 64))
"""Per level, each of which doubles height and width: channels, frames for each frame, channels of the next level."""
BLOCKS = 3  # of each level
OTHERS = ("lighttaew2_2", "lighttaehy", "taehv", "taew2_2", "taecvx", "taeos", "taeltx", "taesd", "taef1")
"""Beginnings of files for other latents; some have the very same layout."""
RAW = "lighttaew2_1"
"""Beginning of files that take un-normalised latents; nothing in them tells."""
LATENT_STATISTICS = (
    (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
"""Of Wan 2.1's latents, by channel: the means' halves, then the standard deviations'."""


class PastBlock(nn.Module):
    """Three convolutions over a frame and the one before it, around which the frame is added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [_conv(2 * channels, channels), nn.ReLU(), _conv(channels, channels), nn.ReLU()]
        self.conv = nn.Sequential(*layers, _conv(channels, channels))

    def forward(self, x_NCHW: Tensor, past_NCHW: Tensor) -> Tensor:
        return F.relu(self.conv(torch.cat([x_NCHW, past_NCHW], dim=1)) + x_NCHW)


class Grow(nn.Module):
    """Several frames for each, by a convolution over single pixels."""

    def __init__(self, channels: int, frames: int) -> None:
        super().__init__()
        self.frames = frames
        self.conv = nn.Conv2d(channels, frames * channels, 1, bias=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.conv(x_NCHW).unflatten(1, (self.frames, -1)).flatten(0, 1)


def _conv(channels: int, out: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1, bias=bias)


class TinyVae(nn.Module):
    """The decoder's weights; ``decoder`` numbers its layers as files do, those without weights included."""

    numbers_per_pixel = 800
    """Numbers that decoding one latent frame holds at once, per pixel: four frames of 64 channels in three tensors."""

    def __init__(self, *, raw: bool = False) -> None:
        """``raw`` weights take un-normalised latents."""
        super().__init__()
        self.raw = raw
        layers: list[nn.Module] = [nn.Identity(), _conv(LATENT_CHANNELS, LEVELS[0][0]), nn.ReLU()]
        for channels, frames, following in LEVELS:
            layers += [PastBlock(channels) for _ in range(BLOCKS)]
            layers += [nn.Upsample(scale_factor=2), Grow(channels, frames), _conv(channels, following, bias=False)]
        self.decoder = nn.ModuleList([*layers, nn.ReLU(), _conv(LEVELS[-1][2], 3)])

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class TinyDecoder(Decoder):
    """Decodes latents as they come, as ``vae.StreamingDecoder`` does; it keeps nothing between calls."""

    def __init__(self, vae: TinyVae) -> None:
        self.vae = vae

    @torch.no_grad()
    def _decode(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[Tensor, VaeState]:
        weight = next(self.vae.parameters())
        z = latents_BCFHW.to(weight.device)
        if self.vae.raw:
            mean, std = _latent_statistics(weight.device)
            z = z.float() * std + mean
        frames = []
        for latent in z.to(weight.dtype).unbind(2):  # one shape for every call: bytes do not depend on the chunks
            pixels_BTCHW, after = decode_frame(self.vae, latent, () if state is None else state.features)
            first = 0 if state is not None else TEMPORAL_FACTOR - 1
            frames.append(pixels_BTCHW[:, first:].float().clamp(0, 1).movedim(2, -1))
            state = VaeState(after)
        assert state is not None, "no latent frame to decode"
        return torch.cat(frames, dim=1), state


@cache
def _latent_statistics(device: torch.device) -> Tensor:
    """Mean and deviation, [2, 1, C, 1, 1, 1]. Kept: to put them on a CUDA device makes the host wait for its stream."""
    with torch.inference_mode(False):
        pair = torch.tensor(LATENT_STATISTICS, device=device)
        return pair.view(2, 1, LATENT_CHANNELS, 1, 1, 1)


def decoder_for(vae: Any, *, channels_last: bool | None = None) -> Decoder:
    """Return what decodes with ``vae``: a Wan autoencoder or a tiny one; ``channels_last`` is for the former."""
    return TinyDecoder(vae) if isinstance(vae, TinyVae) else StreamingDecoder(vae, channels_last=channels_last)


def decode_frame(vae: TinyVae, z_BCHW: Tensor, features: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Decode one latent frame to four, [B, 4, 3, 8H, 8W], not clamped.

    ``features`` are the blocks' last inputs [B, C, H, W], empty at the start of a video; the next ones are returned.
    """
    batch, x = z_BCHW.shape[0], torch.tanh(z_BCHW / 3) * 3
    kept, after = iter(features), []
    for layer in vae.decoder:
        if isinstance(layer, PastBlock):
            x_BTCHW = x.unflatten(0, (batch, -1))
            before = next(kept) if features else torch.zeros_like(x_BTCHW[:, 0])
            past = torch.cat([before.unsqueeze(1), x_BTCHW[:, :-1]], dim=1).flatten(0, 1)
            after.append(x_BTCHW[:, -1].clone())
            x = layer(x, past)
        else:
            x = layer(x)
    return x.unflatten(0, (batch, -1)), tuple(after)


def load_tiny_vae(path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> TinyVae:
    """Load a decoder from a file of the ``taew2_1`` kind; the encoder beside it is left out.

    Raises ``ValueError`` that names the file for any other, also for decoders of other latents with the same layout.
    """
    if path.name.lower().startswith(OTHERS):
        raise ValueError(f"{path.name} decodes other latents than Wan 2.1's; use taew2_1")
    state, _ = read_state(path, what="a tiny autoencoder", dtype=dtype)
    raw = path.name.lower().startswith(RAW)
    return tiny_vae_of(state, source=path.name, raw=raw, dtype=dtype, device=device)


def tiny_vae_of(
    state: Mapping[str, Any], *, source: str, raw: bool, dtype: torch.dtype, device: torch.device | str
) -> TinyVae:
    """Return a decoder with copies of a file's weights; ``ValueError`` names ``source`` if they do not fit."""
    found = {
        name: tensor for name, tensor in state.items() if name.startswith("decoder.") and isinstance(tensor, Tensor)
    }
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            vae = TinyVae(raw=raw)
        _check(found, vae.state_dict(), source)
        placed = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in found.items()}
        vae.load_state_dict(placed, assign=True)
    return vae.requires_grad_(False).eval()


def _check(found: dict[str, Any], expected: dict[str, Tensor], source: str) -> None:
    for name, tensor in expected.items():
        there = tuple(found[name].shape) if name in found else "nothing"
        if there != tuple(tensor.shape):
            raise ValueError(
                f"{source} is no tiny autoencoder for Wan 2.1: {name} is {there}, expected {tuple(tensor.shape)}; "
                "use taew2_1"
            )
    if strange := sorted(found.keys() - expected.keys()):
        raise ValueError(f"{source} is no tiny autoencoder for Wan 2.1: it also has {strange[0]}; use taew2_1")
