"""Sparse attention by buckets, against masks written out in loops; padding merged, against the whole prompt."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.graph.task import Role
from flashforward_core.kv.bucket_attention import (
    BUCKET_ATTENTION,
    BucketAttention,
    attend_flex,
    attend_torch,
    resolve_bucket_attention,
)
from flashforward_core.kv.bucket_flashinfer import pattern
from flashforward_core.kv.grouped import attend_cpu, attend_ragged
from flashforward_core.kv.groups import (
    KeyGroups,
    all_codes,
    bucket_tables,
    group_codes,
    group_page,
    in_page_order,
    meets,
    shared_mask,
)
from flashforward_core.kv.padding import MergedPrompt, merge_padding
from flashforward_core.kv.sparse import SparseForward, attend_prompt, density, kept_rows
from flashforward_core.kv_policy import SPARSE_KERNELS, SparseOptions
from flashforward_core.model.attention import sdpa
from flashforward_core.model.biased_attention import attend_biased
from flashforward_core.model.config import WanConfig
from flashforward_core.model.transformer import CausalWanTransformer, TextContext

pytestmark = pytest.mark.cpu

EXACT = 1e-12  # float64, sums of some dozen terms
OPTIONS = SparseOptions(planes=4, tables=2)


def _qkv(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    make = lambda tokens: torch.randn(2, tokens, 2, 8, generator=generator, dtype=torch.float64)  # noqa: E731
    return make(queries), make(keys) + 2, make(keys)


def _pages(k: Tensor, sizes: list[int], options: SparseOptions, alive: Tensor | None = None) -> list[KeyGroups]:
    """Group the keys page by page; ``alive`` [B, N, H] is for all of them."""
    parts = k.split(sizes, dim=1)
    lives = [None] * len(parts) if alive is None else alive.split(sizes, dim=1)
    return [group_page(part, options=options, alive_BNH=live) for part, live in zip(parts, lives, strict=True)]


def _mask_written_out(q: Tensor, k: Tensor, sizes: list[int], options: SparseOptions) -> Tensor:
    """Return [B, H, L, N]: some table agrees, or none does with any key. Keys are taken less their page's mean."""
    k = torch.cat([page - page.mean(dim=1, keepdim=True) for page in k.split(sizes, dim=1)], dim=1)
    q_codes, k_codes = bucket_tables(q, options=options), bucket_tables(k, options=options)
    mask = torch.zeros(2, 2, q.shape[1], k.shape[1], dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(q.shape[1])).tolist():
        row = [bool((q_codes[:, b, i, h] == k_codes[:, b, j, h]).any()) for j in range(k.shape[1])]
        mask[b, h, i] = torch.tensor(row if any(row) else [True] * len(row))
    return mask


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    return out.transpose(1, 2)


SIZES = [5, 4, 3]  # tokens of three pages


def test_a_query_sees_the_keys_of_its_buckets() -> None:
    q, k, v = _qkv(20, 12)
    mask = _mask_written_out(q, k, SIZES, OPTIONS)
    assert mask.all(dim=-1).any() and not mask.all(), "some query must be alone and some not"
    pages = _pages(k, SIZES, OPTIONS)
    found = attend_torch(q, bucket_tables(q, options=OPTIONS), k, v, pages)
    assert (found - _masked(q, k, v, mask)).abs().max() < EXACT
    assert density(q, pages, options=OPTIONS) == pytest.approx(mask.double().mean().item(), abs=EXACT)


def test_a_page_is_listed_by_bucket() -> None:
    """Hidden keys come last; equal buckets keep their order, whatever else is read."""
    codes = torch.tensor([2, 0, 2, 4, 1, 0]).view(1, 1, 6, 1)
    page = group_codes(codes, num_buckets=4)
    assert page.order_BHN.flatten().tolist() == [1, 5, 4, 0, 2, 3]
    assert page.starts_BHE.flatten().tolist() == [0, 2, 3, 5, 5, 6]


def test_the_bias_goes_on_top() -> None:
    q, k, v = _qkv(20, 12)
    bias = torch.rand(2, 2, 12, generator=torch.Generator().manual_seed(1))
    mask = _mask_written_out(q, k, SIZES, OPTIONS)
    scores = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) + bias.unsqueeze(2)
    found = attend_torch(q, bucket_tables(q, options=OPTIONS), k, v, _pages(k, SIZES, OPTIONS), bias)
    assert (found - _masked(q, k, v, scores)).abs().max() < EXACT


@pytest.mark.parametrize("biased", [False, True])
def test_flex_attention_computes_the_same(biased: bool) -> None:
    """With queries that share no bucket with any key, and so see all."""
    q, k, v = (x.float() for x in _qkv(40, 30))
    options = SparseOptions(planes=5, tables=1)
    codes, pages = bucket_tables(q, options=options), _pages(k, [20, 10], options)
    assert 0 < (codes[0].unsqueeze(2) == all_codes(pages)[0].unsqueeze(1)).any(dim=2).double().mean() < 1
    bias = torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(1)) if biased else None
    found = attend_flex(q, codes, k, v, pages, bias)
    expected = attend_torch(q, codes, k, v, pages, bias)
    assert (found - expected).abs().max() < 1e-5  # float32, sums of 30


def ragged_written_out(
    q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, longest: tuple[int, int], scale: float
) -> Tensor:
    """Attend sequence by sequence."""
    assert max(q_at.diff().max(), 0) <= longest[0] and max(k_at.diff().max(), 0) <= longest[1]
    out = torch.zeros_like(q)
    for q_first, q_last, k_first, k_last in zip(q_at[:-1], q_at[1:], k_at[:-1], k_at[1:], strict=True):
        logits = torch.einsum("thd,nhd->htn", q[q_first:q_last], k[k_first:k_last]) * scale
        out[q_first:q_last] = torch.einsum("htn,nhd->thd", logits.softmax(dim=-1), v[k_first:k_last])
    return out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("planes", [3, 6])
def test_a_call_per_bucket_computes_the_same(planes: int, biased: bool) -> None:
    """With 64 buckets some queries are alone; hidden keys are never seen."""
    q, k, v = _qkv(60, 40)
    options, sizes = SparseOptions(planes=planes), [20, 9, 11]
    bias = torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(1)) if biased else None
    if bias is not None:
        bias[:, 0, ::3] = -torch.inf
    alive = None if bias is None else (bias > -torch.inf).transpose(1, 2)
    codes, pages = bucket_tables(q, options=options), _pages(k, sizes, options, alive)
    assert planes == 3 or not meets(codes, all_codes(pages), num_buckets=64).all()
    found = attend_cpu(q, codes, k, v, pages, bias)
    assert (found - attend_torch(q, codes, k, v, pages, bias)).abs().max() < EXACT


@pytest.mark.parametrize("biased", [False, True])
def test_dense_calls_per_bucket_compute_the_same(biased: bool) -> None:
    """A bias that is minus infinity hides a key; one of log 1000 rides on three channels of half precision or more."""
    q, k, v = _qkv(300, 200)
    options, sizes = SparseOptions(planes=3, tables=1), [90, 60, 50]
    bias = torch.rand(2, 2, 200, generator=torch.Generator().manual_seed(1)) * 7 if biased else None
    if bias is not None:
        bias[:, 0, ::3] = -torch.inf
    alive = None if bias is None else (bias > -torch.inf).transpose(1, 2)
    codes, pages = bucket_tables(q, options=options), _pages(k, sizes, options, alive)
    assert meets(codes, all_codes(pages), num_buckets=8).all(), "no query may be alone here"
    found = attend_ragged(q, codes, k, v, pages, bias, ragged=ragged_written_out)
    expected = attend_torch(q, codes, k, v, pages, bias)
    assert (found - expected).abs().max() < (1e-6 if biased else EXACT)  # the bias itself is float32


def test_the_pattern_of_blocks_is_the_mask() -> None:
    """What FlashInfer is given, written out over sorted queries and keys; some keys are hidden, some queries alone."""
    q, k, _ = _qkv(20, 12)
    options, alive = SparseOptions(planes=4), torch.rand(2, 12, 2, generator=torch.Generator().manual_seed(1)) > 0.2
    codes, pages = bucket_tables(q, options=options), _pages(k, SIZES, options, alive)
    mask, rows, columns, q_order = pattern(codes, pages)
    expected = shared_mask(codes, all_codes(pages)) & alive.transpose(1, 2).unsqueeze(2)
    assert not meets(codes, all_codes(pages), num_buckets=16).all(), "some query must be alone"
    k_order = in_page_order(pages)[0]
    for n, (b, h) in enumerate(torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist()):
        written = mask[n].repeat_interleave(rows[n], dim=0).repeat_interleave(columns[n], dim=1)
        assert torch.equal(written, expected[b, h][q_order[b, h]][:, k_order[b, h]])


def test_half_precision_keeps_a_bias_to_float32() -> None:
    """One bucket; equal keys, so weights are those of the biases alone: log 700 and 0, of values 1 and 0."""
    k = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    v = k.clone()
    v[:, 0] = 1
    q, codes = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    bias = torch.tensor([700.0, 1.0]).log().view(1, 1, 2)
    weights: list[float] = []

    def ragged(q: Tensor, k: Tensor, v: Tensor, *args: object) -> Tensor:
        logits = torch.einsum("thd,nhd->tn", q.double(), k.double()) * 8**-0.5
        weights.extend(logits.softmax(dim=-1)[0].tolist())
        return q

    attend_ragged(q, codes, k, v, [group_codes(codes.expand(1, 1, 2, 1), num_buckets=1)], bias, ragged=ragged)
    assert weights[0] == pytest.approx(700 / 701, rel=1e-6)


def test_a_query_alone_with_hidden_keys_sees_the_others() -> None:
    """All keys of its bucket are hidden: it sees every key that is not."""
    q, k, v = _qkv(20, 12)
    options = SparseOptions(planes=2, tables=1)
    codes = group_page(k, options=options).codes_ABNH[0]
    alive = codes != codes[:, :1]
    bias = torch.zeros(2, 2, 12).masked_fill(~alive.transpose(1, 2), -torch.inf)
    found = attend_torch(q, bucket_tables(q, options=options), k, v, _pages(k, [12], options, alive), bias)
    assert found.isfinite().all()


class Pages:
    """A view of one page, for every block."""

    def groups(self, block: int, k_BNHD: Tensor, group: Any) -> list[KeyGroups]:
        return [group(k_BNHD)]


def test_a_forward_is_dense_and_sparse_where_the_options_say() -> None:
    """Of ten blocks at stage 1 the last seven; all of stage 0 is dense. Each block attends twice."""
    q, k, v = (x.float() for x in _qkv(20, 12))
    options = SparseOptions(planes=3)
    prompt = MergedPrompt(text=TextContext(Role.RENDERER, ()), bias_N=torch.zeros(12), padded=True)
    kernel = BUCKET_ATTENTION["torch"]
    page = group_page(k, options=options)
    sparse_self = attend_torch(q, bucket_tables(q, options=options), k, v, [page])
    kept = kept_rows(q, all_codes([page]), keep_last=True, options=options)
    sparse_cross = attend_prompt(
        q, k, v, kept_BNH=kept, bias_BHN=torch.zeros(1, 1, 12), attend=attend_biased, kernel=kernel
    )
    dense = sdpa(q, k, v)
    assert (sparse_self - dense).abs().max() > 1e-2 and (sparse_cross - dense).abs().max() > 1e-2
    for stage, first in ((0, 10), (1, 3), (3, 3)):
        forward = SparseForward(
            options,
            prompt,
            stage=stage,
            num_stages=4,
            num_blocks=10,
            attend=sdpa,
            attend_biased=attend_biased,
            kernel=kernel,
        )
        forward.over(Pages())
        for block in range(10):
            torch.testing.assert_close(forward.self_attend(q, k, v), sparse_self if block >= first else dense)
            torch.testing.assert_close(forward.cross_attend(q, k, v), sparse_cross if block >= first else dense)


def test_one_plane_of_one_table_halves_the_pairs_and_more_planes_leave_fewer() -> None:
    q, k, _ = _qkv(300, 300)
    each = [SparseOptions(planes=planes, tables=1) for planes in (1, 2, 4)]
    shares = [density(q, _pages(k, [300], options), options=options) for options in each]
    assert shares[0] == pytest.approx(0.5, abs=0.05)  # Gaussian tokens: half on either side
    assert shares[0] > shares[1] > shares[2]


def test_prompt_tokens_that_no_query_meets_are_dropped() -> None:
    q, k, v = _qkv(2, 12)
    options = SparseOptions(planes=4, tables=1)
    q_codes, k_codes = bucket_tables(q, options=options), all_codes(_pages(k, [12], options))
    met = torch.tensor(
        [
            [[bool((q_codes[0, b, :, h] == k_codes[0, b, j, h]).any()) for j in range(12)] for h in range(2)]
            for b in range(2)
        ]
    )
    met[..., -1] = True  # the padding's row
    assert 0 < met.sum() < met.numel() / 2
    bias = torch.rand(2, 2, 12, generator=torch.Generator().manual_seed(1))
    kept = kept_rows(q, k_codes, keep_last=True, options=options)
    assert (kept == met.transpose(1, 2)).all()
    found = attend_prompt(q, k, v, kept_BNH=kept, bias_BHN=bias, attend=attend_biased, kernel=BUCKET_ATTENTION["torch"])
    expected = _masked(q, k, v, bias.double().masked_fill(~met, -torch.inf).unsqueeze(2).expand(-1, -1, 2, -1))
    assert (found - expected).abs().max() < EXACT


def test_a_head_that_meets_no_prompt_token_keeps_all() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = 0.01 * torch.randn(1, 6, 1, 8, generator=generator, dtype=torch.float64)
    q = -1000 * spread[:, :1]
    options = SparseOptions(planes=12, tables=1)
    codes = all_codes(_pages(spread, [6], options))
    assert not (bucket_tables(q, options=options)[:, :, 0] == codes.squeeze(-1)).any()
    assert kept_rows(q, codes, keep_last=False, options=options).all()


def test_of_four_stages_the_first_is_dense_and_of_ten_blocks_the_first_three() -> None:
    options = SparseOptions()
    sparse = {
        (stage, block)
        for stage in range(4)
        for block in range(10)
        if options.is_sparse(stage=stage, num_stages=4, block=block, num_blocks=10)
    }
    assert sparse == {(stage, block) for stage in (1, 2, 3) for block in range(3, 10)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_share": 30}, r"dense_share=30 is no share; use 0 to 1"),
        ({"planes": 0}, r"planes=0 and tables=1 are out of range; use 1 to 16 of each"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseOptions(**changes)  # type: ignore[arg-type]


def test_a_kernel_that_cannot_run_says_why() -> None:
    def resolve(name: str) -> BucketAttention:
        return resolve_bucket_attention(SparseOptions(attention=name), "cpu", dtype=torch.float32)

    assert resolve("auto").name == "cpu"
    for name in ("triton", "flashinfer", "flash", "flex"):  # whatever is installed, and in whatever precision
        message = f"sparse_attention='{name}' cannot run on cpu: it needs a CUDA device, not cpu; use 'auto'"
        with pytest.raises(ValueError, match=message):
            resolve(name)
    if find_spec("flashinfer") is None:
        missing = BUCKET_ATTENTION["flashinfer"].obstacle(torch.device("cuda"), torch.bfloat16, 1)
        assert missing == "FlashInfer is not installed (pip install flashinfer-python)"
    assert set(SPARSE_KERNELS) == set(BUCKET_ATTENTION)
    with pytest.raises(ValueError, match="sparse_attention='quick' is unknown; use one of: torch, triton"):
        resolve("quick")


CONFIG = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=9, freq_dim=32)


@pytest.mark.parametrize(
    ("lengths", "kept"), [((4, 4), 5), ((6, 3), 7), ((3, 6), 7), ((9, 2), 9), ((8, 8), 9), ((0, 0), 1)]
)
def test_merged_padding_attends_as_all_rows(lengths: tuple[int, int], kept: int) -> None:
    torch.manual_seed(0)
    model = CausalWanTransformer(CONFIG).double().requires_grad_(False)
    text = torch.randn(2, 9, 12, dtype=torch.float64)
    for row, length in enumerate(lengths):
        text[row, length:] = 0
    whole = model.text_context(text, Role.RENDERER)
    merged = merge_padding(whole, text)
    assert merged.padded == (kept != 9 or lengths == (8, 8))
    q = torch.randn(2, 5, 2, 24, dtype=torch.float64)
    for (k, v), (k_all, v_all) in zip(merged.text.pairs, whole.pairs, strict=True):
        assert k.shape[1] == v.shape[1] == kept
        found = attend_biased(q, k, v, merged.bias_N.view(1, 1, -1))
        assert (found - sdpa(q, k_all, v_all)).abs().max() < 1e-7  # log n is rounded to float32
