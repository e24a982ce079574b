"""Tokens know where their keys are rotated, and survivors move without changing what they say."""

import pytest
import torch

from flashforward_core.kv.tokens import Grid, Tokens, close_gaps, join, rotation_at, unrotate, whole_frames
from flashforward_core.model.config import WanConfig
from flashforward_core.model.layers import rotate, rotate_time, rotation

pytestmark = pytest.mark.cpu

CONFIG = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)
GRID = Grid(config=CONFIG, rows=2, columns=3)
EXACT = 1e-12  # float64 angles of up to a few thousand radians


def _plain(frames: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, len(frames) * GRID.frame_tokens, 2, 24, generator=generator, dtype=torch.float64)


def _rotated(plain: torch.Tensor, frames: list[int]) -> torch.Tensor:
    return rotate(plain, rotation(CONFIG, frames=torch.tensor(frames), rows=2, columns=3, dtype=torch.float64))


def _tokens(frames: list[int]) -> Tokens:
    plain = _plain(frames)
    return whole_frames(_rotated(plain, frames), plain.clone(), frames=torch.tensor(frames), grid=GRID)


def test_places_give_the_rotation_of_whole_frames() -> None:
    frames = torch.tensor([0, 5, 2000])
    whole = rotation(CONFIG, frames=frames, rows=2, columns=3, dtype=torch.float64)
    found = rotation_at(GRID.places(frames), grid=GRID, dtype=torch.float64)
    assert torch.equal(found.cos, whole.cos.squeeze(1))
    assert torch.equal(found.sin, whole.sin.squeeze(1))


def test_unrotating_gives_the_key_before_positions() -> None:
    frames = [3, 1500, -4]
    tokens = _tokens(frames)
    assert (unrotate(tokens.k_BNHD, tokens.place_BNH, grid=GRID) - _plain(frames)).abs().max() < EXACT


def test_each_head_takes_its_own_tokens() -> None:
    tokens = _tokens([0, 1])
    index = torch.tensor([[5, 0], [2, 11]]).expand(2, 2, 2)
    taken = tokens.take(index)
    assert torch.equal(taken.k_BNHD[1, 0, 1], tokens.k_BNHD[1, 0, 1])
    assert torch.equal(taken.v_BNHD[0, 1, 1], tokens.v_BNHD[0, 11, 1])
    assert taken.place_BNH[0].tolist() == [[5, 0], [2, 11]]


def test_kept_frames_close_up_to_the_next_one() -> None:
    frames = [2, 3, 7, 8]
    tokens = _tokens(frames)
    dead = tokens.place_BNH // GRID.frame_tokens == 3
    dead[1, 18, 1] = True  # a frame of which one head lost one token moves all the same
    moved = close_gaps(
        Tokens(
            k_BNHD=tokens.k_BNHD,
            v_BNHD=tokens.v_BNHD,
            count_BNH=tokens.count_BNH.masked_fill(dead, 0),
            place_BNH=tokens.place_BNH,
        ),
        grid=GRID,
        first=2,
        stop=12,
    )
    expected = _rotated(_plain(frames), [9, 0, 10, 11])
    alive = moved.count_BNH > 0
    assert (moved.k_BNHD - expected)[alive].abs().max() < EXACT
    places = GRID.places(torch.tensor([9, 0, 10, 11])).view(1, -1, 1).expand_as(alive)
    assert torch.equal(moved.place_BNH[alive], places[alive])


def test_rows_of_a_batch_close_their_own_gaps() -> None:
    tokens = _tokens([0, 1, 2])
    count = tokens.count_BNH.clone()
    count[0, 6:12] = 0
    thinned = Tokens(k_BNHD=tokens.k_BNHD, v_BNHD=tokens.v_BNHD, count_BNH=count, place_BNH=tokens.place_BNH)
    moved = close_gaps(thinned, grid=GRID, first=0, stop=3)
    assert (moved.place_BNH[:, :6] // GRID.frame_tokens).unique(dim=1).flatten(1)[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gaps_no_byte_changes(dtype: torch.dtype) -> None:
    tokens = _tokens([4, 5, 6])
    tokens = whole_frames(tokens.k_BNHD.to(dtype), tokens.v_BNHD.to(dtype), frames=torch.arange(4, 7), grid=GRID)
    moved = close_gaps(tokens, grid=GRID, first=0, stop=7)
    assert torch.equal(moved.k_BNHD, tokens.k_BNHD)
    assert torch.equal(moved.place_BNH, tokens.place_BNH)


def test_keys_that_are_moved_a_thousand_times_stay_as_near_as_after_one_move() -> None:
    """The oldest frame moves on by one every time. bfloat16 rounds to 2^-9; moving what was moved ends 30 % away."""
    start = whole_frames(_tokens([0]).k_BNHD.bfloat16(), _tokens([0]).v_BNHD, frames=torch.tensor([0]), grid=GRID)
    tokens = start
    for frame in range(2, 1002):
        latest = whole_frames(start.k_BNHD, start.v_BNHD, frames=torch.tensor([frame]), grid=GRID)
        first = torch.arange(GRID.frame_tokens).view(1, -1, 1).expand_as(start.place_BNH)
        tokens = close_gaps(join(tokens.take(first), latest), grid=GRID, first=0, stop=frame + 1)
    moved = tokens.take(first)
    assert (moved.place_BNH // GRID.frame_tokens == 1000).all()
    expected = rotate_time(start.k_BNHD.double(), delta=1000, config=CONFIG)
    assert ((moved.k_BNHD.double() - expected).norm() / expected.norm()) < 2**-8
    assert tokens.num_bytes > join(start, latest).num_bytes


def test_joined_tokens_stay_in_order() -> None:
    both = join(_tokens([0]), _tokens([4]))
    assert (both.place_BNH[0, :, 0] // GRID.frame_tokens).tolist() == [0] * 6 + [4] * 6
    assert torch.equal(both.bias_BHN, torch.zeros(2, 2, 12))
