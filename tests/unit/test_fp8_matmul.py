"""Multiplying in 8 bits: how far from the exact product, and that no row spoils another."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flashforward_core.graph.task import Role
from flashforward_core.model.config import WanConfig
from flashforward_core.model.fp8_matmul import LAYERS, Fp8MatmulLinear, use_fp8_matmul
from flashforward_core.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.cpu

# e4m3 keeps 3 bits after the leading one: rounding errs by up to 2^-4, 2.6 % root mean square for numbers spread
# evenly over a binade, for each of the two factors: 3.7 % together. Errors are independent, so the sum errs as much.
ROUNDING = 0.045


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (found - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 64)


def test_a_product_errs_by_the_rounding_of_its_factors(layer: nn.Linear) -> None:
    x = torch.randn(2, 30, 256)
    error = relative_error(Fp8MatmulLinear(layer)(x), layer(x))
    assert 0.01 < error.mean() < ROUNDING  # not exact either: it did round


def test_a_row_of_outliers_leaves_the_others_alone(layer: nn.Linear) -> None:
    """With one scale for all rows, small rows would vanish: 1e-3 of 448 is below float8's smallest steps."""
    x = torch.randn(1, 8, 256)
    alone = Fp8MatmulLinear(layer)(x)
    x[:, 3] *= 1e6
    beside = Fp8MatmulLinear(layer)(x)
    rows = [n for n in range(8) if n != 3]
    assert torch.equal(alone[:, rows], beside[:, rows])
    assert relative_error(beside, layer(x)).max() < 2 * ROUNDING  # of single rows, not of their mean


def test_the_result_has_the_inputs_dtype_and_zero_stays_zero(layer: nn.Linear) -> None:
    out = Fp8MatmulLinear(layer)(torch.zeros(1, 2, 256, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0, 0], layer.bias.bfloat16(), rtol=0, atol=0)


def test_a_whole_model_stays_close_and_only_its_block_linears_change() -> None:
    torch.manual_seed(0)
    config = WanConfig(
        name="tiny", dim=96, ffn_dim=128, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32
    )
    model = CausalWanTransformer(config).requires_grad_(False)
    fast = copy.deepcopy(model)
    use_fp8_matmul(fast)
    kinds = {name for name, part in fast.named_modules() if isinstance(part, Fp8MatmulLinear)}
    assert kinds == {f"blocks.{n}.{name}" for n in range(2) for name in LAYERS}
    exact, found = (velocity(m) for m in (model, fast))
    assert 0 < (found - exact).norm() / exact.norm() < 2 * ROUNDING  # the residual path carries most of it unrounded


def velocity(model: CausalWanTransformer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    text = model.text_context(torch.randn(1, 5, 12, generator=generator), Role.RENDERER)
    x = torch.randn(1, 16, 3, 8, 8, generator=generator)
    timestep = torch.full((1, 3), 900.0)
    return model(x, timestep_BF=timestep, text=text, frames=torch.arange(3), role=Role.RENDERER)


def test_unmerged_roles_and_odd_widths_are_refused(rig: Any) -> None:
    with pytest.raises(ValueError, match=r"attn1\.to_q carries a role's LoRA, which fp8 cannot apply"):
        use_fp8_matmul(rig.model(torch.float32))
    odd = CausalWanTransformer(WanConfig(name="odd", dim=24, ffn_dim=32, num_heads=2, num_layers=1, text_dim=12))
    with pytest.raises(ValueError, match=r"attn1\.to_q is 24x24, but fp8 needs multiples of 16"):
        use_fp8_matmul(odd)
