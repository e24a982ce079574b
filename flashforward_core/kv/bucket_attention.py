"""Attention of each query to the keys of its buckets (AnnSA), by whatever kernel a device has.

A query that shares no bucket with any key sees all keys. Every entry computes the same; ``torch`` is the reference.
Letters: B batch, L queries, N keys of all pages, H heads, D head dim, A tables, E edges (buckets + 2).
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kv_policy import SPARSE_KERNELS, SparseOptions
from ..model.attention import HALF
from ..registry import Registry
from .dispatch import has_triton
from .groups import KeyGroups, all_codes, meets, shared_mask

QUERY_BLOCK = 512
"""Queries whose mask over all keys exists at a time."""

BucketAttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[KeyGroups], Tensor | None], Tensor]
"""(q_BLHD, the queries' buckets [A, B, L, H], k_BNHD, v_BNHD, the groups of the keys' pages in order, bias_BHN)
-> out_BLHD. The bias goes on the logits; keys that it hides with minus infinity are hidden in the groups too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAttention:
    """One kernel and what it needs."""

    name: str
    attend: BucketAttentionFn
    obstacle: Callable[[torch.device, torch.dtype, int], str | None]
    """(device, dtype of queries and keys, number of tables) -> why it cannot run, or None."""
    skips_hidden: bool = False
    """Whether hidden keys cost nothing and the host is never waited for, so that AnnCA may hide what it drops."""


BUCKET_ATTENTION: Registry[BucketAttention] = Registry("sparse_attention")
"""``auto`` takes the first of ``SPARSE_KERNELS`` that runs; only ``triton`` and ``torch`` never wait for the device."""


def attend_torch(
    q_BLHD: Tensor,
    q_codes_ABLH: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    groups: Sequence[KeyGroups],
    bias_BHN: Tensor | None = None,
) -> Tensor:
    """Attend through a mask, in float32 at least: right everywhere, but it computes all pairs."""
    k_ABNH = all_codes(groups)
    outputs = []
    for rows in query_blocks(q_BLHD.shape[1]):
        mask = shared_mask(q_codes_ABLH[:, :, rows], k_ABNH)
        outputs.append(_attend_masked(q_BLHD[:, rows], k_BNHD, v_BNHD, mask, bias_BHN))
    return torch.cat(outputs, dim=1)


def query_blocks(length: int) -> Iterator[slice]:
    return (slice(start, start + QUERY_BLOCK) for start in range(0, length, QUERY_BLOCK))


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask_BHLN: Tensor, bias_BHN: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = torch.einsum("blhd,bnhd->bhln", q.to(wide), k.to(wide)) / math.sqrt(q.shape[-1])
    if bias_BHN is not None:
        logits = logits + bias_BHN.to(wide).unsqueeze(2)
    weights = logits.masked_fill(~mask_BHLN, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhln,bnhd->blhd", weights, v.to(wide)).to(v.dtype)


def attend_flex(
    q_BLHD: Tensor,
    q_codes_ABLH: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    groups: Sequence[KeyGroups],
    bias_BHN: Tensor | None = None,
) -> Tensor:
    """Attend with FlexAttention, which skips blocks of pairs that share nothing, for any number of tables.

    Queries and keys are sorted by their buckets of the first table, so that such blocks arise.
    """
    k_codes_ABNH, num_buckets = all_codes(groups), num_buckets_of(groups)
    lonely_BLH = ~meets(q_codes_ABLH, k_codes_ABNH, num_buckets=num_buckets)
    q_order, k_order = (codes[0].argsort(dim=1, stable=True) for codes in (q_codes_ABLH, k_codes_ABNH))
    q_codes, k_codes = _sorted_codes(q_codes_ABLH, q_order), _sorted_codes(k_codes_ABNH, k_order)
    lonely = lonely_BLH.gather(1, q_order)
    sorted_bias = None if bias_BHN is None else bias_BHN.float().gather(2, k_order.transpose(1, 2))

    def may_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = lonely[b, i, h]
        for table in range(len(q_codes)):
            seen = seen | (q_codes[table, b, i, h] == k_codes[table, b, j, h])
        return seen

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if sorted_bias is None else score + sorted_bias[b, h, j]

    flex, make_mask = _flex_attention(compiled=q_BLHD.is_cuda)
    sizes = (q_BLHD.shape[0], q_BLHD.shape[2], q_BLHD.shape[1], k_BNHD.shape[1])
    mask = make_mask(may_see, *sizes, device=str(q_BLHD.device))
    q, k, v = (pick(x, order).transpose(1, 2) for x, order in ((q_BLHD, q_order), (k_BNHD, k_order), (v_BNHD, k_order)))
    out_BLHD = flex(q, k, v, score_mod=add_bias, block_mask=mask).transpose(1, 2)
    return pick(out_BLHD, q_order.argsort(dim=1))


@cache
def _flex_attention(*, compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def _sorted_codes(codes_ABLH: Tensor, order_BLH: Tensor) -> Tensor:
    return codes_ABLH.gather(2, order_BLH.unsqueeze(0).expand_as(codes_ABLH))


def pick(x_BNHD: Tensor, order_BMH: Tensor) -> Tensor:
    """Return each head's tokens at ``order_BMH``."""
    return x_BNHD.gather(1, order_BMH.unsqueeze(-1).expand(-1, -1, -1, x_BNHD.shape[-1]))


def num_buckets_of(groups: Sequence[KeyGroups]) -> int:
    return groups[0].starts_BHE.shape[-1] - 2


def _flash(*args: Any) -> Tensor:
    from .grouped import attend_ragged

    return attend_ragged(*args)


def _cpu(*args: Any) -> Tensor:
    from .grouped import attend_cpu

    return attend_cpu(*args)


def _triton(*args: Any) -> Tensor:
    from .bucket_kernel import attend_triton

    return attend_triton(*args)


def _flashinfer(*args: Any) -> Tensor:
    from .bucket_flashinfer import attend_flashinfer

    return attend_flashinfer(*args)


def _needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"it needs a CUDA device, not {device}"


def _needs_half(dtype: torch.dtype) -> str | None:
    return None if dtype in HALF else f"it does not take {dtype}"


def _one_table(tables: int) -> str | None:
    return None if tables == 1 else f"it takes one table, not {tables}"


def _triton_obstacle(device: torch.device, dtype: torch.dtype, tables: int) -> str | None:
    missing = None if has_triton() else "it needs Triton, which is not installed (pip install triton)"
    wide = f"it does not take {dtype}" if dtype == torch.float64 else None
    return _needs_cuda(device) or missing or wide or _one_table(tables)


def _flash_obstacle(device: torch.device, dtype: torch.dtype, tables: int) -> str | None:
    missing = None if importlib.util.find_spec("torch.nn.attention.varlen") else "it needs a newer PyTorch"
    return _needs_cuda(device) or missing or _needs_half(dtype) or _one_table(tables)


def _flex_obstacle(device: torch.device, dtype: torch.dtype, tables: int) -> str | None:
    missing = None if has_triton() else "it needs Triton, which is not installed (pip install triton)"
    return _needs_cuda(device) or missing


def _cpu_obstacle(device: torch.device, dtype: torch.dtype, tables: int) -> str | None:
    return _one_table(tables) if device.type == "cpu" else f"it needs a CPU, not {device}"


def _flashinfer_obstacle(device: torch.device, dtype: torch.dtype, tables: int) -> str | None:
    found = importlib.util.find_spec("flashinfer") is not None
    missing = None if found else "FlashInfer is not installed (pip install flashinfer-python)"
    return _needs_cuda(device) or missing or _needs_half(dtype) or _one_table(tables)


def _file(
    name: str,
    attend: BucketAttentionFn,
    obstacle: Callable[[torch.device, torch.dtype, int], str | None],
    *,
    skips_hidden: bool = False,
) -> None:
    entry = BucketAttention(name=name, attend=attend, obstacle=obstacle, skips_hidden=skips_hidden)
    BUCKET_ATTENTION.add(name)(entry)


_file("torch", attend_torch, lambda device, dtype, tables: None)
_file("triton", _triton, _triton_obstacle, skips_hidden=True)
_file("flashinfer", _flashinfer, _flashinfer_obstacle)
_file("flash", _flash, _flash_obstacle)
_file("flex", attend_flex, _flex_obstacle)
_file("cpu", _cpu, _cpu_obstacle)


def resolve_bucket_attention(
    options: SparseOptions, device: torch.device | str, *, dtype: torch.dtype
) -> BucketAttention:
    """Return the entry that ``options.attention`` means on ``device``: ``auto`` is the first that runs there.

    A kernel asked for by name that cannot run there raises ``ValueError`` with the reason.
    """
    device = torch.device(device)
    if options.attention == "auto":
        usable = (BUCKET_ATTENTION[name] for name in SPARSE_KERNELS)
        return next(entry for entry in usable if entry.obstacle(device, dtype, options.tables) is None)
    chosen = BUCKET_ATTENTION[options.attention]
    reason = chosen.obstacle(device, dtype, options.tables)
    if reason:
        raise ValueError(f"sparse_attention={chosen.name!r} cannot run on {device}: {reason}; use 'auto'")
    return chosen
