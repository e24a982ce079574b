"""What ran on each lane and when, for the performance page: timelines of ``bench latency --traces``, drawn."""

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashforward_core.engine.events import Timeline
from flashforward_core.metrics.plot import require_matplotlib

TIMELINES = "performance_timelines.png"
TIMELINES_ABOUT = (
    "What runs on each lane, and when: predicted from one device's forwards, or measured, as each title says. All are "
    "kept in `benchmarks/results/`, as `bench latency --traces` writes them."
)
STAGES = ("#cfe3f5", "#8fbde4", "#4a90cc", "#1c5d99")
PLANNER, COMMIT, DECODE = "#e08a1e", "#9a9a9a", "#5aa469"
LEGEND = {
    "planner": PLANNER,
    "cache update": COMMIT,
    "decoding": DECODE,
    **{f"stage {n}": tone for n, tone in enumerate(STAGES)},
}


def read_timelines(archive: Path, names: Sequence[str]) -> dict[str, Timeline]:
    """Read timelines out of a tar file, by their titles. Raises ``ValueError`` for names that are not in it."""
    if not names:
        raise ValueError(f"timelines={str(archive)!r} is given without names; name what to draw after it")
    with tarfile.open(archive) as files:
        members = {Path(member.name).stem: member for member in files.getmembers() if member.isfile()}
        found = {}
        for name in names:
            if name not in members:
                raise ValueError(
                    f"timelines={name!r} is not in {archive}; it has, for one, {min(members, default='nothing')}"
                )
            file = files.extractfile(members[name])
            assert file is not None
            found[name.replace("_", " ")] = Timeline.from_json(json.loads(file.read()))
    return found


def plot_timelines(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw what ran on each lane and when, a panel per timeline, all on one scale of seconds."""
    heights = [0.8 + 0.28 * len(timeline.lanes) for timeline in timelines.values()]
    figure = require_matplotlib()(figsize=(11, sum(heights) + 1), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        for span in timeline.spans:
            length = span.end_s - span.start_s
            axes.barh(
                span.lane, length, left=span.start_s, height=0.85, color=_tone(span.task), edgecolor="white", lw=0.3
            )
        axes.set_yticks(range(len(timeline.lanes)), [lane.name for lane in timeline.lanes], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(f"{title}: {timeline.length:.2f} s", fontsize=9, loc="left")
    panels[-1].set_xlabel("seconds")
    marks = [panels[0].barh(0, 0, color=tone, label=name) for name, tone in LEGEND.items()]
    figure.legend(marks, LEGEND, loc="outside lower center", ncols=len(LEGEND), fontsize=8)
    figure.savefig(path, dpi=110)


def _tone(task: str) -> str:
    if task.startswith("planner/"):
        return PLANNER
    if task.startswith("decode/"):
        return DECODE
    return COMMIT if "/denoise/" not in task else STAGES[int(task.rpartition("/s")[2]) % len(STAGES)]
