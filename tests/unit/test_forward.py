"""Faster ways to run a forward change no byte, and step aside where they cannot work."""

import gc
import logging
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine import forward
from flashforward_core.engine import lanes as lanes_module
from flashforward_core.engine.events import Event, Launches
from flashforward_core.engine.executor import run_placed
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.graphs import MIN_REPLAYS, Inputs, Recordings, Rerun, captured
from flashforward_core.engine.lanes import ThreadLane
from flashforward_core.engine.ops import RunInputs
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.recorded_parts import RecordedParts, StandIn
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.graph.task import Role
from flashforward_core.kv_policy import WindowOptions
from flashforward_core.model import compiled
from flashforward_core.model.compiled import compiled_parts, num_compilations
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import PromptSpan, RolloutSpec

pytestmark = pytest.mark.cpu


def run(
    rig: Any,
    spec: RolloutSpec,
    *,
    fast: FastOptions,
    lanes: int = 2,
    told: list[Launches] | None = None,
    backbone: Backbone | None = None,
) -> Tensor:
    """Return the video; ``told`` is given how the lanes launched their forwards."""
    events: list[Event] = []
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"] * lanes), layout="single" if lanes == 1 else "interleaved")
    report = run_placed(
        graph,
        inputs=RunInputs(spec=spec_for(spec), texts=rig.texts()),
        backbone=backbone or rig.backbone(),
        placement=placement,
        on_event=events.append,
        fast=fast,
        poison=True,
    )
    if told is not None:
        told.extend(report.launches)
    return rig.video(events)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is recorded and what is replayed: whole forwards, and parts of blocks."""
    counts: Counter[str] = Counter()

    class Counting(Rerun):
        def record(self, body: Any, *, run: bool = True) -> Any:
            what = "parts " if RecordedParts.__name__ in body.__qualname__ else ""
            counts[f"{what}recorded"] += 1
            super().record(body, run=run)

            def replay() -> None:
                counts[f"{what}replayed"] += 1
                body()

            return replay

    monkeypatch.setattr(forward, "Rerun", Counting)
    return counts


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_replayed_forwards_give_the_same_bytes(rig: Any, replays: Counter[str], schedule: str, lanes: int) -> None:
    spec = rig.spec(schedule, latent_frames=30)
    expected = run(rig, spec, fast=FastOptions(graphs="off"), lanes=lanes)
    assert not replays
    told: list[Launches] = []
    assert torch.equal(run(rig, spec, fast=FastOptions(graphs="on"), lanes=lanes, told=told), expected)
    assert replays["replayed"] > 2 * replays["recorded"] > 0
    counts = {name: sum(getattr(lane, name) for lane in told) for name in ("eager", "replayed", "in_parts", "recorded")}
    assert (counts.pop("recorded"), counts["replayed"]) == (replays["recorded"], replays["replayed"])
    assert sum(counts.values()) == build_graph(spec, decode=False).counts()["total"]
    blocks = rig.backbone().config.num_layers
    assert replays["parts replayed"] == 3 * blocks * counts["in_parts"]
    assert 0 < replays["parts recorded"] <= 3 * 4 * lanes  # roles and lengths


def test_blocks_that_differ_in_more_than_their_weights_run_as_they_are(rig: Any, replays: Counter[str]) -> None:
    """A recording of one block serves others through its memory, which an update of another rank does not fit into."""
    spec, model = rig.spec(latent_frames=30), rig.model(torch.float32)
    layer = model.blocks[1].attn1.to_q
    for role in Role:
        layer.add_role(role, rank=2, alpha=4)
    backbone = rig.backbone(model=model.requires_grad_(False))
    expected = run(rig, spec, fast=FastOptions(), backbone=backbone)
    told: list[Launches] = []
    assert torch.equal(run(rig, spec, fast=FastOptions(graphs="on"), told=told, backbone=backbone), expected)
    in_parts = sum(lane.in_parts for lane in told)
    assert replays["parts replayed"] == 3 * in_parts > 0  # of the first block alone


def test_large_blocks_are_recorded_only_within_whole_forwards(
    rig: Any, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = rig.spec(latent_frames=30)
    expected = run(rig, spec, fast=FastOptions())
    monkeypatch.setattr(forward, "RECORDED_BLOCK_BYTES", 1)
    # with two lanes one may always find the other launching, which it does piece by piece
    assert torch.equal(run(rig, spec, fast=FastOptions(graphs="on"), lanes=1), expected)
    assert replays["parts recorded"] == 0 < replays["recorded"] < replays["replayed"]


def test_a_new_prompt_needs_a_recording_of_its_own(rig: Any, replays: Counter[str]) -> None:
    """A recording holds the keys of the prompt it was made with."""
    spans = (PromptSpan(), PromptSpan(start=30, prompt=1))
    spec = rig.spec("flashforward_no_anchors", latent_frames=60, prompts=spans)
    expected = run(rig, spec, fast=FastOptions())
    assert torch.equal(run(rig, spec, fast=FastOptions(graphs="on")), expected)
    assert replays["recorded"] == 2 * 2  # stages and prompts; the short histories at the start recur too seldom


def test_memory_order_lets_banks_go_in_spite_of_recordings(rig: Any) -> None:
    spec = rig.spec("flashforward_no_anchors", latent_frames=30)
    graph = build_graph(spec, decode=False)
    peaks = [
        run_placed(
            graph,
            inputs=RunInputs(spec=spec_for(spec), texts=rig.texts()),
            backbone=rig.backbone(),
            placement=place(graph, lanes=lanes_for(["cpu"]), order="memory"),
            fast=FastOptions(graphs=graphs),
        ).peak_kv_bytes
        for graphs in ("off", "on")
    ]
    assert peaks[0] == peaks[1]


class FakeView:
    """Stands for memory that a recording holds."""

    dtype = torch.float32
    own = torch.arange(2)

    def at(self, own: Tensor) -> "FakeView":
        return self


def inputs(value: float) -> Inputs:
    return Inputs(torch.full((1, 2, 1, 2, 2), value), torch.zeros(1, 1), torch.arange(1))


def test_a_recording_goes_after_its_last_use_and_none_is_made_for_few() -> None:
    recordings = Recordings(Rerun(), Counter({"often": MIN_REPLAYS + 1, "seldom": MIN_REPLAYS}))
    for kind in ("often", "seldom"):
        recordings.count(kind)  # the first runs in parts
    assert recordings.pays("often") and not recordings.pays("seldom") and not recordings.pays("never")
    recordings.record("often", inputs(0), FakeView(), lambda given, view: given.x_BCFHW * 2)  # type: ignore[arg-type]
    for value in range(MIN_REPLAYS):
        assert recordings.has("often") and not recordings.pays("often")
        v = recordings.replay("often", inputs(value), FakeView())  # type: ignore[arg-type]
        assert v.unique().tolist() == [2 * value]
        recordings.count("often")
    assert not recordings.has("often")


def test_what_cannot_be_captured_is_told_once(caplog: Any) -> None:
    def refused(body: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\ndetails")

    assert [captured(refused, lambda: None) for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert "not permitted when stream is capturing) and" in record.getMessage()
    assert captured(lambda body: body, print) is print


class Graphs(Rerun):
    """As CUDA graphs: a recording of a part reads the memory that it was made with, and always writes to the same."""

    fails: tuple[str, ...] = ()
    """Parts, or ``whole`` forwards, that cannot be recorded."""

    def record(self, body: Any, *, run: bool = True) -> Any:
        cells = dict(zip(body.__code__.co_freevars, (cell.cell_contents for cell in body.__closure__), strict=True))
        if cells.get("name", "whole") in self.fails:
            if run:
                body()
            return None
        if "name" not in cells:
            return super().record(body, run=run)
        body()
        parts, name = cells["self"], cells["name"]
        read, written = parts._inputs[name], parts._outputs[name]

        def replay() -> None:
            parts._inputs[name] = read
            body()
            made, parts._outputs[name] = parts._outputs[name], written
            for target, tensor in zip(*((o if isinstance(o, tuple) else (o,)) for o in (written, made)), strict=True):
                target.copy_(tensor)

        return replay


@pytest.mark.parametrize(
    "fails", ["", "before", "between", "finish", "between finish", "before between finish", "whole"]
)
def test_a_part_that_cannot_be_recorded_leaves_the_others_right(
    rig: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Memory may run out during any capture."""
    spec = rig.spec(latent_frames=30)
    expected = run(rig, spec, fast=FastOptions())
    monkeypatch.setattr(Graphs, "fails", tuple(fails.split()))
    monkeypatch.setattr(forward, "Rerun", Graphs)
    told: list[Launches] = []
    assert torch.equal(run(rig, spec, fast=FastOptions(graphs="on"), lanes=1, told=told), expected)
    assert (told[0].recorded == 0) == (fails == "whole")


def test_recordings_do_not_keep_the_weights(rig: Any) -> None:
    """Gigabytes would wait for Python's collector of cycles."""
    backbone = rig.backbone()
    weights = weakref.ref(backbone.models[Role.RENDERER])
    gc.collect()
    gc.disable()
    try:
        run(rig, rig.spec(), fast=FastOptions(graphs="on"), backbone=backbone)
        del backbone
        assert weights() is None
    finally:
        gc.enable()


def test_a_stand_in_takes_on_like_blocks_only(rig: Any) -> None:
    model = rig.model(torch.float32)
    stand_in = StandIn(model.blocks[0])
    assert stand_in.becomes(model.blocks[1])
    for own, other in zip(stand_in.block.parameters(), model.blocks[1].parameters(), strict=True):
        assert torch.equal(own, other)

    def changed(change: Any) -> Any:
        block = rig.model(torch.float32).blocks[1]
        change(block)
        return block

    def tie(block: Any) -> None:
        block.attn1.to_k.weight = block.attn1.to_q.weight

    def more(block: Any) -> None:
        block.register_buffer("more", torch.zeros(1), persistent=False)

    def wide(block: Any) -> None:
        block.norm1.eps = 1.0

    assert not any(stand_in.becomes(changed(change)) for change in (tie, more, wide))


def test_nothing_is_recorded_with_cuda_malloc_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures fail there, and what they leave ends the process when it is freed."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert not FastOptions().records(cuda) and not FastOptions(graphs="off").records(cuda)
    assert FastOptions(graphs="on").records(cpu)
    with pytest.raises(ValueError, match="graphs='on' cannot record with the allocator cudaMallocAsync; use"):
        forward.Forwarders(FastOptions(graphs="on"), uses=[], devices=[cuda, cpu])


def test_a_run_ahead_of_its_device_gives_the_same_bytes(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a lane completes a task while the next one is queued; here the lanes only do the same in Python."""
    spec = rig.spec()
    expected = run(rig, spec, fast=FastOptions(), lanes=3)
    monkeypatch.setattr(lanes_module, "ThreadLane", partial(ThreadLane, lookahead=2))
    for lanes in (1, 3):
        assert torch.equal(run(rig, spec, fast=FastOptions(), lanes=lanes), expected)


def test_one_compilation_serves_all_blocks_and_histories(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts, for planner and renderer, for full and short chunks: 12 in all, and none in a second run.

    dynamo's own backend runs what was traced as it is, so not one byte may differ.
    """
    monkeypatch.setattr(forward, "compiled_parts", partial(compiled_parts, backend="eager"))
    spec = rig.spec(latent_frames=11)  # chunks of 3 and 2, anchor blocks of 2
    expected = run(rig, spec, fast=FastOptions())
    before = num_compilations()
    assert torch.equal(run(rig, spec, fast=FastOptions(compile="on")), expected)
    made = num_compilations() - before
    assert made == 3 * 3  # renderer chunks of 3 and 2, anchor blocks of 2; two blocks each, histories of 0 to 2 chunks
    assert torch.equal(run(rig, spec, fast=FastOptions(compile="on")), expected)
    assert num_compilations() - before == made
    told: list[Launches] = []  # recordings are of the same compiled code; here they run again
    assert torch.equal(run(rig, spec, fast=FastOptions(compile="on", graphs="on"), told=told), expected)
    assert sum(lane.in_parts for lane in told) > 0
    assert num_compilations() - before == made


def test_without_a_compiler_blocks_run_eagerly_after_one_warning(
    rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def no_compiler(graph: Any, examples: Any) -> Any:
        raise OSError("no C++ compiler found")

    compiled._warn.cache_clear()
    monkeypatch.setattr(forward, "compiled_parts", partial(compiled_parts, backend=no_compiler))
    spec = rig.spec("self_forcing", latent_frames=6)
    expected = run(rig, spec, fast=FastOptions())
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(rig, spec, fast=FastOptions(compile="on")), expected)
    (record,) = (r for r in caplog.records if r.name == compiled.__name__)
    assert "compile='off'" in record.getMessage()


def test_what_the_parts_do_is_what_a_block_does(rig: Any) -> None:
    """Block.forward calls before and after; compiled blocks call before, between and finish, in fixed memory or not."""
    spec = rig.spec("self_forcing", latent_frames=6)
    expected = run(rig, spec, fast=FastOptions())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "compiled_parts", lambda *key, parts=compiled.PLAIN: parts)
        assert torch.equal(run(rig, spec, fast=FastOptions(compile="on")), expected)
        window = replace(spec, kv_policy=WindowOptions(budget_frames=5))
        assert torch.equal(run(rig, window, fast=FastOptions(compile="on")), run(rig, window, fast=FastOptions()))


@pytest.mark.parametrize("field", ["compile", "graphs", "channels_last"])
def test_an_unknown_choice_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}='fast' is unknown; use one of: auto, on, off"):
        replace(FastOptions(), **{field: "fast"})


def test_auto_is_on_for_cuda_alone() -> None:
    auto, cuda, cpu = FastOptions(), torch.device("cuda:0"), torch.device("cpu")
    assert not auto.compiles(cpu) and not auto.records(cpu) and auto.records(cuda)


def test_a_lane_of_its_own_leaves_large_blocks_out(
    rig: Any, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA device would with ``auto``."""
    monkeypatch.setattr(FastOptions, "records", lambda self, device: True)
    monkeypatch.setattr(forward, "ALONE_BLOCK_BYTES", 1)
    run(rig, rig.spec(latent_frames=30), fast=FastOptions(), lanes=1)
    assert not replays
    run(rig, rig.spec(latent_frames=30), fast=FastOptions(), lanes=2)
    assert replays["parts recorded"] > 0
