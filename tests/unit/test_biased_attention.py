"""A bias per key goes on the logit, in float32, whatever the keys are."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashforward_core.model.attention import HALF, sdpa
from flashforward_core.model.biased_attention import (
    AUTO_ORDER,
    BIASED_ATTENTION,
    HIDDEN,
    _column_kernel,
    attend_biased,
    attend_columns,
    bias_columns,
    resolve_biased_attention,
)

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


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""By how much rounding changes a number, relative to it."""


def _assert_rounded_twice(
    found: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> None:
    """Compare with double precision: half precision rounds the weights before they meet the values, and the result."""
    q, k, v, bias = q.double(), k.double(), v.double(), bias.double()
    expected = _written_out(q, k, v, bias)
    assert found.shape == expected.shape
    bound = ROUNDING[found.dtype] * (_written_out(q, k, v.abs(), bias) + expected.abs())
    assert ((found.double() - expected).abs() <= bound + 1e-5).all()  # float32's sums of 700


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [24, 64, 128])
def test_columns_equal_attention_in_double_precision(dtype: torch.dtype, dim: int) -> None:
    """With counts of 1 to 10,000, and all of the first keys hidden, where a kernel's running maximum is low."""
    generator = torch.Generator().manual_seed(dim)
    q = torch.randn(2, 70, 3, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 700, 3, dim, generator=generator).to(dtype)
    bias = torch.rand(2, 3, 700, generator=generator) * math.log(10_000)
    bias[..., :520] = -torch.inf
    bias[..., 600::7] = -torch.inf
    found = attend_columns(q, k, v, bias)
    assert found.dtype == dtype
    _assert_rounded_twice(found, q, k, v, bias)


@pytest.mark.parametrize("shape", [(1, 1, 9), (1, 3, 9), (2, 1, 9)])
def test_a_bias_of_all_batches_or_heads_is_spread(shape: tuple[int, ...]) -> None:
    q, k, v, _ = _qkv(torch.bfloat16)
    bias = torch.arange(math.prod(shape)).view(shape) * 0.4
    found = attend_columns(q, k, v, bias)
    assert torch.equal(found, attend_columns(q, k, v, bias.expand(2, 3, 9)))
    _assert_rounded_twice(found, q, k, v, bias.expand(2, 3, 9))


@pytest.mark.parametrize("dtype", HALF)
def test_hidden_keys_have_no_influence_through_columns(dtype: torch.dtype) -> None:
    """Not even where queries like them best: 1e4 in the values, and keys of 100 times the logits of others."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 600, 3, 64, generator=generator).to(dtype) for _ in range(3))
    bias = torch.zeros(2, 3, 600)
    bias[..., :530] = bias[..., 560:570] = -torch.inf
    hidden = (bias == -torch.inf).transpose(1, 2).unsqueeze(-1)
    expected = attend_columns(q, k, v, bias)
    loud = attend_columns(q, torch.where(hidden, 100 * k, k), torch.where(hidden, 1e4, v.float()).to(dtype), bias)
    assert torch.equal(loud, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_columns_tell_neighbouring_counts_apart(dtype: torch.dtype) -> None:
    """Two keys with the values 1 and -1 give tanh of half the difference of their biases, which is small.

    A bias in bfloat16 alone is wrong by up to 0.016 for either key, so the result would be by 0.016.
    """
    counts = torch.arange(1, 10_000, 3, dtype=torch.float64)
    bias = torch.stack([counts, counts + 1], dim=-1).log().unsqueeze(1)
    v = torch.tensor([1.0, -1.0], dtype=dtype).view(1, 2, 1, 1).expand(len(counts), 2, 1, 128)
    q = torch.zeros(len(counts), 1, 1, 128, dtype=dtype)
    found = attend_columns(q, torch.zeros_like(v), v, bias.float())[:, 0, 0, 0].double()
    expected = ((bias[..., 0] - bias[..., 1]) / 2).tanh().squeeze(1)
    bound = ROUNDING[dtype] * (0.5 + expected.abs())  # of the two weights only the smaller is rounded, then the result
    assert ((found - expected).abs() < bound).all()


@given(
    bias=st.lists(st.floats(0, 9.25, width=32), min_size=1, max_size=20),
    dim=st.sampled_from([24, 64, 96, 128]),
    dtype=st.sampled_from(HALF),
)
def test_columns_add_up_to_the_bias(bias: list[float], dim: int, dtype: torch.dtype) -> None:
    """As exactly as float32 does: 9.25 is above log 10,000."""
    given_bias = torch.tensor(bias, dtype=torch.float32).view(1, 1, -1)
    columns = bias_columns(given_bias, dim=dim, dtype=dtype)
    assert columns.dtype == dtype
    error = (columns.double().sum(dim=-1) / math.sqrt(dim) - given_bias.double()).abs()
    assert (error <= 2.0**-22 * given_bias.double() + 2.0**-25).all()


@pytest.mark.parametrize("dtype", HALF)
def test_a_bias_too_large_for_half_precision_stays_a_number(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, n, 1, 64).to(dtype) for n in (2, 31, 31))
    out = attend_columns(q, k, v, torch.full((1, 1, 31), 1e4))
    even = attend_columns(q, k, v, torch.zeros(1, 1, 31))  # all keys alike: the same weights
    assert (out.float() - even.float()).abs().max() < 0.05  # logits of 4,096 leave float32 12 bits behind the point


@pytest.mark.parametrize("dtype", HALF)
def test_minus_infinity_is_a_number_in_columns(dtype: torch.dtype) -> None:
    columns = bias_columns(torch.full((1, 1, 1), -torch.inf), dim=128, dtype=dtype)
    assert columns.flatten().tolist() == [HIDDEN, 0, 0]


@pytest.mark.parametrize(("dim", "wide"), [(24, 64), (61, 64), (64, 128), (128, 192), (192, 256)])
def test_columns_fill_the_next_head_dim_and_keep_the_scale(dim: int, wide: int) -> None:
    seen: list[object] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        seen.extend([q.shape[-1], k.shape[-1], v.shape[-1], scale])
        return q

    q = torch.randn(1, 4, 2, dim, dtype=torch.bfloat16)
    out = attend_columns(q, q, q, torch.zeros(1, 2, 4), attend=attend)
    assert seen == [wide, wide, wide, dim**-0.5]
    assert torch.equal(out, q)


def test_auto_means_torch_on_a_cpu_and_others_say_why_not() -> None:
    for dtype in (*HALF, torch.float32, torch.float64):
        assert resolve_biased_attention("auto", "cpu", dtype=dtype).name == "torch"
    with pytest.raises(ValueError, match=r"biased attention='flex' cannot run on cpu: it needs a CUDA device"):
        resolve_biased_attention("flex", "cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"'columns' cannot run on cpu: it takes half precision, not torch.float32"):
        resolve_biased_attention("columns", "cpu", dtype=torch.float32)
    assert resolve_biased_attention("columns", "cpu", dtype=torch.float16).attend is attend_columns


def test_auto_on_cuda_depends_on_the_dtype() -> None:
    """Without the device: what each entry says of it is given."""
    with pytest.MonkeyPatch.context() as patch:
        for running in ({"columns", "flex"}, {"flex"}, set[str]()):
            for name in AUTO_ORDER:
                entry = BIASED_ATTENTION[name]
                reason = None if name in running else "not here"
                given_entry = dataclasses.replace(entry, obstacle=lambda device, dtype, reason=reason: reason)
                patch.setitem(BIASED_ATTENTION._entries, name, given_entry)
            best = next((name for name in AUTO_ORDER if name in running), "torch")
            for dtype in HALF:
                assert resolve_biased_attention("auto", "cuda", dtype=dtype).name == best
            for dtype in (torch.float32, torch.float64):
                assert resolve_biased_attention("auto", "cuda", dtype=dtype).name == "torch"


@pytest.mark.parametrize(
    ("capability", "cudnn", "kernel"),
    [
        ((9, 0), 91_002, "cudnn"),
        ((9, 0), 90_100, "flash"),
        ((8, 0), 91_002, "flash"),
        ((10, 0), 91_002, "flash"),
        ((7, 5), 91_002, None),
    ],
)
def test_columns_run_over_cudnn_only_where_it_takes_wide_heads(
    capability: tuple[int, int], cudnn: int, kernel: str | None
) -> None:
    """PyTorch lets it have heads of more than 128 on compute capability 9.0 from cuDNN 9.10 on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashforward_core.model.attention._fa3_module", lambda: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        found = _column_kernel.__wrapped__(torch.device("cuda"), torch.bfloat16)
    assert (found.name if found else None) == kernel
