"""How much attention each cached token gets from groups of queries, without a matrix of all queries and keys.

Letters: B batch, G groups of queries, R queries of a group, N keys, H heads, D head dim.
"""

import torch
from torch import Tensor

from ..model.layers import at_least_fp32
from .dispatch import triton_serves

QUERY_BLOCK = 64
"""Queries whose weights over all keys exist at a time."""


def attention_mass(q_BGRHD: Tensor, k_BNHD: Tensor, *, bias_BHN: Tensor | None = None) -> Tensor:
    """Return the mean over each group of softmax(q·k/√d + bias), [B, G, N, H]: the keys of a group sum to 1.

    Computed in float32 at least; on CUDA by a Triton kernel where Triton is there, elsewhere by its twin below.
    """
    if triton_serves(q_BGRHD):
        from .kernels import attention_mass_triton

        return attention_mass_triton(q_BGRHD, k_BNHD, bias_BHN=bias_BHN)
    return attention_mass_torch(q_BGRHD, k_BNHD, bias_BHN=bias_BHN)


def attention_mass_torch(q_BGRHD: Tensor, k_BNHD: Tensor, *, bias_BHN: Tensor | None = None) -> Tensor:
    """Return what ``attention_mass`` does, a block of queries at a time."""
    k = at_least_fp32(k_BNHD)
    q = at_least_fp32(q_BGRHD) / k.shape[-1] ** 0.5
    bias = None if bias_BHN is None else bias_BHN.to(k.dtype).unsqueeze(2)
    sums: list[Tensor] = []
    for some_BGRHD in q.split(max(1, QUERY_BLOCK // q.shape[2]), dim=1):
        parts = []
        for part_BGRHD in some_BGRHD.split(QUERY_BLOCK, dim=2):
            logits = torch.einsum("bqhd,bnhd->bhqn", part_BGRHD.flatten(1, 2), k)
            weights = (logits if bias is None else logits + bias).softmax(dim=-1)
            parts.append(weights.unflatten(2, part_BGRHD.shape[1:3]).sum(dim=3))  # [B, H, G, N]
        sums.append(torch.stack(parts).sum(dim=0))
    return torch.cat(sums, dim=2).permute(0, 2, 3, 1) / q.shape[2]
