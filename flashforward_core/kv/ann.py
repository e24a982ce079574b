"""Approximate nearest neighbours among keys: by signs of random projections, or by quantised products (FAST-AR).

The neighbour of a query is the key with the largest inner product, which is the one that it attends to most. Keys are
centred per head first: that changes no query's order, and lets few bits say more.
Letters: B batch, L queries, N keys, H heads, D head dim, P planes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from ..kv_policy import AnnOptions
from ..model.layers import at_least_fp32
from ..registry import Registry
from .dispatch import triton_serves

QUERY_BLOCK = 512
"""Queries that are compared with all keys at a time, to bound the memory."""


Encoder = Callable[[Tensor, AnnOptions], tuple[Tensor, Tensor]]
"""(x [..., D], options) -> codes [..., E], scales [...]: product of codes times key scale orders the keys."""

ENCODERS: Registry[Encoder] = Registry("ann method")


@ENCODERS.add("exact")
def _exact(x: Tensor, options: AnnOptions) -> tuple[Tensor, Tensor]:
    return x, x.new_ones(x.shape[:-1])


@ENCODERS.add("quantised")
def _quantised(x: Tensor, options: AnnOptions) -> tuple[Tensor, Tensor]:
    return quantise(x, bits=options.bits)


@ENCODERS.add("signs")
def _signs(x: Tensor, options: AnnOptions) -> tuple[Tensor, Tensor]:
    planes = random_planes(x.shape[-1], options.bits, seed=options.seed, like=x)
    return torch.where(x @ planes >= 0, 1.0, -1.0).to(x.dtype), x.new_ones(x.shape[:-1])


def quantise(x: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Return integers [..., D] of ``bits`` signed bits, held as floats, and the scale [...] of each row.

    Products of 8-bit codes are exact in float32 up to a head dim of 1,000: they stay below 2²⁴.
    """
    levels = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim=-1) / levels
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x / scale.unsqueeze(-1)).round(), scale


def random_planes(dim: int, count: int, *, seed: int, like: Tensor) -> Tensor:
    """Return Gaussian normals [dim, count], the same on every device; only to be read."""
    return _planes(dim, count, seed, like.device, like.dtype)


@cache  # a copy from the host waits for the device
def _planes(dim: int, count: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.inference_mode(False):
        return torch.randn(dim, count, generator=generator).to(device=device, dtype=dtype)


def centre(k_BNHD: Tensor, alive_BNH: Tensor | None = None) -> Tensor:
    """Return keys, in float32 at least, less the mean of each head's that are alive."""
    k = at_least_fp32(k_BNHD)
    if alive_BNH is None:
        return k - k.mean(dim=1, keepdim=True)
    weight = alive_BNH.to(k.dtype).unsqueeze(-1)
    total = weight.sum(dim=1, keepdim=True).clamp(min=1)
    return k - (k * weight).sum(dim=1, keepdim=True) / total


def nearest(q_BLHD: Tensor, k_BNHD: Tensor, *, options: AnnOptions, alive_BNH: Tensor | None = None) -> Tensor:
    """Return the index of each query's nearest key, int64 [B, L, H]; only keys that are alive count.

    A head with no key alive gets some index all the same.
    """
    encode = ENCODERS[options.method]
    q_codes, _ = encode(at_least_fp32(q_BLHD), options)
    k_codes, k_scale = encode(centre(k_BNHD, alive_BNH), options)
    if options.method == "quantised" and triton_serves(q_codes):
        from .kernels import nearest_codes_triton

        found_scale = k_scale if alive_BNH is None else torch.where(alive_BNH, k_scale, -1.0)
        return nearest_codes_triton(q_codes, k_codes, found_scale)
    found = [_scores(q_codes[:, rows], k_codes, k_scale, alive_BNH).argmax(dim=-1) for rows in _blocks(q_BLHD.shape[1])]
    return torch.cat(found, dim=2).transpose(1, 2)


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, start + QUERY_BLOCK) for start in range(0, length, QUERY_BLOCK))


def _scores(q_BLHE: Tensor, k_BNHE: Tensor, scale_BNH: Tensor, alive_BNH: Tensor | None) -> Tensor:
    products = torch.einsum("blhe,bnhe->bhln", q_BLHE, k_BNHE) * scale_BNH.transpose(1, 2).unsqueeze(2)
    if alive_BNH is None:
        return products
    return products.masked_fill(~alive_BNH.transpose(1, 2).unsqueeze(2), -torch.inf)


def recall(q_BLHD: Tensor, k_BNHD: Tensor, *, options: AnnOptions) -> float:
    """Return the share of queries whose approximate nearest key is the one that brute force finds."""
    found = nearest(q_BLHD, k_BNHD, options=options)
    truth = nearest(q_BLHD, k_BNHD, options=AnnOptions(method="exact"))
    return (found == truth).double().mean().item()


def recall_by_bits(q_BLHD: Tensor, k_BNHD: Tensor, *, method: str, bits: Sequence[int]) -> dict[int, float]:
    """Return the recall of ``method`` for each number of bits."""
    return {n: recall(q_BLHD, k_BNHD, options=AnnOptions(method=method, bits=n)) for n in bits}


def buckets(x_BLHD: Tensor, *, planes: int, seed: int = 0) -> Tensor:
    """Return the bucket of each token, int64 [B, L, H] below 2^planes: the sides of random planes it lies on."""
    wide = at_least_fp32(x_BLHD)
    sides = wide @ random_planes(wide.shape[-1], planes, seed=seed, like=wide) >= 0
    return (sides * 2 ** torch.arange(planes, device=x_BLHD.device)).sum(dim=-1)
