"""A bias per key goes on the logit, in float32, whatever the keys are."""

import math

import pytest
import torch

from flashforward_core.model.attention import sdpa
from flashforward_core.model.biased_attention import BIASED_ATTENTION, attend_biased, resolve_biased_attention

pytestmark = pytest.mark.cpu


def _qkv(dtype: torch.dtype = torch.float64, *, keys: int = 9) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 3, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, keys, 3, 8, generator=generator, dtype=torch.float64)
    bias = torch.rand(2, 3, keys, generator=generator, dtype=torch.float32)
    return q.to(dtype), k.to(dtype), v.to(dtype), bias


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    logits = torch.einsum("blhd,bnhd->bhln", q, k) / math.sqrt(q.shape[-1]) + bias.unsqueeze(2)
    return torch.einsum("bhln,bnhd->blhd", logits.softmax(dim=-1), v)


def test_the_bias_is_added_to_the_logit_of_its_key_and_head() -> None:
    q, k, v, bias = _qkv()
    assert (attend_biased(q, k, v, bias) - _written_out(q, k, v, bias.double())).abs().max() < 1e-12  # sums of 9


def test_flex_attention_computes_the_same() -> None:
    """Not compiled, which a CPU test need not pay for: the same score function, run by PyTorch itself."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, bias = _qkv(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashforward_core.model.biased_attention._compiled_flex", lambda: flex_attention)
        found = BIASED_ATTENTION["flex"].attend(q, k, v, bias)
    assert (found - attend_biased(q, k, v, bias)).abs().max() < 1e-5  # float32, sums of 9


def test_log_m_equals_m_copies_of_a_key() -> None:
    q, k, v, _ = _qkv()
    bias = torch.zeros(2, 3, 9)
    bias[..., 4] = math.log(6)
    copies = [x[:, [*range(9), 4, 4, 4, 4, 4]] for x in (k, v)]
    assert (attend_biased(q, k, v, bias) - sdpa(q, *copies)).abs().max() < 1e-7  # log 6 is rounded to float32


def test_minus_infinity_hides_a_key() -> None:
    q, k, v, _ = _qkv()
    bias = torch.zeros(2, 3, 9)
    bias[..., 6:] = -torch.inf
    assert (attend_biased(q, k, v, bias) - sdpa(q, k[:, :6], v[:, :6])).abs().max() < 1e-12  # the same sums


def test_half_precision_keys_keep_a_float32_bias() -> None:
    """log 1001 - log 1000 is 0.001, which bfloat16 cannot tell at 6.9: the two values would cancel."""
    q = torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16)
    v = torch.tensor([1.0, -1.0], dtype=torch.bfloat16).view(1, 2, 1, 1).expand(2, 2, 3, 8)
    bias = torch.tensor([math.log(1001.0), math.log(1000.0)]).expand(2, 3, 2)
    found = attend_biased(q, v, v, bias)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - 1 / 2001).abs() < 0.01 / 2001).all()  # bfloat16 keeps 0.4 %, log m in float32 0.1 %


def test_auto_means_torch_on_a_cpu_and_flex_says_why_not() -> None:
    assert resolve_biased_attention("auto", "cpu").name == "torch"
    with pytest.raises(ValueError, match=r"biased attention='flex' cannot run on cpu: it needs a CUDA device"):
        resolve_biased_attention("flex", "cpu")
