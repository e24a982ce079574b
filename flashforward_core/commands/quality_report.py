"""Tables, plots and findings from the rows of ``bench quality``: nothing in the page is typed."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..metrics.plot import require_matplotlib
from .bench_rows import Row, read_rows
from .quality_looks import read_looks, save_curves, save_sheet

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
ORDER = ("drawn", "flashforward", "clean_history", "self_forcing", "hiar", "no_anchors", "pasted_anchors")
Z_95 = 1.96
FPS = 16.0
PERIODS = {"chunks": 3, "anchors": 10}
BY_HAND = "<!-- From here on written by hand; generating the page again keeps it. -->"

CLAIMS = (
    ("flicker", "no_anchors", "lower", "Without anchors the video flickers more than with them"),
    ("seam_anchor", "pasted_anchors", "higher", "Anchors that are pasted into the output leave seams"),
    ("drift", "no_anchors", "higher", "Without anchors the colours drift further"),
    ("drift", "self_forcing", "higher", "Self-Forcing's colours drift further"),
    ("drift", "hiar", "higher", "HiAR's colours drift further"),
    ("faithfulness", "no_anchors", "lower", "Without anchors the video follows its caption less"),
)
"""(metric, variant, where its value should be against flashforward's, in words): what the paper leads to expect."""

HELD = ("faithfulness", "palette_error", "drift_sharpness", "flicker")
"""Metrics that should be the same at any length."""

INTRODUCTION = """# Quality of the schedules, on the embedded model

This page is generated: `python -m flashforward_core bench quality --from ROWS.json --report docs/quality.md`.

Every variant rendered the same {captions} held-out captions with the same seeds and the same weights
(`{fingerprint}`, {machine}, commit {commit}, {date}). Values are means over the captions, ± half of the 95 % interval.
Flicker is VBench's; seams are the change at chunk or anchor borders over that nearby, minus 1 (0 is seamless); drift
compares the first and last two seconds; palette error is the distance of sky and hills from the caption's colours, in
levels of 255; faithfulness is the mean of sky, hills, the sprites' colours and the way they move, each 0 to 1.
`drawn` is no model: the scenes that the captions name, as they are drawn, which is what a perfect model would give.
"""


def quality_rows(path: Path) -> list[Row]:
    """Read this benchmark's rows from a file of any. Raises ``ValueError`` when there are none."""
    rows = [row for row in read_rows(path) if row["metric"] in TITLES and "variant" in row.get("config", {})]
    if not rows:
        raise ValueError(f"{path} holds no rows of bench quality; write it with bench quality --json")
    return rows


def write_report(rows: Sequence[Row], path: Path, *, looks: Path | None = None) -> None:
    """Write the page to ``path`` and its pictures into a folder of its name beside it.

    ``looks`` is the folder of frames and curves that ``bench quality --frames`` wrote. What the page has below its line
    that says so was written by hand, and stays.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    save_plot(rows, folder / "by_length.png")
    parts = [_introduction(rows), "## What the paper leads to expect\n\n" + _findings(rows)]
    if len(_lengths(rows)) > 1:
        parts.append("## Whether quality holds with length\n\n" + _growth(rows))
    parts.append(f"## By length\n\n![metrics by length]({folder.name}/by_length.png)\n")
    for latents in _lengths(rows):
        parts.append(f"## {latents} latents ({_seconds(latents):.0f} s)\n\n" + _table(rows, latents))
        parts.append(_pictures(folder, looks, latents))
    by_hand = path.read_text(encoding="utf-8").partition(BY_HAND)[2] if path.exists() else ""
    text = "\n".join(part for part in parts if part)
    path.write_text(text + (f"\n{BY_HAND}{by_hand}" if by_hand else ""), encoding="utf-8")


def _pictures(folder: Path, looks: Path | None, latents: int) -> str:
    """Draw what was kept of this length into ``folder`` and return the lines that show it."""
    found = {} if looks is None else read_looks(looks, latents=latents)
    if not found:
        return ""
    ordered = {name: found[name] for name in _ordered(found)}
    save_sheet(ordered, folder / f"frames_{latents}.png")
    save_curves(ordered, folder / f"curves_{latents}.png", fps=FPS, periods=PERIODS)
    return (
        f"Means over the captions:\n\n![curves]({folder.name}/curves_{latents}.png)\n\n"
        f"One caption, from the first frame to the last:\n\n![frames]({folder.name}/frames_{latents}.png)\n"
    )


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
    return _ordered({row["config"]["variant"] for row in rows})


def _ordered(names: Iterable[str]) -> list[str]:
    found = set(names)
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


def _growth(rows: Sequence[Row]) -> str:
    """Say how each variant's values at the greatest length differ from those at the least, caption by caption."""
    shortest, longest = _lengths(rows)[0], _lengths(rows)[-1]
    lines = [f"| from {shortest} to {longest} latents | " + " | ".join(TITLES[metric] for metric in HELD) + " |"]
    lines.append("|---|" + "---|" * len(HELD))
    for variant in _variants(rows):
        cells = []
        for metric in HELD:
            short, long = (_row(rows, metric=metric, variant=variant, latents=n) for n in (shortest, longest))
            if short is None or long is None or len(short["values"]) != len(long["values"]):
                cells.append("–")
                continue
            mean, ci95 = paired_difference(short["values"], long["values"])
            cells.append(f"{mean:+.3g} ± {ci95:.2g}")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def comparison(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Return lines of a table: every number that both have, and the difference, caption by caption.

    Raises ``ValueError`` when the two have no variant and length in common.
    """
    lines = ["| variant | latents | metric | before | after | difference |", "|---|---|---|---|---|---|"]
    for latents in _lengths(after):
        for variant in _variants(after):
            for metric, title in TITLES.items():
                pair = [_row(rows, metric=metric, variant=variant, latents=latents) for rows in (before, after)]
                old, new = pair
                if old is None or new is None or len(old["values"]) != len(new["values"]):
                    continue
                mean, ci95 = paired_difference(old["values"], new["values"])
                seen = "" if abs(mean) <= ci95 else " *"
                lines.append(
                    f"| {variant} | {latents} | {title} | {old['value']:.4g} | {new['value']:.4g} "
                    f"| {mean:+.3g} ± {ci95:.2g}{seen} |"
                )
    if len(lines) == 2:
        raise ValueError("the two files have no variant, length and number of captions in common; measure both alike")
    return lines


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
