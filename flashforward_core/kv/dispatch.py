"""Whether a Triton kernel serves a tensor."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def triton_serves(x: Tensor) -> bool:
    """Whether ``x`` is on CUDA, in a precision that the kernels compute in, and Triton is installed."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()
