"""What holds of every graph, placement and timeline, whatever the specs."""

import random
from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashforward_core.engine.cost import CostModel, rounds
from flashforward_core.engine.placement import LAYOUTS, ORDERS, Placement, lanes_for, place
from flashforward_core.engine.simulate import peak_kv_bytes, simulate
from flashforward_core.graph.anchors import RULES, anchors_for
from flashforward_core.graph.passes import from_json, prune, readers, remaining_path, to_json
from flashforward_core.graph.schedules import SCHEDULES, build_graph, history_chunks, spec_for
from flashforward_core.graph.task import Kind, Role, Slot, Space, TaskGraph, sort_topologically
from flashforward_core.specs import AnchorPlan, History, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu

# Deadlines are off because the machine is shared; the number of examples keeps the file within seconds.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STARTS = (1.0, 0.75, 0.5, 0.25)
KV = (Space.KV, Space.ANCHOR_KV)

plans = st.builds(
    AnchorPlan,
    stride=st.integers(1, 12),
    block_frames=st.integers(1, 4),
    context=st.integers(1, 4),
    rule=st.sampled_from(list(RULES)),
)


@st.composite
def specs(draw: st.DrawFn) -> RolloutSpec:
    latent_frames = draw(st.integers(1, 36))
    chunk_frames = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 5))
    history = History(
        chunks=chunks, planner_blocks=draw(st.integers(0, 4)), sink=draw(st.integers(0, chunks * chunk_frames))
    )
    starts = sorted(draw(st.sets(st.integers(1, max(1, latent_frames - 1)), max_size=2))) if latent_frames > 1 else []
    cuts = tuple(PromptSpan(start=start, prompt=1, hard_cut=draw(st.booleans())) for start in starts)
    spec = RolloutSpec(
        shape=VideoShape(width=16, height=16, latent_frames=latent_frames),
        schedule=draw(st.sampled_from(list(SCHEDULES))),
        chunk_frames=chunk_frames,
        stages=StageSchedule(starts=STARTS[: draw(st.integers(1, 4))]),
        anchors=draw(plans),
        history=history,
        prompts=(PromptSpan(), *cuts),
    )
    return spec_for(spec)


@st.composite
def placements(draw: st.DrawFn) -> tuple[RolloutSpec, TaskGraph, Placement]:
    spec = draw(specs())
    graph = build_graph(spec, given_anchors=draw(st.booleans()))
    lanes = draw(st.integers(1, 7))
    names = [name for name in (*LAYOUTS, "auto") if lanes > 1 or name != "streaming"]
    layout, order = draw(st.sampled_from(names)), draw(st.sampled_from(ORDERS))
    return spec, graph, place(graph, lanes=lanes_for([""] * lanes), layout=layout, order=order)


@quick
@given(specs(), st.booleans())
def test_graphs_are_acyclic_and_slots_have_one_writer(spec: RolloutSpec, given_anchors: bool) -> None:
    graph = build_graph(spec, given_anchors=given_anchors)
    writes = Counter(slot for task in graph.tasks for slot in task.writes)
    assert max(writes.values()) == 1
    assert len({task.id for task in graph.tasks}) == len(graph)
    TopologicalSorter({t.id: [p.id for p in graph.parents(t)] for t in graph.tasks}).prepare()  # raises on a cycle
    assert all(slot in writes or slot in graph.inputs for task in graph.tasks for slot in task.reads)


@quick
@given(specs(), st.randoms(use_true_random=False))
def test_any_topological_order_is_a_graph_with_the_same_edges(spec: RolloutSpec, shuffle: random.Random) -> None:
    graph = build_graph(spec)
    tasks = list(graph.tasks)
    shuffle.shuffle(tasks)
    again = sort_topologically(tasks, graph.inputs)
    assert set(again.tasks) == set(graph.tasks)
    assert again.counts() == graph.counts()


@quick
@given(specs())
def test_forwards_have_closed_forms(spec: RolloutSpec) -> None:
    counts, schedule = build_graph(spec).counts(), SCHEDULES[spec.schedule]
    stages, chunks, blocks = spec.stages.num_stages, spec.num_chunks, len(spec.anchor_blocks())
    assert counts["renderer_denoise"] == chunks * stages
    assert counts["planner_denoise"] == blocks * stages
    read_later = len({earlier for chunk in range(chunks) for earlier in history_chunks(spec, chunk)})
    if spec.history.sink == 0 and not any(span.hard_cut for span in spec.prompts):
        assert read_later == chunks - 1
    commits = {"clean": read_later, "output_level": read_later * stages}
    assert counts["renderer_commit"] == commits.get(schedule.memory, 0)
    assert counts["planner_commit"] <= blocks


@quick
@given(plans, st.integers(1, 60), st.integers(1, 5))
def test_gamma_is_consecutive_in_range_and_moves_forward(plan: AnchorPlan, latent_frames: int, chunk: int) -> None:
    count = len(plan.positions(latent_frames))
    starts = range(0, latent_frames, chunk)
    found = [anchors_for(plan, range(s, min(s + chunk, latent_frames)), latent_frames) for s in starts]
    for gamma in found:
        assert len(gamma) == min(plan.context, count)
        assert all(b == a + 1 for a, b in pairwise(gamma))
        assert 0 <= gamma[0] <= gamma[-1] < count
    assert found == sorted(found)


@quick
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 60), st.integers(1, 5))
def test_no_window_is_nearer_than_nearest(stride: int, context: int, latent_frames: int, chunk: int) -> None:
    plan = AnchorPlan(stride=stride, context=context)
    positions = plan.positions(latent_frames)
    size = min(context, len(positions))
    windows = [positions[i : i + size] for i in range(len(positions) - size + 1)]
    for start in range(0, latent_frames, chunk):
        frames = range(start, min(start + chunk, latent_frames))
        gaps = [abs(sum(window) / size - sum(frames) / len(frames)) for window in windows]
        # sums of small integers over small counts: equal gaps may differ in the last bits
        best = max(i for i, gap in enumerate(gaps) if gap <= min(gaps) + 1e-9)
        assert anchors_for(plan, frames, latent_frames)[0] == best


@quick
@given(specs())
def test_anchors_that_are_read_are_of_the_same_scene(spec: RolloutSpec) -> None:
    """Scenes by their numbers, counted cut by cut; one that has no anchor reads the last scene's before it that has."""
    spec = spec_for(spec)
    cuts = [span.start for span in spec.prompts if span.hard_cut]
    positions = spec.anchor_positions()

    def scene(frame: int) -> int:
        return sum(cut <= frame for cut in cuts)

    with_anchors = {scene(position) for position in positions}
    for task in build_graph(spec, decode=False).tasks:
        read = {scene(positions[slot.index]) for slot in task.reads if slot.space is Space.ANCHOR_KV}
        if task.role is Role.PLANNER:
            first = positions[spec.anchor_blocks()[task.index][0]]
            assert read <= {scene(first)}
        elif positions:
            own = scene(spec.chunk(task.index).start)
            assert read == {max(number for number in with_anchors if number <= own)}


@quick
@given(specs())
def test_history_is_bounded_sorted_and_of_the_same_scene(spec: RolloutSpec) -> None:
    cuts = [span.start for span in spec.prompts if span.hard_cut]
    for chunk in range(spec.num_chunks):
        seen = history_chunks(spec, chunk)
        assert len(seen) <= spec.history.chunks
        assert list(seen) == sorted(set(seen))
        assert all(earlier < chunk for earlier in seen)
        start = spec.chunk(chunk).start
        assert not any(spec.chunk(earlier).start < cut <= start for earlier in seen for cut in cuts)
        if chunk and not cuts:
            assert len(seen) == min(chunk, spec.history.chunks)


@quick
@given(specs())
def test_renderer_never_commits_in_flight_and_every_kv_slot_is_read(spec: RolloutSpec) -> None:
    graph = build_graph(spec)
    commits = [t for t in graph.tasks if t.kind is Kind.COMMIT and t.role is Role.RENDERER]
    assert not (SCHEDULES[spec.schedule].memory in ("same_stage", "last_stage") and commits)
    used = readers(graph)
    assert all(used[slot] for task in graph.tasks for slot in task.writes if slot.space in KV)
    assert prune(graph) == graph


@quick
@given(specs())
def test_in_flight_history_has_the_level_of_its_reader(spec: RolloutSpec) -> None:
    levels = {"same_stage": lambda stage: stage, "output_level": lambda stage: stage + 1}
    memory = SCHEDULES[spec.schedule].memory
    for task in build_graph(spec).tasks:
        if task.role is Role.RENDERER and task.kind is Kind.DENOISE and memory in levels:
            read = {(slot.level, slot.bank) for slot in task.reads if slot.space is Space.KV}
            assert read <= {(levels[memory](task.stage), f"stage{task.stage}")}


@quick
@given(specs(), st.booleans())
def test_graphs_survive_json(spec: RolloutSpec, given_anchors: bool) -> None:
    graph = build_graph(spec, given_anchors=given_anchors)
    assert from_json(to_json(graph)) == graph


@quick
@given(placements())
def test_placements_run_everything_once_and_keep_stages_in_place(
    case: tuple[RolloutSpec, TaskGraph, Placement],
) -> None:
    _, graph, placement = case
    ran = [task_id for lane in placement.order for task_id in lane]
    assert Counter(ran) == Counter(task.id for task in graph.tasks)
    assert all(placement.assign[task_id] == i for i, lane in enumerate(placement.order) for task_id in lane)
    homes: dict[int, set[int]] = {}
    for task in graph.tasks:
        if task.role is Role.RENDERER and task.kind is Kind.DENOISE:
            homes.setdefault(task.stage, set()).add(placement.assign[task.id])
    assert all(len(lanes) == 1 for lanes in homes.values())


@quick
@given(placements(), st.booleans())
def test_timelines_respect_lanes_and_dependencies(case: tuple[RolloutSpec, TaskGraph, Placement], fitted: bool) -> None:
    spec, graph, placement = case
    # durations that are sums of powers of two keep the arithmetic exact
    cost = CostModel(forward_s=0.5, key_s=2**-6, decode_frame_s=0.25).of(spec) if fitted else rounds
    timeline = simulate(graph, placement=placement, seconds=cost if fitted else None)
    spans = {span.task: span for span in timeline.spans}
    for task in graph.tasks:
        span = spans[task.id]
        assert span.end_s - span.start_s == cost(task)
        assert all(spans[parent.id].end_s <= span.start_s for parent in graph.parents(task))
    for lane in placement.order:
        assert all(spans[a].end_s <= spans[b].start_s for a, b in pairwise(lane))
    assert timeline.length >= max(remaining_path(graph, cost=cost).values())
    assert timeline.length * len(placement.lanes) >= sum(map(cost, graph.tasks))
    assert timeline.predicted_s == (timeline.length if fitted else None)
    assert [span.start_s for span in timeline.spans] == sorted(span.start_s for span in timeline.spans)


@quick
@given(placements())
def test_peak_memory_is_what_counting_at_every_moment_gives(case: tuple[RolloutSpec, TaskGraph, Placement]) -> None:
    _, graph, placement = case
    timeline = simulate(graph, placement=placement)
    spans = {span.task: span for span in timeline.spans}

    def size(slot: Slot) -> int:
        return 1 + slot.index % 3

    def alive(slot: Slot, lane: int, moment: float) -> bool:
        writer = spans[graph.writers[slot].id]
        ends = [spans[t.id].end_s for t in used[slot] if spans[t.id].lane == lane]
        if writer.lane == lane:
            return writer.start_s < moment < max([writer.end_s, *ends])
        return bool(ends) and writer.end_s < moment < max(ends)

    used = readers(graph)
    kv = [slot for slot in graph.writers if slot.space in KV]
    moments = [i + 0.5 for i in range(int(timeline.length))]  # rounds are whole, so nothing changes in between
    counted = tuple(
        max((sum(size(slot) for slot in kv if alive(slot, lane, moment)) for moment in moments), default=0)
        for lane in range(len(placement.lanes))
    )
    found = peak_kv_bytes(graph, spans=timeline.spans, lanes=len(placement.lanes), slot_bytes=size)
    assert found == counted


@quick
@given(specs(), st.integers(1, 7))
def test_auto_is_never_longer_than_a_layout_it_chooses_from(spec: RolloutSpec, lanes: int) -> None:
    graph = build_graph(spec)

    def length(layout: str) -> float:
        placement = place(graph, lanes=lanes_for([""] * lanes), layout=layout)
        return simulate(graph, placement=placement).length

    names = ["interleaved", "prelude", *(["streaming"] if lanes > 1 else [])]
    assert length("auto") <= min(map(length, names))
