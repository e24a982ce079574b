"""Attention with an additive bias per key: what tokens that stand for several need (FAST-AR: log m on the logit).

The bias is float32 whatever the keys are: log m in bfloat16 is wrong by up to 0.016. Minus infinity hides a key.
Letters: B batch, L queries, N keys, H heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Registry
from .layers import at_least_fp32

BiasedAttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q_BLHD, k_BNHD, v_BNHD, bias_BHN) -> out_BLHD; every query must have a key whose bias is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedAttention:
    """One kernel that takes a bias, and what it needs."""

    name: str
    attend: BiasedAttentionFn
    obstacle: Callable[[torch.device], str | None]
    """Why the kernel cannot run on a device, or None."""


BIASED_ATTENTION: Registry[BiasedAttention] = Registry("biased attention")


def attend_biased(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_BHN: Tensor) -> Tensor:
    """Attend in float32 at least, on any device; the result has the values' dtype.

    PyTorch's kernels take a mask of the queries' dtype only, so half precision is widened rather than the bias cut.
    """
    q, k, v = (at_least_fp32(x).transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    mask = bias_BHN.to(q.dtype).unsqueeze(2).expand(*q.shape[:3], k.shape[2])
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


def _flex_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device}"
    return None if find_spec("triton") else "it needs Triton, which is not installed"


BIASED_ATTENTION.add("torch")(BiasedAttention(name="torch", attend=attend_biased, obstacle=lambda device: None))
BIASED_ATTENTION.add("flex")(BiasedAttention(name="flex", attend=attend_biased_flex, obstacle=_flex_obstacle))


def resolve_biased_attention(name: str, device: torch.device | str) -> BiasedAttention:
    """Return the entry that ``name`` means on ``device``: ``auto`` is ``flex`` where it runs and ``torch`` elsewhere.

    A kernel asked for by name that cannot run there raises ``ValueError`` with the reason.
    """
    device = torch.device(device)
    flex = BIASED_ATTENTION["flex"]
    if name == "auto":
        return flex if flex.obstacle(device) is None else BIASED_ATTENTION["torch"]
    chosen = BIASED_ATTENTION[name]
    reason = chosen.obstacle(device)
    if reason:
        raise ValueError(f"biased attention={name!r} cannot run on {device}: {reason}; use 'auto'")
    return chosen
