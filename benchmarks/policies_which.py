"""The page on KV policies, its beginning: which policy is for what, by the measured rows, and its memory."""

from collections.abc import Sequence

from report_tables import GIB, of, table

from flashforward_core.commands.bench_rows import Row
from flashforward_core.commands.simulate import BF16
from flashforward_core.engine.memory import backbone_sizes, predict_memory
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.graph.schedules import build_graph, spec_for
from flashforward_core.kv_policy import KVPolicy, policy_named
from flashforward_core.model.config import WAN_1_3B
from flashforward_core.specs import History, RolloutSpec, VideoShape

SCHEDULES = ("self_forcing", "flashforward")
BUDGET = 9
"""Latent frames of every policy in the table of memory."""
LATENTS = 81
SHAPE = VideoShape(width=832, height=480, latent_frames=LATENTS)


def which(rows: Sequence[Row]) -> list[str]:
    """Say which policy is for what."""
    usual = RolloutSpec(shape=SHAPE)
    return [
        "## Which policy?\n",
        f"- **`keep`** with the default schedule, whose anchors hold a long video, and wherever memory is short: "
        f"its window ({usual.history.chunks * usual.chunk_frames} latent frames by default) takes the least for its "
        "length. To save memory lower `history`, not the budget of a policy.",
        f"- **`window`** for long videos under schedules without anchors, when time counts.{_window_time(rows)}",
        "- **`future_forcing`** for the most likeness to the full history late in a long video without anchors"
        f"{_future_forcing(rows)}.",
        f"- **`temp_cache`** only for a long context that is not bounded, at a high threshold.{_temp_cache(rows)}\n",
        *memory(),
    ]


def ratios(rows: Sequence[Row]) -> dict[int, float]:
    """Return by budget how many times first in, first out's time a chunk under Future Forcing takes."""
    found = {}
    for ours in of(rows, "chunk_ms", policy="future_forcing"):
        for fifo in of(rows, "chunk_ms", policy="window", budget=ours["config"].get("budget"))[:1]:
            found[ours["config"]["budget"]] = ours["value"] / fifo["value"]
    return dict(sorted(found.items()))


def _window_time(rows: Sequence[Row]) -> str:
    times = [row["value"] for row in of(rows, "chunk_ms", policy="window") if "budget" in row["config"]]
    full = next(iter(of(rows, "chunk_ms", policy="full")), None)
    if not times or full is None:
        return ""
    return (
        f" A chunk of a batch of the embedded model takes {min(times):.0f} to {max(times):.0f} ms, under the full "
        f"history {full['value']:.0f}."
    )


def _late(rows: Sequence[Row], policy: str) -> str:
    """Return the gains over first in, first out in the last quarter, and which of them the interval holds."""
    said = []
    for row in sorted(of(rows, "psnr_late_gain", policy=policy), key=lambda row: int(row["config"]["budget"])):
        inside = f" (within its interval of {row['ci95']:.1f})" if abs(row["value"]) <= row["ci95"] else ""
        said.append(f"{row['value']:+.1f} at {row['config']['budget']}{inside}")
    return ", ".join(said)


def _future_forcing(rows: Sequence[Row]) -> str:
    gains, times = _late(rows, "future_forcing"), ratios(rows).values()
    if not gains or not times:
        return ""
    return (
        f": in dB over `window` by budget {gains}. It takes {min(times):.0f} to {max(times):.0f} times `window`'s time "
        "per chunk with the embedded model in float32; attention with a bias in that precision has another kernel "
        "since, and has not been measured in whole chunks again"
    )


def _temp_cache(rows: Sequence[Row]) -> str:
    gains = _late(rows, "temp_cache")
    high = [
        (name, row, kept)
        for name in ("0.98", "0.99")
        for row in of(rows, "attention_error", policy=f"threshold={name}")[:1]
        for kept in of(rows, "kept", policy=f"threshold={name}")[:1]
    ]
    if not gains or not high:
        return ""
    errors = ", and ".join(
        f"{row['value']:.3f} at {name}, where {100 * kept['value']:.0f} % stays" for name, row, kept in high
    )
    fifo = max(of(rows, "attention_error", policy="window"), key=lambda row: int(row["config"]["budget"]), default=None)
    beside = f"; `window`'s at {fifo['config']['budget']} is {fifo['value']:.3f}" if fifo else ""
    return (
        f" With a bounded window and a threshold of 0.9 it is far below `window`: in dB late by budget {gains}. "
        f"Without a bound the error of what attention reads is {errors}{beside}."
    )


def memory() -> list[str]:
    """Predict the memory of rollouts with every policy, as ``simulate`` does."""
    chunks = RolloutSpec(shape=SHAPE).history.chunks
    names = ("keep", "window", "future_forcing", "temp_cache")
    body = []
    for schedule in SCHEDULES:
        of_length = [
            _gib(schedule, policy_named("keep"), history=chunks),
            _gib(schedule, policy_named("keep"), history=BUDGET // RolloutSpec(shape=SHAPE).chunk_frames),
            *(_gib(schedule, policy_named(name, budget_frames=BUDGET), history=chunks) for name in names[1:]),
        ]
        body.append([f"`{schedule}`", *(f"{size:.1f}" for size in of_length)])
    frames = chunks * RolloutSpec(shape=SHAPE).chunk_frames
    header = [
        "schedule",
        f"`keep`, {frames} frames",
        f"`keep`, {BUDGET}",
        *(f"`{name}`, {BUDGET}" for name in names[1:]),
    ]
    return [
        "**A policy saves no memory**: it takes more than `keep` with as many latent frames, as the old and the new "
        "state and what a forward handed over are there at once. GiB on one device as `simulate` predicts them, not "
        f"measured; 1.3B, 480p, {LATENTS} latent frames:\n",
        table(header, body),
    ]


def _gib(schedule: str, policy: KVPolicy, *, history: int) -> float:
    spec = spec_for(RolloutSpec(shape=SHAPE, schedule=schedule, history=History(chunks=history), kv_policy=policy))
    graph = build_graph(spec)
    placement = place(graph, lanes=lanes_for(["cuda:0"]), layout="interleaved")
    sizes = backbone_sizes(WAN_1_3B, element_bytes=BF16)
    return max(one.peak_bytes for one in predict_memory(graph, spec=spec, placement=placement, sizes=sizes)) / GIB
