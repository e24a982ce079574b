"""Steering the engine: prompts take effect within a chunk; anchors are replaced, locked and planned again alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.anchors import Anchors, plan_anchors, reseed
from flashforward_core.engine.rollout import render
from flashforward_core.graph.schedules import SCHEDULES
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import AnchorPlan, PromptSpan

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone()


@pytest.fixture(scope="module")
def anchors(rig: Any, backbone: Backbone) -> Anchors:
    """5 anchors at the latent frames 0, 3, 6, 9 and 12, in blocks of 2, 2 and 1; a block sees the one before."""
    return plan_anchors(backbone, rig.spec(), rig.texts())


def kept(before: Anchors, after: Anchors) -> list[bool]:
    """Which anchors have the same bytes."""
    pairs = zip(before.latents_BCAHW.unbind(2), after.latents_BCAHW.unbind(2), strict=True)
    return [torch.equal(a, b) for a, b in pairs]


ONE_BLOCK = AnchorPlan(stride=3, block_frames=5)


@pytest.mark.parametrize("hard_cut", [False, True])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("switch", "chunk"), [(1, 1), (3, 1), (7, 3), (13, 5)])
def test_a_prompt_takes_effect_with_the_first_chunk_that_begins_at_or_after_its_start(
    rig: Any, backbone: Backbone, switch: int, chunk: int, schedule: str, hard_cut: bool
) -> None:
    """14 latent frames in chunks of 3, so chunk 5 is past the end. All anchors are one block, of the first prompt:
    otherwise the anchors that lie after the switch, which chunks before it read, would tell of it. A hard cut needs no
    such help: nothing before it depends on what comes after."""
    spec = rig.spec(schedule) if hard_cut else rig.spec(schedule, anchors=ONE_BLOCK)
    stays, switches = (
        replace(spec, prompts=(PromptSpan(), PromptSpan(start=switch, prompt=prompt, hard_cut=hard_cut)))
        for prompt in (0, 1)
    )
    without = render(backbone, stays, rig.texts()).latents_BCFHW
    switched = render(backbone, switches, rig.texts()).latents_BCFHW
    start = 3 * chunk
    assert torch.equal(switched[:, :, :start], without[:, :, :start])
    for frame in range(start, 14):
        assert not torch.equal(switched[:, :, frame], without[:, :, frame])


@pytest.mark.parametrize("cut", [6, 9])
def test_after_a_hard_cut_nothing_tells_of_the_first_prompt(rig: Any, backbone: Backbone, cut: int) -> None:
    """The scene has the same bytes whatever was there before, its anchors among them."""
    after = [
        replace(rig.spec(), prompts=(PromptSpan(prompt=prompt), PromptSpan(start=cut, prompt=1, hard_cut=True)))
        for prompt in (0, 1)
    ]
    one, other = (render(backbone, spec, rig.texts()).latents_BCFHW for spec in after)
    assert torch.equal(one[:, :, cut:], other[:, :, cut:])
    assert not torch.equal(one[:, :, :cut], other[:, :, :cut])
    planned = [plan_anchors(backbone, spec, rig.texts()) for spec in after]
    assert kept(*planned) == [position >= cut for position in planned[0].positions]


def test_the_nearest_anchor_is_meant_and_the_earlier_of_two(anchors: Anchors) -> None:
    """Latent frame n ends at 4n/16 s, so the anchors are 0.75 s apart."""
    assert [anchors.seconds(n) for n in range(5)] == [0.0, 0.75, 1.5, 2.25, 3.0]
    assert [anchors.nearest(s) for s in (0.0, 0.375, 0.376, 1.4, 3.3)] == [0, 0, 1, 2, 4]
    with pytest.raises(ValueError, match=r"seconds=3\.4 is outside the video, 0 to 3\.3125 s"):
        anchors.nearest(3.4)


def test_replacing_and_locking_leave_the_original_and_all_others_alone(anchors: Anchors) -> None:
    before = anchors.latents_BCAHW.clone()
    after = anchors.with_latent(2, torch.zeros_like(anchors.latents_BCAHW[:, :, 2])).with_lock(2, True)
    assert torch.equal(anchors.latents_BCAHW, before)
    assert anchors.locked == (False,) * 5
    assert kept(anchors, after) == [True, True, False, True, True]
    assert after.locked == (False, False, True, False, False)
    with pytest.raises(ValueError, match=r"latent has shape \(1, 16, 2, 2\), but the anchors have \(1, 16, 4, 4\)"):
        anchors.with_latent(2, torch.zeros(1, 16, 2, 2))


def test_a_reseed_changes_one_anchor_and_the_same_seed_gives_it_back(anchors: Anchors) -> None:
    after = reseed(anchors, 2, seed=99)
    assert kept(anchors, after) == [True, True, False, True, True]
    assert torch.equal(reseed(anchors, 2, seed=99).latents_BCAHW, after.latents_BCAHW)
    assert not torch.equal(reseed(anchors, 2, seed=98).latents_BCAHW, after.latents_BCAHW)
    # Alone in its block, an anchor with the rollout's own seed is planned as it was.
    assert kept(anchors, reseed(anchors, 4, seed=anchors.seed)) == [True] * 5
    with pytest.raises(ValueError, match="connect anchors from Plan Anchors"):
        reseed(replace(anchors, planner=None), 2, seed=1)


def test_a_reseeded_anchor_sees_its_neighbours_as_they_are_now(anchors: Anchors) -> None:
    """Both the anchor beside it in its block and the block before, but nothing after it."""
    expected = reseed(anchors, 2, seed=99).latents_BCAHW[:, :, 2]
    for other, matters in ((1, True), (3, True), (4, False)):
        moved = anchors.with_latent(other, anchors.latents_BCAHW[:, :, other] + 1)
        assert torch.equal(reseed(moved, 2, seed=99).latents_BCAHW[:, :, 2], expected) != matters


def test_planning_again_keeps_locked_anchors_and_follows_them(rig: Any, backbone: Backbone, anchors: Anchors) -> None:
    moved: Tensor = anchors.latents_BCAHW[:, :, 2] + 1
    locked = anchors.with_latent(2, moved).with_lock(2, True)
    again = plan_anchors(backbone, rig.spec(), rig.texts(), keep=locked)
    assert again.locked == locked.locked
    assert kept(locked, again) == [True, True, True, False, False]  # beside it and after it, not before


def test_planning_again_with_every_anchor_locked_changes_nothing(
    rig: Any, backbone: Backbone, anchors: Anchors
) -> None:
    locked = replace(anchors, locked=(True,) * 5)
    assert kept(anchors, plan_anchors(backbone, rig.spec(seed=1), rig.texts(), keep=locked)) == [True] * 5
    assert kept(anchors, plan_anchors(backbone, rig.spec(seed=1), rig.texts(), keep=anchors)) == [False] * 5


def test_anchors_of_another_plan_cannot_be_kept(rig: Any, backbone: Backbone, anchors: Anchors) -> None:
    other = rig.spec(anchors=AnchorPlan(stride=4, block_frames=2))
    with pytest.raises(ValueError, match=r"anchors are at the latent frames \(0, 3, 6, 9, 12\)"):
        plan_anchors(backbone, other, rig.texts(), keep=anchors)
