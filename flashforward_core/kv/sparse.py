"""Sparse attention by shared buckets: AnnCA over the prompt, AnnSA over the video (FAST-AR, arXiv 2602.01801).

Random planes cut the space of a head into buckets; a query sees the keys on its own side of all planes. Several sets
of planes (tables) give a pair several chances to meet.
Letters: B batch, L queries, N keys, H heads, D head dim, A tables.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kv_policy import SparseOptions
from ..model.attention import AttentionFn
from ..model.biased_attention import BiasedAttentionFn, attend_biased
from .ann import buckets, centre
from .grouped import attend_grouped, group_keys, grouped_serves
from .padding import MergedPrompt

QUERY_BLOCK = 512
"""Queries whose mask over all keys exists at a time."""


def bucket_tables(x_BLHD: Tensor, *, options: SparseOptions) -> Tensor:
    """Return each token's bucket in every table, int64 [A, B, L, H]."""
    seeds = range(options.seed, options.seed + options.tables)
    return torch.stack([buckets(x_BLHD, planes=options.planes, seed=seed) for seed in seeds])


def bucket_of_queries_and_keys(
    q_BLHD: Tensor, k_BNHD: Tensor, *, options: SparseOptions, bias_BHN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the bucket tables of queries and of keys, the keys less their mean.

    What all keys share changes no query's preference, but would put them into one bucket. Keys that ``bias_BHN`` hides
    with minus infinity are in a bucket of their own, the one after the last, where no query is.
    """
    q_ABLH = bucket_tables(q_BLHD, options=options)
    if bias_BHN is None:
        return q_ABLH, bucket_tables(centre(k_BNHD), options=options)
    alive_BNH = (bias_BHN > -torch.inf).transpose(1, 2).expand(k_BNHD.shape[:3])
    k_ABNH = bucket_tables(centre(k_BNHD, alive_BNH), options=options)
    return q_ABLH, k_ABNH.masked_fill(~alive_BNH, 2**options.planes)


def meets(x_ABLH: Tensor, others_ABNH: Tensor, *, num_buckets: int) -> Tensor:
    """Return whether each of ``x`` shares a bucket with at least one of the others, bool [B, L, H]."""
    tables, batch, _, heads = others_ABNH.shape
    used = torch.zeros(tables, batch, num_buckets + 1, heads, dtype=torch.bool, device=x_ABLH.device)
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
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options, bias_BHN=bias_BHN)
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
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options, bias_BHN=bias_BHN)
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


def attend_sparse(
    q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, options: SparseOptions, bias_BHN: Tensor | None = None
) -> Tensor:
    """Return what ``attend_buckets`` does, by what is fastest where the tensors are.

    On CUDA that is one dense call per bucket for one table (``grouped.py``) and FlexAttention for several.
    """
    if not q_BLHD.is_cuda:
        return attend_buckets(q_BLHD, k_BNHD, v_BNHD, options=options, bias_BHN=bias_BHN)
    if options.tables > 1 or not grouped_serves(q_BLHD):
        return attend_buckets_flex(q_BLHD, k_BNHD, v_BNHD, options=options, bias_BHN=bias_BHN)
    q_ABLH, k_ABNH = bucket_of_queries_and_keys(q_BLHD, k_BNHD, options=options, bias_BHN=bias_BHN)
    if not bool(meets(q_ABLH, k_ABNH, num_buckets=2**options.planes).all()):  # a lonely query sees all keys
        return attend_buckets_flex(q_BLHD, k_BNHD, v_BNHD, options=options, bias_BHN=bias_BHN)
    keys = group_keys(k_BNHD, v_BNHD, k_ABNH[0], buckets=2**options.planes + 1, bias_BHN=bias_BHN)
    return attend_grouped(q_BLHD, q_ABLH[0], keys)


class SparseForward:
    """The attention of one forward, whose blocks are visited in order: dense or sparse, as the options say."""

    def __init__(
        self,
        options: SparseOptions,
        prompt: MergedPrompt,
        *,
        stage: int,
        num_stages: int,
        num_blocks: int,
        attend: AttentionFn,
        attend_biased: BiasedAttentionFn,
    ) -> None:
        """``attend`` and ``attend_biased`` serve the dense blocks. ``prompt`` is what is cross-attended to."""
        self._options = options
        self._sparse = [
            options.is_sparse(stage=stage, num_stages=num_stages, block=block, num_blocks=num_blocks)
            for block in range(num_blocks)
        ]
        self._prompt = prompt
        self._attend = attend
        self._attend_biased = attend_biased
        self._self_block = self._cross_block = 0

    def self_attend(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attend to all keys, or to those of each query's buckets (AnnSA)."""
        if self._next_self():
            return attend_sparse(q_BLHD, k_BNHD, v_BNHD, options=self._options)
        return self._attend(q_BLHD, k_BNHD, v_BNHD)

    def self_attend_biased(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor) -> Tensor:
        """Attend so with a bias per key; a block calls this or ``self_attend``."""
        if self._next_self():
            return attend_sparse(q_BLHD, k_BNHD, v_BNHD, options=self._options, bias_BHN=bias_BHN)
        return self._attend_biased(q_BLHD, k_BNHD, v_BNHD, bias_BHN)

    def cross_attend(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attend to the prompt with its padding as one row, or to the rows that a query meets (AnnCA)."""
        block, self._cross_block = self._cross_block, self._cross_block + 1
        bias = self._prompt.bias_N.view(1, 1, -1)
        if self._options.prompt and self._sparse[block]:
            return attend_prompt(
                q_BLHD,
                k_BNHD,
                v_BNHD,
                bias_BHN=bias,
                keep_last=self._prompt.padded,
                options=self._options,
                attend=self._attend_biased,
            )
        if not self._prompt.padded:
            return self._attend(q_BLHD, k_BNHD, v_BNHD)
        return self._attend_biased(q_BLHD, k_BNHD, v_BNHD, bias)

    def _next_self(self) -> bool:
        block, self._self_block = self._self_block, self._self_block + 1
        return self._options.video and self._sparse[block]


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
