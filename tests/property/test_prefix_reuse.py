"""A render that goes on from an earlier one gives a full render's bytes, and runs only what depends on a change."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashforward_core.engine.anchors import Anchors, plan_anchors
from flashforward_core.engine.events import ChunkReady, Event, FramesReady, TaskFinished
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.rollout import render
from flashforward_core.graph.anchors import anchors_for
from flashforward_core.graph.schedules import build_graph
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu

TINY_DIM = 48
PLENTY = 2**30  # bytes; a rollout of the small backbone keeps less than a megabyte
# The fixtures hold no state between examples; a busy machine must not fail a slow example.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def moved(anchors: Anchors, index: int) -> Anchors:
    """Change one anchor a little."""
    return anchors.with_latent(index, anchors.latents_BCAHW[:, :, index] + 0.1)


@st.composite
def specs(draw: st.DrawFn) -> RolloutSpec:
    """Draw a rollout with anchors and perhaps a change of prompt."""
    frames = draw(st.integers(6, 24))
    switch = draw(st.integers(1, frames - 1))
    spans = (PromptSpan(start=switch, prompt=1, hard_cut=draw(st.booleans())),) if draw(st.booleans()) else ()
    return RolloutSpec(
        shape=VideoShape(width=32, height=32, latent_frames=frames),
        schedule=draw(st.sampled_from(["flashforward", "clean_history_anchors"])),
        chunk_frames=draw(st.integers(1, 3)),
        stages=StageSchedule(starts=(1.0, 0.5)),
        anchors=AnchorPlan(
            stride=draw(st.integers(2, 5)),
            block_frames=draw(st.integers(1, 3)),
            rule=draw(st.sampled_from(["nearest", "aligned", "floor"])),
            context=draw(st.integers(1, 3)),
        ),
        history=History(chunks=draw(st.integers(1, 3)), planner_blocks=draw(st.integers(1, 2))),
        prompts=(PromptSpan(), *spans),
        seed=3,
    )


def first_chunk_that_depends(spec: RolloutSpec, anchor: int) -> int:
    """The first chunk that reads the block of ``anchor`` or a later one of its scene: a block sees those before.

    From Γ alone. A scene without anchors of its own reads those of the one before.
    """
    assert spec.anchors is not None
    positions = spec.anchor_positions()
    (block,) = [block for block in spec.anchor_blocks() if anchor in block]
    changed = {other for other in spec.scene_anchors(positions[anchor]) if other >= block[0]}
    for chunk in range(spec.num_chunks):
        frames = spec.chunk(chunk)
        scene = spec.scene_anchors(frames.start)
        scene = scene or spec.scene_anchors(positions[scene.start - 1])
        if changed & set(anchors_for(spec.anchors, frames, spec.shape.latent_frames, scene=scene)):
            return chunk
    return spec.num_chunks


@settings(RELAXED, max_examples=8)
@given(spec=specs(), data=st.data(), lanes=st.integers(1, 3))
def test_after_any_change_of_an_anchor_the_bytes_are_a_full_renders(
    rig: Any, spec: RolloutSpec, data: st.DataObject, lanes: int
) -> None:
    backbone, texts = rig.backbone(), rig.texts()
    anchors = plan_anchors(backbone, spec, texts)
    index = data.draw(st.integers(0, len(anchors.positions) - 1))
    render(backbone, spec, texts, anchors=anchors, reuse_bytes=PLENTY)
    changed = moved(anchors, index)
    devices = DevicePlan(devices=(f"cpu*{lanes}",))
    again = render(backbone, spec, texts, anchors=changed, devices=devices, reuse_bytes=PLENTY)
    full = render(backbone, spec, texts, anchors=changed)
    assert again.sha256 == full.sha256
    assert torch.equal(again.latents_BCFHW, full.latents_BCFHW)
    assert again.reused.chunks == first_chunk_that_depends(spec, index)
    assert len(again.timeline.spans) == len(full.timeline.spans) - again.reused.forwards


@settings(RELAXED, max_examples=6)
@given(spec=specs(), switch=st.integers(1, 23), seed=st.integers(3, 4))
def test_after_any_change_of_the_last_prompt_the_bytes_are_a_full_renders(
    rig: Any, spec: RolloutSpec, switch: int, seed: int
) -> None:
    """Here the render plans its anchors itself, so the planner's finished blocks are reused too."""
    switch = min(switch, spec.shape.latent_frames - 1)
    before = replace(spec, prompts=(PromptSpan(), PromptSpan(start=switch, prompt=1)))
    after = replace(spec, prompts=(PromptSpan(), PromptSpan(start=switch, prompt=2)), seed=seed)
    backbone, texts = rig.backbone(), rig.texts(count=3)
    render(backbone, before, texts, reuse_bytes=PLENTY)
    again = render(backbone, after, texts, reuse_bytes=PLENTY)
    assert again.sha256 == render(rig.backbone(), after, texts).sha256
    assert seed == before.seed or again.reused.forwards == 0


@pytest.fixture(scope="module")
def paper(rig: Any) -> RolloutSpec:
    """The paper's case: 81 latents, 27 chunks, 9 anchors in 3 blocks, history of 5."""
    spec: RolloutSpec = rig.spec(latent_frames=81, anchors=AnchorPlan(), history=History())
    return spec


@pytest.fixture(scope="module")
def rendered(rig: Any, paper: RolloutSpec) -> tuple[Backbone, Anchors]:
    """A backbone that has rendered the paper's case with some anchors."""
    backbone = rig.backbone()
    anchors = plan_anchors(backbone, paper, rig.texts())
    render(backbone, paper, rig.texts(), anchors=anchors, reuse_bytes=PLENTY)
    return backbone, anchors


@pytest.mark.parametrize(("index", "chunks"), [(0, 0), (2, 0), (3, 5), (5, 5), (6, 15), (8, 15)])
def test_an_anchor_of_the_second_block_saves_5_of_27_chunks_and_of_the_third_15(
    rig: Any, paper: RolloutSpec, rendered: tuple[Backbone, Anchors], index: int, chunks: int
) -> None:
    backbone, anchors = rendered
    again = render(backbone, paper, rig.texts(), anchors=moved(anchors, index), reuse_bytes=PLENTY)
    assert again.reused.chunks == chunks
    assert again.reused.forwards == chunks * paper.stages.num_stages  # the planner's three commits run again
    assert again.sha256 == render(rig.backbone(), paper, rig.texts(), anchors=moved(anchors, index)).sha256


def test_the_same_render_again_runs_nothing(rig: Any, paper: RolloutSpec, rendered: tuple[Backbone, Anchors]) -> None:
    backbone, anchors = rendered
    again = render(backbone, paper, rig.texts(), anchors=anchors, reuse_bytes=PLENTY)
    assert again.timeline.spans == ()
    assert again.reused.chunks == 27
    assert again.sha256 == render(rig.backbone(), paper, rig.texts(), anchors=anchors).sha256


def test_every_chunk_comes_once_and_reused_work_counts_as_done(
    rig: Any, paper: RolloutSpec, rendered: tuple[Backbone, Anchors]
) -> None:
    backbone, anchors = rendered
    events: list[Event] = []
    render(backbone, paper, rig.texts(), anchors=moved(anchors, 7), reuse_bytes=PLENTY, on_event=events.append)
    chunks = [event.index for event in events if isinstance(event, ChunkReady)]
    assert sorted(chunks) == list(range(27))
    assert chunks[:15] == list(range(15))
    bar = [(event.done, event.total) for event in events if isinstance(event, TaskFinished)]
    total = len(build_graph(paper, decode=False, given_anchors=True))
    assert bar == [(done, total) for done in range(total - len(bar) + 1, total + 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"stages": StageSchedule(starts=(1.0, 0.6))},
        {"prompts": (PromptSpan(prompt=1),)},
        {"shape": VideoShape(width=32, height=48, latent_frames=14)},
    ],
    ids=["seed", "stages", "prompt", "size"],
)
def test_what_every_chunk_depends_on_leaves_nothing_to_reuse(rig: Any, change: dict[str, Any]) -> None:
    backbone = rig.backbone()
    render(backbone, rig.spec(), rig.texts(), reuse_bytes=PLENTY)
    again = render(backbone, rig.spec(**change), rig.texts(), reuse_bytes=PLENTY)
    assert again.reused.forwards == 0
    assert again.sha256 == render(rig.backbone(), rig.spec(**change), rig.texts()).sha256


def test_other_weights_share_nothing(rig: Any) -> None:
    backbone = rig.backbone()
    render(backbone, rig.spec(), rig.texts(), reuse_bytes=PLENTY)
    assert len(backbone.store)
    assert not len(replace(backbone, fingerprint="other").store)


def test_a_budget_of_0_keeps_and_reuses_nothing(rig: Any) -> None:
    backbone = rig.backbone()
    render(backbone, rig.spec(), rig.texts(), reuse_bytes=PLENTY)
    again = render(backbone, rig.spec(), rig.texts())
    assert (again.reused.chunks, len(backbone.store)) == (0, 0)
    with pytest.raises(ValueError, match="reuse_bytes=-1 is below 0"):
        render(backbone, rig.spec(), rig.texts(), reuse_bytes=-1)


def test_the_budget_bounds_what_is_kept(rig: Any, paper: RolloutSpec) -> None:
    """Room for one snapshot: the later one stays, and an earlier change is rendered in full, to the same bytes."""
    backbone = rig.backbone()
    anchors = plan_anchors(backbone, paper, rig.texts())
    render(backbone, paper, rig.texts(), anchors=anchors, reuse_bytes=PLENTY)
    budget = backbone.store.num_bytes * 4 // 5  # latents and one snapshot: each is about a third
    backbone.store.shrink(0)
    for index, chunks in ((8, 15), (3, 0)):
        render(backbone, paper, rig.texts(), anchors=anchors, reuse_bytes=budget)
        assert 0 < backbone.store.num_bytes <= budget
        again = render(backbone, paper, rig.texts(), anchors=moved(anchors, index), reuse_bytes=budget)
        assert again.reused.chunks == chunks
        assert again.sha256 == render(rig.backbone(), paper, rig.texts(), anchors=moved(anchors, index)).sha256


def test_where_not_all_snapshots_fit_they_are_spread_and_the_last_is_among_them(rig: Any) -> None:
    """27 anchors in 9 blocks come in at 8 places. With room for 3 snapshots, every third is kept, from the last on."""
    spec = rig.spec(latent_frames=81, anchors=AnchorPlan(stride=3), history=History())
    backbone = rig.backbone()
    anchors = plan_anchors(backbone, spec, rig.texts())
    depends = [first_chunk_that_depends(spec, 3 * block) for block in range(1, 9)]
    latents = (81 + 27) * 16 * 4 * 4 * 4
    snapshot = 2 * 2 * 15 * 4 * TINY_DIM * 2 * 4  # stages, keys and values, frames, tokens, width, blocks, bytes
    budget = latents + 3 * snapshot
    for block, chunks in ((8, depends[7]), (7, depends[4]), (5, depends[4]), (3, depends[1])):
        render(backbone, spec, rig.texts(), anchors=anchors, reuse_bytes=budget)
        assert backbone.store.num_bytes <= budget
        again = render(backbone, spec, rig.texts(), anchors=moved(anchors, 3 * block), reuse_bytes=budget)
        assert again.reused.chunks == chunks
        backbone.store.shrink(0)


def test_frames_are_the_same_when_their_latents_are_reused(rig: Any) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, z_dim=16).eval()
    backbone = replace(rig.backbone(), vae=vae)
    anchors = plan_anchors(backbone, rig.spec(), rig.texts())
    render(backbone, rig.spec(), rig.texts(), anchors=anchors, reuse_bytes=PLENTY)
    videos = []
    for budget in (PLENTY, 0):
        events: list[Event] = []
        last = moved(anchors, len(anchors.positions) - 1)
        result = render(
            backbone,
            rig.spec(),
            rig.texts(),
            anchors=last,
            decode=True,
            reuse_bytes=budget,
            on_event=events.append,
            devices=DevicePlan(devices=("cpu*2",)),
        )
        assert (result.reused.chunks > 0) == (budget > 0)
        frames = [event for event in events if isinstance(event, FramesReady)]
        assert [event.index for event in frames] == list(range(rig.spec().num_chunks))
        videos.append(torch.cat([event.frames for event in frames], dim=1))
    assert torch.equal(*videos)
