"""Noise belongs to a latent frame: no grouping, order or neighbour changes it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashforward_core.flow import keyed_noise, keyed_noise_frames

pytestmark = pytest.mark.cpu

SHAPE = (16, 2, 3)

seeds = st.integers(min_value=0, max_value=2**64 - 1)
stages = st.integers(min_value=0, max_value=8)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, stage=stages, chunk=st.integers(1, 5), purpose=st.sampled_from(["anchor", "render"]))
def test_chunking_does_not_change_noise(seed: int, stage: int, chunk: int, purpose: str) -> None:
    whole = keyed_noise_frames(seed, purpose, range(9), stage, SHAPE)
    pieces = [
        keyed_noise_frames(seed, purpose, range(start, min(start + chunk, 9)), stage, SHAPE)
        for start in range(0, 9, chunk)
    ]
    assert torch.equal(torch.cat(pieces, dim=2), whole)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, frames=st.permutations(range(6)), global_seed=seeds)
def test_order_and_the_global_generator_do_not_change_noise(seed: int, frames: list[int], global_seed: int) -> None:
    expected = keyed_noise_frames(seed, "render", range(6), 0, SHAPE)
    torch.manual_seed(global_seed)
    drawn = {frame: keyed_noise(seed, "render", frame, 0, SHAPE) for frame in frames}
    assert torch.equal(torch.stack([drawn[frame] for frame in range(6)], dim=1), expected[0])


@settings(max_examples=30, deadline=None)
@given(keys=st.lists(st.tuples(seeds, st.integers(0, 2000), stages), min_size=2, max_size=6, unique=True))
def test_different_keys_give_different_noise(keys: list[tuple[int, int, int]]) -> None:
    drawn = {keyed_noise(seed, "render", frame, stage, SHAPE).numpy().tobytes() for seed, frame, stage in keys}
    assert len(drawn) == len(keys)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, stride=st.integers(1, 12))
def test_anchor_strides_share_the_noise_of_shared_frames(seed: int, stride: int) -> None:
    positions = range(0, 25, stride)
    anchors = keyed_noise_frames(seed, "anchor", positions, 0, SHAPE)
    assert torch.equal(anchors[0, :, -1], keyed_noise(seed, "anchor", positions[-1], 0, SHAPE))
