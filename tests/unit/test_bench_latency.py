"""The latency benchmark: what its numbers mean, and that a run leaves rows that can be read again."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashforward_core.cli import main
from flashforward_core.commands import bench_kernels
from flashforward_core.commands.bench_engine import Bench, Timed, forward_seconds, frames_to, steady_rate
from flashforward_core.commands.bench_latency import METRICS, _add_peaks, add_arguments, run
from flashforward_core.commands.bench_models import random_transformer
from flashforward_core.commands.bench_rows import RowBook, machine, read_rows
from flashforward_core.engine.budget import sizes_of
from flashforward_core.engine.cost import CostKey, CostModel, load_cost, num_keys, save_cost
from flashforward_core.engine.events import LaneInfo, TaskSpan, Timeline
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.lanes import DevicePlan, MemoryOptions
from flashforward_core.engine.memory import GIB, DoesNotFit, predict_memory
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.rollout import RenderResult
from flashforward_core.graph.schedules import SCHEDULES, build_graph
from flashforward_core.graph.task import Kind, Role
from flashforward_core.specs import AnchorPlan, VideoShape

pytestmark = pytest.mark.cpu


def span(task: str, start: float, end: float, lane: int = 0) -> TaskSpan:
    return TaskSpan(task=task, lane=lane, start_s=start, end_s=end)


def test_two_lanes_that_overlap_fully_are_twice_as_fast() -> None:
    one = [span(f"a{n}", n, n + 1) for n in range(40)]
    two = [span(f"{lane}{n}", n, n + 1, lane) for n in range(40) for lane in range(2)]
    assert steady_rate(one) == pytest.approx(1)
    # 20 to 21 ends of each lane lie in the middle half; the first of them starts the clock
    assert steady_rate(two) == pytest.approx(2, rel=0.03)


def test_a_ramp_at_either_end_does_not_count() -> None:
    """Filling and draining a wavefront takes 10 of 100 s here, with a lane idle for all of it."""
    steady = [span(f"a{n}", n, n + 1) for n in range(10, 90)]
    ramps = [span("first", 0, 10), span("last", 90, 100)]
    assert steady_rate([*ramps, *steady]) == pytest.approx(1)
    with pytest.raises(ValueError, match="latents are too few"):
        steady_rate(ramps)


def test_forwards_are_told_apart_by_role_and_keys(rig: Any) -> None:
    """Chunks see two anchors and the chunk before; each anchor block of one sees itself and the block before."""
    spec = rig.spec(latent_frames=8, anchors=AnchorPlan(stride=4, block_frames=1), chunk_frames=4)
    graph = build_graph(spec, decode=False)
    seconds = {"planner/denoise/b0/s0": 1.0, "planner/denoise/b0/s1": 3.0, "planner/denoise/b1/s0": 5.0}
    spans = tuple(span(task.id, 0, seconds.get(task.id, 7.0)) for task in graph.tasks)
    timeline = Timeline(source="measured", lanes=(LaneInfo(name="lane0", device="cpu"),), spans=spans)
    result = RenderResult(latents_BCFHW=None, timeline=timeline, sha256="")
    tokens = spec.shape.tokens_per_frame
    found = forward_seconds(graph, spec, result)
    assert found[Role.PLANNER, tokens] == 2  # the median of its two stages
    assert found[Role.PLANNER, 2 * tokens] == 6  # 5 and 7
    assert {keys // tokens for role, keys in found if role is Role.RENDERER} == {4 + 2, 4 + 2 + 4}


def test_rows_are_kept_after_each_and_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    for value in (1.0, 2.0):
        book = RowBook(path=path, machine="a machine", common={"model": "embedded"}, commit="abc")
        row = book.add("forward_ms", value, "ms", context=21)
    assert [row["value"] for row in read_rows(path)] == [1.0, 2.0]
    assert set(row) == {"metric", "value", "unit", "config", "machine", "date", "commit"}
    assert row["config"] == {"model": "embedded", "context": 21}
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="holds no benchmark rows"):
        read_rows(path)


def test_random_weights_of_any_size_give_finite_velocities(rig: Any) -> None:
    model = random_transformer(rig.backbone().config, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    backbone = replace(rig.backbone(), models=dict.fromkeys(Role, model), dtype=torch.bfloat16)
    errors = list(bench_kernels.forward_errors(backbone, rig.spec(latent_frames=3), fast=FastOptions()))
    assert errors[0][0]["attention"] == "sdpa"
    # bf16 keeps 8 bits: 2^-9 relative, some tens of roundings one after another
    assert 0 < errors[0][1] < 0.05


def arguments(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--devices", "cpu"])
    vars(args).update(changes)
    return args


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "2B"}, "model='2B' is unknown"),
        ({"decoder": "huge"}, "decoder='huge' is unknown"),
        ({"precision": "int4"}, "precision='int4' is unknown"),
        ({"metrics": ["forward_ms", "speed"]}, "metrics='speed' is unknown"),
        ({"resolution": "480p"}, "resolution='480p' does not fit model='embedded'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(arguments(**changes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--graphs", "yes"], "graphs='yes' is unknown; use one of: auto, on, off"),
        (["--compile", "offf"], "compile='offf' is unknown; use one of: auto, on, off"),
        (["--order", "fast"], "order='fast' is unknown; use one of: latency, memory"),
        (["--schedules", "hiar", "fast"], "schedules='fast' is unknown; use one of: flashforward, "),
        (["--layouts", "zigzag"], "layouts='zigzag' is unknown; use one of: auto, interleaved, "),
        (["--decode", "own", "everywhere"], "decode='everywhere' is unknown; use one of: auto, own, "),
        (["--latents", "21", "0"], "latents=0 is below 1; use latents=21"),
        (["--latents", "9999999999"], "is above 100000"),
        (["--model", "1.3B", "--resolution", "100x96"], "width=100 is not a positive multiple of 16"),
        (["--repeats", "0"], "repeats=0 is below 1; use repeats=1"),
        (["--predict", "4", "0"], "predict=0 is outside 1 to 64; use predict=4"),
        (["--predict", "65"], "predict=65 is outside 1 to 64"),
        (["--devices", "cpu", "gpu"], "devices='gpu' is no device; use auto, cpu, cpu*4 or cuda:0"),
        (["--devices", "cpu", "cuda:63"], "devices='cuda:63' has 0 of its 1 devices present (not cuda:63); use auto"),
        (["--devices", "cpu,mps"], "devices='cpu,mps' has 1 of its 2 devices present (not mps); use auto"),
    ],
)
def test_bad_options_end_in_one_line_before_weights_are_made(words: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", "latency", *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""  # not even "weights made"


def test_an_unknown_option_points_to_the_suite_s_own_help(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "latency", "--speed", "on"])
    assert ended.value.code == 2
    name = "flashforward_core bench latency"
    assert capsys.readouterr().err == f"{name}: unrecognized arguments: --speed on; see {name} --help\n"


def test_lists_of_different_hardware_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows name the hardware of the first list's first device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"are of several kinds \(cpu, cuda\), and rows name the hardware of one"):
        Bench.each(arguments(devices=["cpu", "cuda:0"]))


@pytest.mark.parametrize("option", ["--json", "--costs", "--traces"])
@pytest.mark.parametrize("target", ["folder", "binary", "damaged", "other", "damaged/below"])
def test_what_cannot_be_written_is_found_before_measuring(
    option: str, target: str, tmp_path: Path, capsys: Any
) -> None:
    """``--traces`` names a folder, the others a file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xd0\x00\xff")
    (tmp_path / "damaged").write_text('[{"metric": ')
    (tmp_path / "other").write_text('{"a": 1}')
    if (option, target) == ("--traces", "folder"):
        target = "binary/below"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    words = ["bench", "latency", "--devices", "cpu", "--fit", "--metrics", "rollout_s", "--latents", "1"]
    words += ["--costs", str(tmp_path / "new" / "costs.json"), "--json", str(tmp_path / "new" / "rows.json")]
    assert main([*words, option, str(tmp_path / target)]) == 2
    shown = capsys.readouterr()
    assert str(tmp_path / target) in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job_s", "--decode", "split"], "skipped job_s: lanes=1 of devices='cpu' is below 3 for decode='split'; use"),
        (["job_s", "--decode", "own"], "skipped job_s: lanes=1 of devices='cpu' is below 2 for decode='own'; use"),
        (["lane_scaling"], "skipped lane_scaling: lanes=1 of devices='cpu' is below 2; use"),
    ],
)
def test_a_metric_that_needs_more_lanes_says_so(words: list[str], said: str, capsys: Any) -> None:
    assert main(["bench", "latency", "--devices", "cpu", "--latents", "1", "--metrics", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(said) and shown.count("\n") == 1


def test_costs_of_the_embedded_model_go_by_one_name() -> None:
    (bench,) = Bench.each(arguments(resolution="192x128"))
    assert bench.resolution == "128x192"


def test_one_failing_metric_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def broken(bench: Bench) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(METRICS._entries, "lane_scaling", broken)
    monkeypatch.setitem(METRICS._entries, "decode_fps", lambda bench: bench.book.add("decode_fps", 1.0, "frames/s"))
    path = tmp_path / "rows.json"
    words = ["bench", "latency", "--devices", "cpu", "--metrics", "lane_scaling", "decode_fps", "--json", str(path)]
    assert main(words) == 1
    assert [row["metric"] for row in json.loads(path.read_text())] == ["decode_fps"]
    said = capsys.readouterr().out
    assert "FAILED lane_scaling (sdpa): RuntimeError: out of memory\n" in said
    assert "not measured: lane_scaling (sdpa)" in said


def test_jobs_end_with_the_last_frames_where_pyav_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.setitem(sys.modules, "flashforward_core.media", None)
    path = tmp_path / "job.mp4"
    with frames_to(path, VideoShape(width=32, height=32, latent_frames=1)) as (write, encoded):
        write(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
    assert not encoded and not path.exists()
    assert "write no mp4" in caplog.text


def test_attention_is_timed_at_every_context_of_the_renderer(rig: Any) -> None:
    found = list(bench_kernels.attention_times(rig.backbone(), rig.spec(), device=torch.device("cpu")))
    assert [context for context, _, _ in found] == [6, 9, 12, 15, 18, 21]
    assert all(seconds > 0 and first_s > 0 for _, seconds, first_s in found)


def test_the_command_measures_predicts_and_fits(tmp_path: Path) -> None:
    """One small rollout of the embedded model on the CPU; only that the numbers are there and fit together."""
    rows_path, costs = tmp_path / "rows.json", tmp_path / "costs.json"
    words = ["bench", "latency", "--latents", "4", "--devices", "cpu", "--metrics", "rollout_s", "--predict", "4"]
    assert main([*words, "--json", str(rows_path), "--fit", "--costs", str(costs), "--traces", str(tmp_path)]) == 0
    rows = read_rows(rows_path)
    by_source = {row["config"]["source"]: row["value"] for row in rows if row["metric"] == "rollout_s"}
    assert 0 < by_source["predicted"] < by_source["measured"]  # four lanes overlap; one cannot be faster
    key = CostKey(device=rows[0]["machine"], model="embedded", resolution="128x192", precision="fp32")
    cost = load_cost(costs, key=key)
    assert cost is not None and cost.forward_s > 0
    (error,) = (row for row in rows if row["metric"] == "makespan_error")
    measured, predicted = error["config"]["measured_s"], error["config"]["predicted_s"]
    (launching,) = (row for row in rows if row["metric"] == "launching_s")
    # 2 chunks of 4 stages and an anchor block of 4 stages and a commit; on a CPU nothing is recorded by default
    assert {name: launching["config"][name] for name in ("eager", "recorded", "compilations")} == {
        "eager": 13,
        "recorded": 0,
        "compilations": 0,
    }
    assert 0 < launching["value"] < by_source["measured"] <= launching["config"]["first_s"]
    assert error["value"] == pytest.approx(abs(measured - predicted) / measured) and measured > 0
    assert {path.suffix for path in tmp_path.glob("embedded_*")} == {".json"}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_is_measured_with_the_same_longest_context(schedule: str) -> None:
    spec = Bench.each(arguments(attention=["auto"]))[0].spec(schedule, 81)
    tasks = [task for task in build_graph(spec, decode=False).tasks if task.kind is Kind.DENOISE]
    assert max(num_keys(task, spec) for task in tasks) == 21 * spec.shape.tokens_per_frame


def test_predictions_are_made_for_the_first_schedules_layouts_and_their_timelines_kept(
    rig: Any, tmp_path: Path
) -> None:
    options = {"latents": [14], "predict": [1, 5], "layouts": ["auto", "streaming"], "devices": ["cpu"]}
    schedules = ["flashforward", "self_forcing"]
    (bench,) = Bench.each(arguments(**options, schedules=schedules, attention=["auto"], traces=tmp_path))
    bench.models.backbone, bench.models.texts = rig.backbone(), rig.texts()
    METRICS["rollout_s"](bench)
    runs = [row["config"] for row in bench.book.rows if row["metric"] == "rollout_s"]
    assert [(run["schedule"], run["devices"], run["layout"]) for run in runs if run["source"] == "predicted"] == [
        ("flashforward", 1, "single"),
        ("flashforward", 5, "interleaved"),
        ("flashforward", 5, "streaming"),
        ("self_forcing", 1, "single"),
        ("self_forcing", 5, "interleaved"),
    ]
    measured = {run["schedule"]: run for run in runs if run["source"] == "measured"}
    # the last of five chunks: 12 latents of history, both anchors that there are, and two of its own
    assert {name: run["context"] for name, run in measured.items()} == {"flashforward": 16, "self_forcing": 14}
    assert all(run["denoise_ms"] > 0 for run in measured.values())
    (kept,) = tmp_path.glob("*_flashforward_14_streaming_5_predicted.json")
    timeline = Timeline.from_json(json.loads(kept.read_text()))
    assert len(timeline.lanes) == 5 and timeline.source == "simulated"


class TightBench(Bench):
    """Measures within a budget that one stage's bank of a lane fits into, and not those of all stages."""

    budget_gib = 0.0

    def plan(self, devices: str, **options: Any) -> DevicePlan:
        return replace(super().plan(devices, **options), memory=MemoryOptions(budget_gib=self.budget_gib))


def test_costs_are_fitted_stage_by_stage_where_one_lane_cannot_hold_all_banks(rig: Any) -> None:
    (bench,) = TightBench.each(arguments(latents=[14, 4], attention=["auto"]))
    bench.models.backbone, bench.models.texts = rig.backbone(), rig.texts()
    graph, sizes = build_graph(bench.spec("flashforward", 14), decode=False), sizes_of(rig.backbone())

    def peak(order: str) -> int:
        placement = place(graph, lanes=lanes_for(["cpu"]), layout="single", order=order)
        (found,) = predict_memory(graph, spec=bench.spec("flashforward", 14), placement=placement, sizes=sizes)
        return found.peak_bytes

    TightBench.budget_gib = (peak("latency") + peak("memory")) / 2 / GIB
    with pytest.raises(DoesNotFit):
        bench.single("flashforward", 14)
    assert bench.cost.forward_s > 0
    assert [key[1:] for key in bench._singles] == [(14, "memory")]


def test_a_fit_of_decoding_keeps_the_forwards_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def half_a_second(bench: Bench) -> None:
        bench.decode_frame_s = 0.5

    monkeypatch.setitem(METRICS._entries, "decode_fps", half_a_second)
    costs = tmp_path / "costs.json"
    words = ["bench", "latency", "--devices", "cpu", "--metrics", "decode_fps", "--fit", "--costs", str(costs)]
    key = CostKey(device=machine("cpu"), model="embedded", resolution="128x192", precision="fp32")
    save_cost(costs, key=key, cost=CostModel(forward_s=2.0, key_s=0.125))
    assert main(words) == 0
    assert load_cost(costs, key=key) == CostModel(forward_s=2.0, key_s=0.125, decode_frame_s=0.5)


def test_peaks_are_filed_beside_what_was_predicted_for_each_device(rig: Any) -> None:
    args = arguments(latents=[14], attention=["auto"])
    (bench,) = Bench.each(args)
    bench.models.backbone = rig.backbone()
    spec = rig.spec()
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cuda:0", "cuda:1"]), layout="interleaved")
    (of_second, of_first) = reversed(
        predict_memory(graph, spec=spec, placement=placement, sizes=sizes_of(rig.backbone()))
    )
    timed = Timed(
        result=None, seconds=1.0, first_frames_s=None, peak_bytes={"cuda:1": 2**20, "cuda:0": 2**21}, compilations=0
    )
    _add_peaks(bench, timed, graph=graph, spec=spec, placement=placement)
    found = {row["config"]["device"]: row for row in bench.book.rows}
    for name, expected in (("cuda:0", of_first.peak_bytes), ("cuda:1", of_second.peak_bytes)):
        peak = found[name]["value"]
        assert found[name]["config"]["predicted_bytes"] == expected
        assert found[name]["config"]["error"] == pytest.approx(abs(peak - expected) / peak)
