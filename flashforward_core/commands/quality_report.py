"""Tables, plots and findings from the rows of ``bench quality``: nothing in the page is typed."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..metrics.plot import require_matplotlib
from .bench_rows import Row, read_rows

TITLES = {
    "flicker": "flicker (1 is still)",
    "motion": "motion",
    "seam_chunk": "chunk seams",
    "seam_anchor": "anchor seams",
    "drift": "colour drift",
    "drift_sharpness": "sharpness drift",
    "palette_error": "palette error",
    "palette_drift": "palette drift",
    "faithfulness": "faithfulness",
}
ORDER = ("flashforward", "clean_history", "self_forcing", "hiar", "no_anchors", "pasted_anchors")
Z_95 = 1.96

CLAIMS = (
    ("flicker", "no_anchors", "lower", "Without anchors the video flickers more than with them"),
    ("seam_anchor", "pasted_anchors", "higher", "Anchors that are pasted into the output leave seams"),
    ("drift", "no_anchors", "higher", "Without anchors the colours drift further"),
    ("drift", "self_forcing", "higher", "Self-Forcing's colours drift further"),
    ("drift", "hiar", "higher", "HiAR's colours drift further"),
    ("faithfulness", "no_anchors", "lower", "Without anchors the video follows its caption less"),
)
"""(metric, variant, where its value should be against flashforward's, in words): what the paper leads to expect."""

INTRODUCTION = """# Quality of the schedules, on the embedded model

This page is generated: `python -m flashforward_core bench quality --from ROWS.json --report docs/quality.md`.

Every variant rendered the same {captions} held-out captions with the same seeds and the same weights
(`{fingerprint}`, {machine}, commit {commit}, {date}). Values are means over the captions, ± half of the 95 % interval.
Flicker is VBench's; seams are the change at chunk or anchor borders over that nearby, minus 1 (0 is seamless); drift
compares the first and last two seconds; palette error is the distance of sky and hills from the caption's colours, in
levels of 255; faithfulness is the mean of sky, hills, the sprites' colours and the way they move, each 0 to 1.
"""


def quality_rows(path: Path) -> list[Row]:
    """Read this benchmark's rows from a file of any. Raises ``ValueError`` when there are none."""
    rows = [row for row in read_rows(path) if row["metric"] in TITLES and "variant" in row.get("config", {})]
    if not rows:
        raise ValueError(f"{path} holds no rows of bench quality; write it with bench quality --json")
    return rows


def write_report(rows: Sequence[Row], path: Path, *, frames: Path | None = None) -> None:
    """Write the page to ``path`` and its plots into a folder of its name beside it.

    ``frames`` is a folder of frame sheets to show, which should lie beside the page too.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    plot = folder / "by_length.png"
    save_plot(rows, plot)
    parts = [_introduction(rows), "## What the paper leads to expect\n\n" + _findings(rows)]
    parts.append(f"## By length\n\n![metrics by length]({_beside(plot, path)})\n")
    for latents in _lengths(rows):
        parts.append(f"## {latents} latents ({_seconds(latents):.0f} s)\n\n" + _table(rows, latents))
        sheet = None if frames is None else frames / f"frames_{latents}.jpg"
        if sheet is not None and sheet.exists():
            parts.append(f"One caption, from the first frame to the last:\n\n![frames]({_beside(sheet, path)})\n")
    path.write_text("\n".join(parts), encoding="utf-8")


def _beside(file: Path, page: Path) -> str:
    folder = page.parent.resolve()
    resolved = file.resolve()
    return str(resolved.relative_to(folder)) if resolved.is_relative_to(folder) else str(file)


def _introduction(rows: Sequence[Row]) -> str:
    first = rows[0]
    return INTRODUCTION.format(
        captions=first["config"]["captions"],
        fingerprint=first["config"]["fingerprint"],
        machine=first["machine"],
        commit=first["commit"],
        date=first["date"],
    )


def _lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row["config"]["latents"] for row in rows})


def _variants(rows: Sequence[Row]) -> list[str]:
    found = {row["config"]["variant"] for row in rows}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def _row(rows: Sequence[Row], *, metric: str, variant: str, latents: int) -> Row | None:
    wanted = (metric, variant, latents)
    return next((r for r in rows if (r["metric"], r["config"]["variant"], r["config"]["latents"]) == wanted), None)


def _seconds(latents: int) -> float:
    return (4 * latents - 3) / 16


def _table(rows: Sequence[Row], latents: int) -> str:
    variants = _variants(rows)
    lines = ["| metric | " + " | ".join(variants) + " |", "|---|" + "---|" * len(variants)]
    for metric, title in TITLES.items():
        cells = []
        for variant in variants:
            row = _row(rows, metric=metric, variant=variant, latents=latents)
            cells.append("–" if row is None else f"{row['value']:.4g} ± {row['ci95']:.2g}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the mean of second - first, caption by caption, and half of its 95 % interval."""
    difference = np.array(second) - np.array(first)
    return float(difference.mean()), Z_95 * float(difference.std(ddof=1)) / math.sqrt(len(difference))


def _findings(rows: Sequence[Row]) -> str:
    """Say of each claim, at each length, whether the paired difference bears it out."""
    lines = ["| claim | latents | difference from flashforward | found |", "|---|---|---|---|"]
    for metric, variant, side, words in CLAIMS:
        for latents in _lengths(rows):
            ours = _row(rows, metric=metric, variant="flashforward", latents=latents)
            other = _row(rows, metric=metric, variant=variant, latents=latents)
            if ours is None or other is None or len(ours["values"]) != len(other["values"]):
                continue
            mean, ci95 = paired_difference(ours["values"], other["values"])
            found = verdict(mean, ci95, side=side)
            lines.append(f"| {words} ({TITLES[metric]}) | {latents} | {mean:+.3g} ± {ci95:.2g} | {found} |")
    return "\n".join(lines) + "\n"


def verdict(mean: float, ci95: float, *, side: str) -> str:
    """Return ``yes`` or ``no, the opposite`` where 0 lies outside the interval, else ``no difference seen``."""
    if abs(mean) <= ci95:
        return "no difference seen"
    return "yes" if (mean > 0) == (side == "higher") else "no, the opposite"


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: each metric against the length, a line per variant, with intervals."""
    figure = require_matplotlib()(figsize=(13, 10), layout="constrained")
    axes = figure.subplots(3, 3).flatten()
    for place, (metric, title) in zip(axes, TITLES.items(), strict=True):
        for variant in _variants(rows):
            found = [_row(rows, metric=metric, variant=variant, latents=latents) for latents in _lengths(rows)]
            points = [(r["config"]["latents"], r["value"], r["ci95"]) for r in found if r is not None]
            if points:
                lengths, values, errors = zip(*points, strict=True)
                place.errorbar(lengths, values, yerr=errors, label=variant, capsize=3, marker="o", markersize=3)
        place.set(title=title, xlabel="latent frames")
    labelled = next(place for place in axes if place.get_legend_handles_labels()[0])
    labelled.legend(fontsize="small")
    figure.savefig(path, dpi=100, format="png")


def save_sheet(frames: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a picture with a row of frames [N, H, W, 3] per variant, named at its left."""
    from PIL import Image, ImageDraw

    margin = 110
    names = [name for name in ORDER if name in frames] + sorted(set(frames) - set(ORDER))
    strips = [np.concatenate(list(frames[name]), axis=1) for name in names]
    picture = Image.new("RGB", (margin + strips[0].shape[1], sum(len(strip) for strip in strips)), "white")
    draw, top = ImageDraw.Draw(picture), 0
    for name, strip in zip(names, strips, strict=True):
        picture.paste(Image.fromarray(strip), (margin, top))
        draw.text((6, top + len(strip) // 2 - 6), name, fill="black")
        top += len(strip)
    picture.save(path, quality=85)
