"""``bench quality``: rows of real renders, and a report whose findings follow from the rows."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashforward_core.commands import bench_quality
from flashforward_core.commands.bench_quality import VARIANTS, Bench, held_out_captions, mean_and_ci95, paste
from flashforward_core.commands.quality_report import (
    ORDER,
    TITLES,
    paired_difference,
    quality_rows,
    save_sheet,
    verdict,
    write_report,
)
from flashforward_core.metrics.numbers import METRICS
from flashforward_core.model.loading import load_embedded
from flashforward_core.scenes import parse_caption, sample_scene

pytestmark = pytest.mark.cpu


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_quality.add_arguments(parser)
    return parser.parse_args(words)


def test_rows_are_of_real_renders(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    words = ["--captions", "2", "--latents", "11", "--variants", "flashforward", "--json", str(target)]
    words += ["--device", "cpu", "--workers", "1", "--frames", str(tmp_path / "sheets")]
    assert bench_quality.run(arguments(*words)) == 0
    rows = json.loads(target.read_text())
    assert {row["metric"] for row in rows} == set(METRICS)
    for row in rows:
        assert row["value"] == pytest.approx(np.mean(row["values"]), abs=1e-6) and len(row["values"]) == 2
        assert row["unit"] == METRICS[row["metric"]] and np.isfinite(row["ci95"])
        assert row["config"] | {"model": "embedded", "latents": 11, "variant": "flashforward"} == row["config"]
    assert (tmp_path / "sheets" / "frames_11.jpg").stat().st_size > 1000


def test_variants_of_one_schedule_share_a_rollout_and_only_pasting_tells_them_apart() -> None:
    with ThreadPoolExecutor(1) as pool:
        bench = Bench(backbone=load_embedded(), device="cpu", latents=4, seed=0, batch=1, pool=pool)
        made = dict(bench._render(held_out_captions(1), ["flashforward", "pasted_anchors"], first=0))
    differs = (made["flashforward"] != made["pasted_anchors"]).any(dim=4).any(dim=3).any(dim=1)
    assert differs.tolist() == [[True, False, False, False]]  # four latents have one anchor, at 0


def test_pasting_touches_only_the_anchors_places() -> None:
    latents, anchors = torch.zeros(2, 16, 12, 2, 2), {0: torch.ones(2, 16, 2, 2), 10: 2 * torch.ones(2, 16, 2, 2)}
    pasted = paste(latents, anchors)
    assert pasted[:, :, 0].eq(1).all() and pasted[:, :, 10].eq(2).all()
    assert pasted.count_nonzero() == 2 * latents[:, :, 0].numel()
    assert latents.count_nonzero() == 0


def test_captions_are_held_out_and_different() -> None:
    captions = held_out_captions(40)
    assert len(set(captions)) == 40
    assert all(parse_caption(caption) is not None for caption in captions)
    assert not set(captions) & {sample_scene(seed).caption for seed in range(4096)}


def test_the_interval_is_of_the_mean() -> None:
    mean, ci95 = mean_and_ci95([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert ci95 == pytest.approx(1.96 * np.sqrt(5 / 3) / 2)  # sample variance 5/3, four values


def test_differences_are_paired_by_caption() -> None:
    """Captions differ by far more than variants do: only pairing sees the difference."""
    first = [0.0, 100.0, 200.0]
    assert paired_difference(first, [1.0, 101.0, 201.0]) == (1.0, 0.0)
    assert verdict(1.0, 0.5, side="higher") == "yes"
    assert verdict(-1.0, 0.5, side="higher") == "no, the opposite"
    assert verdict(-1.0, 0.5, side="lower") == "yes"
    assert verdict(0.4, 0.5, side="higher") == "no difference seen"


def made_rows(*, drift: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "metric": "drift",
            "value": float(np.mean(values)),
            "unit": "levels",
            "ci95": 0.25,
            "values": values,
            "config": {"variant": variant, "latents": latents, "captions": len(values), "fingerprint": "abc"},
            "machine": "a machine",
            "date": "2026-01-01",
            "commit": "123",
        }
        for variant, values in drift.items()
        for latents in (81, 141)
    ]


def test_the_report_says_what_the_rows_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = made_rows(drift={"flashforward": [1.0, 2.0], "self_forcing": [5.0, 6.0], "hiar": [0.0, 1.0]})
    page = tmp_path / "quality.md"
    write_report(rows, page)
    text = page.read_text()
    assert "| Self-Forcing's colours drift further (colour drift) | 81 | +4 ± 0 | yes |" in text
    assert "| HiAR's colours drift further (colour drift) | 141 | -1 ± 0 | no, the opposite |" in text
    assert "| colour drift | 1.5 ± 0.25 | 5.5 ± 0.25 | 0.5 ± 0.25 |" in text
    assert (tmp_path / "quality" / "by_length.png").read_bytes().startswith(b"\x89PNG")
    assert "](quality/by_length.png)" in text


def test_the_report_knows_every_variant_and_metric() -> None:
    assert set(ORDER) == set(VARIANTS)
    assert set(TITLES) == set(METRICS)


def test_rows_of_other_benchmarks_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    other = {"metric": "forward_ms", "value": 1.0, "config": {}}
    file.write_text(json.dumps([other, *made_rows(drift={"hiar": [0.0, 1.0]})]))
    assert {row["metric"] for row in quality_rows(file)} == {"drift"}
    file.write_text(json.dumps([other]))
    with pytest.raises(ValueError, match="no rows of bench quality"):
        quality_rows(file)


def test_a_sheet_has_a_row_per_variant(tmp_path: Path) -> None:
    from PIL import Image

    save_sheet(
        {"hiar": np.zeros((8, 12, 18, 3), np.uint8), "flashforward": np.zeros((8, 12, 18, 3), np.uint8)},
        tmp_path / "a.jpg",
    )
    assert Image.open(tmp_path / "a.jpg").size == (110 + 8 * 18, 24)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--latents", "81,x"], "latents='81,x'"),
        (["--variants", "best"], "variants=best are unknown; use some of: flashforward"),
        (["--captions", "1"], "captions=1 is below 2"),
        (["--batch", "0"], "batch=0"),
        (["--workers", "0"], "workers=0"),
    ],
)
def test_settings_out_of_range_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench_quality.run(arguments(*words))
