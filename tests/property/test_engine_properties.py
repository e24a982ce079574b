"""For any rollout that a spec allows: pages are never fought over, and order changes no byte."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashforward_core.engine.events import Event
from flashforward_core.engine.executor import run_placed, run_sequential
from flashforward_core.engine.ops import RunInputs
from flashforward_core.engine.placement import ORDERS, lanes_for, place
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import ForwardTask, Role, Space, TaskGraph
from flashforward_core.kv.pages import PagePlan, kv_slots, plan_pages
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu

# The engine's fixtures hold no state between examples; a busy machine must not fail a slow example.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def specs(draw: st.DrawFn, *, latent_frames: int = 30) -> RolloutSpec:
    """Draw a rollout: any schedule, window, sink, anchor grid and hard cut that fit together."""
    frames = draw(st.integers(1, latent_frames))
    chunk_frames = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 5))
    cuts = draw(st.sets(st.integers(1, frames - 1), max_size=2)) if frames > 1 else set()
    return RolloutSpec(
        shape=VideoShape(width=32, height=32, latent_frames=frames),
        schedule=draw(st.sampled_from(list(SCHEDULES))),
        chunk_frames=chunk_frames,
        stages=StageSchedule(starts=draw(st.sampled_from([(1.0,), (1.0, 0.5), (1.0, 0.75, 0.25)]))),
        anchors=AnchorPlan(
            stride=draw(st.integers(1, 7)),
            block_frames=draw(st.integers(1, 4)),
            rule=draw(st.sampled_from(["nearest", "aligned", "floor"])),
            context=draw(st.integers(1, 4)),
        ),
        history=History(
            chunks=chunks,
            planner_blocks=draw(st.integers(0, 3)),
            sink=draw(st.integers(0, chunks * chunk_frames)),
        ),
        prompts=(PromptSpan(), *(PromptSpan(start=cut, hard_cut=True) for cut in sorted(cuts))),
        seed=draw(st.integers(0, 2**63)),
    )


def own_frames(spec: RolloutSpec, task: ForwardTask) -> int:
    return len(spec.anchor_blocks()[task.index] if task.role is Role.PLANNER else spec.chunk(task.index))


def check_pages(graph: TaskGraph, plan: PagePlan, order: list[str]) -> None:
    """Run ``order`` on paper: each page that a forward reads must still hold the slot that it wants."""
    by_id = graph.by_id()
    readers = {slot: {t.id for t in graph.tasks if slot in t.reads} for t in graph.tasks for slot in t.writes}
    holds: dict[tuple[str, int], Any] = {}
    for task_id in order:
        task = by_id[task_id]
        if task_id in plan.views:
            view = plan.views[task_id]
            for slot, page in view.reads:
                assert page.front or holds[page.bank, page.start] == slot, f"{task_id} misses {slot}"
            for start in range(view.own.start, view.own.stop):
                left = readers.get(holds.pop((view.own.bank, start), None), set())
                assert not left, f"{task_id} takes a page that {left} still read"
            holds.update({(page.bank, page.start): slot for slot, page in view.publishes})
        for slot in kv_slots(task.reads):
            readers[slot].discard(task_id)


@RELAXED
@given(spec=specs(), seed=st.integers(0, 1000))
def test_no_order_takes_a_page_that_is_still_needed(rig: Any, spec: RolloutSpec, seed: int) -> None:
    spec = spec_for(spec)
    graph = build_graph(spec)
    check_pages(graph, plan_pages(spec, graph), rig.shuffled(graph, seed=seed))


@RELAXED
@given(spec=specs())
def test_a_view_is_what_the_task_reads_and_itself(spec: RolloutSpec) -> None:
    spec = spec_for(spec)
    graph = build_graph(spec)
    plan = plan_pages(spec, graph)
    for task in graph.tasks:
        if not task.is_forward:
            continue
        view = plan.views[task.id]
        kv = kv_slots(task.reads)
        assert tuple(slot for slot, _ in view.reads) == kv
        sizes = (1 if slot.space is Space.ANCHOR_KV else len(spec.chunk(slot.index)) for slot in kv)
        assert sum(stop - start for start, stop in view.ranges) == own_frames(spec, task) + sum(sizes)
        assert all(0 <= start < stop <= plan.bank_frames[view.own.bank] for start, stop in view.ranges)


@RELAXED
@given(spec=specs())
def test_a_chunk_bank_without_cuts_is_no_longer_than_its_window(spec: RolloutSpec) -> None:
    """A ring of H+1 pages after the anchors suffices, whatever the sink."""
    spec = spec_for(RolloutSpec(**{name: getattr(spec, name) for name in spec.__slots__ if name != "prompts"}))
    plan = plan_pages(spec, build_graph(spec))
    context = spec.anchors.context if spec.anchors else 0
    for bank, frames in plan.bank_frames.items():
        assert bank == "anchor" or frames <= context + (spec.history.chunks + 1) * spec.chunk_frames


@settings(RELAXED, max_examples=25)
@given(spec=specs(latent_frames=12), seed=st.integers(0, 1000), lanes=st.integers(1, 5), order=st.sampled_from(ORDERS))
def test_order_and_lanes_change_no_byte(rig: Any, spec: RolloutSpec, seed: int, lanes: int, order: str) -> None:
    graph = build_graph(spec, decode=False)
    inputs = RunInputs(spec=spec_for(spec), texts=rig.texts())
    backbone = rig.backbone()
    events: list[list[Event]] = [[], [], []]
    run_sequential(graph, inputs=inputs, backbone=backbone, on_event=events[0].append, poison=True)
    shuffled = rig.shuffled(graph, seed=seed)
    run_sequential(graph, inputs=inputs, backbone=backbone, order=shuffled, on_event=events[1].append, poison=True)
    placement = place(graph, lanes=lanes_for(["cpu"] * lanes), order=order)
    run_placed(graph, inputs=inputs, backbone=backbone, placement=placement, on_event=events[2].append, poison=True)
    videos = [rig.video(run) for run in events]
    assert torch.isfinite(videos[0]).all()
    assert torch.equal(videos[0], videos[1])
    assert torch.equal(videos[0], videos[2])
