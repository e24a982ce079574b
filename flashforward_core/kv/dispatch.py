"""Whether a Triton kernel serves a tensor."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def triton_serves(x: Tensor) -> bool:
    """Whether ``x`` is on CUDA, in a precision that the kernels compute in, and Triton is installed."""
    return x.is_cuda and x.dtype != torch.float64 and has_triton()
