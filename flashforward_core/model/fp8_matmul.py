"""Linears that multiply in 8 bits: weights and activations scaled row by row, activations as they come.

Each row uses the whole range of float8, so a row of outliers costs the others nothing. On CUDA the product runs on
8-bit tensor cores; elsewhere the same rounded numbers are multiplied in float32, as a reference.
"""

import torch
from torch import Tensor, nn

from .fp8 import FP8, Fp8Linear, quantise
from .transformer import CausalWanTransformer

STEP = 16  # widths that the 8-bit kernels can take
LAYERS = (
    *(f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "attn2.to_q",
    "attn2.to_out.0",
    "ffn.net.0.proj",
    "ffn.net.2",
)
"""The linears of a block that every token goes through; a prompt's keys and values are made once."""


def scaled_matmul(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (x·x_scale) @ (weight·weight_scale)ᵀ + bias in ``dtype``.

    ``x`` [M, in] and ``weight`` [out, in] are float8 and contiguous, their scales [M, 1] and [out, 1] float32.
    """
    if x.is_cuda:
        scales = {"scale_a": x_scale, "scale_b": weight_scale.t()}
        return torch._scaled_mm(x, weight.t(), **scales, bias=bias, out_dtype=dtype, use_fast_accum=True)
    out = (x.float() * x_scale) @ (weight.float() * weight_scale).t()
    return (out if bias is None else out + bias.float()).to(dtype)


class Fp8MatmulLinear(nn.Module):
    """A linear that multiplies in 8 bits; the result has the input's dtype."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        """Round ``layer``'s weight, or take it as it is when it is 8 bits already. The bias is shared."""
        super().__init__()
        stored, scale = (layer.weight.detach(), layer.weight_scale) if _is_ready(layer) else quantise(_wide(layer))
        self.register_buffer("weight", stored.contiguous())
        self.register_buffer("weight_scale", scale.float().reshape(-1, 1).expand(stored.shape[0], 1).contiguous())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = quantise(x.flatten(0, -2))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = scaled_matmul(rows, scale, self.weight, self.weight_scale, bias=bias, dtype=x.dtype)
        return out.unflatten(0, x.shape[:-1])


def _is_ready(layer: nn.Linear) -> bool:
    return isinstance(layer, Fp8Linear) and layer.weight.dtype == FP8


def _wide(layer: nn.Linear) -> Tensor:
    return layer.widened(torch.float32) if isinstance(layer, Fp8Linear) else layer.weight.detach()


def use_fp8_matmul(model: CausalWanTransformer) -> None:
    """Replace the linears of ``model``'s blocks, in place.

    Raises ``ValueError`` for weights whose roles are not merged, and for widths that the kernels cannot take.
    """
    with torch.inference_mode(False), torch.no_grad():
        for block in model.blocks:
            for name in LAYERS:
                layer = block.get_submodule(name)
                if type(layer) not in (nn.Linear, Fp8Linear):
                    raise ValueError(f"{name} carries a role's LoRA, which fp8 cannot apply; load with merged roles")
                if layer.in_features % STEP or layer.out_features % STEP:
                    raise ValueError(
                        f"{name} is {layer.in_features}x{layer.out_features}, but fp8 needs multiples of {STEP}"
                    )
                parent, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(parent), leaf, Fp8MatmulLinear(layer))
