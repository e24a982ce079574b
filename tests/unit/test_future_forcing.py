"""Future Forcing against its definition written out in loops, float64."""

import math

import pytest
import torch
from torch import Tensor

from flashforward_core.kv.attention_mass import attention_mass
from flashforward_core.kv.future_forcing import (
    Attended,
    compact,
    future_frames,
    hybrid_scores,
    merge_evicted,
    received,
    split,
)
from flashforward_core.kv.queries import proxies, query_statistics
from flashforward_core.kv.tokens import Grid, Tokens, whole_frames
from flashforward_core.kv_policy import FutureForcingOptions
from flashforward_core.model.config import WanConfig
from flashforward_core.model.layers import rotate, rotation

pytestmark = pytest.mark.cpu

CONFIG = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)
GRID = Grid(config=CONFIG, rows=2, columns=3)
SIZE = GRID.frame_tokens
EXACT = 1e-12  # float64, sums of a hundred terms
OPTIONS = FutureForcingOptions(budget_frames=3, sink_frames=1, recent_frames=1, lookahead=(1, 2), cells=2)


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _turned(plain: Tensor, frames: list[int]) -> Tensor:
    return rotate(plain, rotation(CONFIG, frames=torch.tensor(frames), rows=2, columns=3, dtype=torch.float64))


def _cache(num_frames: int = 6) -> tuple[Tokens, Attended]:
    k, v = (_randn(2, num_frames * SIZE, 2, 24, seed=seed) for seed in (0, 1))
    tokens = whole_frames(_turned(k, list(range(num_frames))), v, frames=torch.arange(num_frames), grid=GRID)
    mass = _randn(2, num_frames * SIZE, 2, seed=2).softmax(dim=1)
    return tokens, Attended(mass_BNH=mass, chunks_BNH=torch.ones_like(mass))


def _softmax_written_out(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Return the weights [N] of one query [D] over keys [N, D]."""
    logits = [float(q @ key) / math.sqrt(len(q)) + float(b) for key, b in zip(k, bias, strict=True)]
    weights = torch.tensor([math.exp(logit - max(logits)) for logit in logits], dtype=torch.float64)
    return weights / weights.sum()


def test_mass_is_the_mean_of_softmax_rows() -> None:
    """More queries in a group than are taken at a time."""
    q, k = _randn(1, 2, 70, 2, 8, seed=0), _randn(1, 11, 2, 8, seed=1)
    bias = _randn(1, 2, 11, seed=2)
    found = attention_mass(q, k, bias_BHN=bias)
    for group, head in ((0, 1), (1, 0)):
        rows = [_softmax_written_out(q[0, group, r, head], k[0, :, head], bias[0, head]) for r in range(70)]
        assert (found[0, group, :, head] - torch.stack(rows).mean(dim=0)).abs().max() < EXACT
    assert (attention_mass(q, k).sum(dim=2) - 1).abs().max() < EXACT


def test_received_attention_comes_from_every_nth_query() -> None:
    q, k = _randn(1, 9, 2, 8, seed=0), _randn(1, 5, 2, 8, seed=1)
    rows = [_softmax_written_out(q[0, r, 1], k[0, :, 1], torch.zeros(5)) for r in (0, 4, 8)]
    assert (received(q, k, stride=4)[0, :, 1] - torch.stack(rows).mean(dim=0)).abs().max() < EXACT


def test_statistics_in_pieces_equal_those_of_all_frames() -> None:
    q = _randn(2, 7 * SIZE, 2, 24, seed=0) + 3
    whole = query_statistics(q, grid=GRID)
    pieces = query_statistics(q[:, : 2 * SIZE], grid=GRID)
    for start, stop in ((2, 3), (3, 7)):
        pieces = pieces.update(q[:, start * SIZE : stop * SIZE], grid=GRID)
    assert pieces.frames == 7
    assert (pieces.mean_BTHD - whole.mean_BTHD).abs().max() < EXACT
    assert (pieces.deviation_BTH - whole.deviation_BTH).abs().max() < 1e-10  # sums of 168 squares near 1
    frames = q.unflatten(1, (7, SIZE))
    assert (whole.mean_BTHD - frames.mean(dim=1)).abs().max() < EXACT
    assert (whole.deviation_BTH - frames.var(dim=1, correction=0).sum(dim=-1) * 7).abs().max() < 1e-10


def test_one_mean_per_head_counts_the_spread_between_places() -> None:
    q = _randn(2, 5 * SIZE, 2, 24, seed=0) + 1
    pooled = query_statistics(q, grid=GRID).per_head()
    assert (pooled.mean_BTHD[:, 0] - q.mean(dim=1)).abs().max() < EXACT
    per_query = pooled.deviation_BTH[:, 0] / pooled.frames
    assert (per_query - q.var(dim=1, correction=0).sum(dim=-1)).abs().max() < 1e-10  # sums of 30 squares
    first, rest = (query_statistics(part, grid=GRID).per_head() for part in (q[:, : 2 * SIZE], q[:, 2 * SIZE :]))
    merged = first.merge(rest)
    assert (merged.mean_BTHD - pooled.mean_BTHD).abs().max() < EXACT
    assert (merged.deviation_BTH - pooled.deviation_BTH).abs().max() < 1e-10  # the same sums


def test_stationarity_is_one_for_equal_frames_and_falls_with_noise() -> None:
    frame = _randn(1, SIZE, 2, 24, seed=0)
    still = query_statistics(frame.repeat(1, 9, 1, 1), grid=GRID).stationarity_BTH
    noisy = query_statistics(frame.repeat(1, 9, 1, 1) + _randn(1, 9 * SIZE, 2, 24, seed=1), grid=GRID)
    assert (still - 1).abs().max() < EXACT
    assert 0.3 < noisy.stationarity_BTH.mean() < 0.7  # as much noise as signal


def test_a_proxy_is_the_mean_query_rotated_to_its_future_frame_and_place() -> None:
    statistics = query_statistics(_randn(1, 4 * SIZE, 2, 24, seed=0), grid=GRID)
    found = proxies(statistics, frames=[7, 40], grid=GRID, cells=2, cell_queries=3)
    every = torch.cat([_turned(statistics.mean_BTHD, [frame]) for frame in (7, 40)], dim=1)
    assert found.shape == (1, 4, 3, 2, 24)
    assert (found.flatten(1, 2) - every).abs().max() < EXACT
    sample = proxies(statistics, frames=[40], grid=GRID, cells=2, cell_queries=1)
    assert (sample.flatten(1, 2) - every[:, [6, 9]]).abs().max() < EXACT


def test_one_mean_per_head_asks_at_every_sampled_place() -> None:
    pooled = query_statistics(_randn(1, 4 * SIZE, 2, 24, seed=0), grid=GRID).per_head()
    found = proxies(pooled, frames=[7], grid=GRID, cells=2, cell_queries=3)
    expected = _turned(pooled.mean_BTHD.expand(-1, SIZE, -1, -1), [7])
    assert (found.flatten(1, 2) - expected).abs().max() < EXACT


def test_lookahead_counts_chunks_from_the_next() -> None:
    options = FutureForcingOptions(lookahead=(1, 2, 8))
    assert list(future_frames(options, next_frame=12, chunk_frames=3)) == [13, 16, 34]


def test_the_score_mixes_future_and_history() -> None:
    future, history = _randn(1, 3, 5, 2, seed=0), _randn(1, 5, 2, seed=1)
    mixed = hybrid_scores(future, history, future_weight=0.25)
    assert (mixed - (0.25 * future.sum(dim=1) / 3 + 0.75 * history)).abs().max() < EXACT


def test_history_is_a_running_mean_over_the_chunks_that_could_see_a_token() -> None:
    attended = Attended(mass_BNH=torch.zeros(1, 1, 1), chunks_BNH=torch.zeros(1, 1, 1))
    attended = attended.update(torch.tensor([0.3]).view(1, 1, 1)).append(1)
    attended = attended.update(torch.tensor([0.1, 0.8]).view(1, 2, 1))
    assert torch.allclose(attended.mass_BNH.flatten(), torch.tensor([0.2, 0.8]))
    assert attended.chunks_BNH.flatten().tolist() == [2, 1]


def test_the_lowest_scores_go_but_never_sink_or_recent_tokens() -> None:
    scores = torch.tensor([[0.0, 0.5, 0.1, 0.9, 0.3, 0.0], [0.0, 0.2, 0.8, 0.1, 0.3, 0.0]]).t().unsqueeze(0)
    kept, evicted = split(scores, keep=4, sink=1, recent=1)
    assert kept[0].t().tolist() == [[0, 1, 3, 5], [0, 2, 4, 5]]
    assert evicted[0].t().tolist() == [[2, 4], [1, 3]]


def test_an_evicted_value_joins_the_token_that_the_future_sees_alike() -> None:
    tokens, _ = _cache()
    generator = torch.Generator().manual_seed(3)
    profile = torch.rand(2, 3, 6 * SIZE, 2, generator=generator, dtype=torch.float64)
    kept, evicted = split(profile.mean(dim=1), keep=12, sink=6, recent=0)
    found = merge_evicted(tokens, profile, kept_BMH=kept, evicted_BEH=evicted, weigh=False)
    assert torch.equal(found.k_BNHD, tokens.take(kept).k_BNHD)
    for row, head in ((0, 0), (1, 1)):
        expected = _merged_written_out(
            tokens.v_BNHD[row, :, head], profile[row, :, :, head].t(), kept[row, :, head], evicted[row, :, head]
        )
        assert (found.v_BNHD[row, :, head] - expected).abs().max() < EXACT


def _merged_written_out(v: Tensor, profile: Tensor, kept: Tensor, evicted: Tensor) -> Tensor:
    members = {int(index): [int(index)] for index in kept}
    for index in evicted.tolist():
        cosines = {k: torch.cosine_similarity(profile[index], profile[k], dim=0) for k in members}
        members[max(cosines, key=lambda k: float(cosines[k]))].append(index)
    assert max(len(group) for group in members.values()) > 2, "some token must take in several"
    weight = profile.mean(dim=1)
    rows = [(weight[group].unsqueeze(-1) * v[group]).sum(dim=0) / weight[group].sum() for group in members.values()]
    return torch.stack(rows)


def test_a_kept_token_that_the_future_ignores_is_not_silenced() -> None:
    """A sink's predicted attention may underflow to 0; it still counts as one, and what joins it adds to that."""
    tokens, _ = _cache(1)
    kept, evicted = (torch.tensor(index).view(1, -1, 1).expand(2, -1, 2) for index in ([0, 1], [2]))
    profile = torch.tensor([0, 1, 1e-3, 0, 0, 0], dtype=torch.float64).view(1, 1, -1, 1).expand(2, -1, -1, 2)
    found = merge_evicted(tokens, profile, kept_BMH=kept, evicted_BEH=evicted, weigh=True)
    assert torch.equal(found.count_BNH[:, 0], torch.ones(2, 2))
    assert torch.allclose(found.count_BNH[:, 1], torch.tensor(1.001))


def test_a_token_that_the_future_ignores_changes_no_value() -> None:
    tokens, _ = _cache(2)
    profile = torch.rand(2, 3, 12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    profile[:, :, 6:] = 0
    kept, evicted = split(profile.mean(dim=1), keep=6, sink=0, recent=0)
    found = merge_evicted(tokens, profile, kept_BMH=kept, evicted_BEH=evicted, weigh=False)
    assert torch.equal(found.v_BNHD, tokens.v_BNHD[:, :6])


def test_a_merged_token_draws_what_its_members_would_but_never_more_than_their_number() -> None:
    """Of six tokens two stay. Token 1 (attention 4) takes in 2 and 3 (1 and 3); token 0 (0.1) takes in 4 and 5."""
    tokens, _ = _cache(1)
    mass = torch.tensor([0.1, 4, 1, 3, 2, 2], dtype=torch.float64)
    along = torch.tensor([0, 1, 1, 1, 0, 0])  # which of two groups of queries looks at it
    profile = torch.nn.functional.one_hot(along).t().double() * mass * 2
    profile = profile[None, :, :, None].expand(2, -1, -1, 2)
    kept, evicted = (torch.tensor(index).view(1, -1, 1).expand(2, -1, 2) for index in ([0, 1], [2, 3, 4, 5]))
    found = merge_evicted(tokens, profile, kept_BMH=kept, evicted_BEH=evicted, weigh=True)
    assert torch.allclose(found.count_BNH[1, :, 1], torch.tensor([3.0, 2.0]))  # 4.1 / 0.1 is cut to 3; 8 / 4
    swapped = profile[:, :, [1, 0]]  # now token 1 has 0.1 and takes in the other, of 4
    again = merge_evicted(found, swapped, kept_BMH=kept[:, 1:], evicted_BEH=kept[:, :1], weigh=True)
    assert torch.allclose(again.count_BNH, torch.tensor(5.0))


@pytest.mark.parametrize("num_frames", [1, 3])
def test_within_the_budget_no_byte_changes(num_frames: int) -> None:
    tokens, attended = _cache(num_frames)
    statistics = query_statistics(_randn(2, SIZE, 2, 24, seed=5), grid=GRID)
    found = compact(tokens, attended, statistics, next_frame=num_frames, chunk_frames=1, grid=GRID, options=OPTIONS)
    assert found[0] is tokens
    assert found[1] is attended


def test_compacting_keeps_the_budget_the_sink_and_the_recent_frame() -> None:
    tokens, attended = _cache()
    statistics = query_statistics(_randn(2, SIZE, 2, 24, seed=5), grid=GRID)
    found, history = compact(tokens, attended, statistics, next_frame=6, chunk_frames=1, grid=GRID, options=OPTIONS)
    assert found.k_BNHD.shape == (2, 3 * SIZE, 2, 24)
    assert history.mass_BNH.shape == (2, 3 * SIZE, 2)
    assert torch.equal(found.k_BNHD[:, -SIZE:], tokens.k_BNHD[:, -SIZE:])
    frames = found.place_BNH // SIZE
    assert (frames.diff(dim=1) >= 0).all()
    assert (frames[:, -SIZE:] == 5).all()
    assert torch.equal(history.mass_BNH[:, :SIZE], attended.mass_BNH[:, :SIZE])
    for row in frames:  # contiguous up to the next chunk, over all heads
        assert row.unique().tolist() == list(range(int(row.min()), 6))


def test_what_coming_queries_look_for_survives() -> None:
    """Future queries equal to one middle frame's keys keep that frame; history alone keeps what was seen.

    Frames that lost all their tokens leave no gap.
    """
    tokens, attended = _cache()
    plain = _randn(2, 6 * SIZE, 2, 24, seed=0)  # the keys of _cache before positions
    statistics = query_statistics(8 * plain[:, 3 * SIZE : 4 * SIZE], grid=GRID)
    seen = torch.zeros_like(attended.mass_BNH)
    seen[:, 2 * SIZE : 3 * SIZE] = 1
    attended = Attended(mass_BNH=seen, chunks_BNH=attended.chunks_BNH)
    values = {}
    for weight in (0.0, 1.0):
        options = FutureForcingOptions(
            budget_frames=3,
            sink_frames=1,
            recent_frames=1,
            lookahead=(1,),
            cells=6,
            cell_queries=1,
            future_weight=weight,
        )
        found, _ = compact(tokens, attended, statistics, next_frame=6, chunk_frames=1, grid=GRID, options=options)
        values[weight] = _frames_of(found, tokens), (found.place_BNH[0, :, 0] // SIZE).unique().tolist()
    assert values[0.0] == ([0, 2, 5], [3, 4, 5])
    assert 3 in values[1.0][0]


def _frames_of(found: Tokens, tokens: Tokens) -> list[int]:
    """Return the frames of which the first row's first head keeps the most, by the part of the key that never moves."""
    still = slice(2 * CONFIG.rope_pairs[0], None)
    same = (found.k_BNHD[0, :, None, 0, still] - tokens.k_BNHD[0, None, :, 0, still]).abs().amax(dim=-1) < EXACT
    counts = (same.to(torch.int64).argmax(dim=1) // SIZE).bincount(minlength=6)
    return sorted(counts.argsort(descending=True)[:3].tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"budget_frames": 6},
            r"budget_frames=6 leaves no choice beside sink_frames=3 and 3 recent frames; use at least 7",
        ),
        ({"future_weight": 1.5}, r"future_weight=1.5 is no share; use 0 to 1"),
        ({"lookahead": (0, 1)}, r"lookahead=\(0, 1\) predicts no coming chunk"),
        ({"cells": 0}, r"cells=0 asks nothing; use at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FutureForcingOptions(**changes)  # type: ignore[arg-type]
