"""Attention within buckets as dense calls: queries and keys of a bucket and head are one sequence of a ragged batch.

A bias per key rides along as channels of its own: a constant in the query times the bias in the key, split into three
parts that half precision holds, so that nothing of float32 is lost.
Letters: B batch, L queries, N keys, H heads, D head dim, S sequences (B·H·buckets).
"""

import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BIAS_PARTS = 3  # of float32's 24 bits, 8 in each bfloat16
BIAS_CHANNELS = 8  # kernels take multiples of eight
HIDDEN = -1.0e4  # a bias this low hides a key: minus infinity times a channel would be no number
Ragged = Callable[..., Tensor]
"""(q_THD, k_THD, v_THD, starts of the sequences' queries [S+1], of their keys, longest of each, scale) -> out_THD."""


@cache
def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def grouped_serves(q_BLHD: Tensor) -> bool:
    """Whether a kernel for ragged batches takes these queries here."""
    half = q_BLHD.dtype in (torch.bfloat16, torch.float16)
    return q_BLHD.is_cuda and half and importlib.util.find_spec("torch.nn.attention.varlen") is not None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, longest: tuple[int, int], scale: float
) -> Tensor:
    attend, default = _varlen(), q.shape[-1] ** -0.5
    options: dict[str, float] = {}
    if scale != default and "scale" in inspect.signature(attend).parameters:
        options["scale"] = scale
    elif scale != default:  # an older PyTorch: scale the queries
        q = (q.float() * (scale / default)).to(q.dtype)
    out: Tensor = attend(q, k, v, q_at, k_at, *longest, **options)
    return out


def ragged_torch(
    q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, longest: tuple[int, int], scale: float
) -> Tensor:
    """Attend sequence by sequence, with logits in float32 at least, as flash attention has them; right everywhere."""
    out, wide = torch.zeros_like(q), torch.promote_types(q.dtype, torch.float32)
    q_edges, k_edges = q_at.tolist(), k_at.tolist()
    for s in range(len(q_edges) - 1):
        rows, keys = slice(q_edges[s], q_edges[s + 1]), slice(k_edges[s], k_edges[s + 1])
        logits = torch.einsum("thd,nhd->htn", q[rows].to(wide), k[keys].to(wide)) * scale
        out[rows] = torch.einsum("htn,nhd->thd", logits.softmax(dim=-1), v[keys].to(wide)).to(out.dtype)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedKeys:
    """Keys and values in sequences by batch, head and bucket: they serve as long as the cache does not change."""

    k_THD: Tensor
    v_THD: Tensor
    at: Tensor
    """Where each sequence begins, int32 [S+1]."""
    longest: int
    buckets: int
    biased: bool
    """Whether a bias rides along."""


def group_keys(
    k_BNHD: Tensor, v_BNHD: Tensor, codes_BNH: Tensor, *, buckets: int, bias_BHN: Tensor | None = None
) -> GroupedKeys:
    """Sort keys and values by bucket. Waits for the device once, to learn the longest sequence."""
    if bias_BHN is not None:
        k_BNHD, v_BNHD = _with_bias(k_BNHD, v_BNHD, bias_BHN)
    order, at = _sequences(codes_BNH, buckets)
    return GroupedKeys(
        k_THD=_rows(k_BNHD)[order],
        v_THD=_rows(v_BNHD)[order],
        at=at,
        longest=int(at.diff().max()),
        buckets=buckets,
        biased=bias_BHN is not None,
    )


def attend_grouped(q_BLHD: Tensor, codes_BLH: Tensor, keys: GroupedKeys, *, ragged: Ragged | None = None) -> Tensor:
    """Attend each query to the keys of its bucket, [B, L, H, D]. Every query's bucket must hold a key.

    Waits for the device once, to learn the longest sequence.
    """
    dim = q_BLHD.shape[-1]
    if keys.biased:
        constant = q_BLHD.new_full((*q_BLHD.shape[:3], BIAS_PARTS), _bias_factor(dim, q_BLHD.dtype))
        q_BLHD = torch.cat([q_BLHD, pad(constant, (0, BIAS_CHANNELS - BIAS_PARTS))], dim=-1)
    order, at = _sequences(codes_BLH, keys.buckets)
    attend = ragged or (_flash if q_BLHD.is_cuda else ragged_torch)
    longest = (int(at.diff().max()), keys.longest)
    found = attend(_rows(q_BLHD)[order], keys.k_THD, keys.v_THD, at, keys.at, longest, dim**-0.5)
    out = torch.empty_like(found)
    out[order] = found
    batch, queries, heads = codes_BLH.shape
    return out.view(batch, heads, queries, -1)[..., :dim].transpose(1, 2)


def _rows(x_BNHD: Tensor) -> Tensor:
    """Return tokens head by head, [B·H·N, 1, D]."""
    return x_BNHD.transpose(1, 2).reshape(-1, 1, x_BNHD.shape[-1])


def _sequences(codes_BNH: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the order of ``_rows`` in which sequences are whole, and where each begins, int32 [S+1]."""
    batch, _, heads = codes_BNH.shape
    group = torch.arange(batch * heads, device=codes_BNH.device).view(batch, heads, 1) * buckets
    sequence = (group + codes_BNH.transpose(1, 2)).flatten()
    counts = torch.bincount(sequence, minlength=batch * heads * buckets)
    return sequence.argsort(stable=True), pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _bias_factor(dim: int, dtype: torch.dtype) -> float:
    """Return what a query holds in the bias's channels: √D, which undoes the logits' scale, as ``dtype`` has it."""
    return float(torch.tensor(math.sqrt(dim), dtype=dtype))


def _with_bias(k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with channels that put ``bias_BHN`` on the scaled logits."""
    dim = k_BNHD.shape[-1]
    factor = math.sqrt(dim) / _bias_factor(dim, k_BNHD.dtype)
    rest = (bias_BHN.float().clamp(min=HIDDEN) * factor).transpose(1, 2).expand(k_BNHD.shape[:3])
    parts = []
    for _ in range(BIAS_PARTS):
        parts.append(rest.to(k_BNHD.dtype))
        rest = rest - parts[-1].float()
    channels = pad(torch.stack(parts, dim=-1), (0, BIAS_CHANNELS - BIAS_PARTS))
    return torch.cat([k_BNHD, channels], dim=-1), pad(v_BNHD, (0, BIAS_CHANNELS))
