"""A KV policy's graph against edge tables typed by hand, and what the simulator makes of it.

9 latents in 3 chunks, 2 stages. A forward hands over instead of publishing; a compaction follows; the next chunk reads
what it kept. What nobody reads is not written: nothing after the last chunk.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashforward_core.engine.cost import CostModel, num_keys, slot_frames
from flashforward_core.engine.placement import lanes_for, place, stage_groups
from flashforward_core.engine.simulate import simulate
from flashforward_core.graph.schedules import SCHEDULES, build_graph
from flashforward_core.graph.task import Kind, slot_from_str
from flashforward_core.kv_policy import (
    KV_POLICIES,
    AnnOptions,
    FutureForcingOptions,
    KeepOptions,
    SparseOptions,
    TempCacheOptions,
    WindowOptions,
    policy_named,
)
from flashforward_core.specs import AnchorPlan, PromptSpan, RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu

SPEC = RolloutSpec(
    shape=VideoShape(width=32, height=32, latent_frames=9),
    stages=StageSchedule(starts=(1.0, 0.5)),
    anchors=AnchorPlan(stride=8),
    kv_policy=FutureForcingOptions(),
)

TABLES = {
    "flashforward_no_anchors": """
        renderer/denoise/c0/s0: latent/0/0 -> latent/0/1 policy_state/0/0/stage0.own
        compact/c0/s0: policy_state/0/0/stage0.own -> policy_state/0/0/stage0
        renderer/denoise/c0/s1: latent/0/1 -> latent/0/2 policy_state/0/1/stage1.own
        compact/c0/s1: policy_state/0/1/stage1.own -> policy_state/0/1/stage1
        renderer/denoise/c1/s0: latent/1/0 policy_state/0/0/stage0 -> latent/1/1 policy_state/1/0/stage0.own
        compact/c1/s0: policy_state/0/0/stage0 policy_state/1/0/stage0.own -> policy_state/1/0/stage0
        renderer/denoise/c1/s1: latent/1/1 policy_state/0/1/stage1 -> latent/1/2 policy_state/1/1/stage1.own
        compact/c1/s1: policy_state/0/1/stage1 policy_state/1/1/stage1.own -> policy_state/1/1/stage1
        renderer/denoise/c2/s0: latent/2/0 policy_state/1/0/stage0 -> latent/2/1
        renderer/denoise/c2/s1: latent/2/1 policy_state/1/1/stage1 -> latent/2/2
    """,
    "self_forcing": """
        renderer/denoise/c0/s0: latent/0/0 -> latent/0/1
        renderer/denoise/c0/s1: latent/0/1 -> latent/0/2
        renderer/commit/c0/l2: latent/0/2 -> policy_state/0/2/clean.own
        compact/c0/s2: policy_state/0/2/clean.own -> policy_state/0/2/clean
        renderer/denoise/c1/s0: latent/1/0 policy_state/0/2/clean -> latent/1/1
        renderer/denoise/c1/s1: latent/1/1 policy_state/0/2/clean -> latent/1/2
        renderer/commit/c1/l2: latent/1/2 policy_state/0/2/clean -> policy_state/1/2/clean.own
        compact/c1/s2: policy_state/0/2/clean policy_state/1/2/clean.own -> policy_state/1/2/clean
        renderer/denoise/c2/s0: latent/2/0 policy_state/1/2/clean -> latent/2/1
        renderer/denoise/c2/s1: latent/2/1 policy_state/1/2/clean -> latent/2/2
    """,
    "last_stage": """
        renderer/denoise/c0/s0: latent/0/0 -> latent/0/1
        renderer/denoise/c0/s1: latent/0/1 -> latent/0/2 policy_state/0/1/stage1.own
        compact/c0/s1: policy_state/0/1/stage1.own -> policy_state/0/1/stage1
        renderer/denoise/c1/s0: latent/1/0 policy_state/0/1/stage1 -> latent/1/1
        renderer/denoise/c1/s1: latent/1/1 policy_state/0/1/stage1 -> latent/1/2 policy_state/1/1/stage1.own
        compact/c1/s1: policy_state/0/1/stage1 policy_state/1/1/stage1.own -> policy_state/1/1/stage1
        renderer/denoise/c2/s0: latent/2/0 policy_state/1/1/stage1 -> latent/2/1
        renderer/denoise/c2/s1: latent/2/1 policy_state/1/1/stage1 -> latent/2/2
    """,
}


def _lines(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


@pytest.mark.parametrize("schedule", TABLES)
def test_edges(schedule: str) -> None:
    graph = build_graph(replace(SPEC, schedule=schedule), decode=False)
    found = [f"{t.id}: {' '.join(map(str, t.reads))} -> {' '.join(map(str, t.writes))}" for t in graph]
    assert found == _lines(TABLES[schedule])


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_policy_adds_compactions_and_no_forward(schedule: str) -> None:
    spec = replace(SPEC, schedule=schedule)
    kept = build_graph(replace(spec, kv_policy=KeepOptions()))
    graph = build_graph(spec)
    forwards = [task.id for task in graph if task.is_forward]
    assert forwards == [task.id for task in kept if task.is_forward]
    anchors = [[s for s in task.reads if s.space == "anchor_kv"] for task in graph if task.is_forward]
    assert anchors == [[s for s in task.reads if s.space == "anchor_kv"] for task in kept if task.is_forward]
    assert {task.kind for task in graph} - {task.kind for task in kept} == {Kind.COMPACT}


def test_keep_is_the_graph_without_a_policy() -> None:
    assert KV_POLICIES["keep"]() == RolloutSpec(shape=SPEC.shape).kv_policy
    assert not any(task.kind is Kind.COMPACT for task in build_graph(replace(SPEC, kv_policy=KeepOptions())))


def test_a_hard_cut_starts_a_state_of_its_own() -> None:
    cut = PromptSpan(start=3, prompt=1, hard_cut=True)
    graph = build_graph(replace(SPEC, schedule="self_forcing", prompts=(PromptSpan(), cut))).by_id()
    assert "compact/c0/s2" not in graph
    assert [str(slot) for slot in graph["renderer/denoise/c1/s0"].reads] == ["latent/1/0"]
    assert [str(slot) for slot in graph["compact/c1/s2"].reads] == ["policy_state/1/2/clean.own"]


@pytest.mark.parametrize("schedule", ["flashforward", "hiar"])
def test_a_compaction_runs_where_its_bank_is_and_costs_no_round(schedule: str) -> None:
    spec = replace(SPEC, schedule=schedule)
    graph = build_graph(spec)
    groups = stage_groups(graph)
    for task in graph:
        if task.kind is Kind.COMPACT:
            (own,) = (slot for slot in task.reads if slot.bank.endswith(".own"))
            assert groups[task.id] == groups[graph.writers[own].id]
    placement = place(graph, lanes=lanes_for(["", ""]))
    without = build_graph(replace(spec, kv_policy=KeepOptions()))
    expected = simulate(without, placement=place(without, lanes=lanes_for(["", ""]))).rounds
    assert simulate(graph, placement=placement).rounds == expected


@pytest.mark.parametrize(
    ("policy", "after_five_chunks"),
    [
        (WindowOptions(budget_frames=9), 9),
        (FutureForcingOptions(budget_frames=12), 12),
        (TempCacheOptions(budget_frames=18), 15),
    ],
)
def test_memory_and_keys_stop_growing_at_the_budget(policy: object, after_five_chunks: int) -> None:
    shape = VideoShape(width=32, height=32, latent_frames=30)
    spec = replace(SPEC, schedule="self_forcing", shape=shape, kv_policy=policy)
    assert slot_frames(slot_from_str("policy_state/1/2/clean"), spec) == 6
    assert slot_frames(slot_from_str("policy_state/4/2/clean"), spec) == after_five_chunks
    assert slot_frames(slot_from_str("policy_state/4/2/clean.own"), spec) == 5  # keys, values and queries of 3
    task = build_graph(spec).by_id()["renderer/denoise/c5/s0"]
    assert num_keys(task, spec) == (after_five_chunks + 3) * 4
    seconds = CostModel(forward_s=1, key_s=0.5).of(spec)
    assert seconds(task) == 1 + 0.5 * (after_five_chunks + 3) * 4


def test_a_policy_by_name_has_its_defaults_but_for_what_is_given() -> None:
    assert policy_named("temp_cache") == TempCacheOptions()
    assert policy_named("window", budget_frames=12) == WindowOptions(budget_frames=12)
    assert policy_named("keep") == KeepOptions()
    assert policy_named("window", sink_frames=12, budget_frames=13) == WindowOptions(sink_frames=12, budget_frames=13)
    assert policy_named("future_forcing", future_weight=0, sink_frames=0) == FutureForcingOptions(
        future_weight=0, sink_frames=0
    )
    assert policy_named("temp_cache", threshold=0.98) == TempCacheOptions(threshold=0.98)
    least = {"window": 4, "future_forcing": 7, "temp_cache": 1}
    assert {name: policy_named(name, budget_frames=frames).held_frames(99) for name, frames in least.items()} == least


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: WindowOptions(budget_frames=3),
            r"budget_frames=3 leaves no window beside sink_frames=3; use at least 4",
        ),
        (lambda: TempCacheOptions(budget_frames=0), r"budget_frames=0 keeps nothing; use at least 1"),
        (
            lambda: policy_named("keep", budget_frames=9),
            r"kv_budget=9 has no use with kv_policy='keep'; it is for: window, future_forcing, temp_cache",
        ),
        (
            lambda: policy_named("future_forcing", budget_frames=6),
            r"kv_budget=6 is below 7, .* kv_policy='future_forcing' works with; use --kv-budget 7 or more",
        ),
        (
            lambda: policy_named("window", sink_frames=12),
            r"kv_budget=9 is below 13, .* kv_policy='window' works with; use --kv-budget 13 or more",
        ),
        (lambda: policy_named("window", sink_frames=-1), r"kv_sink=-1 is below 0; use --kv-sink 0 or more"),
        (
            lambda: policy_named("temp_cache", sink_frames=3),
            r"kv_sink=3 has no use with kv_policy='temp_cache'; it is for: window, future_forcing",
        ),
        (lambda: policy_named("future_forcing", future_weight=2), r"^kv_future_weight=2 is no share; use 0 to 1"),
        (lambda: policy_named("temp_cache", threshold=0.0), r"^kv_threshold=0.0 merges unrelated tokens; use a cosine"),
        (lambda: policy_named("window", budget_frames=3), r"kv_budget=3 is below 4, .*; use --kv-budget 4 or more"),
        (lambda: policy_named("temp_cache", budget_frames=0), r"kv_budget=0 is below 1, .*; use --kv-budget 1 or more"),
        (lambda: KV_POLICIES["drop"], r"kv_policy='drop' is unknown; use one of: keep, window, future_forcing, temp"),
    ],
)
def test_settings_that_keep_nothing_are_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: FutureForcingOptions(budget_frames=float("nan")),
            "budget_frames=nan is no whole number; use one such",
        ),
        (lambda: FutureForcingOptions(sink_frames=2.5), r"sink_frames=2.5 is no whole number; use one such as 3"),
        (lambda: FutureForcingOptions(cells=True), "cells=True is no whole number"),
        (lambda: FutureForcingOptions(future_weight="0.5"), "future_weight='0.5' is no number; use one such as 0.5"),
        (
            lambda: FutureForcingOptions(lookahead=[1]),
            r"lookahead=\[1\] is no tuple of whole numbers; use one such as \(",
        ),
        (lambda: FutureForcingOptions(lookahead=(1, 2.0)), r"lookahead=\(1, 2.0\) is no tuple of whole numbers"),
        (lambda: FutureForcingOptions(per_head="no"), "per_head='no' is neither True nor False"),
        (lambda: WindowOptions(budget_frames=9.7), r"budget_frames=9.7 is no whole number; use one such as 9"),
        (lambda: TempCacheOptions(budget_frames="18"), "budget_frames='18' is no whole number"),
        (lambda: TempCacheOptions(threshold=None), "threshold=None is no number"),
        (lambda: AnnOptions(method=[]), r"method=\[\] is no text; use one such as 'quantised'"),
        (lambda: SparseOptions(planes=3.0), r"planes=3.0 is no whole number"),
    ],
)
def test_another_kind_of_value_is_refused_by_name(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
