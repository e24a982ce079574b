"""The page on KV policies says what the rows say."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashforward_core import cli

pytestmark = pytest.mark.cpu

pytest.importorskip("matplotlib", reason="the page has plots")

FOLDER = Path(__file__).parents[2] / "benchmarks"
DEFAULT = "λ=0.5 ahead=1 recent=3 sink=3"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("policies_report")


def row(metric: str, value: float, *, ci95: float | None = None, **config: Any) -> dict[str, Any]:
    found = {
        "metric": metric,
        "value": value,
        "unit": "1",
        "config": config,
        "machine": "NVIDIA H200",
        "date": "2026-11-30T00:00:00+00:00",
        "commit": "abc",
    }
    return found if ci95 is None else {**found, "ci95": ci95}


def page(report: ModuleType, folder: Path, rows: list[Any], kernels: list[Any] | None = None) -> str:
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "kernels.json").write_text(json.dumps(kernels or []), encoding="utf-8")
    paths = [str(folder / "rows.json"), "--kernels", str(folder / "kernels.json"), "--out", str(folder)]
    assert report.main(paths) == 0
    return (folder / "policies.md").read_text(encoding="utf-8")


def compared(policy: str, late_gain: float) -> list[Any]:
    config = {"policy": policy, "budget": 9, "captions": 4, "latents": 81}
    rows = [row("psnr", 40, ci95=1, **config), row("chunk_ms", 840 if policy == "future_forcing" else 84, **config)]
    return rows if policy == "window" else [*rows, row("psnr_late_gain", late_gain, ci95=0.5, **config)]


def test_policies_are_sorted_by_their_gain_over_fifo(report: ModuleType, tmp_path: Path) -> None:
    gains = {"window": 0.0, "future_forcing": 0.51, "future_only": -0.5, "temp_cache": -0.51}
    text = page(report, tmp_path, [line for name, gain in gains.items() for line in compared(name, gain)])
    assert "- above: Future Forcing (+0.51 at 9)\n" in text
    assert "- within the interval: Future Forcing, λ = 1 (-0.50 at 9)\n" in text
    assert "- below: TempCache (-0.51 at 9)\n" in text
    assert "first out, by budget: 10.0 at 9." in text
    assert (tmp_path / "policies_likeness.png").stat().st_size > 0


def test_choices_are_compared_with_the_default_size_by_size(report: ModuleType, tmp_path: Path) -> None:
    rows = []
    for latents, best in ((24, 0.26), (81, 0.24)):
        config = {"budget": 9, "captions": 4, "latents": latents}
        for choice, late in ((DEFAULT, 0.3), ("window", best)):
            rows.append(row("first_error", 0.05, ci95=0.01, choice=choice, **config))
            rows.append(row("late_error", late, ci95={DEFAULT: 0.03, "window": 0.04}[choice], choice=choice, **config))
    text = page(report, tmp_path, rows)
    long, short = text.split("### 81 latent frames")[1].split("### 24 latent frames")
    assert "| window | 0.050 ± 0.010 | 0.240 ± 0.040 | -0.060 ± 0.050 |" in long  # 3-4-5: hypot(0.03, 0.04)
    assert "Nearer than the default by more than the interval: window." in long
    assert "| window | 0.050 ± 0.010 | 0.260 ± 0.040 | -0.040 ± 0.050 |" in short
    assert "Nearer than the default by more than the interval: none." in short
    assert "2 of 22 choices were measured: 1 of the 20 within Future Forcing and 1 of first in, first out." in long
    assert "Least in the last quarter: window." in long


def test_the_future_s_weight_is_compared_by_videos_and_by_attention(report: ModuleType, tmp_path: Path) -> None:
    gains = {"window": 0.0, "future_forcing": 1.5, "future_only": -0.5}
    rows = [line for name, gain in gains.items() for line in compared(name, gain)]
    rows.append(row("late_error", 0.3, ci95=0.03, choice=DEFAULT, budget=9, captions=4, latents=81))
    for name, error in {"future_forcing": 0.07, "future_only": 0.06}.items():
        rows.append(row("attention_error", error, policy=name, budget=9, latents=81))
    text = page(report, tmp_path, rows)
    assert "+2.00 ± 0.71 dB at 9 (interval of independent samples)" in text  # hypot(0.5, 0.5)
    assert "smaller with λ = 1 at budgets 9;" in text


def timed(policy: str, frames: int, ms: float, *, dense: float, kernel: str = "triton", bounded: bool = False) -> Any:
    config = {"model": "1.3B", "resolution": "480p", "precision": "bf16", "chunk_frames": 3, "stages": 4}
    config |= {"densities": "assumed", "attention": "fa3", "sparse_attention": kernel, "policy": policy}
    config |= {"bounded": bounded, "video_frames": frames, "blocks": "one, multiplied"}
    peak = 2**30 * (1 if policy == "temp_cache" else frames)
    numbers = {"chunk_ms": ms, "speedup": dense / ms, "peak_bytes": peak}
    return [row(metric, value, **config) for metric, value in numbers.items()]


def test_flatness_and_gains_are_counted_and_kernels_stay_apart(report: ModuleType, tmp_path: Path) -> None:
    rows = [
        *timed("dense", 69, 400, dense=400, bounded=True),
        *timed("temp_cache", 69, 800, dense=400, bounded=True),
        *timed("ann_sa", 69, 320, dense=400, bounded=True),
        *timed("dense", 253, 1000, dense=1000),
        *timed("temp_cache", 253, 1000, dense=1000),
        *timed("dense", 3001, 9000, dense=9000),
        *timed("temp_cache", 3001, 1250, dense=9000),
    ]
    kernels = [
        *timed("dense", 253, 1100, dense=1100),
        *timed("ann_sa", 253, 550, dense=1100),
        *timed("ann_sa", 253, 2200, dense=1100, kernel="flex"),
    ]
    text = page(report, tmp_path, rows, kernels)
    assert "changes so: dense +800.0 %, TempCache +25.0 % (asked: flat)" in text
    assert "Speed-up at 3001: TempCache 7.20 (asked: 5;" in text
    assert "the work of TempCache is the same at all lengths" in text
    assert "1 of these settings were measured a second time, up to 10.0 % apart" in text
    assert "vanish (below 1 is slower than dense): TempCache 0.50; these are left: AnnSA 1.25." in text
    assert "| Triton | 1100 (1.00) | – | 550 (2.00) | – | – |" in text
    assert "| FlexAttention | – | – | 2200 (0.50) | – | – |" in text
    assert "| 253 | dense | 1000 | 1.00 |" in text  # not the 1100 of the kernels' run
    assert "| 253 | AnnSA" not in text


def test_a_cache_that_still_grows_is_not_called_full(report: ModuleType, tmp_path: Path) -> None:
    rows = [*timed("all", 253, 1000, dense=2000), *timed("all", 3001, 1100, dense=5500)]
    text = page(report, tmp_path, rows)
    assert "all three +10.0 %" in text
    assert "the same at all lengths" not in text


def test_the_beginning_says_what_each_policy_is_for_by_the_rows(report: ModuleType, tmp_path: Path) -> None:
    gains = {"window": 0.0, "future_forcing": 0.4, "temp_cache": -3.0}
    rows = [line for name, gain in gains.items() for line in compared(name, gain)]
    rows.append(row("chunk_ms", 96, policy="full", captions=4, latents=81))
    for threshold, error, kept in (("0.98", 0.091, 0.81), ("0.99", 0.065, 0.88)):
        rows.append(row("attention_error", error, policy=f"threshold={threshold}", budget=9, latents=81))
        rows.append(row("kept", kept, policy=f"threshold={threshold}", budget=9, latents=81))
    first = page(report, tmp_path, rows).split("## Which policy?")[1].split("\n## ")[0]
    assert "under the full history 96." in first
    assert "in dB over `window` by budget +0.4 at 9 (within its interval of 0.5). It takes 10 to 10 times" in first
    assert "in dB late by budget -3.0 at 9." in first
    assert "0.091 at 0.98, where 81 % stays, and 0.065 at 0.99, where 88 % stays" in first


def test_memory_is_what_simulate_says(report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table's second and fourth column: the usual window, and Future Forcing with the table's budget."""
    text = page(report, tmp_path, compared("window", 0.0))
    for schedule in ("self_forcing", "flashforward"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{schedule}` | ")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for policy, cell in (("keep", cells[1]), ("future_forcing --kv-budget 9", cells[4])):
            assert cli.main(["simulate", "--schedule", schedule, "--kv-policy", *policy.split()]) == 0
            assert f"memory per device, GiB  {cell}  (" in capsys.readouterr().out


def test_keep_is_where_a_window_without_a_sink_is(report: ModuleType, tmp_path: Path) -> None:
    rows = compared("window", 0.0)
    assert "with as long a `history`.\n" in page(report, tmp_path, rows)
    for latents, shift in ((24, 0.5), (81, 0.0)):
        for choice, late in (("window", 0.3), ("window sink=0", 0.4)):
            config = {"choice": choice, "budget": 9, "captions": 4, "latents": latents}
            rows += [row(metric, late + shift, ci95=0.01, **config) for metric in ("first_error", "late_error")]
    assert "that is 0.400 ± 0.010 at 9, and 0.300 ± 0.010 with the sink." in page(report, tmp_path, rows)


def test_what_sparse_attention_does_to_videos_has_a_row_per_choice(report: ModuleType, tmp_path: Path) -> None:
    config = {"schedule": "flashforward", "latents": 30, "captions": 6}
    rows = [row("density", 0.13, what="ann_sa", frames=9), row("density", 0.141, what="ann_sa", frames=33)]
    for name, value in (("none", 1.0), ("self", 0.5)):
        metrics = ("faithfulness", "caption_sky", "caption_hills", "caption_colour", "caption_motion", "palette_error")
        rows += [row(metric, value, ci95=0.1, sparse=name, **config) for metric in metrics]
    rows.append(row("psnr", 14.0, ci95=0.5, sparse="self", **config))
    text = page(report, tmp_path, rows)
    same = "0.50 ± 0.10"
    assert f"| `self` | {same} | {same} | {same} | {same} | {same} | 0.5 ± 0.1 | 14.0 ± 0.5 |" in text
    assert "| 1.0 ± 0.1 | – |" in text
    assert "a bucket (13 to 14 % of all pairs) misses most" in text
