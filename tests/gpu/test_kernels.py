"""Triton kernels equal their torch twins: on CUDA, or run by Triton's interpreter where TRITON_INTERPRET=1."""

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from flashforward_core.kv.ann import nearest, quantise
from flashforward_core.kv.attention_mass import attention_mass_torch
from flashforward_core.kv.bucket_attention import BUCKET_ATTENTION, attend_torch
from flashforward_core.kv.groups import all_codes, bucket_tables, group_page, meets
from flashforward_core.kv.sparse import attend_prompt, kept_rows
from flashforward_core.kv_policy import AnnOptions, SparseOptions
from flashforward_core.model.attention import ATTENTION
from flashforward_core.model.biased_attention import (
    COLUMN_KERNELS,
    _takes_columns,
    attend_biased,
    attend_columns,
    resolve_biased_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason="needs a CUDA device, or Triton's interpreter")]


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]  # the interpreter has no bfloat16 dot

# batch, groups, queries of a group, heads, head dim, keys: parts of blocks, several blocks, dims that are padded
SHAPES = [(1, 2, 5, 2, 24, 70), (2, 1, 70, 2, 64, 130), (1, 3, 4, 1, 128, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_mass_equals_its_twin(shape: tuple[int, ...], biased: bool) -> None:
    """With the first block of keys hidden too, where the running maximum is still minus infinity."""
    from flashforward_core.kv.kernels import attention_mass_triton

    batch, groups, queries, heads, dim, keys = shape
    q, k = _randn(batch, groups, queries, heads, dim, seed=0), _randn(batch, keys, heads, dim, seed=1)
    bias = _randn(batch, heads, keys, seed=2) if biased else None
    if bias is not None and keys > 64:
        bias[:, :, :64] = -torch.inf
    found = attention_mass_triton(q, k, bias_BHN=bias)
    expected = attention_mass_torch(q, k, bias_BHN=bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)  # float32 sums of up to 130, in another order


@pytest.mark.parametrize("dtype", HALF)
def test_mass_of_half_precision_keys_equals_its_twin(dtype: torch.dtype) -> None:
    """The twin widens the same values; products of them are exact in float32."""
    from flashforward_core.kv.kernels import attention_mass_triton

    q, k = _randn(1, 2, 9, 2, 64, seed=0).to(dtype), _randn(1, 90, 2, 64, seed=1).to(dtype)
    torch.testing.assert_close(attention_mass_triton(q, k), attention_mass_torch(q, k), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_nearest_codes_equal_the_twin(shape: tuple[int, ...]) -> None:
    """Products of integers are exact, so the very same keys are found."""
    from flashforward_core.kv.kernels import nearest_codes_triton

    batch, _, queries, heads, dim, keys = shape
    q, k = _randn(batch, queries, heads, dim, seed=0).cpu(), _randn(batch, keys, heads, dim, seed=1).cpu()
    alive = torch.rand(batch, keys, heads, generator=torch.Generator().manual_seed(3)) > 0.3
    k = k - (k * alive.unsqueeze(-1)).sum(1, keepdim=True) / alive.sum(1, keepdim=True).unsqueeze(-1)
    expected = nearest(q, k, options=AnnOptions(), alive_BNH=alive)
    (q_codes, _), (k_codes, scale) = quantise(q, bits=8), quantise(k, bits=8)
    scale = torch.where(alive, scale, -1.0)
    found = nearest_codes_triton(*(x.to(DEVICE) for x in (q_codes, k_codes, scale))).cpu()
    assert (found == expected).float().mean() > 0.98  # centring twice rounds some codes to the next step
    products = torch.einsum("blhe,bnhe->blhn", q_codes.double(), k_codes.double())
    products = (products * scale.double().transpose(1, 2).unsqueeze(1)).masked_fill(
        ~alive.transpose(1, 2).unsqueeze(1), -torch.inf
    )
    reached = products.gather(-1, found.unsqueeze(-1)).squeeze(-1)
    assert ((products.amax(dim=-1) - reached).abs() < 1e-4 * reached.abs()).all()  # float32 scales


BUCKETED = [torch.float32, *HALF]


@pytest.mark.parametrize("dtype", BUCKETED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 70, [90, 20, 60], 2, 24, 2), (2, 20, [12], 1, 64, 5)])
def test_attention_over_pages_of_buckets_equals_its_twin(shape: Any, dtype: torch.dtype, biased: bool) -> None:
    """Of pages in a longer buffer, with hidden keys; with many buckets some queries are alone and see all keys."""
    from flashforward_core.kv.bucket_kernel import attend_triton

    batch, queries, sizes, heads, dim, planes = shape
    options, keys = SparseOptions(planes=planes), sum(sizes)
    q = _randn(batch, queries, heads, dim, seed=0).to(dtype)
    k, v = (_randn(batch, keys + 9, heads, dim, seed=seed).to(dtype)[:, 4:-5] for seed in (1, 2))
    bias = _randn(batch, heads, keys, seed=3).abs() * 3 if biased else None
    if bias is not None:
        bias[..., ::5] = -torch.inf
    alive = torch.ones(batch, keys, heads, device=DEVICE) > 0 if bias is None else (bias > -torch.inf).transpose(1, 2)
    pages = [
        group_page(k_page, options=options, alive_BNH=alive_page)
        for k_page, alive_page in zip(k.split(sizes, dim=1), alive.split(sizes, dim=1), strict=True)
    ]
    codes = bucket_tables(q, options=options)
    met = meets(codes, all_codes(pages), num_buckets=2**planes)
    assert met.all() if planes == 2 else not met.all()
    found = attend_triton(q, codes, k, v, pages, bias)
    expected = attend_torch(q.float(), codes, k.float(), v.float(), pages, bias)
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # weights are rounded to the values' dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=close[dtype])


def test_dropped_prompt_rows_are_a_hidden_bucket() -> None:
    """The kernel skips them; the other way gathers what is kept."""
    q, k, v = (_randn(2, tokens, 3, 32, seed=seed) for seed, tokens in enumerate((50, 20, 20)))
    kept = _randn(2, 20, 3, seed=5) > 0
    bias = _randn(1, 1, 20, seed=6)
    attend = partial(attend_prompt, q, k, v, kept_BNH=kept, bias_BHN=bias, attend=attend_biased)
    found, expected = (attend(kernel=BUCKET_ATTENTION[name]) for name in ("triton", "torch"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


if DEVICE == "cuda":
    ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # by how much it changes a number, relative to it

    def _biased(dtype: torch.dtype, dim: int) -> tuple[torch.Tensor, ...]:
        """Return queries, a part of a bank's keys and values, and a bias; hidden are all of the first, and others."""
        q, bank = _randn(2, 300, 3, dim, seed=0).to(dtype), _randn(2, 900, 2, 3, dim, seed=1).to(dtype)
        bias = _randn(2, 3, 741, seed=2).abs() * 3
        bias[..., :400] = bias[..., 600::5] = -torch.inf
        return q, bank[:, 100:841, 0], bank[:, 100:841, 1], bias

    def _column_kernel(name: str, dtype: torch.dtype) -> Any:
        if not _takes_columns(ATTENTION[name], torch.device(DEVICE), dtype):
            pytest.skip(f"{name} does not run here with {dtype} and wider heads")
        return ATTENTION[name].attend

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("name", COLUMN_KERNELS)
    def test_a_bias_in_columns_equals_a_bias_in_float32(name: str, dim: int, dtype: torch.dtype) -> None:
        """Half precision rounds weights before they meet values, and the result; twice that, for exponents and sums."""
        attend = _column_kernel(name, dtype)
        q, k, v, bias = _biased(dtype, dim)
        found = attend_columns(q, k, v, bias, attend=attend)
        assert (found.shape, found.dtype) == (q.shape, dtype)
        q, k, v = q.float(), k.float(), v.float()
        expected = attend_biased(q, k, v, bias)
        bound = 2 * ROUNDING[dtype] * (attend_biased(q, k, v.abs(), bias) + expected.abs())
        assert ((found.float() - expected).abs() <= bound + 1e-5).all()

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("name", COLUMN_KERNELS)
    def test_hidden_keys_have_no_influence_through_columns(name: str, dtype: torch.dtype) -> None:
        """Their weight is 0, also of keys that have 100 times the logits of others: the bytes stay."""
        attend = _column_kernel(name, dtype)
        q, k, v, bias = _biased(dtype, 128)
        hidden = (bias == -torch.inf).transpose(1, 2).unsqueeze(-1)
        expected = attend_columns(q, k, v, bias, attend=attend)
        loud = torch.where(hidden, 1e4, v.float()).to(dtype)
        assert torch.equal(attend_columns(q, torch.where(hidden, 100 * k, k), loud, bias, attend=attend), expected)

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("name", COLUMN_KERNELS)
    def test_columns_tell_neighbouring_counts_apart(name: str, dtype: torch.dtype) -> None:
        """As on a CPU: two keys with the values 1 and -1; a bias in bfloat16 would be wrong by 0.016."""
        attend = _column_kernel(name, dtype)
        counts = torch.arange(1, 10_000, 3, dtype=torch.float64, device=DEVICE)
        bias = torch.stack([counts, counts + 1], dim=-1).log().unsqueeze(1)
        v = torch.tensor([1.0, -1.0], dtype=dtype, device=DEVICE).view(1, 2, 1, 1).expand(len(counts), 2, 1, 128)
        q = torch.zeros(len(counts), 1, 1, 128, dtype=dtype, device=DEVICE)
        found = attend_columns(q, torch.zeros_like(v), v, bias.float(), attend=attend)[:, 0, 0, 0].double()
        expected = ((bias[..., 0] - bias[..., 1]) / 2).tanh().squeeze(1)
        assert ((found - expected).abs() < ROUNDING[dtype] * (0.5 + expected.abs()) + 1e-4).all()  # raw sums of 104

    def test_auto_takes_columns_in_half_precision_and_can_be_recorded() -> None:
        """And waits for nothing; in float32 it is PyTorch's own mask."""
        assert resolve_biased_attention("auto", DEVICE, dtype=torch.float32).name == "torch"
        assert resolve_biased_attention("flex", DEVICE, dtype=torch.bfloat16).name == "flex"
        chosen = resolve_biased_attention("auto", DEVICE, dtype=torch.bfloat16)
        if chosen.name != "columns":
            pytest.skip("no kernel takes wider heads here")
        q, k, v, bias = _biased(torch.bfloat16, 128)
        expected = chosen.attend(q, k, v, bias)
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert chosen.attend(q, k, v, bias).shape == expected.shape
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = chosen.attend(q, k, v, bias)
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, expected)

    def test_a_sparse_block_waits_for_nothing_and_can_be_recorded() -> None:
        """What a forward does in a sparse block, with a policy's state beside a page, needs nothing of the host."""
        from flashforward_core.kv.bucket_kernel import attend_triton

        options, triton = SparseOptions(), BUCKET_ATTENTION["triton"]
        q, k, v = (_randn(1, tokens, 3, 64, seed=n).to(torch.bfloat16) for n, tokens in enumerate((300, 700, 700)))
        prompt_k, prompt_v = (_randn(1, 40, 3, 64, seed=n).to(torch.bfloat16) for n in (3, 4))
        rows = group_page(prompt_k, options=options).codes_ABNH.long()
        bias, prompt_bias = _randn(1, 3, 700, seed=5), torch.zeros(1, 1, 40, device=DEVICE)
        alive = torch.ones(1, 400, 3, dtype=torch.bool, device=DEVICE)

        def block() -> torch.Tensor:
            pages = [group_page(k[:, :400], options=options, alive_BNH=alive), group_page(k[:, 400:], options=options)]
            seen = attend_triton(q, bucket_tables(q, options=options), k, v, pages, bias)
            kept = kept_rows(q, rows, keep_last=True, options=options)
            told = {"kept_BNH": kept, "bias_BHN": prompt_bias, "attend": attend_biased, "kernel": triton}
            return seen + attend_prompt(q, prompt_k, prompt_v, **told)

        expected = block()  # planes are drawn and block sizes measured, once
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = block()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(again, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = block()
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, expected)

    @pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer (pip install flashinfer-python)")
    @pytest.mark.parametrize("planes", [2, 9])
    @pytest.mark.parametrize("dtype", HALF)
    def test_flashinfer_equals_the_twin(dtype: torch.dtype, planes: int) -> None:
        """With 512 buckets some queries are alone and see all keys. Twice, for its workspace is used again."""
        from flashforward_core.kv.bucket_flashinfer import attend_flashinfer

        options = SparseOptions(planes=planes)
        for seed in (0, 3):
            q, k, v = (_randn(2, tokens, 3, 64, seed=seed + n).to(dtype) for n, tokens in enumerate((300, 700, 700)))
            pages = [group_page(page, options=options) for page in k.split([300, 250, 150], dim=1)]
            codes = bucket_tables(q, options=options)
            found = attend_flashinfer(q, codes, k, v, pages)
            expected = attend_torch(q.float(), codes, k.float(), v.float(), pages)
            torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)  # bfloat16 weights and results

    @pytest.mark.parametrize("biased", [False, True])
    def test_dense_calls_per_bucket_equal_their_twin(biased: bool) -> None:
        """Flash attention on ragged batches, with a bias on channels of its own: bfloat16's precision of the result."""
        from flashforward_core.kv.grouped import attend_ragged

        q, k, v = (
            _randn(2, tokens, 3, 64, seed=seed).to(torch.bfloat16) for seed, tokens in enumerate((300, 700, 700))
        )
        bias = _randn(2, 3, 700, seed=4).abs() * 3 if biased else None
        if bias is not None:
            bias[..., ::5] = -torch.inf
        alive = None if bias is None else (bias > -torch.inf).transpose(1, 2)
        pages = [group_page(k, options=SparseOptions(), alive_BNH=alive)]
        codes = bucket_tables(q, options=SparseOptions())
        found = attend_ragged(q, codes, k, v, pages, bias)
        expected = attend_torch(q.float(), codes, k.float(), v.float(), pages, bias)
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)
