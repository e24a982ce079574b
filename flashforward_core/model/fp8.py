"""Weights in 8-bit floats: files that hold them, scaled or plain, and linears that keep them.

A stored weight w stands for w·scale; the scale is one number per weight or one per output row.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import at_least_fp32

FP8 = torch.float8_e4m3fn
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_MAX = torch.finfo(FP8).max

SCALES = ("scale_weight", "weight_scale")
"""What files call the scale of the weight beside it: ComfyUI's older and newer way."""
NOT_WEIGHTS = ("scale_input", "input_scale", "comfy_quant")
"""Tensors beside a scaled weight that the arithmetic here does not need: activations stay in half precision."""


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype in FP8_TYPES


def dequantise(weight: Tensor, scale: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """Return weight·scale in ``dtype``, multiplied in float32."""
    if scale is None:
        return weight.to(dtype)
    return (weight.float() * _by_row(scale)).to(dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] in 8 bits and its scale [out, 1], so that each row uses the whole range."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (wide / scale).to(FP8), scale


def _by_row(scale: Tensor) -> Tensor:
    """A scale per weight stays as it is, one per row becomes a column."""
    return scale.float().reshape(()) if scale.numel() == 1 else scale.float().reshape(-1, 1)


def split_scales(tensors: Mapping[str, Tensor], *, source: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Part weights from their scales (by the weight's name), and drop what is neither.

    A scale without its weight, or one that is neither per weight nor per row, raises ``ValueError``.
    """
    weights, scales = {}, {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in SCALES:
            scales[f"{module}.weight"] = tensor
        elif leaf not in NOT_WEIGHTS and name != "scaled_fp8":
            weights[name] = tensor
    for name, scale in scales.items():
        if name not in weights or not is_fp8(weights[name]) or scale.numel() not in (1, weights[name].shape[0]):
            found = "no such weight" if name not in weights else f"{weights[name].dtype} {tuple(weights[name].shape)}"
            raise ValueError(
                f"{source}: the scale of {name} has shape {tuple(scale.shape)}, found {found}; use an fp8 file that is "
                "scaled per tensor or per row, or the bf16 version"
            )
    return weights, scales


class Fp8Linear(nn.Linear):
    """A linear whose weight is stored in 8 bits and widened to the input's dtype when used: half of bf16's memory."""

    weight_scale: Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        """Make an empty one on the meta device; its tensors come by assignment."""
        super().__init__(in_features, out_features, bias=bias, device="meta")
        self.weight = nn.Parameter(self.weight.to(FP8), requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(out_features, 1, device="meta"))

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that the stored one stands for."""
        return dequantise(self.weight.detach(), self.weight_scale, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.widened(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @torch.no_grad()
    def updated(self, update: Tensor) -> "Fp8Linear":
        """Return a linear with ``update`` added to the weight, rounded to 8 bits again; the bias is shared."""
        new = Fp8Linear(self.in_features, self.out_features, bias=self.bias is not None)
        stored, new.weight_scale = quantise(self.widened(torch.float32) + at_least_fp32(update))
        new.weight = nn.Parameter(stored, requires_grad=False)
        new.bias = self.bias
        return new


def hold_fp8(blocks: nn.Module) -> None:
    """Replace every linear below ``blocks`` by an empty Fp8Linear, in place."""
    for name, layer in list(blocks.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            replacement = Fp8Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            setattr(blocks.get_submodule(parent), leaf, replacement)
