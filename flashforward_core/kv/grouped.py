"""Attention within buckets as dense calls: queries and keys of a bucket and head are one sequence.

On a CPU each is a call. On CUDA they are one ragged batch, where a bias per key rides along as channels of its own: a
constant in the query times the bias in the key, split into three parts that half precision holds, so that nothing of
float32 is lost.
Letters: B batch, L queries, N keys, H heads, D head dim, P pages, K buckets, E edges, S sequences (B·H·K).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..model.attention import sdpa
from ..model.biased_attention import attend_biased
from .bucket_attention import attend_flex, num_buckets_of
from .groups import KeyGroups, all_codes, group_codes, in_page_order, meets, with_lonely

BIAS_PARTS = 3  # of float32's 24 bits, 8 in each bfloat16
BIAS_CHANNELS = 8  # kernels take multiples of eight
HIDDEN = -1.0e4  # a bias this low hides a key: minus infinity times a channel would be no number
Ragged = Callable[..., Tensor]
"""(q_THD, k_THD, v_THD, starts of the sequences' queries [S+1], of their keys, longest of each, scale) -> out_THD."""


@cache
def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


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


def attend_cpu(
    q_BLHD: Tensor,
    q_codes_ABLH: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    groups: Sequence[KeyGroups],
    bias_BHN: Tensor | None = None,
) -> Tensor:
    """Return what ``attend_torch`` does, one call per head and bucket, with lengths that the host knows."""
    batch, length, heads, dim = q_BLHD.shape
    num_buckets = num_buckets_of(groups)
    codes_BHL = with_lonely(q_codes_ABLH[0], torch.stack([page.starts_BHE for page in groups]))
    q_order, q_at = _sequences([group_codes(codes_BHL.transpose(1, 2).unsqueeze(0), num_buckets=num_buckets)])
    k_order, k_at = _sequences(groups)
    q, k, v = _rows(q_BLHD)[q_order], _rows(k_BNHD)[k_order], _rows(v_BNHD)[k_order]
    bias = None if bias_BHN is None else bias_BHN.expand(batch, heads, -1).flatten()[k_order]
    out, q_edges, k_edges = torch.empty_like(q), q_at.tolist(), k_at.tolist()
    for s in range(len(q_edges) - 1):
        rows, keys = slice(q_edges[s], q_edges[s + 1]), slice(k_edges[s], k_edges[s + 1])
        if s % (num_buckets + 1) == num_buckets:  # queries that are alone see all of the head's keys but hidden ones
            keys = slice(k_edges[s - num_buckets], k_edges[s])
        if rows.stop > rows.start:
            out[rows] = _attend_one(q[rows], k[keys], v[keys], None if bias is None else bias[keys])
    found = torch.empty_like(out)
    found[q_order] = out
    return found.view(batch, heads, length, dim).transpose(1, 2)


def _attend_one(q_T1D: Tensor, k_N1D: Tensor, v_N1D: Tensor, bias_N: Tensor | None) -> Tensor:
    q, k, v = (x.unsqueeze(0) for x in (q_T1D, k_N1D, v_N1D))
    if bias_N is None:
        return sdpa(q, k, v)[0]
    return attend_biased(q, k, v, bias_N.view(1, 1, -1))[0]


def attend_ragged(
    q_BLHD: Tensor,
    q_codes_ABLH: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    groups: Sequence[KeyGroups],
    bias_BHN: Tensor | None = None,
    *,
    ragged: Ragged | None = None,
) -> Tensor:
    """Attend each query to the keys of its bucket, [B, L, H, D].

    Copies keys and values into the order of their buckets, since a sequence must lie in one piece. Waits for the
    device once, to see whether a query's bucket holds no key; if one does, FlexAttention takes the call.
    """
    num_buckets, dim = num_buckets_of(groups), q_BLHD.shape[-1]
    if not bool(meets(q_codes_ABLH, all_codes(groups), num_buckets=num_buckets).all()):
        return attend_flex(q_BLHD, q_codes_ABLH, k_BNHD, v_BNHD, groups, bias_BHN)
    if bias_BHN is not None:
        k_BNHD, v_BNHD = _with_bias(k_BNHD, v_BNHD, bias_BHN)
        constant = q_BLHD.new_full((*q_BLHD.shape[:3], BIAS_PARTS), _bias_factor(dim, q_BLHD.dtype))
        q_BLHD = torch.cat([q_BLHD, pad(constant, (0, BIAS_CHANNELS - BIAS_PARTS))], dim=-1)
    queries = group_codes(q_codes_ABLH, num_buckets=num_buckets)
    q_order, q_at = _sequences([queries])
    k_order, k_at = _sequences(groups)
    attend = ragged or _flash
    longest = (q_BLHD.shape[1], k_BNHD.shape[1])  # a bound: the lengths themselves are on the device
    found = attend(
        _rows(q_BLHD)[q_order], _rows(k_BNHD)[k_order], _rows(v_BNHD)[k_order], q_at, k_at, longest, dim**-0.5
    )
    out = torch.empty_like(found)
    out[q_order] = found
    batch, length, heads = q_BLHD.shape[:3]
    return out.view(batch, heads, length, -1)[..., :dim].transpose(1, 2)


def _rows(x_BNHD: Tensor) -> Tensor:
    """Return tokens head by head, [B·H·N, 1, D]."""
    return x_BNHD.transpose(1, 2).reshape(-1, 1, x_BNHD.shape[-1])


def _sequences(groups: Sequence[KeyGroups]) -> tuple[Tensor, Tensor]:
    """Return the order of ``_rows`` in which sequences are whole, and where each begins, int32 [S+1].

    Pages' orders are merged, not sorted again: each run of a page's bucket moves as one. Hidden keys are a bucket too.
    """
    order_BHN, sorted_BHN = in_page_order(groups)
    counts_PBHK = torch.stack([page.starts_BHE for page in groups]).diff(dim=-1).to(torch.int64)
    total_BHK = counts_PBHK.sum(dim=0)
    first_BHK = (total_BHK.flatten().cumsum(0) - total_BHK.flatten()).view_as(total_BHK)
    starts_PBHK = torch.stack([page.starts_BHE[..., :-1] for page in groups])
    shift_PBHK = first_BHK + counts_PBHK.cumsum(dim=0) - counts_PBHK - starts_PBHK
    place = []
    for n, codes in enumerate(sorted_BHN.split([page.num_keys for page in groups], dim=-1)):
        within = torch.arange(codes.shape[-1], device=codes.device)
        place.append(shift_PBHK[n].gather(2, codes) + within)
    head = torch.arange(total_BHK.shape[0] * total_BHK.shape[1], device=order_BHN.device) * order_BHN.shape[-1]
    rows = order_BHN.flatten(0, 1) + head.unsqueeze(1)
    merged = torch.empty_like(rows.flatten()).scatter_(0, torch.cat(place, dim=-1).flatten(), rows.flatten())
    return merged, pad(total_BHK.flatten().cumsum(0), (1, 0)).to(torch.int32)


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
