"""The Wan 2.1 autoencoder's computation on diffusers' modules and weights, over any number of frames at a time.

diffusers runs a clip chunk by chunk and keeps a causal cache. The same numbers come out of the full sequence at once:

- a causal convolution sees zeros before the first frame, once;
- temporal downsampling keeps the first frame and runs its strided convolution over the full sequence;
- temporal upsampling keeps the first frame and interleaves its convolution's two halves over *the rest*: that
  convolution starts at the second frame, so it never sees the first.

With a ``CausalCache`` a call continues where the previous one ended; without one, a call is a whole clip. Both are one
code. Everything is differentiable, works under autocast and ``torch.compile``, and leaves the modules unchanged.

Shape letters: B batch, C channels, F frames, H height, W width; z latent channels, f h w latent sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


NO_DIVISION_BY_ZERO = 1e-24  # under a root; a norm of 1e-12, as diffusers has it


class CausalCache:
    """What each causal convolution saw last, in order of execution.

    ``kept`` is the previous call's ``after`` (empty at the start of a video). Its tensors are read, never written.
    """

    def __init__(self, kept: tuple[Tensor, ...] = ()) -> None:
        self.first = len(kept) == 0
        self._kept = iter(kept)
        self._after: list[Tensor] = []

    @property
    def after(self) -> tuple[Tensor, ...]:
        return tuple(self._after)

    def join(self, x: Tensor, frames: int) -> Tensor:
        """Put the ``frames`` frames before ``x`` in front of it (zeros at the start) and keep its last ones."""
        joined = _zeros_before(x, frames) if self.first else torch.cat((next(self._kept), x), dim=2)
        self.keep(joined[:, :, joined.shape[2] - frames :])
        return joined

    def join_last(self, x: Tensor) -> Tensor:
        """Like ``join`` with one frame, but with nothing in front at the start."""
        joined = x if self.first else torch.cat((next(self._kept), x), dim=2)
        self.keep(x[:, :, -1:])
        return joined

    def keep(self, x: Tensor) -> None:
        self._after.append(x.clone())  # a slice would hold on to all of its source


class Options:
    """How to compute: ``as_conv2d`` as in ``encode_moments``; ``cache`` None for a whole clip.

    ``channels_last`` says that activations come in channels-last memory, where a norm is one kernel.
    """

    def __init__(
        self,
        *,
        as_conv2d: bool = False,
        recompute: bool = False,
        cache: CausalCache | None = None,
        channels_last: bool = False,
    ) -> None:
        assert cache is None or not recompute, "a recomputed layer would read the cache twice"
        self.channels_last = channels_last
        self.as_conv2d = as_conv2d
        self.recompute = recompute
        self.cache = cache

    @property
    def first(self) -> bool:
        """Whether this call holds the video's first frame."""
        return self.cache is None or self.cache.first


def require_wan21(vae: AutoencoderKLWan) -> None:
    """Raise ``ValueError`` unless ``vae`` has the layers of Wan 2.1's autoencoder."""
    residual, patch = vae.config.is_residual, vae.config.patch_size
    if residual or patch is not None:
        raise ValueError(
            f"the autoencoder is not Wan 2.1's (is_residual={residual}, patch_size={patch}); use a Wan 2.1 autoencoder"
        )


def encode_moments(vae: AutoencoderKLWan, video_BCFHW: Tensor, options: Options) -> Tensor:
    """Encode frames in [-1, 1] to moments [B, 2z, f, h, w] (mean, then log variance)."""
    encoder = vae.encoder
    x = _causal_conv(encoder.conv_in, video_BCFHW, options)
    for level in _encoder_levels(encoder.down_blocks):
        x = _run(_layers, level, x, options)
    x = _run(_layers, _mid_layers(encoder.mid_block), x, options)
    x = _causal_conv(encoder.conv_out, _norm_silu(encoder.norm_out, x, options), options)
    return _causal_conv(vae.quant_conv, x, options)


def decode_raw(vae: AutoencoderKLWan, z_BCFHW: Tensor, options: Options) -> Tensor:
    """Decode un-normalised latents [B, z, f, h, w] to frames [B, 3, F, 8h, 8w], not clamped."""
    return decode_back(vae, decode_front(vae, z_BCFHW, options), options)


def decode_front(vae: AutoencoderKLWan, z_BCFHW: Tensor, options: Options) -> Tensor:
    """Run the decoder up to its last upsampling, some 60 % of Wan's multiplications; what comes out is small there."""
    decoder = vae.decoder
    x = _causal_conv(decoder.conv_in, _causal_conv(vae.post_quant_conv, z_BCFHW, options), options)
    x = _run(_layers, _mid_layers(decoder.mid_block), x, options)
    for block in decoder.up_blocks[:-2]:
        x = _run(_layers, [*block.resnets, *(block.upsamplers or ())], x, options)
    return _run(_layers, list(decoder.up_blocks[-2].resnets), x, options)


def decode_back(vae: AutoencoderKLWan, x_BCFHW: Tensor, options: Options) -> Tensor:
    """Run the rest on what ``decode_front`` gives, with a cache of its own or the one that has gone through it."""
    decoder = vae.decoder
    last, final = decoder.up_blocks[-2:]
    x = _run(_layers, [*(last.upsamplers or ()), *final.resnets, *(final.upsamplers or ())], x_BCFHW, options)
    return _causal_conv(decoder.conv_out, _norm_silu(decoder.norm_out, x, options), options)


def _run(step: Callable[..., Tensor], layers: list[nn.Module], x: Tensor, options: Options) -> Tensor:
    if options.recompute and torch.is_grad_enabled():
        recomputed: Any = checkpoint(partial(step, layers, options=options), x, use_reentrant=False)
        return recomputed
    return step(layers, x, options=options)


def _encoder_levels(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Split the encoder's flat list after every resampling layer."""
    levels: list[list[nn.Module]] = [[]]
    for layer in layers:
        levels[-1].append(layer)
        if hasattr(layer, "resample"):
            levels.append([])
    return levels


def _mid_layers(block: Any) -> list[nn.Module]:
    pairs = zip(block.attentions, block.resnets[1:], strict=True)
    return [block.resnets[0], *(layer for pair in pairs for layer in pair)]


def _layers(layers: Iterable[nn.Module], x: Tensor, *, options: Options) -> Tensor:
    for layer in layers:
        if hasattr(layer, "conv1"):
            x = _residual(layer, x, options)
        elif hasattr(layer, "resample"):
            x = _resample(layer, x, options)
        else:
            assert hasattr(layer, "to_qkv"), type(layer)
            x = layer(x)  # attends within a frame, so a clip is a batch of frames
    return x


def _residual(block: Any, x: Tensor, options: Options) -> Tensor:
    shortcut = block.conv_shortcut
    kept = x if isinstance(shortcut, nn.Identity) else _causal_conv(shortcut, x, options)
    x = _causal_conv(block.conv1, _norm_silu(block.norm1, x, options), options)
    x = block.dropout(_norm_silu(block.norm2, x, options))
    return _causal_conv(block.conv2, x, options) + kept


def _resample(layer: Any, x: Tensor, options: Options) -> Tensor:
    if layer.mode == "upsample3d":
        x = _upsample_time(layer.time_conv, x, options)
    x = _resample_space(layer, x)
    if layer.mode == "downsample3d":
        x = _downsample_time(layer.time_conv, x, options)
    return x


def _upsample_time(time_conv: Any, x: Tensor, options: Options) -> Tensor:
    """Two frames for each, except for the video's first frame."""
    if not options.first:
        return _interleave(_causal_conv(time_conv, x, options))
    head, rest = x[:, :, :1], x[:, :, 1:]
    if rest.shape[2]:
        return torch.cat((head, _interleave(_causal_conv(time_conv, rest, options))), dim=2)
    if options.cache is not None:
        before = time_conv.kernel_size[0] - 1
        options.cache.keep(_zeros_before(x, before)[:, :, :before])
    return head


def _interleave(pairs: Tensor) -> Tensor:
    """From [B, 2C, F, H, W], even frames in the first half of the channels, to [B, C, 2F, H, W]."""
    halves = pairs.unflatten(1, (2, -1)).permute(0, 3, 1, 4, 5, 2)  # B F 2 H W C: the order of channels-last memory
    return halves.flatten(1, 2).permute(0, 4, 1, 2, 3)


def _downsample_time(time_conv: Any, x: Tensor, options: Options) -> Tensor:
    """Every second frame, and the video's first one as it is."""
    joined = x if options.cache is None else options.cache.join_last(x)
    if not options.first:
        return _conv(time_conv, joined, options)
    if x.shape[2] == 1:
        return x
    return torch.cat((x[:, :, :1], _conv(time_conv, joined, options)), dim=2)


def _resample_space(layer: Any, x: Tensor) -> Tensor:
    """Resample every frame. Nearest upsampling only copies, so it needs no float32 detour."""
    frames = x.shape[2]
    x = _fold_frames(x)
    if layer.mode.startswith("upsample"):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest-exact")
    else:
        x = F.pad(x, (0, 1, 0, 1))
    return _unfold_frames(layer.resample[1](x), frames)


def _norm_silu(norm: Any, x: Tensor, options: Options) -> Tensor:
    """Normalise over channels, then SiLU; in ``x``'s dtype, so that autocast keeps activations small."""
    if options.channels_last:
        return F.silu(_rms_norm(norm, x), inplace=not torch.is_grad_enabled())
    gamma = norm.gamma * norm.scale
    if x.is_cuda and torch.is_grad_enabled():
        return _fused_norm_silu()(x, gamma)
    return _plain_norm_silu(x, gamma)


def _rms_norm(norm: Any, x_BCFHW: Tensor) -> Tensor:
    """Return x / |x| · √C · gamma: channels come last in memory, so this is PyTorch's norm over the last axis."""
    out = F.rms_norm(x_BCFHW.movedim(1, -1), x_BCFHW.shape[1:2], norm.gamma.flatten(), eps=NO_DIVISION_BY_ZERO)
    return out.movedim(-1, 1)


def _plain_norm_silu(x: Tensor, gamma: Tensor) -> Tensor:
    return F.silu(F.normalize(x.float(), dim=1).to(x.dtype) * gamma.to(x.dtype))


@cache
def _fused_norm_silu() -> Callable[[Tensor, Tensor], Tensor]:
    """One kernel for every shape: passes over memory, not the convolutions, are most of an eager training step."""
    fused: Callable[[Tensor, Tensor], Tensor] = torch.compile(_plain_norm_silu, dynamic=True)
    return fused


def _causal_conv(conv: Any, x: Tensor, options: Options) -> Tensor:
    """Convolve with the frames before ``x`` in front: the cache's, or zeros before the first."""
    before = conv.kernel_size[0] - 1
    if before:
        x = _zeros_before(x, before) if options.cache is None else options.cache.join(x, before)
    return _conv(conv, x, options)


def _conv(conv: Any, x: Tensor, options: Options) -> Tensor:
    """Convolve without padding in time, and in space as the layer says."""
    padding = conv._padding[2], conv._padding[0]
    if options.as_conv2d:
        return _stacked_conv2d(conv, x, padding)
    return F.conv3d(x, conv.weight, conv.bias, stride=conv.stride, padding=(0, *padding))


def _stacked_conv2d(conv: Any, x: Tensor, padding: tuple[int, int]) -> Tensor:
    """The 3D convolution as one 2D convolution whose input channels are the kernel's frames, stacked."""
    taps, step = conv.kernel_size[0], conv.stride[0]
    frames = (x.shape[2] - taps) // step + 1
    span = step * (frames - 1) + 1
    stacked = x if taps == 1 else torch.cat([x[:, :, t : t + span : step] for t in range(taps)], dim=1)
    folded = _fold_frames(stacked).contiguous(memory_format=torch.channels_last)
    weight = conv.weight.transpose(1, 2).flatten(1, 2)  # [out, taps * in, kh, kw], in the order of the stack
    out = F.conv2d(folded, weight, conv.bias, stride=conv.stride[1:], padding=padding)
    return _unfold_frames(out, frames)


def _fold_frames(x_BCFHW: Tensor) -> Tensor:
    """To [B*F, C, H, W]; a view when the memory is channels-last."""
    return x_BCFHW.transpose(1, 2).flatten(0, 1)


def _unfold_frames(x: Tensor, frames: int) -> Tensor:
    return x.unflatten(0, (-1, frames)).transpose(1, 2)


def _zeros_before(x: Tensor, frames: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, frames, 0))  # unlike concatenation with new zeros, it keeps the memory format
