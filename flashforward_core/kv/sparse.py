"""Sparse attention by shared buckets: AnnCA over the prompt, AnnSA over the video (FAST-AR, arXiv 2602.01801).

A query sees the keys on its own side of all of a head's random planes (``groups.py``), through whatever kernel a
device has (``bucket_attention.py``). Buckets of cached keys are found once, when their page or their policy's state is
made; a forward finds those of its own queries and keys.
Letters: B batch, L queries, N keys, H heads, D head dim, A tables.
"""

from functools import partial

import torch
from torch import Tensor

from ..kv_policy import SparseOptions
from ..model.attention import AttentionFn
from ..model.biased_attention import BiasedAttentionFn
from .bucket_attention import BucketAttention, pick, query_blocks
from .groups import (
    GroupedContext,
    GroupPage,
    KeyGroups,
    all_codes,
    bucket_tables,
    group_codes,
    group_page,
    meets,
    shared_mask,
)
from .padding import MergedPrompt


def kept_rows(q_BLHD: Tensor, codes_ABNH: Tensor, *, keep_last: bool, options: SparseOptions) -> Tensor:
    """Return which prompt rows each head keeps, bool [B, N, H]: those that share a bucket with a query of the chunk.

    ``codes_ABNH`` are the rows' buckets. ``keep_last`` keeps the last row, which stands for the padding. A head in
    which no row meets a query keeps all.
    """
    met = meets(codes_ABNH, bucket_tables(q_BLHD, options=options), num_buckets=2**options.planes)
    met |= ~met.any(dim=1, keepdim=True)
    if keep_last:
        met[:, -1] = True
    return met


def attend_prompt(
    q_BLHD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    *,
    kept_BNH: Tensor,
    bias_BHN: Tensor,
    attend: BiasedAttentionFn,
    kernel: BucketAttention,
) -> Tensor:
    """Cross-attend to the prompt rows that each head keeps (AnnCA), [B, L, H, D].

    Heads keep different numbers. A kernel that walks buckets skips what is dropped, as a hidden bucket. Any other
    attends over the fullest head's number, for which it waits for the device once.
    """
    bias = bias_BHN.expand(kept_BNH.shape[0], kept_BNH.shape[2], -1)
    if kernel.skips_hidden:
        rows = group_codes((~kept_BNH).to(torch.int64).unsqueeze(0), num_buckets=1)
        one_bucket = torch.zeros(1, *q_BLHD.shape[:3], dtype=torch.int64, device=q_BLHD.device)
        return kernel.attend(q_BLHD, one_bucket, k_BNHD, v_BNHD, [rows], bias)
    fullest = int(kept_BNH.sum(dim=1).max())
    index_BMH = kept_BNH.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :fullest]
    bias = bias.masked_fill(~kept_BNH.transpose(1, 2), -torch.inf).gather(2, index_BMH.transpose(1, 2))
    return attend(q_BLHD, pick(k_BNHD, index_BMH), pick(v_BNHD, index_BMH), bias)


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
        kernel: BucketAttention,
    ) -> None:
        """``attend`` and ``attend_biased`` serve the dense blocks, ``kernel`` the sparse ones.

        ``prompt`` is what is cross-attended to. Say what the forward reads with ``over`` before it begins.
        """
        self._options = options
        self._sparse = [
            options.is_sparse(stage=stage, num_stages=num_stages, block=block, num_blocks=num_blocks)
            for block in range(num_blocks)
        ]
        self._prompt = prompt
        self._attend = attend
        self._attend_biased = attend_biased
        self._kernel = kernel
        self._group: GroupPage = partial(group_page, options=options)
        self._view: GroupedContext | None = None
        self._self_block = self._cross_block = 0

    def over(self, view: GroupedContext) -> None:
        """Take the view whose keys ``self_attend`` will be given."""
        self._view = view

    def self_attend(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attend to all keys, or to those of each query's buckets (AnnSA)."""
        block = self._next_self()
        if block is None:
            return self._attend(q_BLHD, k_BNHD, v_BNHD)
        return self._attend_buckets(block, q_BLHD, k_BNHD, v_BNHD, None)

    def self_attend_biased(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor) -> Tensor:
        """Attend so with a bias per key; a block calls this or ``self_attend``."""
        block = self._next_self()
        if block is None:
            return self._attend_biased(q_BLHD, k_BNHD, v_BNHD, bias_BHN)
        return self._attend_buckets(block, q_BLHD, k_BNHD, v_BNHD, bias_BHN)

    def cross_attend(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attend to the prompt with its padding as one row, or to the rows that a query meets (AnnCA)."""
        block, self._cross_block = self._cross_block, self._cross_block + 1
        bias = self._prompt.bias_N.view(1, 1, -1)
        if self._options.prompt and self._sparse[block]:
            codes = self._prompt.codes(block, lambda: self._group(k_BNHD).codes_ABNH.to(torch.int64))
            kept = kept_rows(q_BLHD, codes, keep_last=self._prompt.padded, options=self._options)
            return attend_prompt(
                q_BLHD, k_BNHD, v_BNHD, kept_BNH=kept, bias_BHN=bias, attend=self._attend_biased, kernel=self._kernel
            )
        if not self._prompt.padded:
            return self._attend(q_BLHD, k_BNHD, v_BNHD)
        return self._attend_biased(q_BLHD, k_BNHD, v_BNHD, bias)

    def _next_self(self) -> int | None:
        """Count the blocks; return this one's index if it is sparse."""
        block, self._self_block = self._self_block, self._self_block + 1
        return block if self._options.video and self._sparse[block] else None

    def _attend_buckets(
        self, block: int, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor | None
    ) -> Tensor:
        assert self._view is not None, "the forward has not said what it reads"
        groups = self._view.groups(block, k_BNHD, self._group)
        return self._kernel.attend(
            q_BLHD, bucket_tables(q_BLHD, options=self._options), k_BNHD, v_BNHD, groups, bias_BHN
        )


def density(q_BLHD: Tensor, pages: list[KeyGroups], *, options: SparseOptions) -> float:
    """Return the share of query-key pairs that AnnSA computes over keys in ``pages``."""
    q_ABLH = bucket_tables(q_BLHD, options=options)
    k_ABNH = all_codes(pages)
    shares = [shared_mask(q_ABLH[:, :, rows], k_ABNH).double().sum() for rows in query_blocks(q_BLHD.shape[1])]
    return float(sum(shares)) / (q_BLHD.shape[0] * q_BLHD.shape[2] * q_BLHD.shape[1] * k_ABNH.shape[2])
