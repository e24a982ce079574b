"""A video that begins with given latents: committed clean at t=0 under every schedule, and never made again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.anchors import plan_anchors, reseed
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.rollout import render
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import Slot, Space
from flashforward_core.kv_policy import WindowOptions
from flashforward_core.model.reference import reference_rollout, rendered
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import RolloutSpec

pytestmark = pytest.mark.cpu

FLOAT32_STEP = 1e-6  # both compute in float64 and differ by 1e-10; the engine hands its latents back in float32
ANCHORED = [name for name in SCHEDULES if SCHEDULES[name].uses_anchors]
PLENTY = 2**30


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone()


@pytest.fixture(scope="module")
def start() -> Callable[[int], Tensor]:
    """Latents of so many frames for the rig's size."""
    drawn = torch.randn(1, 16, 14, 4, 4, generator=torch.Generator().manual_seed(3))
    return lambda frames: drawn[:, :, :frames]


# The rig has two stages, so the clean level is 2: which commits a given chunk 0 takes, by the level they stand in for.
COMMITS = {
    "flashforward": {"renderer/commit/c0/l2/s0", "renderer/commit/c0/l2/s1"},
    "flashforward_no_anchors": {"renderer/commit/c0/l2/s0", "renderer/commit/c0/l2/s1"},
    "hiar": {"renderer/commit/c0/l2/s1", "renderer/commit/c0/l2"},
    "last_stage": {"renderer/commit/c0/l2/s1"},
    "self_forcing": {"renderer/commit/c0/l2"},
    "clean_history_anchors": {"renderer/commit/c0/l2"},
}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_given_chunk_is_committed_once_per_bank_and_never_denoised(rig: Any, schedule: str) -> None:
    graph = build_graph(replace(rig.spec(schedule), start_frames=5), decode=False)
    first = {task.id for task in graph.tasks if "/c0" in task.id}
    assert first == COMMITS[schedule]
    assert "renderer/denoise/c1/s0" in graph.by_id()  # of chunk 1, two of three frames are given


@pytest.mark.parametrize("frames", [3, 6])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_the_engine_continues_as_the_full_recompute_does(
    rig: Any, start: Callable[[int], Tensor], schedule: str, frames: int
) -> None:
    model = rig.model(torch.float64)
    spec, texts = rig.spec(schedule), rig.texts(torch.float64)
    anchors = plan_anchors(rig.backbone(torch.float64, model=model), spec, texts) if schedule in ANCHORED else None
    given = anchors.slots() if anchors else {}
    level = spec.stages.num_stages
    for chunk in range(frames // 3):
        given[Slot(space=Space.LATENT, index=chunk, level=level)] = start(frames)[:, :, 3 * chunk : 3 * chunk + 3]
    given = {slot: latents.double() for slot, latents in given.items()}
    whole = spec_for(replace(spec, start_frames=frames))
    graph = build_graph(whole, decode=False, given_anchors=anchors is not None)
    expected = rendered(whole, reference_rollout(model, whole, texts, graph=graph, given=given))
    backbone = rig.backbone(torch.float64, model=model)
    found = render(backbone, spec, texts, anchors=anchors, start=start(frames)).latents_BCFHW
    assert (found - expected).abs().max() < FLOAT32_STEP


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_video_begins_with_what_it_is_given_and_follows_it(
    rig: Any, backbone: Backbone, start: Callable[[int], Tensor], schedule: str
) -> None:
    """Any number of latent frames; with part of a chunk given, the rest of that chunk follows it too."""
    plain = render(backbone, rig.spec(schedule), rig.texts()).latents_BCFHW
    for frames in (1, 3, 7, 13):
        found = render(backbone, rig.spec(schedule), rig.texts(), start=start(frames)).latents_BCFHW
        assert torch.equal(found[:, :, :frames], start(frames))
        for frame in range(frames, 14):
            assert not torch.equal(found[:, :, frame], plain[:, :, frame])


@pytest.mark.parametrize("frames", [3, 9, 12])
def test_with_clean_history_a_video_continued_from_its_own_start_is_the_same(
    rig: Any, backbone: Backbone, frames: int
) -> None:
    """Self-Forcing re-encodes each finished chunk clean anyway, so nothing may change, to the byte."""
    whole = render(backbone, rig.spec("self_forcing"), rig.texts())
    start = whole.latents_BCFHW[:, :, :frames]
    again = render(backbone, rig.spec("self_forcing"), rig.texts(), start=start)
    assert again.sha256 == whole.sha256


def continued(rig: Any, backbone: Backbone, spec: RolloutSpec, start: Tensor, **options: Any) -> str:
    sha256: str = render(backbone, spec, rig.texts(), start=start, **options).sha256
    return sha256


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_lanes_and_reuse_change_no_byte_of_a_continued_video(
    rig: Any, start: Callable[[int], Tensor], schedule: str
) -> None:
    backbone, spec = rig.backbone(), rig.spec(schedule)
    expected = continued(rig, backbone, spec, start(4))
    assert continued(rig, backbone, spec, start(4), devices=DevicePlan(devices=("cpu*3",))) == expected
    assert continued(rig, backbone, spec, start(4), reuse_bytes=PLENTY) == expected
    assert continued(rig, backbone, spec, start(4), reuse_bytes=PLENTY) == expected
    other = continued(rig, backbone, spec, start(4) + 0.1, reuse_bytes=PLENTY)
    assert other == continued(rig, rig.backbone(), spec, start(4) + 0.1)
    partly = torch.cat([start(3), start(4)[:, :, 3:] + 0.1], dim=2)  # only what is pinned within chunk 1 differs
    assert continued(rig, backbone, spec, partly, reuse_bytes=PLENTY) == continued(rig, rig.backbone(), spec, partly)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_kv_policy_continues_a_start_too(
    rig: Any, backbone: Backbone, start: Callable[[int], Tensor], schedule: str
) -> None:
    """With room for the whole history a window forgets nothing, and keeping costs no byte but rounding."""
    spec = rig.spec(schedule, kv_policy=WindowOptions(budget_frames=6, sink_frames=0))
    found = render(backbone, spec, rig.texts(), start=start(4), reuse_bytes=PLENTY)
    plain = render(backbone, rig.spec(schedule), rig.texts(), start=start(4))
    assert torch.equal(found.latents_BCFHW[:, :, :4], start(4))
    assert (found.latents_BCFHW - plain.latents_BCFHW).abs().max() < 1e-4  # float32 sums in another order
    assert found.reused.forwards == 0


def test_anchors_follow_the_start_and_carry_it_to_the_render(
    rig: Any, backbone: Backbone, start: Callable[[int], Tensor]
) -> None:
    """Anchors at the latent frames 0 and 3 are the start's own; the render begins with it, planning itself or not."""
    anchors = plan_anchors(backbone, rig.spec(), rig.texts(), start=start(4))
    assert torch.equal(anchors.latents_BCAHW[:, :, :2], start(4)[:, :, [0, 3]])
    plain = plan_anchors(backbone, rig.spec(), rig.texts())
    assert not torch.equal(anchors.latents_BCAHW[:, :, 2], plain.latents_BCAHW[:, :, 2])
    from_anchors = render(backbone, rig.spec(), rig.texts(), anchors=anchors)
    assert from_anchors.sha256 == render(backbone, rig.spec(), rig.texts(), start=start(4)).sha256
    reseeded = reseed(anchors, 3, seed=5)
    assert torch.equal(reseeded.latents_BCAHW[:, :, :3], anchors.latents_BCAHW[:, :, :3])
    assert reseeded.start is anchors.start


def test_a_start_that_does_not_fit_is_refused_by_name(
    rig: Any, backbone: Backbone, start: Callable[[int], Tensor]
) -> None:
    with pytest.raises(ValueError, match="start_frames=14 leaves nothing to make of 14 latent frames"):
        render(backbone, rig.spec(), rig.texts(), start=start(14))
    with pytest.raises(ValueError, match=r"start has latents of \(1, 16, 2, 4\), but the plan needs \(1, 16, 4, 4\)"):
        render(backbone, rig.spec(), rig.texts(), start=start(3)[:, :, :, :2])
