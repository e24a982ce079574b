"""Triton: attention within buckets over keys that lie page by page, read through each page's order of buckets.

Keys and values are not moved, nothing of size queries × keys is written, and nothing waits for the host. A program
takes queries in the order of their buckets, so that most see the same range of a page's order.
"""

# ruff: noqa: ANN001, ANN202 -- a kernel's arguments are pointers and numbers of Triton's own

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .groups import KeyGroups, with_lonely
from .kernels import Tuned, block_sizes, size_class


@triton.jit(do_not_specialize=["SIZE"])
def _attend(
    q_ptr, k_ptr, v_ptr, bias_ptr, q_order_ptr, q_code_ptr, k_order_ptr, starts_ptr, out_ptr,
    num_queries, num_keys, num_pages, num_heads, scale, SIZE,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HAS_BIAS: tl.constexpr, NUM_BUCKETS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write out [B, L, H, D]. A query whose code is NUM_BUCKETS sees all keys but the hidden ones.

    q_order, q_code [BH, L]; k_order [BH, N], page by page and relative to the page; starts [pages, BH, buckets + 2].
    """
    head = tl.program_id(1).to(tl.int64)
    batch, within = head // num_heads, head % num_heads
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    live = rows < num_queries
    dims = tl.arange(0, PAD)
    place = tl.load(q_order_ptr + head * num_queries + rows, mask=live, other=0).to(tl.int64)
    code = tl.load(q_code_ptr + head * num_queries + rows, mask=live, other=0)
    lonely = code == NUM_BUCKETS
    q_at = q_ptr + batch * q_batch + within * q_head + place[:, None] * q_token + dims[None, :]
    q = tl.load(q_at, mask=live[:, None] & (dims[None, :] < DIM), other=0.0)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    found = tl.zeros((BLOCK_Q, PAD), tl.float32)
    k_base = k_ptr + batch * k_batch + within * k_head
    v_base = v_ptr + batch * v_batch + within * v_head
    base = head * 0
    for page in range(0, num_pages):
        edges = starts_ptr + (page * tl.num_programs(1) + head) * (NUM_BUCKETS + 2)
        first = tl.load(edges + tl.where(lonely, 0, code), mask=live, other=2147483647)
        stop = tl.load(edges + tl.where(lonely, NUM_BUCKETS, code + 1), mask=live, other=0)
        last = tl.max(stop, axis=0)
        for start in range(tl.min(first, axis=0), last, BLOCK_K):
            spots = start + tl.arange(0, BLOCK_K)
            inside = spots < last
            keys = tl.load(k_order_ptr + head * num_keys + base + spots, mask=inside, other=0) + base
            held = inside[:, None] & (dims[None, :] < DIM)
            k = tl.load(k_base + keys[:, None] * k_token + dims[None, :], mask=held, other=0.0)
            logits = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
            if HAS_BIAS:
                logits += tl.load(bias_ptr + head * num_keys + keys, mask=inside, other=0.0)[None, :]
            seen = (spots[None, :] >= first[:, None]) & (spots[None, :] < stop[:, None])
            logits = tl.where(seen, logits, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)  # no key so far
            shrink = tl.exp(top - safe)
            weights = tl.exp(logits - safe[:, None])
            v = tl.load(v_base + keys[:, None] * v_token + dims[None, :], mask=held, other=0.0)
            found = found * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
            total = total * shrink + tl.sum(weights, axis=1)
            top = higher
        base += tl.load(edges + NUM_BUCKETS + 1)
    out_at = out_ptr + ((batch * num_queries + place[:, None]) * num_heads + within) * DIM + dims[None, :]
    found = found / tl.where(live, total, 1.0)[:, None]
    tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dims[None, :] < DIM))


_TUNED = Tuned(_attend, block_sizes((64, 64), (128, 64), (128, 128), (64, 128)))


def attend_triton(
    q_BLHD: Tensor,
    q_codes_ABLH: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    groups: Sequence[KeyGroups],
    bias_BHN: Tensor | None = None,
) -> Tensor:
    """Return what ``attend_torch`` does; weights have the values' precision before they multiply them."""
    batch, queries, heads, dim = q_BLHD.shape
    keys, num_buckets = k_BNHD.shape[1], groups[0].starts_BHE.shape[-1] - 2
    starts = torch.stack([page.starts_BHE for page in groups])
    codes_BHL = with_lonely(q_codes_ABLH[0], starts)
    q_code, q_order = codes_BHL.sort(dim=-1, stable=True)
    k_order = torch.cat([page.order_BHN for page in groups], dim=-1)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BLHD, k_BNHD, v_BNHD))
    bias = k if bias_BHN is None else bias_BHN.to(torch.float32).expand(batch, heads, keys).contiguous()
    out = torch.empty(batch, queries, heads, dim, dtype=v.dtype, device=q.device)
    _TUNED.launch(
        lambda meta: (triton.cdiv(queries, meta["BLOCK_Q"]), batch * heads),
        q, k, v, bias, q_order.to(torch.int32), q_code, k_order, starts, out,
        queries, keys, len(groups), heads, dim**-0.5, size_class(queries, keys // num_buckets),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        HAS_BIAS=bias_BHN is not None, NUM_BUCKETS=num_buckets,
        DIM=dim, PAD=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return out
