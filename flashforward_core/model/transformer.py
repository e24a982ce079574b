"""The causal Wan transformer: diffusers' module tree and parameter names, our own forward.

Differences from diffusers' WanTransformer3DModel: a timestep per latent frame, tokens placed at absolute latent
indices, keys and values in and out, and the role as an argument. Source of the arithmetic: the public Wan2.1 code.

Letters: B batch, F latent frames, T tokens per latent frame, L tokens (F·T), N keys, H heads, D head width, C width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..graph.task import Role
from .attention import AttentionFn, sdpa
from .config import PATCH, WanConfig
from .layers import (
    LayerNorm,
    RMSNorm,
    Rotation,
    Segment,
    Segments,
    at_least_fp32,
    project,
    rotate,
    rotation,
    sinusoid,
)

KeyValue = tuple[Tensor, Tensor]


class KVContext(Protocol):
    """What a forward attends to besides itself."""

    def extend(self, block: int, k_BNHD: Tensor, v_BNHD: Tensor) -> KeyValue:
        """Take one block's own rotated keys and values; return all keys and values to attend to, own ones included."""
        ...


@dataclass(frozen=True, slots=True)
class TextContext:
    """A prompt's cross-attention keys and values for every block, as one role computes them."""

    role: Role
    pairs: tuple[KeyValue, ...]
    """Per block: keys and values, each [B, text_len, H, D]."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The three parts of a block around its two attentions, as functions of the block; compiled ones, say."""

    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    between: Callable[..., tuple[Tensor, Tensor]]
    finish: Callable[..., Tensor]


class Attention(nn.Module):
    """Projections and norms of one attention; the kernel is an argument of whoever calls."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.to_q = nn.Linear(config.dim, config.dim)
        self.to_k = nn.Linear(config.dim, config.dim)
        self.to_v = nn.Linear(config.dim, config.dim)
        self.to_out = nn.ModuleList([nn.Linear(config.dim, config.dim)])
        self.norm_q = RMSNorm(config.dim, eps=config.eps)
        self.norm_k = RMSNorm(config.dim, eps=config.eps)

    def query(self, x_BLC: Tensor, segments: Segments) -> Tensor:
        """Return normed queries [B, L, H, D] in float32 at least."""
        return self.norm_q(project(self.to_q, x_BLC, segments)).unflatten(-1, (self.num_heads, -1))

    def key(self, x_BLC: Tensor, segments: Segments) -> Tensor:
        """Return normed keys [B, L, H, D] in float32 at least."""
        return self.norm_k(project(self.to_k, x_BLC, segments)).unflatten(-1, (self.num_heads, -1))

    def value(self, x_BLC: Tensor, segments: Segments) -> Tensor:
        return project(self.to_v, x_BLC, segments).unflatten(-1, (self.num_heads, -1))

    def out(self, x_BLHD: Tensor, segments: Segments) -> Tensor:
        return project(self.to_out[0], x_BLHD.flatten(2), segments)


class GELUProjection(nn.Module):
    """A linear and a tanh-GELU, under the name that diffusers gives the first layer of a feed-forward."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.dim, config.ffn_dim)

    def forward(self, x_BLC: Tensor, segments: Segments) -> Tensor:
        return F.gelu(project(self.proj, x_BLC, segments), approximate="tanh")


class FeedForward(nn.Module):
    """Linear, tanh-GELU, linear; ``net.1`` is where diffusers keeps a dropout."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.net = nn.ModuleList([GELUProjection(config), nn.Identity(), nn.Linear(config.ffn_dim, config.dim)])

    def forward(self, x_BLC: Tensor, segments: Segments) -> Tensor:
        return project(self.net[2], self.net[0](x_BLC, segments), segments)


def modulate(x_BLC: Tensor, *, shift_BF1C: Tensor, scale_BF1C: Tensor) -> Tensor:
    """Return x·(1 + scale) + shift, each latent frame's tokens by its own."""
    x_BFTC = x_BLC.unflatten(1, (shift_BF1C.shape[1], -1))
    return (x_BFTC * (1 + scale_BF1C) + shift_BF1C).flatten(1, 2)


def add_gated(x_BLC: Tensor, *, update_BLC: Tensor, gate_BF1C: Tensor) -> Tensor:
    """Return x + gate·update in x's dtype, summed in float32 at least."""
    gated = (at_least_fp32(update_BLC).unflatten(1, (gate_BF1C.shape[1], -1)) * gate_BF1C).flatten(1, 2)
    return (at_least_fp32(x_BLC) + gated).to(x_BLC.dtype)


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward.

    ``before`` and ``after`` are the parts around self-attention: each has a fixed token count, whatever is attended.
    ``between`` and ``finish`` are the parts of ``after`` around cross-attention.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.dim, eps=config.eps)
        self.attn1 = Attention(config)
        self.norm2 = LayerNorm(config.dim, eps=config.eps, affine=True)
        self.attn2 = Attention(config)
        self.norm3 = LayerNorm(config.dim, eps=config.eps)
        self.ffn = FeedForward(config)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def modulation(self, time_BF6C: Tensor) -> tuple[Tensor, ...]:
        """Return shift, scale and gate of self-attention, then of the feed-forward, each [B, F, 1, C]."""
        table = at_least_fp32(self.scale_shift_table).unsqueeze(0)
        return (table + at_least_fp32(time_BF6C)).split(1, dim=2)

    def text_pair(self, text_BLC: Tensor, segments: Segments) -> KeyValue:
        """Return cross-attention keys and values of an embedded prompt."""
        value = self.attn2.value(text_BLC, segments)
        return self.attn2.key(text_BLC, segments).to(value.dtype), value

    def before(
        self, x_BLC: Tensor, time_BF6C: Tensor, turn: Rotation, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, all of the values' dtype."""
        shift, scale, *_ = self.modulation(time_BF6C)
        h = modulate(self.norm1(x_BLC), shift_BF1C=shift, scale_BF1C=scale).to(x_BLC.dtype)
        v = self.attn1.value(h, segments)
        q = rotate(self.attn1.query(h, segments), turn).to(v.dtype)
        k = rotate(self.attn1.key(h, segments), turn).to(v.dtype)
        return q, k, v

    def after(
        self,
        x_BLC: Tensor,
        attended_BLHD: Tensor,
        time_BF6C: Tensor,
        text: tuple[KeyValue, ...],
        segments: Segments,
        cross_attend: AttentionFn,
    ) -> Tensor:
        """Return the block's output from what self-attention gave."""
        x, q = self.between(x_BLC, attended_BLHD, time_BF6C, segments)
        return self.finish(x, _attend_text(q, text, segments, cross_attend), time_BF6C, segments)

    def between(
        self, x_BLC: Tensor, attended_BLHD: Tensor, time_BF6C: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return the sum so far and the queries for the prompt, both of ``x_BLC``'s dtype or the linears'."""
        gate = self.modulation(time_BF6C)[2]
        update = self.attn1.out(attended_BLHD, segments)
        x = add_gated(x_BLC, update_BLC=update, gate_BF1C=gate)
        return x, self.attn2.query(self.norm2(x).to(x.dtype), segments).to(update.dtype)

    def finish(self, x_BLC: Tensor, attended_BLHD: Tensor, time_BF6C: Tensor, segments: Segments) -> Tensor:
        """Return the block's output from what cross-attention gave."""
        *_, shift, scale, gate = self.modulation(time_BF6C)
        x = x_BLC + self.attn2.out(attended_BLHD, segments).to(x_BLC.dtype)
        h = modulate(self.norm3(x), shift_BF1C=shift, scale_BF1C=scale).to(x.dtype)
        return add_gated(x, update_BLC=self.ffn(h, segments), gate_BF1C=gate)

    def forward(
        self,
        x_BLC: Tensor,
        time_BF6C: Tensor,
        turn: Rotation,
        text: tuple[KeyValue, ...],
        segments: Segments,
        self_attend: AttentionFn,
        cross_attend: AttentionFn,
        extend: Callable[[Tensor, Tensor], KeyValue] | None,
        parts: BlockParts | None = None,
    ) -> Tensor:
        q, k, v = (
            self.before(x_BLC, time_BF6C, turn, segments)
            if parts is None
            else parts.before(self, x_BLC, time_BF6C, turn, segments)
        )
        if extend is not None:
            k, v = extend(k, v)
        attended = self_attend(q, k, v)
        if parts is None:
            return self.after(x_BLC, attended, time_BF6C, text, segments, cross_attend)
        x, q = parts.between(self, x_BLC, attended, time_BF6C, segments)
        return parts.finish(self, x, _attend_text(q, text, segments, cross_attend), time_BF6C, segments)


def _attend_text(q_BLHD: Tensor, text: tuple[KeyValue, ...], segments: Segments, cross_attend: AttentionFn) -> Tensor:
    """Attend to each segment's own prompt."""
    q = q_BLHD.to(text[0][0].dtype)
    if len(text) == 1:
        return cross_attend(q, *text[0])
    tokens = q.shape[1] // segments[-1].stop
    pieces = [
        cross_attend(q[:, s.start * tokens : s.stop * tokens], *pair) for s, pair in zip(segments, text, strict=True)
    ]
    return torch.cat(pieces, dim=1)


class TwoLinears(nn.Module):
    """Two linears under diffusers' names; the activation between them is the caller's."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(dim_in, dim)
        self.linear_2 = nn.Linear(dim, dim)


class ConditionEmbedder(nn.Module):
    """Embeds timesteps and prompts."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = TwoLinears(config.freq_dim, config.dim)
        self.time_proj = nn.Linear(config.dim, 6 * config.dim)
        self.text_embedder = TwoLinears(config.text_dim, config.dim)

    def time(self, timestep_BF: Tensor) -> Tensor:
        """Return the time embedding [B, F, C], in the dtype of the time MLP's weights."""
        layers = self.time_embedder
        wave = sinusoid(timestep_BF, dim=self.freq_dim).to(layers.linear_1.weight.dtype)
        return layers.linear_2(F.silu(layers.linear_1(wave)))

    def modulation(self, time_BFC: Tensor) -> Tensor:
        """Return what every block's modulation starts from, [B, F, 6, C]."""
        active = F.silu(time_BFC).to(self.time_proj.weight.dtype)
        return self.time_proj(active).unflatten(-1, (6, -1))

    def text(self, text_BLC: Tensor) -> Tensor:
        """Embed a prompt's rows; the zero-padded ones too, as Wan was trained."""
        layers = self.text_embedder
        hidden = F.gelu(layers.linear_1(text_BLC.to(layers.linear_1.weight.dtype)), approximate="tanh")
        return layers.linear_2(hidden)


class CausalWanTransformer(nn.Module):
    """Predicts the velocity of latent frames, given what they may attend to."""

    def __init__(self, config: WanConfig, *, serves: Role | None = None) -> None:
        """Make a model with random weights; ``serves`` names the one role that a merged weight set is for."""
        super().__init__()
        self.config = config
        self.serves = serves
        self.patch_embedding = nn.Conv3d(config.channels, config.dim, kernel_size=PATCH, stride=PATCH)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm_out = LayerNorm(config.dim, eps=config.eps)
        self.proj_out = nn.Linear(config.dim, config.channels * PATCH[1] * PATCH[2])
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self.role_embedding = nn.Embedding(len(Role), config.dim)
        nn.init.zeros_(self.role_embedding.weight)

    def text_context(self, text_BLC: Tensor, role: Role) -> TextContext:
        """Compute a prompt's cross-attention keys and values once, from embeddings [B, text_len, text_dim]."""
        self._check_role(role)
        segments = (Segment(role, 0, 1),)
        rows = self.condition_embedder.text(text_BLC)
        return TextContext(role, tuple(block.text_pair(rows, segments) for block in self.blocks))

    def forward(
        self,
        x_BCFHW: Tensor,
        *,
        timestep_BF: Tensor,
        text: TextContext | Sequence[TextContext],
        frames: Tensor,
        segments: Sequence[Segment] | None = None,
        role: Role | None = None,
        kv: KVContext | None = None,
        self_attend: AttentionFn | None = None,
        cross_attend: AttentionFn | None = None,
        checkpoint_blocks: bool = False,
        parts: BlockParts | None = None,
    ) -> Tensor:
        """Return the velocity v_BCFHW, in the dtype of the output layer's weights.

        ``timestep_BF`` is 1000·sigma per latent frame; ``frames`` [F], or [B, F], holds absolute latent indices on
        the model's device. Exactly one of ``role`` (the whole sequence) and ``segments`` (one TextContext each) is
        given. Without ``kv`` the sequence attends to itself only. ``checkpoint_blocks`` recomputes blocks in the
        backward pass; ``parts`` are what to run the blocks with instead of their own methods.
        """
        segments = self._segments(segments, role=role, num_frames=x_BCFHW.shape[2])
        texts = (text,) if isinstance(text, TextContext) else tuple(text)
        assert [t.role for t in texts] == [s.role for s in segments], "one text context per segment, of its role"
        rows, columns = x_BCFHW.shape[3] // PATCH[1], x_BCFHW.shape[4] // PATCH[2]
        x = self._embed(x_BCFHW)
        time_BFC = self._time(timestep_BF, segments)
        time_BF6C = self._modulation(time_BFC)
        wide = torch.promote_types(x.dtype, torch.float32)
        turn = rotation(self.config, frames=frames, rows=rows, columns=columns, dtype=wide)
        for index, block in enumerate(self.blocks):
            extend = None if kv is None else partial(kv.extend, index)
            pairs = tuple(t.pairs[index] for t in texts)
            args = (x, time_BF6C, turn, pairs, segments, self_attend or sdpa, cross_attend or sdpa, extend, parts)
            x = checkpoint(block, *args, use_reentrant=False) if checkpoint_blocks else block(*args)
        return self._velocity(x, time_BFC, rows=rows, columns=columns)

    def _check_role(self, role: Role) -> None:
        assert self.serves in (None, role), f"weights merged for the {self.serves} cannot serve the {role}"

    def _segments(self, segments: Sequence[Segment] | None, *, role: Role | None, num_frames: int) -> Segments:
        assert (role is None) != (segments is None), "give either role or segments"
        found = (Segment(role, 0, num_frames),) if role is not None else tuple(segments or ())
        edges = [0, *(segment.stop for segment in found)]
        assert [s.start for s in found] == edges[:-1] and edges[-1] == num_frames, "segments must tile the sequence"
        for segment in found:
            self._check_role(segment.role)
        return found

    def _embed(self, x_BCFHW: Tensor) -> Tensor:
        """Return tokens [B, L, C] in frame, row, column order. The convolution has no overlap: it is a linear."""
        weight = self.patch_embedding.weight
        patches = rearrange(x_BCFHW.to(weight.dtype), "B c F (h p) (w q) -> B (F h w) (c p q)", p=PATCH[1], q=PATCH[2])
        # Under autocast the product is half precision; the running sum of the blocks keeps the weights' dtype.
        return F.linear(patches, weight.flatten(1), self.patch_embedding.bias).to(weight.dtype)

    def _time(self, timestep_BF: Tensor, segments: Segments) -> Tensor:
        """Return the time embedding plus each latent frame's role embedding, [B, F, C] in float32 at least."""
        with torch.autocast(device_type=timestep_BF.device.type, enabled=False):
            time_BFC = at_least_fp32(self.condition_embedder.time(timestep_BF))
        rows = at_least_fp32(self.role_embedding.weight)
        if len(segments) == 1:
            return time_BFC + rows[segments[0].role.row]
        return time_BFC + torch.cat([rows[s.role.row].expand(s.stop - s.start, -1) for s in segments])

    def _modulation(self, time_BFC: Tensor) -> Tensor:
        with torch.autocast(device_type=time_BFC.device.type, enabled=False):
            return self.condition_embedder.modulation(time_BFC)

    def _velocity(self, x_BLC: Tensor, time_BFC: Tensor, *, rows: int, columns: int) -> Tensor:
        table = at_least_fp32(self.scale_shift_table).unsqueeze(0)
        shift, scale = (table + time_BFC.unsqueeze(2)).split(1, dim=2)
        h = modulate(self.norm_out(x_BLC), shift_BF1C=shift, scale_BF1C=scale)
        with torch.autocast(device_type=x_BLC.device.type, enabled=False):
            out = self.proj_out(h.to(self.proj_out.weight.dtype))
        return rearrange(out, "B (F h w) (p q c) -> B c F (h p) (w q)", h=rows, w=columns, p=PATCH[1], q=PATCH[2])
