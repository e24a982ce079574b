"""Schedules side by side, for the performance page: a table, the forwards behind it, and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report_tables import table

from flashforward_core.commands.bench_rows import Row
from flashforward_core.metrics.plot import require_matplotlib

OURS = "flashforward"
OTHERS = ("hiar", "self_forcing", "last_stage")
WHERE = ("model", "resolution", "precision", "attention")
HEADING = "### Schedules side by side"
ABOUT = (
    "Seconds of whole rollouts, denoiser only, FlashForward in its fastest layout; × is how many times FlashForward's "
    "they are. Every forward attends to 21 latent frames at most, as the schedules' models publish; other contexts are "
    "named. What is predicted comes from costs fitted to one device's forwards, and has not been measured. With "
    "`last_stage` a chunk waits for the one before, as with `self_forcing`, but re-encodes nothing."
)
EQUAL = (
    "The denoising forwards behind it, milliseconds, median at the longest context; `apart`: the largest difference "
    "from FlashForward's."
)
OLD_CONTEXT = {OURS: 21}
"""What rows without ``context`` had, which were measured before it was filed; the other schedules had 18."""

Fastest = dict[str, Row]
"""Schedule -> the row of its fastest layout, with the longest context that it was run with."""


def context_of(row: Row) -> int:
    """Return the latent frames that a rollout's forwards attended to at most."""
    schedule = row["config"]["schedule"]
    return int(row["config"].get("context", OLD_CONTEXT.get(schedule, 18)))


def side_by_side(rows: Sequence[Row], names: tuple[str, ...]) -> dict[tuple[Any, ...], Fastest]:
    """Group rollouts by the settings in ``names``; keep groups in which FlashForward is not alone."""
    found: dict[tuple[Any, ...], Fastest] = {}
    for row in rows:
        if row["metric"] == "rollout_s" and row["config"]["schedule"] in (OURS, *OTHERS):
            group = found.setdefault(tuple(row["config"].get(name, "") for name in names), {})
            schedule = row["config"]["schedule"]
            group[schedule] = min(row, group.get(schedule, row), key=lambda row: (-context_of(row), row["value"]))
    return {where: group for where, group in found.items() if OURS in group and len(group) > 1}


def schedules(rows: Sequence[Row]) -> str:
    """Return the section, or nothing where no two schedules were run."""
    names = (*WHERE, "latents", "devices", "source")
    groups = side_by_side(rows, names)
    if not groups:
        return ""
    measured = {where[:-1] for where in groups if where[-1] == "measured"}
    kept = {where: group for where, group in groups.items() if where[-1] == "measured" or where[:-1] not in measured}
    body = [
        [*map(str, where), f"{group[OURS]['value']:.2f}", *(_times(group, name) for name in OTHERS)]
        for where, group in sorted(kept.items())
    ]
    parts = [HEADING, ABOUT, table([*names, "FlashForward", *OTHERS], body)]
    return "\n\n".join([*parts, *([EQUAL, forwards] if (forwards := _forwards(kept)) else [])])


def _times(group: Fastest, name: str) -> str:
    if name not in group:
        return "–"
    ours, theirs = group[OURS], group[name]
    note = "" if context_of(theirs) == context_of(ours) else f", context {context_of(theirs)}"
    return f"{theirs['value']:.2f} (×{theirs['value'] / ours['value']:.2f}{note})"


def _forwards(groups: Mapping[tuple[Any, ...], Fastest]) -> str:
    """Compare one forward's milliseconds between schedules, in the longest rollouts of each setting."""
    longest: dict[tuple[Any, ...], tuple[int, dict[str, float], int]] = {}
    for where, group in groups.items():
        context = context_of(group[OURS])
        alike = {name: row["config"] for name, row in group.items() if context_of(row) == context}
        times = {name: config["denoise_ms"] for name, config in alike.items() if "denoise_ms" in config}
        latents, key = where[len(WHERE)], (*where[: len(WHERE)], where[len(WHERE) + 1])
        if OURS in times and len(times) > 1 and latents > longest.get(key, (0,))[0]:
            longest[key] = latents, times, context
    body = []
    for key, (latents, times, context) in sorted(longest.items()):
        apart = max(abs(times[name] / times[OURS] - 1) for name in times)
        shown = [f"{times[name]:.1f}" if name in times else "–" for name in (OURS, *OTHERS)]
        body.append([*map(str, key[:-1]), str(latents), str(key[-1]), str(context), *shown, f"{apart:.1%}"])
    names = [*WHERE, "latents", "devices", "context", "FlashForward", *OTHERS, "apart"]
    return table(names, body) if body else ""


def to_plot(rows: Sequence[Row]) -> dict[tuple[Any, ...], Fastest]:
    """Group the rollouts that ``plot_schedules`` draws: those of every schedule."""
    groups = side_by_side(rows, (*WHERE, "devices", "source", "latents"))
    return {where: group for where, group in groups.items() if len(group) == len(OTHERS) + 1}


def plot_schedules(rows: Sequence[Row], path: Path) -> None:
    """Draw seconds over length, a panel per model and size."""
    from matplotlib.ticker import LogLocator

    groups = to_plot(rows)
    panels = sorted({where[: len(WHERE)] for where in groups})
    columns = min(len(panels), 2)
    figure = require_matplotlib()(figsize=(5.5 * columns, 0.8 + 3.6 * -(-len(panels) // columns)), layout="constrained")
    every = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flatten()
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(every, panels, strict=False):
        own = {where[len(WHERE) :]: group for where, group in groups.items() if where[: len(WHERE)] == panel}
        for (devices, source), style in {(1, "measured"): "o-", (4, "measured"): "s-", (4, "predicted"): "s--"}.items():
            for colour, name in enumerate((OURS, *OTHERS)):
                line = sorted(
                    (where[2], group[name]["value"]) for where, group in own.items() if where[:2] == (devices, source)
                )
                label = f"{name}, {devices} device{'s' * (devices > 1)}, {source}"
                if line:
                    axes.plot(*zip(*line, strict=True), style, color=f"C{colour}", label=label, markersize=4)
        axes.set(xscale="log", yscale="log", title=" ".join(panel), xlabel="latent frames", ylabel="seconds, denoiser")
        ticks = sorted({where[2] for where in own})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=110)
