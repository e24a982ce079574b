"""Sparse attention by shared buckets: AnnCA over the prompt, AnnSA over the video (FAST-AR, arXiv 2602.01801).

Random planes cut the space of a head into buckets; a query sees the keys on its own side of all planes. Several sets
of planes (tables) give a pair several chances to meet.
Letters: B batch, L queries, N keys, H heads, D head dim, A tables.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..model.biased_attention import BiasedAttentionFn, attend_biased
from .ann import buckets, centre

QUERY_BLOCK = 512
"""Queries whose mask over all keys exists at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptions:
    """Where attention is sparse, and how fine the buckets are. Planes and tables are ours: the paper gives none."""

    dense_share: float = 0.3
    """Share of the stages that stay dense, the first ones; rounded, at least one stage."""
    sparse_share: float = 0.7
    """Share of the transformer blocks that are sparse, the last ones; rounded."""
    planes: int = 4
    """2^planes buckets."""
    tables: int = 2
    """Sets of planes, of which one must agree."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dense_share", "sparse_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is no share; use 0 to 1")
        if not 1 <= self.planes <= 16 or not 1 <= self.tables <= 16:
            raise ValueError(f"planes={self.planes} and tables={self.tables} are out of range; use 1 to 16 of each")

    def is_sparse(self, *, stage: int, num_stages: int, block: int, num_blocks: int) -> bool:
        """Whether a transformer block attends sparsely at a stage: of 4 stages the first is dense."""
        first_stage = max(1, round(self.dense_share * num_stages))
        first_block = num_blocks - round(self.sparse_share * num_blocks)
        return stage >= first_stage and block >= first_block


def bucket_tables(x_BLHD: Tensor, *, options: SparseOptions) -> Tensor:
    """Return each token's bucket in every table, int64 [A, B, L, H]."""
    seeds = range(options.seed, options.seed + options.tables)
    return torch.stack([buckets(x_BLHD, planes=options.planes, seed=seed) for seed in seeds])


def bucket_of_queries_and_keys(q_BLHD: Tensor, k_BNHD: Tensor, *, options: SparseOptions) -> tuple[Tensor, Tensor]:
    """Return the bucket tables of queries and of keys, the keys less their mean.

    What all keys share changes no query's preference, but would put them into one bucket.
    """
    return bucket_tables(q_BLHD, options=options), bucket_tables(centre(k_BNHD), options=options)


def meets(x_ABLH: Tensor, others_ABNH: Tensor, *, num_buckets: int) -> Tensor:
    """Return whether each of ``x`` shares a bucket with at least one of the others, bool [B, L, H]."""
    tables, batch, _, heads = others_ABNH.shape
    used = torch.zeros(tables, batch, num_buckets, heads, dtype=torch.bool, device=x_ABLH.device)
    used.scatter_(2, others_ABNH, torch.ones_like(others_ABNH, dtype=torch.bool))
    return used.gather(2, x_ABLH).any(dim=0)


def attend_prompt(
    q_BLHD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    *,
    bias_BHN: Tensor,
    keep_last: bool,
    options: SparseOptions,
    attend: BiasedAttentionFn = attend_biased,
) -> Tensor:
    """Cross-attend to the prompt tokens that share a bucket with a query of the chunk (AnnCA), [B, L, H, D].

    Each head drops its own tokens for good, so the attention that follows is over the fullest head's number (found
    out by waiting for the device once). ``keep_last`` keeps the last token: the row that stands for the padding. A
    head in which no token meets a query keeps all.
    """
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options)
    met = meets(k_ABNH, q_ABLH, num_buckets=2**options.planes)
    met |= ~met.any(dim=1, keepdim=True)
    if keep_last:
        met[:, -1] = True
    fullest = int(met.sum(dim=1).max())
    index_BMH = met.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :fullest]
    bias = bias_BHN.expand(met.shape[0], met.shape[2], -1).masked_fill(~met.transpose(1, 2), -torch.inf)
    kept_bias = bias.gather(2, index_BMH.transpose(1, 2))
    return attend(q_BLHD, _pick(k_BNHD, index_BMH), _pick(v_BNHD, index_BMH), kept_bias)


def shared_mask(q_ABLH: Tensor, k_ABNH: Tensor) -> Tensor:
    """Return whether a query may see a key, bool [B, H, L, N]: they share a bucket, or the query shares none."""
    q, k = q_ABLH.permute(0, 1, 3, 2).unsqueeze(-1), k_ABNH.permute(0, 1, 3, 2).unsqueeze(-2)
    mask = (q == k).any(dim=0)
    return mask | ~mask.any(dim=-1, keepdim=True)


def attend_buckets(
    q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, options: SparseOptions, bias_BHN: Tensor | None = None
) -> Tensor:
    """Self-attend to the keys of a query's buckets (AnnSA), [B, L, H, D]: right everywhere, but it computes all pairs.

    A query that shares no bucket with any key sees all of them. ``bias_BHN`` goes on the logits.
    """
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options)
    outputs = []
    for rows in _blocks(q_BLHD.shape[1]):
        mask = shared_mask(q_ABLH[:, :, rows], k_ABNH)
        outputs.append(_attend_masked(q_BLHD[:, rows], k_BNHD, v_BNHD, mask, bias_BHN))
    return torch.cat(outputs, dim=1)


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, start + QUERY_BLOCK) for start in range(0, length, QUERY_BLOCK))


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask_BHLN: Tensor, bias_BHN: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = torch.einsum("blhd,bnhd->bhln", q.to(wide), k.to(wide)) / math.sqrt(q.shape[-1])
    if bias_BHN is not None:
        logits = logits + bias_BHN.to(wide).unsqueeze(2)
    weights = logits.masked_fill(~mask_BHLN, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhln,bnhd->blhd", weights, v.to(wide)).to(v.dtype)


def attend_buckets_flex(
    q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, options: SparseOptions, bias_BHN: Tensor | None = None
) -> Tensor:
    """Return what ``attend_buckets`` does, with FlexAttention, which skips blocks of pairs that share nothing.

    Queries and keys are sorted by their buckets of the first table, so that such blocks arise.
    """
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options)
    lonely_BLH = ~meets(q_ABLH, k_ABNH, num_buckets=2**options.planes)
    q_order, k_order = (codes[0].argsort(dim=1, stable=True) for codes in (q_ABLH, k_ABNH))
    q_codes, k_codes = _sorted_codes(q_ABLH, q_order), _sorted_codes(k_ABNH, k_order)
    lonely = lonely_BLH.gather(1, q_order)
    sorted_bias = None if bias_BHN is None else bias_BHN.float().gather(2, k_order.transpose(1, 2))

    def may_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = lonely[b, i, h]
        for table in range(options.tables):
            seen = seen | (q_codes[table, b, i, h] == k_codes[table, b, j, h])
        return seen

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if sorted_bias is None else score + sorted_bias[b, h, j]

    flex, make_mask = _flex_attention(compiled=q_BLHD.is_cuda)
    sizes = (q_BLHD.shape[0], q_BLHD.shape[2], q_BLHD.shape[1], k_BNHD.shape[1])
    mask = make_mask(may_see, *sizes, device=str(q_BLHD.device))
    q, k, v = (
        _pick(x, order).transpose(1, 2) for x, order in ((q_BLHD, q_order), (k_BNHD, k_order), (v_BNHD, k_order))
    )
    out_BLHD = flex(q, k, v, score_mod=add_bias, block_mask=mask).transpose(1, 2)
    return _pick(out_BLHD, q_order.argsort(dim=1))


@cache
def _flex_attention(*, compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def _sorted_codes(codes_ABLH: Tensor, order_BLH: Tensor) -> Tensor:
    return codes_ABLH.gather(2, order_BLH.unsqueeze(0).expand_as(codes_ABLH))


def _pick(x_BNHD: Tensor, order_BMH: Tensor) -> Tensor:
    return x_BNHD.gather(1, order_BMH.unsqueeze(-1).expand(-1, -1, -1, x_BNHD.shape[-1]))


def density(q_BLHD: Tensor, k_BNHD: Tensor, *, options: SparseOptions) -> float:
    """Return the share of query-key pairs that AnnSA computes."""
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options)
    shares = [shared_mask(q_ABLH[:, :, rows], k_ABNH).double().sum() for rows in _blocks(q_BLHD.shape[1])]
    return float(sum(shares)) / (q_BLHD.shape[0] * q_BLHD.shape[2] * q_BLHD.shape[1] * k_BNHD.shape[1])
