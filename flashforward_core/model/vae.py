"""Pixels to latents and back: a streaming decoder over diffusers' Wan autoencoder.

The engine passes *normalised* latents (zero mean, unit variance by ``vae.config.latents_mean/std``); ComfyUI's LATENT
holds un-normalised ones. The autoencoder is causal in time, so decoding one latent frame at a time with its cache
gives what decoding the whole clip gives. The cache travels as an immutable ``VaeState``.

Shape letters: B batch, C channels, F frames, H height, W width (latent or pixel, as the text says).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..specs import TEMPORAL_FACTOR
from .vae_layers import CausalCache, Options, decode_back, decode_front, decode_raw, encode_moments, require_wan21

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


@dataclass(frozen=True, slots=True)
class VaeState:
    """The decoder's causal cache after some latent frames; reusable, since decoding never changes it."""

    features: tuple[Tensor, ...]
    """The last input frames of each convolution over time, in order of execution."""

    @property
    def num_bytes(self) -> int:
        return sum(f.numel() * f.element_size() for f in self.features)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> VaeState:
        """Return the state with ``change`` done to each tensor, such as a copy to another device."""
        return VaeState(tuple(change(feature) for feature in self.features))


SETTLED_LATENTS = 4  # a still's colours no longer change by then


class Decoder(ABC):
    """Decodes normalised latents [B, C, F, h, w] as they come, with what it needs of the past in a state."""

    def decode(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[Tensor, VaeState]:
        """Decode the latents that follow ``state`` (None at the start) to uint8 frames [B, F, H, W, 3] on the CPU.

        The first latent frame of a video gives one frame, every other one four. ``state`` is not changed.
        """
        frames, after = self.decode_in_place(latents_BCFHW, state)
        return frames.cpu(), after

    def decode_in_place(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[Tensor, VaeState]:
        """Like ``decode``, with the frames left on the autoencoder's device, so that nothing waits for it."""
        frames, after = self._decode(latents_BCFHW, state)
        return to_uint8(frames), after

    def still(self, latent_BC1HW: Tensor) -> VaeState:
        """Return the state after a latent frame that stood still for long enough to look like itself.

        A scene that begins at a hard cut is decoded after it: else the last scene's frames would shine through.
        """
        _, after = self._decode(latent_BC1HW.expand(-1, -1, SETTLED_LATENTS, -1, -1), None)
        return after

    def stream(self, latents_BCFHW: Tensor, *, starts: Sequence[int] = (), at_once: int = 1) -> Iterator[Tensor]:
        """Yield uint8 frames [B, F, H, W, 3] on the CPU, of at most ``at_once`` latent frames at a time.

        Scenes begin at the latent frames ``starts``, of which those past the end do not count, each on its own.
        """
        state: VaeState | None = None
        for scene in latents_BCFHW.tensor_split(list(starts), dim=2):
            if not scene.shape[2]:
                continue
            state = None if state is None else self.still(scene[:, :, :1])
            for part in scene.split(at_once, dim=2):
                frames, state = self.decode(part, state)
                yield frames

    def decode_float(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[Tensor, VaeState]:
        """Like ``decode``, with float32 frames in [0, 1], as ComfyUI's IMAGE has them."""
        frames, after = self._decode(latents_BCFHW, state)
        return frames.cpu(), after

    @abstractmethod
    def _decode(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[Tensor, VaeState]:
        """Decode to float32 frames [B, F, H, W, 3] in [0, 1] on the weights' device."""


class StreamingDecoder(Decoder):
    """Decode latents as they come. It keeps nothing between calls, so several rollouts may share it."""

    def __init__(
        self,
        vae: AutoencoderKLWan,
        *,
        as_conv2d: bool | None = None,
        channels_last: bool | None = None,
        compiled: bool = False,
    ) -> None:
        """``as_conv2d`` None chooses it on a CPU, where torch's 3D convolution of few frames is four times slower.

        ``channels_last`` keeps activations in channels-last memory, which tensor cores read; other roundings. None
        chooses it on CUDA.
        ``compiled`` needs a compiler and takes its time on the first two latent frames, whose shapes differ.
        """
        require_wan21(vae)
        self._step = torch.compile(_decode_step, dynamic=False) if compiled else _decode_step
        self.vae = vae
        self._as_conv2d = as_conv2d
        self._channels_last = channels_last

    @torch.no_grad()
    def _decode(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[Tensor, VaeState]:
        weight = self.vae.post_quant_conv.weight
        z = denormalise(self.vae, latents_BCFHW.to(weight.device)).to(weight.dtype)
        frames = []
        as_conv2d = _use_conv2d(self._as_conv2d, weight.device)
        channels_last = self._is_channels_last
        for latent in z.split(1, dim=2):  # one shape for every call: the bytes do not depend on the chunks
            kept = () if state is None else state.features
            decoded, after = self._step(self.vae, latent, kept, as_conv2d, channels_last)
            frames.append(decoded)
            state = VaeState(after)
        assert state is not None, "no latent frame to decode"
        return torch.cat(frames, dim=1), state

    @torch.no_grad()
    def front(self, latents_BCFHW: Tensor, state: VaeState | None) -> tuple[VaeState, VaeState]:
        """Run the first half of the layers; return what ``back`` takes, a tensor per latent frame, and the next state.

        Both halves keep states of their own and give what ``decode`` gives, on one device or on two.
        """
        weight = self.vae.post_quant_conv.weight
        z = denormalise(self.vae, latents_BCFHW.to(weight.device)).to(weight.dtype)
        given = [
            latent.contiguous(memory_format=torch.channels_last_3d) if self._is_channels_last else latent
            for latent in z.split(1, dim=2)
        ]
        features, after = self._half(decode_front, given, state)
        return VaeState(tuple(features)), after

    @torch.no_grad()
    def back(self, features: VaeState, state: VaeState | None, *, skip: int = 0) -> tuple[Tensor, VaeState]:
        """Run the rest; return uint8 frames [B, F, H, W, 3] on the device, but for the first ``skip`` latents."""
        raw, after = self._half(decode_back, features.features, state)
        return to_uint8(torch.cat([_to_unit_range(frames) for frames in raw[skip:]], dim=1)), after

    def _half(
        self,
        layers: Callable[[AutoencoderKLWan, Tensor, Options], Tensor],
        given: Sequence[Tensor],
        state: VaeState | None,
    ) -> tuple[list[Tensor], VaeState]:
        """Run half of the layers on one latent frame's tensor after the other."""
        made, as_conv2d = [], _use_conv2d(self._as_conv2d, given[0].device)
        for x in given:
            cache = CausalCache(() if state is None else state.features)
            options = Options(as_conv2d=as_conv2d, cache=cache, channels_last=self._is_channels_last)
            made.append(layers(self.vae, x, options))
            state = VaeState(cache.after)
        assert state is not None, "no latent frame to decode"
        return made, state

    @property
    def _is_channels_last(self) -> bool:
        return self.vae.post_quant_conv.weight.is_cuda if self._channels_last is None else self._channels_last


def _decode_step(
    vae: AutoencoderKLWan, z_BC1HW: Tensor, features: tuple[Tensor, ...], as_conv2d: bool, channels_last: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Decode one latent frame after ``features`` (empty at first); return frames in [0, 1] and the next features."""
    cache = CausalCache(features)
    if channels_last:
        z_BC1HW = z_BC1HW.contiguous(memory_format=torch.channels_last_3d)
    raw = decode_raw(vae, z_BC1HW, Options(as_conv2d=as_conv2d, cache=cache, channels_last=channels_last))
    return _to_unit_range(raw), cache.after


@torch.no_grad()
def encode_frames(vae: AutoencoderKLWan, frames_BFHWC: Tensor) -> Tensor:
    """Encode 4n+1 frames (uint8, or float in [0, 1]) to n+1 normalised latents [B, C, F, H/8, W/8] in float32.

    Takes the posterior's mean. Raises ``ValueError`` for a frame count that is not 4n+1 or a side that 8 does not
    divide. Runs four frames at a time on a cache of its own, so threads may share ``vae``.
    """
    require_wan21(vae)
    _, frames, height, width, _ = frames_BFHWC.shape
    if frames % TEMPORAL_FACTOR != 1:
        raise ValueError(f"frames={frames} is not 4n+1; use frames={max(0, frames - 1) // 4 * 4 + 1}")
    if height % 8 or width % 8:
        raise ValueError(f"image is {width}x{height}; use a width and height that are multiples of 8")
    weight = vae.quant_conv.weight
    kept: tuple[Tensor, ...] = ()
    means = []
    for start, stop in [(0, 1), *((i, i + TEMPORAL_FACTOR) for i in range(1, frames, TEMPORAL_FACTOR))]:
        cache = CausalCache(kept)
        options = Options(as_conv2d=_use_conv2d(None, weight.device), cache=cache)
        moments = encode_moments(vae, _from_frames(frames_BFHWC[:, start:stop]).to(weight), options)
        means.append(moments.chunk(2, dim=1)[0])
        kept = cache.after
    return normalise(vae, torch.cat(means, dim=2))


def normalise(vae: AutoencoderKLWan, z_BCFHW: Tensor) -> Tensor:
    """To zero mean and unit variance per channel, in float32: what the transformer works on."""
    mean, std = _latent_statistics(vae, z_BCFHW.device)
    return (z_BCFHW.float() - mean) / std


def denormalise(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """Undo ``normalise``, in float32: what ``vae.decode`` and ComfyUI's LATENT hold."""
    mean, std = _latent_statistics(vae, latents_BCFHW.device)
    return latents_BCFHW.float() * std + mean


def to_uint8(frames: Tensor) -> Tensor:
    """From [0, 1] to bytes, to the nearest."""
    return (frames * 255).round().clamp(0, 255).to(torch.uint8)


def _use_conv2d(choice: bool | None, device: torch.device) -> bool:
    return device.type == "cpu" if choice is None else choice


def _latent_statistics(vae: AutoencoderKLWan, device: torch.device) -> tuple[Tensor, Tensor]:
    return _statistics(tuple(vae.config.latents_mean), tuple(vae.config.latents_std), device)


@cache
def _statistics(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per channel, [1, C, 1, 1, 1]. Kept, since putting them on a CUDA device makes the host wait for its stream."""
    with torch.inference_mode(False):
        pair = torch.tensor([mean, std], dtype=torch.float32, device=device).view(2, 1, -1, 1, 1, 1)
    return pair[0], pair[1]


def _to_unit_range(pixels_BCFHW: Tensor) -> Tensor:
    return ((pixels_BCFHW.float().clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 4, 1)


def _from_frames(frames_BFHWC: Tensor) -> Tensor:
    scale = 255.0 if frames_BFHWC.dtype == torch.uint8 else 1.0
    return (frames_BFHWC.float() / scale * 2 - 1).permute(0, 4, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Preview:
    """A linear look at latents: one RGB pixel per latent pixel, without the decoder."""

    weight: tuple[tuple[float, float, float], ...]
    """Per latent channel, its share in red, green and blue."""
    bias: tuple[float, float, float]
    """Colour of an all-zero latent, in [0, 1]."""

    def frames(self, latents_BCFHW: Tensor) -> Tensor:
        """Project normalised latents to uint8 RGB [B, F, h, w, 3] on the CPU."""
        x = latents_BCFHW.detach().float().cpu().movedim(1, -1)
        return to_uint8(x @ torch.tensor(self.weight) + torch.tensor(self.bias))
