"""The Wan autoencoder over a whole clip at once, for training.

diffusers' ``AutoencoderKLWan`` runs a clip chunk by chunk and carries a causal cache, which is right for streaming
and slow for training. The same modules and weights over the full sequence give the same numbers:

- a causal convolution pads zeros in time on the left, once, before the first frame;
- temporal downsampling keeps the first frame and runs its strided convolution over the full sequence;
- temporal upsampling keeps the first frame and interleaves its convolution's two halves over *the rest*: the cached
  path starts that convolution at the second frame, so the first one is never seen by it.

Everything here is differentiable, works under autocast and ``torch.compile``, and never touches the module's caches.

Shape letters: B batch, C channels, F frames, H height, W width; z latent channels, f h w latent sizes.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanAttentionBlock,
    WanCausalConv3d,
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
    WanUpBlock,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashforward_core.specs import TEMPORAL_FACTOR

Step = Callable[[Tensor], Tensor]


def encode_moments_whole(
    vae: AutoencoderKLWan, video_BCFHW: Tensor, *, as_conv2d: bool = False, recompute: bool = False
) -> Tensor:
    """Encode a clip of 4n+1 frames in [-1, 1] to its moments [B, 2z, n+1, H/8, W/8] (mean, then log variance).

    ``as_conv2d`` computes the 3D convolutions as 2D ones over stacked frames: the same sums, often faster where
    channels are few. ``recompute`` keeps only the activations between resolution levels and recomputes the rest in
    the backward pass. Raises ``ValueError`` for another frame count or an autoencoder other than Wan 2.1's.
    """
    _require_wan21(vae)
    frames = video_BCFHW.shape[2]
    if frames % TEMPORAL_FACTOR != 1:
        raise ValueError(f"frames={frames} is not 4n+1; use frames={frames // TEMPORAL_FACTOR * TEMPORAL_FACTOR + 1}")
    encoder = vae.encoder
    x = _causal_conv(encoder.conv_in, video_BCFHW, as_conv2d)
    for level in _encoder_levels(encoder.down_blocks):
        x = _run(partial(_layers, level, as_conv2d=as_conv2d), x, recompute)
    x = _run(partial(_mid, encoder.mid_block, as_conv2d=as_conv2d), x, recompute)
    x = _causal_conv(encoder.conv_out, F.silu(_rms_norm(encoder.norm_out, x)), as_conv2d)
    return _causal_conv(vae.quant_conv, x, as_conv2d)


def decode_whole(vae: AutoencoderKLWan, z_BCFHW: Tensor, *, as_conv2d: bool = False, recompute: bool = False) -> Tensor:
    """Decode un-normalised latents [B, z, n+1, h, w] to a clip [B, 3, 4n+1, 8h, 8w], not clamped.

    The flags and errors are those of ``encode_moments_whole``.
    """
    _require_wan21(vae)
    decoder = vae.decoder
    x = _causal_conv(decoder.conv_in, _causal_conv(vae.post_quant_conv, z_BCFHW, as_conv2d), as_conv2d)
    x = _run(partial(_mid, decoder.mid_block, as_conv2d=as_conv2d), x, recompute)
    for block in decoder.up_blocks:
        x = _run(partial(_layers, _up_layers(block), as_conv2d=as_conv2d), x, recompute)
    return _causal_conv(decoder.conv_out, F.silu(_rms_norm(decoder.norm_out, x)), as_conv2d)


def _require_wan21(vae: AutoencoderKLWan) -> None:
    if vae.config.is_residual or vae.config.patch_size is not None:
        raise ValueError("the autoencoder is Wan 2.2's (is_residual or patch_size is set); use a Wan 2.1 autoencoder")


def _run(step: Step, x: Tensor, recompute: bool) -> Tensor:
    if recompute and torch.is_grad_enabled():
        return checkpoint(step, x, use_reentrant=False)
    return step(x)


def _encoder_levels(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Split the encoder's flat list after every resampling layer."""
    levels: list[list[nn.Module]] = [[]]
    for layer in layers:
        levels[-1].append(layer)
        if isinstance(layer, WanResample):
            levels.append([])
    return levels


def _up_layers(block: WanUpBlock) -> list[nn.Module]:
    return [*block.resnets, *(block.upsamplers or ())]


def _layers(layers: Iterable[nn.Module], x: Tensor, *, as_conv2d: bool) -> Tensor:
    for layer in layers:
        if isinstance(layer, WanResidualBlock):
            x = _residual(layer, x, as_conv2d)
        elif isinstance(layer, WanResample):
            x = _resample(layer, x, as_conv2d)
        else:
            assert isinstance(layer, WanAttentionBlock), type(layer)
            x = layer(x)  # attends within a frame, so the whole clip is a batch of frames
    return x


def _mid(block: WanMidBlock, x: Tensor, *, as_conv2d: bool) -> Tensor:
    first, *rest = block.resnets
    x = _residual(first, x, as_conv2d)
    for attention, resnet in zip(block.attentions, rest, strict=True):
        x = _residual(resnet, attention(x), as_conv2d)
    return x


def _residual(block: WanResidualBlock, x: Tensor, as_conv2d: bool) -> Tensor:
    shortcut = block.conv_shortcut
    kept = x if isinstance(shortcut, nn.Identity) else _causal_conv(shortcut, x, as_conv2d)
    x = _causal_conv(block.conv1, F.silu(_rms_norm(block.norm1, x)), as_conv2d)
    x = block.dropout(F.silu(_rms_norm(block.norm2, x)))
    return _causal_conv(block.conv2, x, as_conv2d) + kept


def _resample(layer: WanResample, x: Tensor, as_conv2d: bool) -> Tensor:
    frames = x.shape[2]
    if layer.mode == "upsample3d" and frames > 1:
        pairs = _causal_conv(layer.time_conv, x[:, :, 1:], as_conv2d)
        even, odd = pairs.chunk(2, dim=1)
        rest = torch.stack((even, odd), dim=3).flatten(2, 3)
        x = torch.cat((x[:, :, :1], rest), dim=2)
    x = _per_frame(layer, x)
    if layer.mode == "downsample3d" and frames > 1:
        x = torch.cat((x[:, :, :1], _causal_conv(layer.time_conv, x, as_conv2d)), dim=2)
    return x


def _per_frame(layer: WanResample, x: Tensor) -> Tensor:
    """Resample every frame in space. Nearest upsampling only copies, so it needs no float32 detour."""
    frames = x.shape[2]
    x = _fold_frames(x)
    if layer.mode.startswith("upsample"):
        x = F.interpolate(x, scale_factor=2.0, mode="nearest-exact")
    else:
        x = F.pad(x, (0, 1, 0, 1))
    return _unfold_frames(layer.resample[1](x), frames)


def _rms_norm(norm: WanRMS_norm, x: Tensor) -> Tensor:
    """Normalise over channels in float32 and return ``x``'s dtype, so that autocast keeps activations small."""
    unit = F.normalize(x.float(), dim=1).to(x.dtype)
    return unit * (norm.gamma * norm.scale).to(x.dtype)


def _causal_conv(conv: WanCausalConv3d, x: Tensor, as_conv2d: bool) -> Tensor:
    """Convolve with zeros before the first frame; padding is the layer's own (none for the temporal downsampler)."""
    width, _, height, _, before, _ = conv._padding
    if before:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    if as_conv2d:
        return _stacked_conv2d(conv, x, (height, width))
    return F.conv3d(x, conv.weight, conv.bias, stride=conv.stride, padding=(0, height, width))


def _stacked_conv2d(conv: WanCausalConv3d, x: Tensor, padding: tuple[int, int]) -> Tensor:
    """The 3D convolution as one 2D convolution whose input channels are the kernel's frames, stacked."""
    taps, step = conv.kernel_size[0], conv.stride[0]
    frames = (x.shape[2] - taps) // step + 1
    span = step * (frames - 1) + 1
    stacked = x if taps == 1 else torch.cat([x[:, :, t : t + span : step] for t in range(taps)], dim=1)
    weight = conv.weight.transpose(1, 2).flatten(1, 2)  # [out, taps * in, kh, kw], in the order of the stack
    out = F.conv2d(_fold_frames(stacked), weight, conv.bias, stride=conv.stride[1:], padding=padding)
    return _unfold_frames(out, frames)


def _fold_frames(x_BCFHW: Tensor) -> Tensor:
    """To [B*F, C, H, W]; a view when the memory is channels-last."""
    return x_BCFHW.transpose(1, 2).flatten(0, 1)


def _unfold_frames(x: Tensor, frames: int) -> Tensor:
    return x.unflatten(0, (-1, frames)).transpose(1, 2)
