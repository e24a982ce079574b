"""Claims about placement, simulated timelines, memory and costs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashforward_core.engine.cost import (
    CostKey,
    CostModel,
    fitted_devices,
    load_cost,
    num_keys,
    save_cost,
    slot_frames,
)
from flashforward_core.engine.events import LaneInfo, Launches, TaskSpan, Timeline
from flashforward_core.engine.placement import LAYOUTS, Placement, lanes_for, place, stage_groups
from flashforward_core.engine.simulate import simulate
from flashforward_core.graph.halves import in_halves
from flashforward_core.graph.schedules import SCHEDULES, build_graph, planner_graph, spec_for
from flashforward_core.graph.task import ForwardTask, Kind, Slot, TaskGraph
from flashforward_core.kv_policy import WindowOptions
from flashforward_core.model.config import WAN_1_3B
from flashforward_core.specs import AnchorPlan, History, RolloutSpec, VideoShape

pytestmark = pytest.mark.cpu


def rollout(latent_frames: int = 81, schedule: str = "flashforward", **changes: Any) -> RolloutSpec:
    shape = VideoShape(width=832, height=480, latent_frames=latent_frames)
    return spec_for(RolloutSpec(shape=shape, schedule=schedule, **changes))


def placed(spec: RolloutSpec, *, lanes: int, layout: str = "interleaved", order: str = "latency") -> Placement:
    return place(build_graph(spec), lanes=lanes_for([""] * lanes), layout=layout, order=order)


def rounds_of(spec: RolloutSpec, *, lanes: int, layout: str) -> float | None:
    return simulate(build_graph(spec), placement=placed(spec, lanes=lanes, layout=layout)).rounds


def peaks_of(spec: RolloutSpec, *, lanes: int, **options: str) -> tuple[int, ...]:
    def frames(slot: Slot) -> int:
        return slot_frames(slot, spec)

    return simulate(build_graph(spec), placement=placed(spec, lanes=lanes, **options), slot_bytes=frames).peak_kv_bytes


# The paper's closed forms where it gives one: 5P + N + S - 1 and 5 + N + S - 1; the rest as simulated before, once.
@pytest.mark.parametrize(
    ("schedule", "layout", "lanes", "expected"),
    [
        ("flashforward", "interleaved", 4, (37, 60, 105)),
        ("flashforward", "interleaved", 2, (66, 111, 201)),
        ("flashforward", "prelude", 4, (45, 75, 135)),
        ("flashforward", "streaming", 5, (35, 55, 95)),
        ("flashforward", "single", 4, (123, 213, 393)),
        ("hiar", "interleaved", 4, (56, 96, 176)),
        ("self_forcing", "interleaved", 4, (134, 234, 434)),
        ("self_forcing", "single", 1, (134, 234, 434)),
    ],
)
def test_rounds_of_the_layouts(schedule: str, layout: str, lanes: int, expected: tuple[int, ...]) -> None:
    found = tuple(rounds_of(rollout(n, schedule), lanes=lanes, layout=layout) for n in (81, 141, 261))
    assert found == expected


def test_a_stride_of_five_starves_streaming() -> None:
    assert rounds_of(rollout(anchors=AnchorPlan(stride=5)), lanes=5, layout="streaming") == 37  # not 35


def test_auto_takes_the_shortest_layout() -> None:
    assert placed(rollout(), lanes=4, layout="auto").layout == "interleaved"
    assert placed(rollout(), lanes=1, layout="auto").layout == "single"
    assert rounds_of(rollout(), lanes=5, layout="auto") == 35


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_stage_never_moves(schedule: str, layout: str) -> None:
    spec = rollout(41, schedule)
    graph, placement = build_graph(spec), placed(spec, lanes=3, layout=layout)
    for stage in range(4):
        homes = {placement.assign[t.id] for t in graph.tasks if t.role == "renderer" and t.id.endswith(f"/s{stage}")}
        assert len(homes) == 1
    assert len({placement.assign[t.id] for t in graph.tasks if t.kind == "decode"}) == 1  # one decoder state


@pytest.mark.parametrize(
    ("schedule", "groups"),
    [("flashforward", 4), ("flashforward_no_anchors", 4), ("hiar", 4), ("self_forcing", 1), ("last_stage", 1)],
)
def test_stages_that_share_a_bank_share_a_lane(schedule: str, groups: int) -> None:
    assert len(set(stage_groups(build_graph(rollout(41, schedule))).values())) == groups


def test_hiar_commits_beside_its_stage() -> None:
    groups = stage_groups(build_graph(rollout(41, "hiar")))
    assert {groups[f"renderer/commit/c3/l{level}"] for level in (1,)} == {groups["renderer/denoise/c3/s0"]}
    assert [groups[f"renderer/denoise/c3/s{stage}"] for stage in range(4)] == [0, 1, 2, 3]


def test_spare_lanes_take_the_planner_and_the_decoder() -> None:
    graph = build_graph(rollout())
    for layout, planner, decoder in (("streaming", {5}, {4}), ("interleaved", {0, 1, 2, 3, 4}, {5})):
        assign = placed(rollout(), lanes=6, layout=layout).assign
        assert {assign[t.id] for t in graph.tasks if t.role == "planner"} <= planner
        assert {assign[t.id] for t in graph.tasks if t.kind == "decode"} == decoder


def test_prelude_plans_before_it_renders_and_spreads_where_blocks_are_independent() -> None:
    spec = rollout(history=History(planner_blocks=0))
    placement = placed(spec, lanes=4, layout="prelude")
    graph = build_graph(spec)
    spans = simulate(graph, placement=placement).spans
    planner_end = max(span.end_s for span in spans if span.task.startswith("planner"))
    assert planner_end == 5  # three blocks side by side
    assert min(span.start_s for span in spans if span.task.startswith("renderer")) >= planner_end


def test_one_lane_finishes_a_chunk_before_the_next() -> None:
    spec = rollout(21, "flashforward_no_anchors")
    order = placed(spec, lanes=1).order[0]
    assert order[:6] == (
        *(f"renderer/denoise/c0/s{stage}" for stage in range(4)),
        "decode/c0",
        "renderer/denoise/c1/s0",
    )


def test_memory_order_finishes_a_stage_before_the_next() -> None:
    spec = rollout(21)
    for lanes in (1, 2):
        for lane in placed(spec, lanes=lanes, order="memory").order:
            stages = [int(task_id[-1]) for task_id in lane if task_id.startswith("renderer/denoise")]
            assert stages == sorted(stages)


def test_memory_order_keeps_one_bank_instead_of_four() -> None:
    spec = rollout(81, "flashforward_no_anchors")
    assert peaks_of(spec, lanes=1, order="memory") == (18,)  # a window of 15 and the chunk itself
    assert peaks_of(spec, lanes=1) == (4 * 15 + 3,)


def test_each_lane_holds_its_bank_and_the_anchors_it_reads() -> None:
    short = rollout(21, anchors=AnchorPlan(stride=10))  # 3 anchors, 7 chunks
    assert peaks_of(short, lanes=5, layout="streaming") == (21, 21, 21, 21, 3)


def test_kv_of_a_latent_frame_is_the_known_size() -> None:
    assert WAN_1_3B.kv_bytes_per_frame(1560) / 2**30 == pytest.approx(0.268, abs=5e-4)  # three digits are given


def test_the_planner_alone_can_be_placed() -> None:
    graph = planner_graph(rollout())
    for layout in LAYOUTS:
        placement = place(graph, lanes=lanes_for(["", ""]), layout=layout)
        assert simulate(graph, placement=placement).rounds == 14  # 12 denoise, 2 commits, one after the other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 0}, "devices=0 is below 1"),
        ({"lanes": 1, "layout": "streaming"}, "devices=1 is below 2 for layout='streaming'"),
        ({"lanes": 1, "layout": "fast"}, "layout='fast' is unknown; use one of: auto, interleaved"),
        ({"lanes": 1, "order": "fast"}, "order='fast' is unknown; use one of: latency, memory"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed(rollout(9), **options)


def test_keys_are_anchors_history_and_self() -> None:
    spec = rollout()
    graph = build_graph(spec).by_id()
    keys = {task_id: num_keys(graph[task_id], spec) / 1560 for task_id in graph if not task_id.startswith("decode")}
    assert keys["renderer/denoise/c0/s0"] == 6  # 3 anchors and itself
    assert keys["renderer/denoise/c26/s3"] == 21  # the whole context
    assert keys["planner/commit/b2"] == 9


def test_costs_follow_the_keys() -> None:
    spec = rollout(21)
    graph: TaskGraph = build_graph(spec)
    cost = CostModel(forward_s=0.02, key_s=1e-6, decode_frame_s=0.1)
    seconds, tasks = cost.of(spec), graph.by_id()
    assert seconds(tasks["renderer/denoise/c0/s0"]) == pytest.approx(0.02 + 6 * 1560e-6)
    assert seconds(tasks["decode/c0"]) == pytest.approx(0.3)
    placement = place(graph, lanes=lanes_for([""]))
    timeline = simulate(graph, placement=placement, seconds=seconds)
    assert timeline.predicted_s == pytest.approx(sum(seconds(task) for task in graph.tasks))
    assert timeline.rounds == graph.counts()["total"]


def test_compactions_take_the_time_of_their_policy() -> None:
    """Seven chunks publish, of three latent frames each; another policy's time does not count."""
    cost = CostModel(forward_s=0.02, compact_frame_s={"window": 0.001, "temp_cache": 0.5})
    spec = replace(rollout(24), schedule="self_forcing", anchors=None)
    policy = replace(spec, kv_policy=WindowOptions())
    for one, expected in ((spec, 0), (policy, 7 * 3 * 0.001)):
        graph, seconds = build_graph(one), cost.of(one)
        placement = place(graph, lanes=lanes_for([""]))
        predicted = simulate(graph, placement=placement, seconds=seconds).predicted_s
        assert predicted == pytest.approx(0.02 * graph.counts()["total"] + expected)


def test_a_line_is_fitted_exactly() -> None:
    cost = CostModel.fit({9360: 0.05, 18720: 0.07, 32760: 0.1})  # 0.03 s and 0.02 s per 9360 keys
    assert (cost.forward_s, cost.key_s) == pytest.approx((0.03, 0.02 / 9360), rel=1e-9)  # rounding in fp64
    assert CostModel.fit({9360: 0.05}) == CostModel(forward_s=0.05)


def test_one_slow_first_forward_does_not_tilt_the_line() -> None:
    on_line = {frames * 1560: 0.03 + 0.002 * frames for frames in range(6, 22, 3)}
    cost = CostModel.fit({3 * 1560: 0.2, **on_line})
    assert cost.key_s * 1560 == pytest.approx(0.002)
    assert cost.forward_s == pytest.approx(0.03)


def test_forwards_in_which_more_keys_take_no_longer_cost_the_same() -> None:
    assert CostModel.fit({10: 2.0, 20: 1.0, 30: 1.5}) == CostModel(forward_s=1.5)


@pytest.mark.parametrize("forwards", [{}, {10: 0.1, 20: 1.0}, {10: math.nan}])
def test_a_fit_that_is_no_cost_is_refused(forwards: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"forwards is empty|is not a duration"):
        CostModel.fit(forwards)


def test_fits_are_kept_by_what_they_were_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    key = CostKey(device="H200", model="1.3B", resolution="480p", precision="bf16")
    other = CostKey(device="B200", model="1.3B", resolution="480p", precision="bf16")
    assert load_cost(path, key=key) is None
    save_cost(path, key=key, cost=CostModel(forward_s=1.0))
    save_cost(path, key=other, cost=CostModel(forward_s=2.0))
    save_cost(
        path, key=key, cost=CostModel(forward_s=3.0, key_s=0.5, decode_frame_s=0.25, compact_frame_s={"window": 0.1})
    )
    assert load_cost(path, key=key) == CostModel(
        forward_s=3.0, key_s=0.5, decode_frame_s=0.25, compact_frame_s={"window": 0.1}
    )
    assert set(fitted_devices(path, model="1.3B", resolution="480p", precision="bf16")) == {"H200", "B200"}
    assert fitted_devices(path, model="14B", resolution="480p", precision="bf16") == ()


@pytest.mark.parametrize(
    "text",
    [b"[]", b"{", b"\xb9", b'{"fits": 5}', b'{"fits": [5]}', b'{"fits": [{"cost": 1}]}', b'{"fits": [{"key": 1}]}'],
)
def test_a_broken_file_of_fits_names_itself(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"costs\.json is not a file of fitted costs"):
        fitted_devices(path, model="1.3B", resolution="480p", precision="bf16")


def test_a_timeline_survives_json_and_is_the_contract_s() -> None:
    timeline = Timeline(
        source="measured",
        lanes=(LaneInfo(name="lane0", device="cuda:0"),),
        spans=(TaskSpan(task="decode/c0", lane=0, start_s=0.5, end_s=1.0),),
        rounds=3.0,
        predicted_s=0.9,
        peak_kv_bytes=(7,),
        peak_bytes={"cuda:0": 9},
        launches=(Launches(eager=5, recorded=1, replayed=4, in_parts=2, waited_s=0.25, launching_s=0.5),),
    )
    data = json.loads(json.dumps(timeline.to_json()))
    assert data == {
        "source": "measured",
        "lanes": [{"name": "lane0", "device": "cuda:0"}],
        "spans": [{"task": "decode/c0", "lane": 0, "start_s": 0.5, "end_s": 1.0}],
        "rounds": 3.0,
        "predicted_s": 0.9,
        "peak_kv_bytes": [7],
        "peak_bytes": {"cuda:0": 9},
        "launches": [{"eager": 5, "recorded": 1, "replayed": 4, "in_parts": 2, "waited_s": 0.25, "launching_s": 0.5}],
    }
    assert Timeline.from_json(data) == timeline


def test_a_trace_has_a_thread_per_lane_and_microseconds() -> None:
    spec = rollout(9)
    timeline = simulate(build_graph(spec), placement=placed(spec, lanes=2))
    events = timeline.to_chrome_trace()["traceEvents"]
    assert [e["args"]["name"].split()[0] for e in events if e["ph"] == "M"] == ["lane0", "lane1"]
    first = next(e for e in events if e["name"] == "planner/denoise/b0/s0")
    assert (first["ph"], first["ts"], first["dur"], first["cat"]) == ("X", 0.0, 1e6, "planner")


def lanes_of(graph: TaskGraph, placement: Placement, kind: Kind) -> set[int]:
    return {placement.assign[task.id] for task in graph.tasks if task.kind is kind}


@pytest.mark.parametrize("layout", ["auto", "interleaved", "prelude", "streaming", "single"])
def test_decoding_gets_a_lane_of_its_own_when_asked(layout: str) -> None:
    graph = build_graph(rollout(21))
    placement = place(graph, lanes=lanes_for([""] * 3), layout=layout, decode="own")
    assert lanes_of(graph, placement, Kind.DECODE) == {2}
    assert 2 not in lanes_of(graph, placement, Kind.DENOISE) | lanes_of(graph, placement, Kind.COMMIT)


def test_shared_decoding_stays_where_the_clean_latents_are() -> None:
    graph = build_graph(rollout(21))
    placement = place(graph, lanes=lanes_for([""] * 6), layout="interleaved", decode="shared")
    assert lanes_of(graph, placement, Kind.DECODE) == {placement.assign["renderer/denoise/c0/s3"]}


def test_a_lane_for_decoding_alone_is_not_kept_when_nothing_is_decoded() -> None:
    graph = build_graph(rollout(21), decode=False)
    placement = place(graph, lanes=lanes_for(["", ""]), layout="interleaved", decode="own")
    assert lanes_of(graph, placement, Kind.DENOISE) == {0, 1}


def test_decoding_on_one_device_cannot_have_its_own() -> None:
    graph = build_graph(rollout(21))
    with pytest.raises(ValueError, match="devices=1 is below 2 for decode='own'"):
        place(graph, lanes=lanes_for([""]), decode="own")
    with pytest.raises(ValueError, match="devices=2 is below 3 for decode='split'"):
        place(in_halves(graph), lanes=lanes_for(["", ""]), decode="split")
    with pytest.raises(ValueError, match="decode='both' is unknown"):
        place(graph, lanes=lanes_for([""]), decode="both")


def test_a_decoder_on_two_lanes_keeps_up_where_one_does_not() -> None:
    """Decoding a latent frame takes a forward's time here: a chain of 81, or in halves one of 48.6 beside a shorter."""
    spec = RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=81))
    graph, cost = build_graph(spec, decode=True), CostModel(forward_s=1.0, decode_frame_s=1.0)
    halves = in_halves(graph)
    assert len(halves) == len(graph) + 27 and {task.id for task in graph} <= {task.id for task in halves}
    lengths = [
        simulate(g, placement=place(g, lanes=lanes_for([""] * 6), decode=decode), seconds=cost.of(spec)).predicted_s
        for g, decode in ((graph, "own"), (halves, "split"))
    ]
    assert lengths[0] > 81 and 0.6 * 81 < lengths[1] < 0.7 * lengths[0]
    by_id = halves.by_id()
    (between,) = set(by_id["decode/c5/front"].writes) & set(by_id["decode/c5"].reads)
    assert by_id["decode/c5"].half == "back" and str(between) == "vae_state/5/0/between"


def test_decoding_on_any_lane_shortens_a_job_that_one_lane_would_hold_up() -> None:
    """Decoding a chunk takes two forwards' time here: one lane with it has more to do than the other."""
    spec = RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=81))
    graph = build_graph(spec, decode=True)

    def seconds(task: ForwardTask) -> float:
        return 2.0 if task.kind is Kind.DECODE else 1.0

    lengths = {}
    for decode in ("shared", "any"):
        placement = place(graph, lanes=lanes_for(["", ""]), layout="interleaved", decode=decode)
        lengths[decode] = simulate(graph, placement=placement, seconds=seconds).predicted_s
    work = 123 + 27 * 2
    assert work / 2 <= lengths["any"] < 1.1 * work / 2 < lengths["shared"]
