"""Lanes that share no memory: what they hand to each other suffices, and gives the bytes of one machine."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashforward_core.engine.budget import Fit
from flashforward_core.engine.events import Event
from flashforward_core.engine.executor import run_sequential
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.lane_worker import LaneWorker, Rollout, packed_event
from flashforward_core.engine.ops import RunInputs
from flashforward_core.engine.placement import LAYOUTS, Placement, lanes_for, place
from flashforward_core.engine.shares import Share, shares_of
from flashforward_core.engine.wire import Packed, pack_modules, unpack
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import Slot, Space, TaskGraph
from flashforward_core.kv.pages import plan_pages
from flashforward_core.model.roles import Backbone

pytestmark = pytest.mark.cpu

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def placements(graph: TaskGraph, lanes: int, layout: str) -> Placement:
    return place(graph, lanes=lanes_for(["cpu"] * lanes), layout=layout if lanes > 1 else "single")


def run_shares(shares: tuple[Share, ...], rollout: Rollout, backbone: Backbone) -> list[Event]:
    """Run every lane in this thread, each with weights of its own; everything between lanes is pickled."""
    plain = replace(backbone, models={}, vae=None)
    workers = [LaneWorker(f"lane{n}", "cpu", 1) for n in range(len(shares))]
    for worker, share in zip(workers, shares, strict=True):
        worker.receive(*through_bytes((plain, pack_modules((dict(backbone.models), None)))))
        worker.begin(*through_bytes((rollout, share)))
    left = [list(share.order) for share in shares]
    ready: dict[Slot, Packed] = {}
    events: list[Event] = []
    while any(left):
        lane = next(n for n, ids in enumerate(left) if ids and set(shares[n].arrives.get(ids[0], ())) <= set(ready))
        task_id = left[lane].pop(0)
        slots = shares[lane].arrives.get(task_id, ())
        answer = through_bytes(workers[lane].run(rollout.run, task_id, slots, *(ready[slot] for slot in slots)))
        leaves = shares[lane].leaves.get(task_id, ())
        ready.update(zip(leaves, answer[1:] if leaves else (), strict=True))
        events += [packed_event(event, unpack) for event in (answer[0] if leaves else answer)]
    assert all(worker.end() >= 0 for worker in workers)
    return events


def through_bytes(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@settings(RELAXED, max_examples=12)
@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    frames=st.integers(1, 16),
    lanes=st.integers(1, 4),
    layout=st.sampled_from([name for name in LAYOUTS if name != "single"]),
    encode=st.sets(st.integers(0, 3)),
)
def test_lanes_without_shared_memory_change_no_byte(
    rig: Any, schedule: str, frames: int, lanes: int, layout: str, encode: set[int]
) -> None:
    spec = spec_for(rig.spec(schedule, latent_frames=frames))
    graph, inputs, backbone = build_graph(spec, decode=False), RunInputs(spec=spec, texts=rig.texts()), rig.backbone()
    expected: list[Event] = []
    run_sequential(graph, inputs=inputs, backbone=backbone, on_event=expected.append, poison=True)
    shares = shares_of(graph, placement=placements(graph, lanes, layout), encode=encode)
    rollout = Rollout(run=0, inputs=inputs, pages=plan_pages(spec, graph), fast=FastOptions(), fit=Fit(), poison=True)
    found = run_shares(shares, rollout, backbone)
    assert rig.video(found).equal(rig.video(expected))


@settings(RELAXED, max_examples=40)
@given(
    schedule=st.sampled_from(["flashforward", "clean_history_anchors"]),
    frames=st.integers(1, 40),
    lanes=st.integers(2, 5),
    layout=st.sampled_from(["interleaved", "prelude", "streaming"]),
)
def test_a_lane_that_encodes_anchors_is_sent_none_of_their_kv(
    rig: Any, schedule: str, frames: int, lanes: int, layout: str
) -> None:
    graph = build_graph(spec_for(rig.spec(schedule, latent_frames=frames)), decode=False)
    placement = placements(graph, lanes, layout)
    sent, made = (shares_of(graph, placement=placement, encode=lanes) for lanes in ((), range(lanes)))
    for before, share in zip(sent, made, strict=True):
        arriving = [slot for slots in share.arrives.values() for slot in slots]
        assert len(arriving) == len(set(arriving)), "a slot is sent once"
        assert all(slot.space is not Space.ANCHOR_KV for slot in arriving)
        assert not before.again and set(share.order) - share.again == set(before.order)
        assert [task_id for task_id in share.order if task_id not in share.again] == list(before.order)
    assert sum(len(share.order) for share in sent) == len(graph)


@pytest.mark.parametrize("lanes", [2, 4])
def test_each_lane_is_sent_an_anchor_once_and_a_chunk_as_often_as_its_stage_moves(rig: Any, lanes: int) -> None:
    """Counted by hand for two stages on two lanes: each chunk's latents cross once, between the stages."""
    spec = spec_for(rig.spec("flashforward", latent_frames=14))
    graph = build_graph(spec, decode=False)
    shares = shares_of(graph, placement=placements(graph, lanes, "interleaved"))
    crossing = [s for share in shares for slots in share.arrives.values() for s in slots if s.space is Space.LATENT]
    assert sorted((slot.index, slot.level) for slot in crossing) == [(chunk, 1) for chunk in range(5)]
