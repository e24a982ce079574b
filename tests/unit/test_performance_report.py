"""The performance page says what the rows say."""

import importlib.util
import json
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashforward_core.engine.events import LaneInfo, TaskSpan, Timeline

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("performance_report", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(
    metric: str, value: float, *, machine: str = "NVIDIA H200", day: int = 1, commit: str = "abc", **config: Any
) -> dict[str, Any]:
    config = {"model": "1.3B", "attention": "cudnn", **config}
    date = f"2026-11-{day:02}T00:00:00+00:00"
    return {
        "metric": metric,
        "value": value,
        "unit": "ms",
        "config": config,
        "machine": machine,
        "date": date,
        "commit": commit,
    }


def table_rows(page: str, heading: str) -> list[list[str]]:
    lines = page.split(f"### {heading}\n")[1].split("###")[0].split("##")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_contexts_are_sorted_as_numbers_and_empty_columns_left_out(report: ModuleType) -> None:
    rows = [row("forward_ms", ms, context=context) for context, ms in ((21, 82.31), (6, 60.0), (12, 70.0))]
    header, _, *body = table_rows(report.page(rows), "One denoising forward")
    assert header == ["model", "attention", "context", "ms"]
    assert body == [["1.3B", "cudnn", "6", "60.0"], ["1.3B", "cudnn", "12", "70.0"], ["1.3B", "cudnn", "21", "82.3"]]


def test_the_last_commit_of_the_same_measurement_counts_and_machines_stay_apart(report: ModuleType) -> None:
    rows = [
        row("forward_ms", 70.0, context=21, day=3, commit="new"),
        row("forward_ms", 71.0, context=21, day=4, commit="new"),
        row("forward_ms", 90.0, context=21, day=2, commit="old"),
        row("forward_ms", 5000.0, context=21, machine="a CPU"),
    ]
    gpu, cpu = report.page(rows).split("## a CPU")
    assert "70.0" in gpu and "71.0" in gpu and "90.0" not in gpu and "5000" not in gpu
    assert "5000.0" in cpu and "70.0" not in cpu


def test_a_page_and_its_plot_are_written(report: ModuleType, tmp_path: Path) -> None:
    source, page = tmp_path / "rows.json", tmp_path / "performance.md"
    config = {"schedule": "flashforward", "layout": "interleaved", "latents": 81, "devices": 2}
    error = row("makespan_error", 0.031, measured_s=5.0, predicted_s=4.845, **config)
    source.write_text(json.dumps([error, row("unknown_metric", 1.0)]))
    assert report.main([str(source), "--out", str(page)]) == 0
    assert table_rows(page.read_text(), "Predicted and measured")[2][-3:] == ["5", "4.84", "3.1%"]
    assert (tmp_path / "performance_nvidia_h200.png").read_bytes().startswith(b"\x89PNG")
    assert "](performance_nvidia_h200.png)" in page.read_text()


def test_the_page_says_plainly_where_flashforward_does_not_win(report: ModuleType) -> None:
    def run(schedule: str, seconds: float, devices: int, latents: int = 21) -> dict[str, Any]:
        config = {"schedule": schedule, "devices": devices, "latents": latents, "source": "measured", "context": 21}
        return row("rollout_s", seconds, **config)

    rows = [run("flashforward", 3.0, 1), run("self_forcing", 2.4, 1), run("hiar", 4.0, 1)]
    rows += [run("flashforward", 1.6, 2), run("self_forcing", 2.4, 2), run("self_forcing", 9.0, 4, latents=81)]
    lines = [line for line in report.page(rows).splitlines() if line.startswith("- ")]
    assert lines == [
        "- 1.3B cudnn, 1 device: FlashForward 3.00 s, self_forcing 2.40 s. "
        "FlashForward does not win: self_forcing is 25% faster.",
        "- 1.3B cudnn, 2 devices: FlashForward 1.60 s, self_forcing 2.40 s. FlashForward wins by 50%.",
    ]
    assert "Five-second clips" not in report.page(rows[:1])  # nothing to compare with


def test_peaks_stand_beside_their_predictions(report: ModuleType) -> None:
    def peak(name: str, gib: float, predicted: float) -> dict[str, Any]:
        sizes = {"predicted_bytes": predicted * 2**30, "error": abs(gib - predicted) / gib}
        return row("peak_bytes", gib * 2**30, device=name, **sizes)

    page = report.page([peak("cuda:0", 20.0, 21.0), peak("cuda:1", 10.0, 8.0)])
    header, _, *body = table_rows(page, "Memory")
    assert header == ["model", "attention", "device", "predicted_gib", "off", "ms"]
    assert [cells[2:] for cells in body] == [["cuda:0", "21", "5.0%", "20.00"], ["cuda:1", "8", "20.0%", "10.00"]]
    assert "1 of 2 predicted peaks are within 10%; the worst is off by 20.0%." in page


def test_no_rows_make_no_page(report: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert report.main([str(tmp_path / "absent.json"), "--out", str(tmp_path / "page.md")]) == 2
    assert "no rows" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_the_page_begins_with_what_further_devices_save_and_how_sure_that_is(report: ModuleType) -> None:
    def run(seconds: float, devices: int, layout: str, source: str = "measured") -> dict[str, Any]:
        config = {"schedule": "flashforward", "latents": 81, "resolution": "480p", "precision": "bf16"}
        return row("rollout_s", seconds, devices=devices, layout=layout, source=source, **config)

    rows = [run(9.0, 1, "single"), run(5.5, 2, "prelude"), run(5.0, 2, "interleaved")]
    rows += [run(4.8, 2, "interleaved", "predicted"), run(2.5, 4, "interleaved", "predicted")]
    hiar = {"schedule": "hiar", "devices": 2, "measured_s": 2.0, "predicted_s": 1.9}
    rows += [row("makespan_error", error, latents=n, **hiar) for n, error in ((81, 0.02), (41, 0.02), (21, 0.06))]
    page = report.page(rows)
    where = ["1.3B", "480p", "bf16", "cudnn", "81"]
    assert table_rows(page, "What a further device saves")[2:] == [
        [*where, "1", "single", "9.00", "1.00", "measured"],
        [*where, "2", "interleaved", "5.00", "1.80", "measured"],
        [*where, "4", "interleaved", "2.50", "3.60", "predicted"],
    ]
    assert "2 of 3 simulated makespans are within 5% of the measured ones; the worst is off by 6.0%" in page


def test_schedules_stand_side_by_side_and_other_contexts_are_named(report: ModuleType) -> None:
    def run(schedule: str, seconds: float, source: str = "measured", **found: Any) -> dict[str, Any]:
        config = {"schedule": schedule, "latents": 81, "resolution": "480p", "precision": "bf16", "devices": 2}
        return row("rollout_s", seconds, source=source, layout=f"{seconds}", **config, **found)

    rows = [
        run("flashforward", 5.5, context=21, denoise_ms=80.0),
        run("flashforward", 5.0, context=21, denoise_ms=80.0),
    ]
    rows += [run("hiar", 9.0, context=21, denoise_ms=82.0), run("self_forcing", 10.0), run("hiar", 1.0, "predicted")]
    rows += [run("flashforward", 0.5, "predicted")]
    page = report.page(rows)
    (measured,), forwards = (
        table_rows(page, "Schedules side by side")[2:3],
        table_rows(page, "Schedules side by side")[3:],
    )
    assert measured[-4:] == [
        "5.00",
        "9.00 (×1.80)",
        "10.00 (×2.00, context 18)",
        "–",
    ]  # the fastest layout; no prediction
    assert forwards[0][-5:] == ["FlashForward", "hiar", "self_forcing", "last_stage", "apart"]
    assert forwards[2][-6:] == ["21", "80.0", "82.0", "–", "–", "2.5%"]  # at another context, and without its time


def test_a_prediction_gives_way_to_what_was_measured(report: ModuleType) -> None:
    def run(value: float, **config: Any) -> dict[str, Any]:
        return row("rollout_s", value, schedule="hiar", latents=81, devices=4, layout="interleaved", **config)

    rows = [run(2.0, source="predicted"), run(4.0, source="predicted", order="memory")]
    before, page = report.page(rows), report.page([*rows, {**run(2.5, source="measured"), "commit": "seen"}])
    for text, seconds in ((before, ["2.00", "4.00"]), (page, ["2.50", "4.00"])):
        assert [cells[-1] for cells in table_rows(text, "Whole rollouts, denoiser only")[2:]] == seconds
    assert "at seen.\n" in page  # and not where the prediction was made


def test_schedules_are_drawn_where_all_four_were_run(report: ModuleType, tmp_path: Path) -> None:
    source, page, plot = (
        tmp_path / "rows.json",
        tmp_path / "page.md",
        tmp_path / "performance_nvidia_h200_schedules.png",
    )
    rows = [
        row("rollout_s", seconds, schedule=name, latents=81, devices=1, source="measured", resolution="480p")
        for name, seconds in (("flashforward", 9.0), ("hiar", 16.0), ("self_forcing", 10.0), ("last_stage", 8.0))
    ]
    for count in (3, 4):
        source.write_text(json.dumps(rows[:count]))
        assert report.main([str(source), "--out", str(page)]) == 0
        assert plot.is_file() == (plot.name in page.read_text()) == (count == 4)


def test_timelines_are_drawn_by_name_and_an_unknown_one_is_refused(
    report: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    source, page, archive = tmp_path / "rows.json", tmp_path / "page.md", tmp_path / "timelines.tar.xz"
    source.write_text(json.dumps([row("forward_ms", 1.0, context=21)]))
    spans = tuple(
        TaskSpan(task=task, lane=lane, start_s=lane, end_s=lane + 1.0)
        for lane, task in enumerate(("planner/denoise/b0/s0", "renderer/denoise/c0/s1", "renderer/commit/c0/l1/s2"))
    )
    lanes = tuple(LaneInfo(name=f"lane{n}", device="cpu") for n in range(3))
    timeline = Timeline(source="measured", lanes=lanes, spans=spans)
    (tmp_path / "a_run.json").write_text(json.dumps(timeline.to_json()))
    with tarfile.open(archive, "w:xz") as files:
        files.add(tmp_path / "a_run.json", arcname="./a_run.json")
    words = [str(source), "--out", str(page), "--timelines", str(archive)]
    assert report.main([*words, "a_run"]) == 0
    assert "](performance_timelines.png)" in page.read_text()
    assert (tmp_path / "performance_timelines.png").read_bytes().startswith(b"\x89PNG")
    page.unlink()
    for broken, said in (
        ([*words, "another"], "it has, for one, a_run"),
        (words, "is given without names"),
        ([*words[:-1], str(source), "a_run"], "could not be opened"),
    ):
        assert report.main(broken) == 2
        assert said in capsys.readouterr().err
    assert not page.exists()
