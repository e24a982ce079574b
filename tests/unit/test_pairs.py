"""Two forwards as one batch: which ones, what comes out, and what the simulator says of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.batch import Job, render_many
from flashforward_core.engine.cost import CostModel, rounds
from flashforward_core.engine.events import TaskSpan
from flashforward_core.engine.executor import run_placed
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.ops import RunInputs
from flashforward_core.engine.pairing import pairable
from flashforward_core.engine.placement import Placement, lanes_for, place
from flashforward_core.engine.rollout import render
from flashforward_core.engine.simulate import run_lanes, simulate
from flashforward_core.graph.schedules import build_graph, spec_for
from flashforward_core.graph.task import ForwardTask
from flashforward_core.kv_policy import WindowOptions
from flashforward_core.specs import PromptSpan, RolloutSpec, SparseOptions

pytestmark = pytest.mark.cpu
PAIRS = FastOptions(batch_diagonal=True)


def placed(spec: RolloutSpec, *, lanes: int = 1, **options: Any) -> Placement:
    graph = build_graph(spec, decode=False)
    return place(graph, lanes=lanes_for(["cpu"] * lanes), pairable=pairable(spec), **options)


def stage_and_chunk(tasks: Mapping[str, ForwardTask], placement: Placement) -> list[tuple[int, ...]]:
    return [
        tuple(number for one in pair for number in (tasks[one].index, tasks[one].stage))
        for pair in placement.pairs.items()
    ]


@pytest.mark.parametrize(("schedule", "lanes"), [("flashforward", 1), ("flashforward", 2), ("hiar", 1)])
def test_all_but_the_ramps_runs_in_pairs(rig: Any, schedule: str, lanes: int) -> None:
    """Twelve chunks of four stages fill a wavefront. Every task runs once, and neither of a pair needs the other."""
    stages = replace(rig.spec().stages, starts=(1.0, 0.9, 0.7, 0.4))
    spec = spec_for(rig.spec(schedule, latent_frames=36, stages=stages))
    tasks = build_graph(spec, decode=False).by_id()
    placement = placed(spec, lanes=lanes, layout="single" if lanes == 1 else "interleaved")
    found = stage_and_chunk(tasks, placement)
    assert all(chunk != other and stage != other_stage for chunk, stage, other, other_stage in found)
    assert 2 * len(found) >= 4 * 12 - 8
    assert sorted(task for lane in range(lanes) for unit in placement.units(lane) for task in unit) == sorted(tasks)


def test_where_chunks_wait_for_each_other_there_are_no_pairs(rig: Any) -> None:
    assert not placed(spec_for(rig.spec("self_forcing"))).pairs


def test_chunks_of_other_lengths_or_prompts_run_alone(rig: Any) -> None:
    """Fourteen latent frames end with a chunk of two; the prompt changes in the middle."""
    spec = rig.spec(prompts=(PromptSpan(), PromptSpan(start=6, prompt=1)))
    chunks = {frozenset(pair[::2]) for pair in stage_and_chunk(build_graph(spec, decode=False).by_id(), placed(spec))}
    assert chunks == {frozenset({0, 1}), frozenset({2, 3})}  # of the neighbours, 1 and 2 have other prompts; 4 is short


def run(rig: Any, spec: RolloutSpec, *, dtype: torch.dtype = torch.float64, batch: int = 1, **options: Any) -> Tensor:
    texts = rig.texts(dtype, batch=batch)
    return render(rig.backbone(dtype), spec, texts, devices=DevicePlan(**options)).latents_BCFHW


@pytest.mark.parametrize(
    ("schedule", "devices", "batch"),
    [
        ("flashforward", "cpu", 1),
        ("flashforward", "cpu*2", 2),
        ("hiar", "cpu", 2),
        ("flashforward_no_anchors", "cpu*3", 1),
    ],
)
def test_pairs_give_the_same_video_but_for_rounding(rig: Any, schedule: str, devices: str, batch: int) -> None:
    """In float64, where sums in another order differ by 1e-15 or so, through some forwards that feed on each other."""
    spec = rig.spec(schedule, latent_frames=18)
    assert placed(spec_for(spec), lanes=len(DevicePlan(devices=(devices,)).resolve())).pairs or devices != "cpu"
    expected = run(rig, spec, batch=batch, devices=(devices,))
    found = run(rig, spec, batch=batch, devices=(devices,), fast=PAIRS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # latents are kept in float32


def test_pairs_and_recordings_go_together(rig: Any) -> None:
    spec = rig.spec("flashforward", latent_frames=30)
    both = run(rig, spec, devices=("cpu",), fast=replace(PAIRS, graphs="on"))
    assert torch.equal(both, run(rig, spec, devices=("cpu",), fast=PAIRS))


def test_a_pair_is_one_span_in_two_halves(rig: Any) -> None:
    """Freed pages are NaN, so that a page that is taken too early shows."""
    spec = spec_for(rig.spec("flashforward_no_anchors", latent_frames=18))
    graph, placement = build_graph(spec, decode=False), placed(spec)
    report = run_placed(
        graph,
        inputs=RunInputs(spec=spec, texts=rig.texts()),
        backbone=rig.backbone(),
        placement=placement,
        poison=True,
    )
    spans = {span.task: span for span in report.spans}
    assert len(spans) == len(graph) and placement.pairs
    for first, second in placement.pairs.items():
        assert spans[first].end_s == pytest.approx(spans[second].start_s)
        assert length(spans[first]) == pytest.approx(length(spans[second]))
    assert sum(lane.eager for lane in report.launches) == len(graph) - len(placement.pairs)


def length(span: TaskSpan) -> float:
    return span.end_s - span.start_s


def test_the_simulator_times_pairs_by_their_ratio(rig: Any) -> None:
    spec = spec_for(rig.spec("flashforward_no_anchors", latent_frames=18))
    graph, placement = build_graph(spec, decode=False), placed(spec)
    cost = CostModel(forward_s=2.0, pair_ratio=0.75)
    alone, pairs = len(graph) - 2 * len(placement.pairs), len(placement.pairs)
    predicted = simulate(graph, placement=placement, seconds=cost.of(spec), pair_ratio=cost.pair_ratio)
    assert predicted.predicted_s == pytest.approx(2.0 * alone + 0.75 * 4.0 * pairs)
    assert predicted.rounds == len(graph)  # a round is a forward, in a pair too
    ends = {span.task: span.end_s for span in run_lanes(graph, placement=placement, cost=rounds)}
    for task in graph.tasks:
        assert all(ends[parent.id] < ends[task.id] for parent in graph.parents(task))


def test_what_cannot_run_in_pairs_is_refused(rig: Any) -> None:
    backbone, texts = rig.backbone(), rig.texts()
    for spec, words in (
        (rig.spec("self_forcing", kv_policy=WindowOptions(budget_frames=6)), "does not go with kv_policy"),
        (rig.spec("self_forcing", sparse=SparseOptions()), "does not go with sparse"),
    ):
        with pytest.raises(ValueError, match=words):
            render(backbone, spec, texts, devices=DevicePlan(devices=("cpu",), fast=PAIRS))
    with pytest.raises(ValueError, match="does not go with several rollouts"):
        render_many(backbone, [Job(spec=rig.spec(), texts=texts)], devices=DevicePlan(devices=("cpu",), fast=PAIRS))
