"""Tables, plots and findings from the rows of ``bench quality``: nothing in the page is typed."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
RUN = ("fingerprint", "captions", "seed", "precision")
"""Of a row's config: what rows of one page must have in common."""

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""0.975 quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""

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

This page is generated: `python -m flashforward_core bench quality --from ROWS.json --report PAGE.md`.

Every variant rendered the same {captions} held-out captions with the same seeds and the same weights
(`{fingerprint}`, {machine}, commit {commit}, {date}). Values are means over the captions, ± half of the 95 % interval.
Flicker is VBench's; seams are the change at chunk or anchor borders over that nearby, minus 1 (0 is seamless); drift
compares the first and last two seconds; palette error is the distance of sky and hills from the caption's colours, in
levels of 255; faithfulness is the mean of sky, hills, the sprites' colours and the way they move, each 0 to 1.
`drawn` is no model: the scenes that the captions name, as they are drawn, which is what a perfect model would give.
"""


def quality_rows(path: Path) -> list[Row]:
    """Read this benchmark's rows from a file of any. Raises ``ValueError`` when there are none, or of several runs."""
    rows = [row for row in read_rows(path) if row["metric"] in TITLES and "variant" in row.get("config", {})]
    if not rows:
        raise ValueError(f"{path} holds no rows of bench quality; write it with bench quality --json")
    one_run(rows, source=str(path))
    return rows


def one_run(rows: Sequence[Row], *, source: str = "the report") -> dict[str, Any]:
    """Return what all rows were made with, by the names in ``RUN``.

    Raises ``ValueError`` when rows differ in it: they would be taken for each other.
    """
    found = list(dict.fromkeys(tuple(row["config"].get(name) for name in RUN) for row in rows))
    if len(found) > 1:
        listed = "; ".join(", ".join(f"{name}={value}" for name, value in zip(RUN, run, strict=True)) for run in found)
        raise ValueError(f"{source} holds rows that do not belong together: {listed}; use one file for each of these")
    return dict(zip(RUN, found[0], strict=True))


def write_report(rows: Sequence[Row], path: Path, *, looks: Path | None = None) -> None:
    """Write the page to ``path`` and its pictures into a folder of its name beside it; rows must be of one run.

    ``looks`` is the folder of frames and curves that ``bench quality --frames`` wrote. What the page has below its line
    that says so was written by hand, and stays.
    """
    folder = path.with_suffix("")
    parts = [_introduction(rows)]
    folder.mkdir(parents=True, exist_ok=True)
    if findings := _findings(rows):
        parts.append("## What the paper leads to expect\n\n" + findings)
    if len(_lengths(rows)) > 1:
        save_plot(rows, folder / "by_length.png")
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
    return INTRODUCTION.format(**one_run(rows), machine=first["machine"], commit=first["commit"], date=first["date"])


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


def mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of n >= 2 values and half of its 95 % interval, by Student's t with n - 1 degrees of freedom.

    Pages call it "half of the 95 % interval". Rows filed before it was Student's keep what they have: 1.96 standard
    errors.
    """
    return float(np.mean(values)), t_975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def t_975(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t for ``freedom`` degrees of freedom, to 0.0005."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2  # Abramowitz and Stegun, 26.7.5, at the normal quantile 1.96


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the mean of second - first, caption by caption, and half of its 95 % interval."""
    return mean_and_ci95([new - old for old, new in zip(first, second, strict=True)])


def _findings(rows: Sequence[Row]) -> str:
    """Say of each claim, at each length, whether the paired difference bears it out; nothing if no claim applies."""
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
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


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


def comparison(before: Sequence[Row], after: Sequence[Row], *, sources: tuple[str, str]) -> list[str]:
    """Return a table's lines between a line that names the two models, from ``sources``, and one that explains ``*``.

    It has every number that both have, and the difference, caption by caption. Raises ``ValueError`` when the two were
    not measured alike or have no variant in common.
    """
    models = [
        one_run(rows, source=source)["fingerprint"] for rows, source in zip((before, after), sources, strict=True)
    ]
    _require_alike(before, after)
    lines = []
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
    if not lines:
        raise ValueError("the two files have no variant in common; measure both alike")
    return [
        f"before: model {models[0]} ({sources[0]}); after: model {models[1]} ({sources[1]})",
        "",
        "| variant | latents | metric | before | after | difference |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        "* 0 lies outside the difference's 95 % interval, as chance alone puts it in about one line of twenty.",
    ]


def _require_alike(before: Sequence[Row], after: Sequence[Row]) -> None:
    """Raise ``ValueError`` unless both have the same settings: only then captions come in pairs."""
    old, new = (one_run(rows) for rows in (before, after))
    unlike = [f"{name}={old[name]} and {new[name]}" for name in old if name != "fingerprint" and old[name] != new[name]]
    if unlike:
        raise ValueError(f"the two files have {', '.join(unlike)}; measure both models with the same")


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
