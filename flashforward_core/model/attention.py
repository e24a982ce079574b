"""Attention kernels to choose between: q_BLHD, k_BNHD, v_BNHD -> out_BLHD, dense, no mask.

Each entry calls its kernel itself. PyTorch's own choice (``sdpa_kernel`` and the flags under it) is one switch for the
whole process, so a lane's thread that sets it would change the kernels of every other lane.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Registry

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


class ScaledAttentionFn(Protocol):
    """An ``AttentionFn`` whose logits may have another scale than one over the root of the head dim that it sees."""

    def __call__(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
        """Return out_BLHD; ``scale`` None is the kernel's own."""


HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """One kernel and what it needs."""

    name: str
    attend: ScaledAttentionFn
    dtypes: tuple[torch.dtype, ...]
    obstacle: Callable[[torch.device], str | None]
    """Why the kernel cannot run on a device, or None."""


ATTENTION: Registry[AttentionBackend] = Registry("attention")

AUTO_ORDER = ("fa3", "cudnn", "flash", "efficient", "math")
"""``auto`` takes the first that runs."""


def sdpa(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
    """Attend with whatever PyTorch chooses: the only entry on a CPU, and the default of a bare model."""
    q, k, v = q_BLHD.transpose(1, 2), k_BNHD.transpose(1, 2), v_BNHD.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def _flash(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0].transpose(1, 2)


def _cudnn(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    log_sum = torch.is_grad_enabled()  # the backward pass needs it
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, log_sum, scale=scale)[0]
    return out.transpose(1, 2)


def _efficient(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    log_sum = torch.is_grad_enabled()  # the backward pass needs it
    out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, log_sum, scale=scale)[0]
    return out.transpose(1, 2)


def _math(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, scale=scale)[0].transpose(1, 2)


FA3_MODULES = {"fa3_fwd_interface": "fa3_fwd", "flash_attn_interface": "flash_attn_3"}
"""FlashAttention-3's forward-only wheel, and its own package: modules, and the namespace of their operators."""


def _fa3_module() -> str | None:
    return next((name for name in FA3_MODULES if importlib.util.find_spec(name) is not None), None)


@cache
def _fa3_kernel(*, differentiable: bool) -> Callable[..., Any]:
    """Return the package's function, or where no gradient is wanted its bare operator, which takes Python less time."""
    name = _fa3_module()
    assert name is not None, "FlashAttention-3 is used where it is not installed"
    function: Callable[..., Any] = importlib.import_module(name).flash_attn_func
    operator: Callable[..., Any] | None = getattr(getattr(torch.ops, FA3_MODULES[name]), "fwd", None)
    return function if differentiable or operator is None else partial(operator, num_splits=1)  # as the function does


def _fa3(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, scale: float | None = None) -> Tensor:
    kernel = _fa3_kernel(differentiable=torch.is_grad_enabled())
    out = kernel(q_BLHD, k_BNHD, v_BNHD, softmax_scale=q_BLHD.shape[-1] ** -0.5 if scale is None else scale)
    return out[0] if isinstance(out, tuple) else out  # the operator and older releases also return the log-sum


def _needs_cuda(device: torch.device, *, capability: tuple[int, int] = (0, 0)) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device}"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}; {device} has {found[0]}.{found[1]}"
    return None


def _fa3_obstacle(device: torch.device) -> str | None:
    if _fa3_module() is None:
        return "FlashAttention-3 is not installed (pip install fa3-fwd)"
    obstacle = _needs_cuda(device, capability=(9, 0))
    hopper = obstacle is None and torch.cuda.get_device_capability(device)[0] == 9
    return None if hopper else obstacle or f"it runs on Hopper only, not on {device}"


def _ampere_obstacle(device: torch.device) -> str | None:
    return _needs_cuda(device, capability=(8, 0))


def _file(name: str, attend: ScaledAttentionFn, dtypes: tuple[torch.dtype, ...], obstacle: Callable) -> None:  # type: ignore[type-arg]
    ATTENTION.add(name)(AttentionBackend(name=name, attend=attend, dtypes=dtypes, obstacle=obstacle))


_file("sdpa", sdpa, (*HALF, torch.float32, torch.float64), lambda device: None)
_file("fa3", _fa3, (torch.bfloat16,), _fa3_obstacle)  # the forward-only wheel has no float16 kernels
_file("cudnn", _cudnn, HALF, _ampere_obstacle)
_file("flash", _flash, HALF, _ampere_obstacle)
_file("efficient", _efficient, (*HALF, torch.float32), _needs_cuda)
_file("math", _math, (*HALF, torch.float32, torch.float64), _needs_cuda)


def resolve_attention(name: str, device: torch.device | str, *, dtype: torch.dtype) -> AttentionBackend:
    """Return the entry that ``name`` means on ``device``; report its own ``name``, which may differ.

    On a CPU every known name means ``sdpa``. Elsewhere ``auto`` takes the fastest that runs, and a kernel asked for
    by name that cannot run there raises ``ValueError`` with the reason.
    """
    device = torch.device(device)
    if name != "auto":
        chosen = ATTENTION[name]
    if device.type == "cpu":
        return ATTENTION["sdpa"]
    if name == "auto":
        usable = (ATTENTION[entry] for entry in AUTO_ORDER)
        return next((e for e in usable if dtype in e.dtypes and e.obstacle(device) is None), ATTENTION["sdpa"])
    reason = chosen.obstacle(device)
    if dtype not in chosen.dtypes:
        reason = f"it does not take {dtype}"
    if reason:
        raise ValueError(f"attention={name!r} cannot run on {device}: {reason}; use attention='auto'")
    return chosen
