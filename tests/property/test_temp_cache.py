"""TempCache merges what is the same without changing what attention returns (FAST-AR, Lemma 5.1)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashforward_core.kv.temp_cache import absorb_frames, merge_groups, squeeze
from flashforward_core.kv.tokens import Grid, Tokens
from flashforward_core.kv_policy import AnnOptions, TempCacheOptions
from flashforward_core.model.attention import sdpa
from flashforward_core.model.biased_attention import attend_biased
from flashforward_core.model.config import WanConfig
from flashforward_core.model.layers import rotate, rotation

pytestmark = pytest.mark.cpu

CONFIG = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)
GRID = Grid(config=CONFIG, rows=2, columns=3)
EXACT = 1e-6  # float64 but for log m, which is rounded to float32: 1e-7 of values near 4


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _attend(q: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return attend_biased(q, tokens.k_BNHD, tokens.v_BNHD, tokens.bias_BHN)


def _roots(kinds: torch.Tensor) -> torch.Tensor:
    """Return the index of the first token of the same kind, per head."""
    same = kinds.unsqueeze(2) == kinds.unsqueeze(1)  # [B, N, N, H]
    return same.to(torch.int64).argmax(dim=2)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_kinds=st.integers(1, 6), tokens=st.integers(2, 24))
def test_equal_keys_merge_exactly_and_merged_ones_again(seed: int, num_kinds: int, tokens: int) -> None:
    """Keys come in kinds; first some of each kind are merged, then all: heads and rows each have their own groups."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(num_kinds, (2, tokens, 2), generator=generator)
    k_of_kind = _randn(2, num_kinds, 2, 24, seed=seed)
    dense = Tokens(
        k_BNHD=k_of_kind.gather(1, kinds.unsqueeze(-1).expand(-1, -1, -1, 24)),
        v_BNHD=_randn(2, tokens, 2, 24, seed=seed + 1),
        count_BNH=torch.ones(2, tokens, 2),
        place_BNH=torch.arange(tokens).view(1, -1, 1).expand(2, -1, 2).contiguous(),
    )
    q = _randn(2, 5, 2, 24, seed=seed + 2)
    expected = sdpa(q, dense.k_BNHD, dense.v_BNHD)
    halves = kinds * 2 + torch.randint(2, kinds.shape, generator=generator)
    some = merge_groups(dense, _roots(halves), priority_BNH=dense.place_BNH.double())
    whole = merge_groups(some, _roots(kinds), priority_BNH=some.place_BNH.double())
    for merged in (some, whole, squeeze(some), squeeze(whole)):
        assert (_attend(q, merged) - expected).abs().max() < EXACT
        assert torch.equal(merged.count_BNH.sum(dim=1), torch.full((2, 2), float(tokens)))
    assert torch.equal((whole.count_BNH > 0).sum(dim=1), _count_kinds(kinds))


def _count_kinds(kinds: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[kinds[b, :, h].unique().numel() for h in range(2)] for b in range(2)])


def _still_clip(num_frames: int, *, noise: float = 0.0, step: int = 1) -> tuple[torch.Tensor, ...]:
    """Return q, k, v of a clip in which every frame, ``step`` apart, is the first one again, but for ``noise``."""
    plain = _randn(1, GRID.frame_tokens, 2, 24, seed=0).repeat(1, num_frames, 1, 1)
    plain = plain + noise * _randn(*plain.shape, seed=1)
    turn = rotation(CONFIG, frames=step * torch.arange(num_frames), rows=2, columns=3, dtype=torch.float64)
    k = rotate(plain, turn)
    return 3 * k, k, _randn(*plain.shape, seed=2)


def test_a_still_clip_becomes_one_frame_at_its_latest_position() -> None:
    """Frames far apart turn keys and queries by any angle, which matching must not see."""
    q, k, v = _still_clip(5, step=317)
    cache = absorb_frames(None, q, k, v, frames=317 * torch.arange(5), grid=GRID, options=TempCacheOptions())
    cache = squeeze(cache)
    assert torch.equal(cache.count_BNH, torch.full((1, 6, 2), 5.0))
    assert (cache.k_BNHD - k[:, -6:]).abs().max() < 1e-12  # the most recent keys, as they were rotated
    assert torch.equal(cache.place_BNH[0, :, 0], GRID.places(torch.tensor([4 * 317])))
    assert (cache.v_BNHD - v.unflatten(1, (5, 6)).mean(dim=1)).abs().max() < 1e-12  # float64 means of 5


def test_small_noise_merges_and_large_noise_does_not() -> None:
    merged = absorb_frames(None, *_still_clip(3, noise=0.1), frames=torch.arange(3), grid=GRID, options=_exact(0.9))
    apart = absorb_frames(None, *_still_clip(3, noise=2.0), frames=torch.arange(3), grid=GRID, options=_exact(0.9))
    assert squeeze(merged).count_BNH.shape[1] == 6
    assert squeeze(apart).count_BNH.shape[1] > 12


def _exact(threshold: float) -> TempCacheOptions:
    return TempCacheOptions(threshold=threshold, ann=AnnOptions(method="exact"))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), frames=st.integers(1, 4))
def test_without_redundancy_it_equals_dense_attention(seed: int, frames: int) -> None:
    """Random keys have cosines of 0.2: nothing reaches 0.99, so the very same keys and values are attended to."""
    q, k, v = (_randn(1, frames * GRID.frame_tokens, 2, 24, seed=seed + n) for n in range(3))
    cache = absorb_frames(None, q, k, v, frames=torch.arange(frames), grid=GRID, options=_exact(0.99))
    cache = squeeze(cache)
    assert torch.equal(cache.k_BNHD, k)
    assert torch.equal(cache.v_BNHD, v)
    assert (_attend(q, cache) - sdpa(q, k, v)).abs().max() < 1e-12  # the bias is log 1 = 0


def test_several_tokens_may_join_one_and_the_most_similar_key_stays() -> None:
    """The second frame's first two tokens both resemble the first frame's first."""
    plain = _randn(1, GRID.frame_tokens, 2, 24, seed=0)
    nudged = plain.clone()
    nudged[:, 1] = plain[:, 0] + 0.1 * _randn(2, 24, seed=5)
    both = torch.cat([plain, nudged], dim=1)
    turn = rotation(CONFIG, frames=torch.arange(2), rows=2, columns=3, dtype=torch.float64)
    k = rotate(both, turn)
    v = _randn(*k.shape, seed=2)
    cache = absorb_frames(None, 3 * k, k, v, frames=torch.arange(2), grid=GRID, options=_exact(0.9))
    assert torch.equal(cache.count_BNH[0, :, 0], torch.tensor([3.0, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0]))
    assert torch.equal(cache.k_BNHD[:, 0], k[:, 6])
    assert (cache.v_BNHD[:, 0] - (v[:, 0] + v[:, 6] + v[:, 7]) / 3).abs().max() < 1e-12  # float64 mean of 3


def test_over_capacity_the_latest_places_stay_in_order() -> None:
    q, k, v = (_randn(1, 18, 2, 24, seed=n) for n in range(3))
    cache = absorb_frames(None, q, k, v, frames=torch.arange(3), grid=GRID, options=_exact(1.1))
    kept = squeeze(cache, capacity=8)
    assert kept.place_BNH[0, :, 1].tolist() == list(range(10, 18))
    assert torch.equal(kept.v_BNHD, v[:, 10:])


def test_a_threshold_that_merges_anything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=0.0 merges unrelated tokens; use a cosine above 0"):
        TempCacheOptions(threshold=0.0)
