"""Attention is chosen by name, and what runs is what is reported."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from flashforward_core.model import attention
from flashforward_core.model.attention import ATTENTION, AUTO_ORDER, resolve_attention

pytestmark = pytest.mark.cpu


def test_the_kernel_equals_softmax_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 9, 3, 8, generator=generator, dtype=torch.float64)
    weights = (torch.einsum("blhd,bnhd->bhln", q, k) / math.sqrt(8)).softmax(dim=-1)
    expected = torch.einsum("bhln,bnhd->blhd", weights, v)
    found = resolve_attention("auto", "cpu", dtype=torch.float64).attend(q, k, v)
    assert found.shape == (2, 5, 3, 8)
    assert (found - expected).abs().max() < 1e-12  # float64, sums of 9


@pytest.mark.parametrize("name", ["auto", *ATTENTION])
def test_every_name_means_sdpa_on_a_cpu_and_says_so(name: str) -> None:
    assert resolve_attention(name, "cpu", dtype=torch.float32).name == "sdpa"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"attention='flesh' is unknown; use one of: sdpa, fa3, cudnn, flash"):
        resolve_attention("flesh", "cpu", dtype=torch.float32)


def test_cuda_kernels_say_why_they_cannot_run_on_a_cpu() -> None:
    for name in AUTO_ORDER:
        reason = ATTENTION[name].obstacle(torch.device("cpu"))
        assert reason is not None
        assert "CUDA" in reason or "not installed" in reason


def test_the_kernel_of_one_thread_is_no_switch_of_the_process() -> None:
    """PyTorch's own flags are global: an entry that set them would change other lanes."""
    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    q = torch.randn(1, 4, 2, 8)
    for name in ("sdpa", "math"):
        ATTENTION[name].attend(q, q, q)
        assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


@pytest.mark.parametrize("name", ["sdpa", "math"])
def test_a_scale_takes_the_place_of_the_head_dims(name: str) -> None:
    """Queries of twice the size give logits of twice the scale; the head dim's own scale given changes no byte."""
    q, k, v = torch.randn(3, 1, 9, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attend = ATTENTION[name].attend
    assert torch.equal(attend(q, k, v, scale=0.25), attend(q, k, v))
    assert (attend(q, k, v, scale=0.5) - attend(2 * q, k, v)).abs().max() < 1e-12  # float64, sums of 16


def test_flash_attention_3_is_given_the_scale_and_its_operator_where_no_gradient_is_wanted() -> None:
    """A stand-in for its package, which needs a Hopper device; the head's own scale is 8 ** -0.5."""
    asked: list[object] = []

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
        asked.append(("function", softmax_scale))
        return q

    def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> tuple[torch.Tensor, ...]:
        asked.append(("operator", given))
        return q, k

    package, operators = SimpleNamespace(flash_attn_func=function), SimpleNamespace(fwd=operator)
    q = torch.randn(1, 4, 2, 8)
    attention._fa3_kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_fa3_module", lambda: "fa3_fwd_interface")
        patch.setitem(sys.modules, "fa3_fwd_interface", package)
        patch.setattr(torch.ops, "fa3_fwd", operators, raising=False)
        assert ATTENTION["fa3"].attend(q, q, q, scale=0.3) is q
        with torch.inference_mode():
            assert ATTENTION["fa3"].attend(q, q, q) is q
        attention._fa3_kernel.cache_clear()
        patch.delattr(operators, "fwd")
        with torch.inference_mode():
            ATTENTION["fa3"].attend(q, q, q)
    attention._fa3_kernel.cache_clear()
    scale = 8**-0.5
    assert asked == [("function", 0.3), ("operator", {"softmax_scale": scale, "num_splits": 1}), ("function", scale)]


def test_math_kernel_agrees_with_sdpa() -> None:
    q = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    difference = ATTENTION["math"].attend(q, q, q) - ATTENTION["sdpa"].attend(q, q, q)
    assert difference.abs().max() < 1e-12  # float64, the same sums
