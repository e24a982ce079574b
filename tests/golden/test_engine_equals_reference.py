"""The engine with its cache equals the oracle, which recomputes everything with a mask, for every schedule."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.events import Event
from flashforward_core.engine.executor import run_sequential
from flashforward_core.engine.ops import RunInputs
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import Slot, Space
from flashforward_core.model.reference import reference_rollout, rendered
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule

pytestmark = pytest.mark.cpu

EXACT = 1e-10  # both sides compute the same sums in float64, in another order: errors of some 1e-13 at values near 1

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole chunks": {"latent_frames": 12},
    "one chunk": {"latent_frames": 2},
    "four stages": {"stages": StageSchedule()},
    "one stage": {"stages": StageSchedule(starts=(1.0,))},
    "single frames": {"chunk_frames": 1, "latent_frames": 7},
    "sink": {"history": History(chunks=3, sink=3), "latent_frames": 20},
    "odd sink": {"history": History(chunks=2, sink=1)},
    "few anchors": {"anchors": AnchorPlan(stride=10)},
    "blocks that anchors straddle": {"anchors": AnchorPlan(stride=2, block_frames=3), "latent_frames": 17},
    "two prompts": {"prompts": (PromptSpan(), PromptSpan(start=5, prompt=1))},
    "hard cut": {"prompts": (PromptSpan(), PromptSpan(start=7, prompt=1, hard_cut=True)), "latent_frames": 20},
}


@pytest.fixture(scope="module")
def model(rig: Any) -> CausalWanTransformer:
    return rig.model(torch.float64)


def run(
    rig: Any,
    model: CausalWanTransformer,
    spec: RolloutSpec,
    *,
    batch: int = 1,
    merged: bool = False,
    given: dict[Slot, Tensor] | None = None,
) -> tuple[Tensor, Any]:
    """Run sequentially over poisoned pages; return the video and the anchors, in float64."""
    events: list[Event] = []
    texts = rig.texts(torch.float64, batch=batch)
    run_sequential(
        build_graph(spec, decode=False, given_anchors=given is not None),
        inputs=RunInputs(spec=spec, texts=texts, given=given or {}),
        backbone=rig.backbone(torch.float64, model=model, merged=merged),
        on_event=events.append,
        poison=True,
    )
    return rig.video(events), rig.anchors(events)


def reference(
    rig: Any, model: CausalWanTransformer, spec: RolloutSpec, *, seeds: list[int] | None = None
) -> dict[Slot, Tensor]:
    texts = rig.texts(torch.float64, batch=len(seeds or [0]))
    return reference_rollout(model, spec, texts, seeds=seeds)


def planned(spec: RolloutSpec, latents: dict[Slot, Tensor]) -> Tensor:
    level = spec.stages.num_stages
    slots = [Slot(space=Space.ANCHOR_LATENT, index=b, level=level) for b in range(len(spec.anchor_blocks()))]
    return torch.cat([latents[slot] for slot in slots], dim=2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_cached_equals_recomputed(rig: Any, model: CausalWanTransformer, schedule: str, variant: str) -> None:
    spec = spec_for(rig.spec(schedule, **VARIANTS[variant]))
    expected = reference(rig, model, spec)
    video, anchors = run(rig, model, spec)
    torch.testing.assert_close(video, rendered(spec, expected), rtol=0, atol=EXACT)
    if anchors is not None:
        torch.testing.assert_close(anchors, planned(spec, expected), rtol=0, atol=EXACT)


def test_anchors_alone_are_enough_history(rig: Any, model: CausalWanTransformer) -> None:
    spec = rig.spec(history=History(chunks=0))
    video, _ = run(rig, model, spec)
    torch.testing.assert_close(video, rendered(spec, reference(rig, model, spec)), rtol=0, atol=EXACT)


def test_rows_of_a_batch_have_seeds_of_their_own(rig: Any, model: CausalWanTransformer) -> None:
    spec = rig.spec()
    video, _ = run(rig, model, spec, batch=2)
    expected = rendered(spec, reference(rig, model, spec, seeds=[spec.seed, spec.seed + 1]))
    torch.testing.assert_close(video, expected, rtol=0, atol=EXACT)


def test_merged_roles_equal_unmerged(rig: Any, model: CausalWanTransformer) -> None:
    spec = rig.spec()
    video, _ = run(rig, model, spec, merged=True)
    torch.testing.assert_close(video, rendered(spec, reference(rig, model, spec)), rtol=0, atol=EXACT)


def test_given_anchors_equal_planned_ones(rig: Any, model: CausalWanTransformer) -> None:
    spec = rig.spec()
    video, anchors = run(rig, model, spec)
    level, blocks = spec.stages.num_stages, spec.anchor_blocks()
    given = {
        Slot(space=Space.ANCHOR_LATENT, index=n, level=level): anchors[:, :, block[0] : block[-1] + 1]
        for n, block in enumerate(blocks)
    }
    assert torch.equal(run(rig, model, spec, given=given)[0], video)
