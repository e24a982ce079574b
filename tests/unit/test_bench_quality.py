"""``bench quality``: rows of real renders, and a report whose findings follow from the rows."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashforward_core.commands import bench_quality
from flashforward_core.commands.bench_quality import (
    VARIANTS,
    Bench,
    held_out_captions,
    held_out_scenes,
    paste,
)
from flashforward_core.commands.quality_looks import Look, keep_looks, read_looks, save_sheet
from flashforward_core.commands.quality_report import (
    BY_HAND,
    ORDER,
    TITLES,
    comparison,
    mean_and_ci95,
    one_run,
    paired_difference,
    quality_rows,
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


def test_rows_are_of_real_renders_and_come_as_they_are_made(tmp_path: Path) -> None:
    target, looks = tmp_path / "rows.json", tmp_path / "looks"
    words = ["--captions", "2", "--latents", "5", "--json", str(target), "--device", "cpu", "--frames", str(looks)]
    assert bench_quality.run(arguments(*words, "--variants", "drawn,flashforward")) == 0
    rows = json.loads(target.read_text())
    assert {row["metric"] for row in rows} == set(METRICS) - {"seam_anchor"}  # too short for those
    for row in rows:
        assert row["value"] == pytest.approx(np.mean(row["values"]), abs=1e-6) and len(row["values"]) == 2
        assert row["unit"] == METRICS[row["metric"]] and np.isfinite(row["ci95"])
    drawn, ours = ([r for r in rows if r["config"]["variant"] == v] for v in ("drawn", "flashforward"))
    assert ours[0]["config"] | {"model": "embedded", "latents": 5, "captions": 2} == ours[0]["config"]
    assert next(r["value"] for r in drawn if r["metric"] == "faithfulness") > 0.9
    kept = read_looks(looks, latents=5)
    assert kept["flashforward"].shown.shape == (8, 128, 192, 3) and len(kept["drawn"].palette_error) == 17

    # A run that goes on from these rows makes only what is missing.
    assert bench_quality.run(arguments(*words, "--variants", "drawn,flashforward,pasted_anchors")) == 0
    after = json.loads(target.read_text())
    assert [r for r in after if r["config"]["variant"] == "drawn"] == drawn
    assert len(after) == 3 * len(drawn)
    assert set(read_looks(looks, latents=5)) == {"drawn", "flashforward", "pasted_anchors"}


def test_variants_of_one_schedule_share_a_rollout_and_only_pasting_tells_them_apart() -> None:
    bench = Bench(backbone=load_embedded(), device="cpu", latents=4, seed=0, batch=1)
    found = bench.measure(held_out_scenes(1), ["flashforward", "pasted_anchors"])
    plain, pasted = (found[name].measured[0].evaluation.series for name in ("flashforward", "pasted_anchors"))
    assert not np.array_equal(plain.colour[0], pasted.colour[0])  # four latents have one anchor, at 0


def test_captions_in_a_batch_are_the_captions_alone() -> None:
    backbone, scenes = load_embedded(), held_out_scenes(2)
    together = Bench(backbone=backbone, device="cpu", latents=4, seed=3, batch=2).measure(scenes, ["self_forcing"])
    alone = Bench(backbone=backbone, device="cpu", latents=4, seed=3, batch=1).measure(scenes, ["self_forcing"])
    for one, other in zip(together["self_forcing"].measured, alone["self_forcing"].measured, strict=True):
        # batches change float32 sums a little, and a level of 255 here and there
        np.testing.assert_allclose(one.evaluation.series.colour, other.evaluation.series.colour, atol=0.1)


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
    assert ci95 == pytest.approx(3.182 * np.sqrt(5 / 3) / 2)  # sample variance 5/3, four values: 3 degrees of freedom


def test_the_interval_holds_95_of_100_of_students_t() -> None:
    """The oracle is the density of t, integrated over the interval."""
    for freedom in range(1, 80):
        values = np.arange(freedom + 1, dtype=float)
        reach = mean_and_ci95(values.tolist())[1] * math.sqrt(len(values)) / np.std(values, ddof=1)
        t = np.linspace(-1, 1, 20000, endpoint=False) * reach + reach / 20000  # the middles of as many steps
        density = (1 + t**2 / freedom) ** (-(freedom + 1) / 2) / math.sqrt(freedom * math.pi)
        density *= math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
        # Both ends are off by 0.0005, the quantiles' third decimal, at most, where the density is below 0.06.
        assert density.mean() * 2 * reach == pytest.approx(0.95, abs=1e-4), freedom


def test_differences_are_paired_by_caption() -> None:
    """Captions differ by far more than variants do: only pairing sees the difference."""
    first = [0.0, 100.0, 200.0]
    second = [1.0, 102.0, 203.0]  # differences 1, 2, 3: a deviation of 1, two degrees of freedom
    assert paired_difference(first, second) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert paired_difference(first, [1.0, 101.0, 201.0]) == (1.0, 0.0)
    assert verdict(1.0, 0.5, side="higher") == "yes"
    assert verdict(-1.0, 0.5, side="higher") == "no, the opposite"
    assert verdict(-1.0, 0.5, side="lower") == "yes"
    assert verdict(0.4, 0.5, side="higher") == "no difference seen"


def made_rows(
    *, drift: dict[str, list[float]], lengths: tuple[int, ...] = (81, 141), **config: Any
) -> list[dict[str, Any]]:
    made_with = {"fingerprint": "abc", "seed": 0, "precision": "float32"} | config
    return [
        {
            "metric": "drift",
            "value": float(np.mean(values)),
            "unit": "levels",
            "ci95": 0.25,
            "values": values,
            "config": {"variant": variant, "latents": latents, "captions": len(values)} | made_with,
            "machine": "a machine",
            "date": "2026-01-01",
            "commit": "123",
        }
        for variant, values in drift.items()
        for latents in lengths
    ]


OTHERS = [("fingerprint", "def"), ("captions", 4), ("seed", 7), ("precision", "bfloat16")]


@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_rows_that_do_not_belong_together_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    rows = made_rows(drift={"hiar": [0.0, 1.0]})
    mixed, plain, page = tmp_path / "mixed.json", tmp_path / "plain.json", tmp_path / "quality.md"
    plain.write_text(json.dumps(rows))
    mixed.write_text(json.dumps([*rows, *made_rows(drift={"drawn": [0.0, 1.0]}, **{name: value})]))
    said = rf"mixed\.json holds rows .* {name}={rows[0]['config'][name]}.*; .*{name}={value}.* use one file for each"
    for words in (
        ["--from", str(mixed)],
        ["--from", str(mixed), "--report", str(page)],
        ["--from", str(mixed), "--against", str(plain)],
        ["--from", str(plain), "--against", str(mixed)],
    ):
        with pytest.raises(ValueError, match=said):
            bench_quality.run(arguments(*words))
    assert not page.exists()
    with pytest.raises(ValueError, match="the report holds rows"):
        write_report(json.loads(mixed.read_text()), page)


def test_a_file_of_two_models_gives_only_the_rows_of_the_one_measured(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    words = ["--captions", "2", "--latents", "5", "--variants", "drawn", "--json", str(target), "--device", "cpu"]
    rows = bench_quality.bench(arguments(*words))
    others = [row | {"value": -1.0, "config": row["config"] | {"fingerprint": "other"}} for row in rows]
    target.write_text(json.dumps(others))
    again = bench_quality.bench(arguments(*words))
    assert [row["values"] for row in again] == [row["values"] for row in rows]
    assert one_run(again) == one_run(rows)
    assert json.loads(target.read_text()) == others + again


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


def test_the_report_leaves_out_what_has_nothing_to_show(tmp_path: Path) -> None:
    write_report(made_rows(drift={"hiar": [0.0, 1.0]}, lengths=(81,)), tmp_path / "some.md")
    text = (tmp_path / "some.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Quality of the schedules, on the embedded model",
        "## 81 latents (20 s)",
    ]
    assert not (tmp_path / "some" / "by_length.png").exists()
    assert "--report PAGE.md`" in text and "docs/quality.md" not in text


def look(level: int) -> Look:
    frames = np.full((8, 128, 192, 3), level, np.uint8)
    curve = np.full(41, float(level))
    return Look(shown=frames, palette_error=curve, sharpness=curve, cycles=np.array([0.1, 0.3]), power=np.ones(2) / 2)


def test_the_report_shows_what_was_kept_and_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = made_rows(drift={"flashforward": [1.0, 2.0]})
    page, looks = tmp_path / "quality.md", tmp_path / "looks"
    keep_looks({"flashforward": look(3)}, looks, latents=81)
    page.write_text(f"outdated\n{BY_HAND}\n\n## Why\n\nBecause.\n")
    write_report(rows, page, looks=looks)
    text = page.read_text()
    assert "outdated" not in text and text.endswith("\n\n## Why\n\nBecause.\n")
    assert "](quality/frames_81.png)" in text and "frames_141" not in text
    for name in ("frames_81", "curves_81"):
        assert (tmp_path / "quality" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_two_models_are_compared_by_caption() -> None:
    before, after = made_rows(drift={"hiar": [0.0, 100.0]}), made_rows(drift={"hiar": [1.0, 101.0], "new": [0.0, 0.0]})
    lines = comparison(before, after, sources=("old.json", "new.json"))
    assert lines[4:-2] == [f"| hiar | {n} | colour drift | 50 | 51 | +1 ± 0 * |" for n in (81, 141)]
    with pytest.raises(ValueError, match="in common; measure both alike"):
        comparison(made_rows(drift={"other": [0.0, 1.0]}), after, sources=("old.json", "new.json"))


def test_a_comparison_names_both_models_and_explains_its_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(made_rows(drift={"hiar": [0.0, 100.0]}, fingerprint="0123")))
    new.write_text(json.dumps(made_rows(drift={"hiar": [1.0, 101.0]}, fingerprint="4567")))
    assert bench_quality.run(arguments("--from", str(new), "--against", str(old))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"before: model 0123 ({old}); after: model 4567 ({new})"
    assert lines[2].startswith("| variant |") and lines[-1].startswith("* 0 lies outside")


@pytest.mark.parametrize(("name", "value"), OTHERS[1:])
def test_models_that_were_not_measured_alike_are_not_compared(name: str, value: Any) -> None:
    before = made_rows(drift={"hiar": [0.0, 1.0]})
    after = made_rows(drift={"hiar": [0.0, 1.0]}, fingerprint="def", **{name: value})
    was = before[0]["config"][name]
    with pytest.raises(ValueError) as raised:
        comparison(before, after, sources=("old.json", "new.json"))
    assert str(raised.value) == f"the two files have {name}={was} and {value}; measure both models with the same"


def test_lengths_that_both_have_are_compared() -> None:
    before = made_rows(drift={"hiar": [0.0, 1.0]})
    after = made_rows(drift={"hiar": [0.0, 1.0]}, fingerprint="def", lengths=(81,))
    lines = comparison(before, after, sources=("old.json", "new.json"))
    assert [line.split(" | ")[1] for line in lines if line.startswith("| hiar")] == ["81"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--captions", "3"), "captions=2, not 3"),
        (("--captions", "2", "--seed", "5"), "seed=0, not 5"),
        (("--captions", "2", "--precision", "bf16"), "precision=float32, not bfloat16"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_is_measured(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(made_rows(drift={"hiar": [0.0, 1.0]})))
    with pytest.raises(ValueError, match=f"{told}; measure both alike"):
        bench_quality.run(arguments("--against", str(old), "--json", str(new), *words))
    assert not new.exists()


def test_growth_with_length_is_paired_by_caption(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row | {"metric": "palette_error", "values": [v + row["config"]["latents"] for v in row["values"]]}
        for row in made_rows(drift={"hiar": [0.0, 100.0]})
    ]
    write_report(rows, tmp_path / "quality.md")
    assert "| hiar | – | +60 ± 0 | – | – |" in (tmp_path / "quality.md").read_text()


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

    save_sheet({"hiar": look(0), "flashforward": look(9)}, tmp_path / "a.png")
    picture = Image.open(tmp_path / "a.png")
    assert picture.size == (110 + 8 * 96, 2 * 64)
    assert picture.getpixel((200, 10)) == (0, 0, 0) and picture.getpixel((200, 100)) == (9, 9, 9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--latents", "81,x"], "latents='81,x'"),
        (["--variants", "best"], "variants=best are unknown; use some of: drawn, flashforward"),
        (["--captions", "1"], "captions=1 is below 2"),
        (["--batch", "0"], "batch=0"),
    ],
)
def test_settings_out_of_range_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench_quality.run(arguments(*words))
