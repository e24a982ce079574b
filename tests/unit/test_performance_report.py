"""The performance page says what the rows say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("performance_report", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(metric: str, value: float, *, machine: str = "NVIDIA H200", day: int = 1, **config: Any) -> dict[str, Any]:
    config = {"model": "1.3B", "attention": "cudnn", **config}
    date = f"2026-11-{day:02}T00:00:00+00:00"
    return {
        "metric": metric,
        "value": value,
        "unit": "ms",
        "config": config,
        "machine": machine,
        "date": date,
        "commit": "abc",
    }


def table_rows(page: str, heading: str) -> list[list[str]]:
    lines = page.split(f"### {heading}\n")[1].split("###")[0].split("##")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_contexts_are_sorted_as_numbers_and_empty_columns_left_out(report: ModuleType) -> None:
    rows = [row("forward_ms", ms, context=context) for context, ms in ((21, 82.31), (6, 60.0), (12, 70.0))]
    header, _, *body = table_rows(report.page(rows), "One denoising forward")
    assert header == ["model", "attention", "context", "ms"]
    assert body == [["1.3B", "cudnn", "6", "60.0"], ["1.3B", "cudnn", "12", "70.0"], ["1.3B", "cudnn", "21", "82.3"]]


def test_the_latest_of_the_same_measurement_counts_and_machines_stay_apart(report: ModuleType) -> None:
    rows = [
        row("forward_ms", 70.0, context=21, day=3),
        row("forward_ms", 90.0, context=21, day=2),
        row("forward_ms", 5000.0, context=21, machine="a CPU"),
    ]
    gpu, cpu = report.page(rows).split("## a CPU")
    assert "70.0" in gpu and "90.0" not in gpu and "5000" not in gpu
    assert "5000.0" in cpu and "70.0" not in cpu


def test_a_page_and_its_plot_are_written(report: ModuleType, tmp_path: Path) -> None:
    source, page = tmp_path / "rows.json", tmp_path / "performance.md"
    config = {"schedule": "flashforward", "layout": "interleaved", "latents": 81, "devices": 2}
    error = row("makespan_error", 0.031, measured_s=5.0, predicted_s=4.845, **config)
    source.write_text(json.dumps([error, row("unknown_metric", 1.0)]))
    assert report.main([str(source), "--out", str(page)]) == 0
    assert table_rows(page.read_text(), "Predicted and measured")[2][-3:] == ["5", "4.84", "3.1%"]
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")
    assert f"]({report.PLOT})" in page.read_text()


def test_no_rows_make_no_page(report: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert report.main([str(tmp_path / "absent.json"), "--out", str(tmp_path / "page.md")]) == 2
    assert "no rows" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
