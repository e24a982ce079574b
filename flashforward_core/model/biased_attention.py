"""Attention with an additive bias per key: what tokens that stand for several need (FAST-AR: log m on the logit).

The bias is float32 whatever the keys are: log m in bfloat16 is wrong by up to 0.016. Minus infinity hides a key.
In half precision it can ride on further columns of the keys, so that any kernel without a bias will do.
Letters: B batch, L queries, N keys, H heads, D head dim, W head dim with the columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Registry
from .attention import ATTENTION, HALF, AttentionBackend, ScaledAttentionFn
from .layers import at_least_fp32

BiasedAttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q_BLHD, k_BNHD, v_BNHD, bias_BHN) -> out_BLHD; every query must have a key whose bias is finite."""

BIAS_PARTS = 3
"""Of float32's 24 bits bfloat16 holds 8 and float16 holds 11, down to 2**-24."""
WIDTH_STEP = 64
"""Head dims that kernels have tiles for. On an H200 (bfloat16, 4,680 queries, 32,760 keys, 12 heads of 128)
FlashAttention-3 takes 1.97 ms with 64 more columns and 2.12 with 8, cuDNN 2.34 and 2.47."""
HIDDEN = -(2.0**15)
"""What the columns of a hidden key add up to, before the scale. Half precision has it exactly, and at heads of 128 it
lowers a logit by 2,896, which leaves a weight of 0. Not lower: float16 ends at 65,504, and while a query has met none
but hidden keys, a kernel's exponents are differences of rounded numbers of this size."""
COLUMN_KERNELS = ("fa3", "cudnn", "flash")
"""``columns`` runs over the first that runs."""
CUDNN_WIDE = 91000
"""cuDNN's version from which it takes heads of more than 128 on compute capability 9.0; elsewhere it may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedAttention:
    """One kernel that takes a bias, and what it needs."""

    name: str
    attend: BiasedAttentionFn
    obstacle: Callable[[torch.device, torch.dtype], str | None]
    """(device, dtype of queries and keys) -> why the kernel cannot run, or None."""


BIASED_ATTENTION: Registry[BiasedAttention] = Registry("biased attention")


def attend_biased(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor) -> Tensor:
    """Attend in float32 at least, on any device; the result has the values' dtype.

    PyTorch's kernels take a mask of the queries' dtype only, so half precision is widened rather than the bias cut.
    """
    q, k, v = (at_least_fp32(x).transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    mask = bias_BHN.to(q.dtype).unsqueeze(2)  # not expanded over queries: CUDA's kernel would copy what it has to pad
    mask = mask.expand(q.shape[0], q.shape[1], 1, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).to(v_BNHD.dtype)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def attend_biased_flex(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor) -> Tensor:
    """Attend with FlexAttention, which adds the float32 bias inside the kernel."""
    bias = bias_BHN.to(torch.float32).expand(q_BLHD.shape[0], q_BLHD.shape[2], -1)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score + bias[b, h, k_index]

    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    out: Tensor = _compiled_flex()(q, k, v, score_mod=add_bias)
    return out.transpose(1, 2)


def attend_columns(
    q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor, *, attend: ScaledAttentionFn | None = None
) -> Tensor:
    """Attend in half precision with the bias in columns of the keys, which meet ones in the queries.

    ``attend`` is a kernel without a bias, by default the fastest that the device has. Copies keys and values once.
    """
    dim = q_BLHD.shape[-1]
    if attend is None:
        kernel = _column_kernel(q_BLHD.device, q_BLHD.dtype)
        assert kernel is not None, f"columns were chosen where they cannot run: {q_BLHD.device}, {q_BLHD.dtype}"
        attend = kernel.attend
    columns = -(-(dim + BIAS_PARTS) // WIDTH_STEP) * WIDTH_STEP - dim
    q_BLHW, k_BNHW, v_BNHW = (F.pad(x, (0, columns)) for x in (q_BLHD, k_BNHD, v_BNHD))  # kernels want equal head dims
    q_BLHW[..., dim : dim + BIAS_PARTS] = 1
    k_BNHW[..., dim : dim + BIAS_PARTS] = bias_columns(bias_BHN, dim=dim, dtype=k_BNHD.dtype).transpose(1, 2)
    out_BLHW = attend(q_BLHW, k_BNHW, v_BNHW, scale=dim**-0.5)
    return out_BLHW[..., :dim].contiguous()  # heads are joined next, which would copy it too


def bias_columns(bias_BHN: Tensor, *, dim: int, dtype: torch.dtype) -> Tensor:
    """Split the bias over the scale of heads of ``dim`` into parts that ``dtype`` has, [B, H, N, ``BIAS_PARTS``].

    Their sum times the scale is off by 2**-22 of the bias at most, float32's own rounding, and in float16 by 2**-25
    more: by 9.4e-7 for log 1 to log 10,000 in heads of 128. Below ``HIDDEN`` it is ``HIDDEN``, minus infinity too, and
    above ``-HIDDEN`` it is that: float16 has no larger ones, and policies' biases are logarithms of counts.
    """
    rest = (bias_BHN.to(torch.float32) * math.sqrt(dim)).clamp(min=HIDDEN, max=-HIDDEN)
    parts = []
    for _ in range(BIAS_PARTS):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(torch.float32)
    return torch.stack(parts, dim=-1)


@cache
def _column_kernel(device: torch.device, dtype: torch.dtype) -> AttentionBackend | None:
    """Return the fastest kernel that runs with the columns, if any does. On a CPU it is PyTorch's own choice."""
    if device.type == "cpu":
        return ATTENTION["sdpa"]
    return next((ATTENTION[name] for name in COLUMN_KERNELS if _takes_columns(ATTENTION[name], device, dtype)), None)


def _takes_columns(kernel: AttentionBackend, device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in kernel.dtypes or kernel.obstacle(device) is not None:
        return False
    if kernel.name != "cudnn":
        return True  # they take heads of up to 256 wherever they run
    version = torch.backends.cudnn.version() or 0
    return version >= CUDNN_WIDE and torch.cuda.get_device_capability(device) == (9, 0)


def _columns_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in HALF:
        return f"it takes half precision, not {dtype}"
    if _column_kernel(device, dtype) is None:
        return f"none of {', '.join(COLUMN_KERNELS)} runs there with {dtype} and wider heads"
    return None


def _flex_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device}"
    return None if find_spec("triton") else "it needs Triton, which is not installed"


def _file(name: str, attend: BiasedAttentionFn, obstacle: Callable[[torch.device, torch.dtype], str | None]) -> None:
    BIASED_ATTENTION.add(name)(BiasedAttention(name=name, attend=attend, obstacle=obstacle))


_file("torch", attend_biased, lambda device, dtype: None)
_file("columns", attend_columns, _columns_obstacle)
_file("flex", attend_biased_flex, _flex_obstacle)

AUTO_ORDER = ("columns", "flex")
"""``auto`` takes the first that runs, in half precision on CUDA. Elsewhere it is ``torch``: in float32 FlexAttention
took 19.9 ms where ``torch`` took 0.48 (one H200, batch 32, 288 queries, 1,152 keys, 4 heads of 64)."""


def resolve_biased_attention(name: str, device: torch.device | str, *, dtype: torch.dtype) -> BiasedAttention:
    """Return the entry that ``name`` means for ``dtype`` on ``device``; ``auto`` is the fastest that runs.

    A kernel asked for by name that cannot run there raises ``ValueError`` with the reason.
    """
    device = torch.device(device)
    if name == "auto":
        order = AUTO_ORDER if device.type == "cuda" and dtype in HALF else ()
        usable = (BIASED_ATTENTION[entry] for entry in order)
        return next((e for e in usable if e.obstacle(device, dtype) is None), BIASED_ATTENTION["torch"])
    chosen = BIASED_ATTENTION[name]
    reason = chosen.obstacle(device, dtype)
    if reason:
        raise ValueError(f"biased attention={name!r} cannot run on {device}: {reason}; use 'auto'")
    return chosen
