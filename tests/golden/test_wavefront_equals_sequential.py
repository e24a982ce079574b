"""Threads, lanes, layouts and orders change when things run, and not one byte of what comes out."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine import ops
from flashforward_core.engine.events import Event
from flashforward_core.engine.executor import run_placed, run_sequential
from flashforward_core.engine.ops import RunInputs
from flashforward_core.engine.placement import LAYOUTS, ORDERS, Placement, lanes_for, place
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import ForwardTask, Space, TaskGraph
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import History, PromptSpan, RolloutSpec

pytestmark = pytest.mark.cpu

JITTER_S = 0.001  # some forwards' time: enough for lanes to overtake each other


@dataclass(frozen=True)
class Runs:
    """Runs a spec both ways, over poisoned pages, and returns the video's latents."""

    rig: Any
    backbone: Backbone

    def inputs(self, spec: RolloutSpec) -> RunInputs:
        return RunInputs(spec=spec_for(spec), texts=self.rig.texts())

    def sequential(
        self, spec: RolloutSpec, *, order: Sequence[str] | None = None, graph: TaskGraph | None = None
    ) -> Tensor:
        events: list[Event] = []
        run_sequential(
            graph or build_graph(spec, decode=False),
            inputs=self.inputs(spec),
            backbone=self.backbone,
            order=order,
            on_event=events.append,
            poison=True,
        )
        return self.rig.video(events)

    def placed(self, spec: RolloutSpec, *, placement: Placement, seed: int = 0) -> Tensor:
        events: list[Event] = []
        run_placed(
            build_graph(spec, decode=False),
            inputs=self.inputs(spec),
            backbone=self.backbone,
            placement=placement,
            on_event=events.append,
            before_task=jitter(seed),
            poison=True,
        )
        return self.rig.video(events)

    def scattered(self, graph: TaskGraph, *, lanes: int, seed: int) -> Placement:
        """Put every task on a random lane, in a random topological order: KV and latents have to travel."""
        draw = random.Random(seed)
        assign = {task.id: draw.randrange(lanes) for task in graph.tasks}
        order = self.rig.shuffled(graph, seed=seed)
        return Placement(
            layout="scattered",
            lanes=lanes_for(["cpu"] * lanes),
            assign=assign,
            order=tuple(tuple(task for task in order if assign[task] == lane) for lane in range(lanes)),
        )


def jitter(seed: int) -> Callable[[ForwardTask], None]:
    draw = random.Random(seed)
    return lambda task: time.sleep(draw.random() * JITTER_S)


@pytest.fixture(scope="module")
def runs(rig: Any) -> Runs:
    return Runs(rig=rig, backbone=rig.backbone())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_lanes_change_no_byte(runs: Runs, schedule: str, layout: str, order: str) -> None:
    spec = runs.rig.spec(schedule)
    expected = runs.sequential(spec)
    graph = build_graph(spec, decode=False)
    for lanes in range(1, 7) if schedule == "flashforward" else (2, 5):
        if lanes == 1 and layout == "streaming":
            continue  # refused: the planner and the stages need a lane each
        placement = place(graph, lanes=lanes_for(["cpu"] * lanes), layout=layout, order=order)
        assert torch.equal(runs.placed(spec, placement=placement, seed=lanes), expected), f"{lanes} lanes"


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_any_topological_order_gives_the_same_bytes(runs: Runs, schedule: str) -> None:
    spec = runs.rig.spec(schedule)
    expected = runs.sequential(spec)
    for seed in range(4):
        order = runs.rig.shuffled(build_graph(spec, decode=False), seed=seed)
        assert torch.equal(runs.sequential(spec, order=order), expected), f"seed {seed}"


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_kv_that_travels_between_lanes_keeps_its_bytes(runs: Runs, schedule: str) -> None:
    spec = runs.rig.spec(schedule)
    expected = runs.sequential(spec)
    for lanes in (2, 5):
        placement = runs.scattered(build_graph(spec, decode=False), lanes=lanes, seed=lanes)
        assert torch.equal(runs.placed(spec, placement=placement, seed=lanes), expected), f"{lanes} lanes"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": (PromptSpan(), PromptSpan(start=7, prompt=1, hard_cut=True)), "latent_frames": 20},
        {"history": History(chunks=3, sink=3), "latent_frames": 20},
        {"history": History(chunks=0)},
    ],
    ids=["hard cut", "sink", "no history"],
)
def test_unusual_windows_change_no_byte(runs: Runs, changes: dict[str, Any]) -> None:
    spec = runs.rig.spec(**changes)
    graph = build_graph(spec, decode=False)
    expected = runs.sequential(spec)
    placement = place(graph, lanes=lanes_for(["cpu"] * 3), layout="interleaved")
    assert torch.equal(runs.placed(spec, placement=placement), expected)
    for seed in range(3):
        assert torch.equal(runs.sequential(spec, order=runs.rig.shuffled(graph, seed=seed)), expected)


def test_unkeyed_noise_would_be_caught(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: noise from one running generator. Then the order of the tasks shows in the bytes."""
    generator = torch.Generator().manual_seed(0)

    def unkeyed(seeds: Any, purpose: str, latent_frames: Any, stage: int, shape: Any) -> Tensor:
        frames = [torch.randn(shape, generator=generator) for _ in latent_frames]
        return torch.stack(frames, dim=1)[None].expand(len(seeds), -1, -1, -1, -1)

    monkeypatch.setattr(ops, "keyed_noise_frames", unkeyed)
    spec = runs.rig.spec()
    expected = runs.sequential(spec)
    generator.manual_seed(0)
    assert torch.equal(runs.sequential(spec), expected)  # the same order draws the same numbers
    generator.manual_seed(0)
    order = runs.rig.shuffled(build_graph(spec, decode=False), seed=1)
    assert not torch.equal(runs.sequential(spec, order=order), expected)


def test_a_dropped_edge_shows(runs: Runs) -> None:
    """Attention sees just what its task reads: without one KV slot, that chunk and the later ones change."""
    spec = runs.rig.spec()
    graph = build_graph(spec, decode=False)
    changed = graph.by_id()["renderer/denoise/c3/s0"]
    dropped = next(slot for slot in changed.reads if slot.space is Space.KV)
    reads = tuple(slot for slot in changed.reads if slot != dropped)
    tasks = tuple(replace(task, reads=reads) if task is changed else task for task in graph.tasks)
    found, expected = runs.sequential(spec, graph=TaskGraph(tasks, graph.inputs)), runs.sequential(spec)
    start = spec.chunk(3).start
    assert torch.equal(found[:, :, :start], expected[:, :, :start])
    assert not torch.equal(found[:, :, start:], expected[:, :, start:])
