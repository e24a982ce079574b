"""How keys and values are stored: as they are, or in 8-bit floats with one power of two per token and head.

A packed row is the head's numbers in e4m3 and one byte for the exponent of what they are multiplied by. Powers of two
only move the range, so a stored number is off by at most one part in 16 (three bits of mantissa), whatever its size, as
long as it is not 2^14 times smaller than the largest of its row. Packed pages are bytes: they are copied, kept and
sent as any other page.

Letters: B batch, N tokens, H heads, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
TOP = 448.0  # the largest e4m3; 0.875 * 2^9
BIAS = 127  # of the exponent byte, and of float32's own exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a bank stores numbers of ``dtype``."""

    dtype: torch.dtype
    """What goes in and comes out."""
    packed: bool = False
    """Whether numbers are stored in 8 bits."""

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8 if self.packed else self.dtype

    @property
    def poison(self) -> float:
        """Fill with this and every number read is NaN."""
        return 0xFF if self.packed else torch.nan

    def width(self, head_dim: int) -> int:
        """Return the stored elements of one token's head."""
        return head_dim + 1 if self.packed else head_dim

    def store(self, x_BNHD: Tensor) -> Tensor:
        """Return what to write into a bank, [B, N, H, width]."""
        assert x_BNHD.dtype == self.dtype, f"KV comes as {x_BNHD.dtype}, the bank holds {self.dtype}"
        return pack(x_BNHD) if self.packed else x_BNHD

    def load(self, stored_BNHW: Tensor) -> Tensor:
        """Return the numbers [B, N, H, D]: a view where nothing is packed, else scratch of their own."""
        return unpack(stored_BNHW, self.dtype) if self.packed else stored_BNHW


def pack(x_BNHD: Tensor) -> Tensor:
    """Return [B, N, H, D + 1] bytes. A row with a number that is not finite has none that is."""
    x = x_BNHD.float()
    top = x.abs().amax(dim=-1, keepdim=True)
    mantissa, exponent = torch.frexp(top)
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(1 - BIAS, BIAS)  # the largest comes to lie in (224, 448]
    numbers = (x * _power(-exponent)).to(FP8).view(torch.uint8)
    stored = torch.where(top.isfinite(), exponent, BIAS + 1)  # infinity as the factor
    return torch.cat([numbers, (stored + BIAS).to(torch.uint8)], dim=-1)


def unpack(packed_BNHW: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in ``dtype``; bfloat16 and wider types hold each of them exactly."""
    exponent = packed_BNHW[..., -1:].int() - BIAS
    return packed_BNHW[..., :-1].view(FP8).to(dtype).mul_(_power(exponent).to(dtype))


def _power(exponent: Tensor) -> Tensor:
    """Return 2 to a whole number from -126 to 127, exactly, as float32; 128 gives infinity."""
    return (exponent + BIAS).int().bitwise_left_shift(23).view(torch.float32)
