"""Claims about Γ, the anchors that a chunk reads."""

import pytest

from flashforward_core.graph.anchors import RULES, anchors_for
from flashforward_core.specs import AnchorPlan

pytestmark = pytest.mark.cpu


def gamma(first: int, *, rule: str = "nearest", latent_frames: int = 81, length: int = 3, **plan: int) -> list[int]:
    return list(anchors_for(AnchorPlan(rule=rule, **plan), range(first, first + length), latent_frames))


@pytest.mark.parametrize("rule", list(RULES))
def test_the_chunk_of_latents_6_to_8_reads_0_10_20_under_every_rule(rule: str) -> None:
    assert gamma(6, rule=rule) == [0, 1, 2]


# Typed by hand from the rules' words, for anchors at 0, 10, …, 80 (indices 0 to 8).
BY_HAND = {
    "nearest": {
        0: [0, 1, 2],
        12: [0, 1, 2],
        15: [1, 2, 3],
        21: [1, 2, 3],
        24: [2, 3, 4],
        42: [3, 4, 5],
        66: [6, 7, 8],
        78: [6, 7, 8],
    },
    "aligned": {0: [0, 1, 2], 27: [0, 1, 2], 30: [3, 4, 5], 57: [3, 4, 5], 60: [6, 7, 8], 78: [6, 7, 8]},
    "floor": {0: [0, 1, 2], 9: [0, 1, 2], 12: [1, 2, 3], 30: [3, 4, 5], 57: [5, 6, 7], 66: [6, 7, 8], 78: [6, 7, 8]},
}


@pytest.mark.parametrize("rule", list(BY_HAND))
def test_each_rule_reads_what_its_words_say(rule: str) -> None:
    assert {first: gamma(first, rule=rule) for first in BY_HAND[rule]} == BY_HAND[rule]


def test_nearest_gives_a_tie_to_the_later_window() -> None:
    assert gamma(14) == [1, 2, 3]  # the middle, 15, is as far from anchor 10 as from anchor 20
    assert gamma(14, length=2) == [0, 1, 2]  # the middle is 14.5


def test_aligned_keeps_to_a_block_and_clamps_to_full_windows() -> None:
    assert gamma(30, rule="aligned", latent_frames=40) == [1, 2, 3]  # the last block is anchor 3 alone


def test_fewer_anchors_than_asked_for_are_all_read() -> None:
    assert gamma(0, latent_frames=11) == [0, 1]
    assert gamma(0, latent_frames=3) == [0]


def test_context_sets_the_number_of_anchors() -> None:
    assert gamma(42, context=1) == [4]
    assert gamma(42, context=2) == [4, 5]  # middles 43 against 35, 45 and 55
    assert gamma(42, context=5) == [2, 3, 4, 5, 6]


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="anchor_rule='middle' is unknown; use one of: nearest, aligned, floor"):
        gamma(0, rule="middle")
