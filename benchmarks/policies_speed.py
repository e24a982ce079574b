"""The page on KV policies, the part on speed: sparse attention, its kernels, and renders without end."""

from collections.abc import Sequence
from pathlib import Path

from report_tables import GIB, figure_with, interval, measured_on, of, table

from flashforward_core.commands.bench_rows import Row

SETTINGS = {"dense": "dense", "temp_cache": "TempCache", "ann_sa": "AnnSA", "ann_ca": "AnnCA", "all": "all three"}
BOUNDED = ("temp_cache", "all")
"""Settings whose cache stops growing."""
KERNELS = {"triton": "Triton", "flash": "FlashAttention on ragged batches", "flex": "FlexAttention"}
ASKED = 5.0
"""The speed-up that is asked for at the longest cache, and the least that the paper has."""
PAPER_MOST = 10.8
"""The most that the paper has."""
SAME = 0.05
"""A gain below this share counts as none."""
TICKS_MS = (500, 1000, 2000, 4000, 8000)


def speed(rows: Sequence[Row], kernels: Sequence[Row], out: Path) -> list[str]:
    """Show a chunk's time over caches of any length, kernel by kernel, and what a bounded window leaves of the gains.

    ``kernels`` are rows of further runs, each with one kernel of sparse attention; they enter no other table.
    """
    found = of(rows, "chunk_ms", blocks="one, multiplied")
    if not found:
        return []
    lengths = sorted({(row["config"]["bounded"] is False, row["config"]["video_frames"]) for row in found})
    body = []
    for unbounded, frames in lengths:
        for name, words in SETTINGS.items():
            where = {"policy": name, "video_frames": frames, "blocks": "one, multiplied", "bounded": not unbounded}
            if not of(rows, "speedup", **where):
                continue
            ms, times, peak = (
                of(rows, metric, **where)[-1]["value"] for metric in ("chunk_ms", "speedup", "peak_bytes")
            )
            cache = f"{frames}" if unbounded else f"window ({frames})"
            body.append([cache, words, f"{ms:.0f}", f"{times:.2f}", f"{peak / GIB:.1f}"])
    whole = [
        [str(row["config"]["video_frames"]), f"{row['value']:.0f}", f"{_peak_of(rows, row) / GIB:.1f}"]
        for row in of(rows, "chunk_ms", blocks="all")
    ]
    _plot(found, out / "policies_speed.png")
    config = found[0]["config"]
    return [
        "## A chunk over a cache of any length\n",
        f"{config['model']} at {config['resolution']}, {config['precision']}, attention {config['attention']}, sparse "
        f"attention {KERNELS.get(config['sparse_attention'], config['sparse_attention'])}, one chunk of "
        f"{config['chunk_frames']} latent frames: {config['stages']} stages and a commit, the first stage dense. One "
        "transformer block is measured and multiplied by their number (a dense cache of 3,000 frames would not fit "
        f"otherwise); its other layers run eagerly. Densities: {config['densities']}. TempCache holds 18 latent "
        "frames' worth at most, and one compaction per chunk and block is counted. As in rollouts, AnnSA finds the "
        "buckets of the queries and of the chunk's own keys at every sparse forward, which is counted; those of cached "
        "pages are there, found once per page. With all three, what TempCache holds is put into "
        "buckets once per chunk, in the compaction. AnnCA looks at every sparse forward which prompt rows stay; the "
        "prompt's own buckets, found once per prompt, are not counted. Memory is the caches of all blocks "
        f"with one block at work. {measured_on(found)}\n",
        table(["video frames cached", "attention", "ms per chunk", "speed-up", "GiB"], body),
        "![Milliseconds per chunk](policies_speed.png)\n",
        *(["All blocks, dense:\n", table(["video frames cached", "ms per chunk", "GiB"], whole)] if whole else []),
        *_flat(rows, kernels),
        _window(rows),
        *_by_kernel(kernels),
    ]


def _flat(rows: Sequence[Row], kernels: Sequence[Row]) -> list[str]:
    """Say how much slower the longest cache is than the shortest, and how much faster than dense."""
    growing = of(rows, "chunk_ms", blocks="one, multiplied", bounded=False)
    lengths = sorted({row["config"]["video_frames"] for row in growing})
    if len(lengths) < 2:
        return []
    first, last = lengths[0], lengths[-1]
    changes, gains = [], []
    for name in ("dense", *BOUNDED):
        ends = [of(growing, "chunk_ms", policy=name, video_frames=frames) for frames in (first, last)]
        if all(ends):
            changes.append(f"{SETTINGS[name]} {100 * (ends[1][-1]['value'] / ends[0][-1]['value'] - 1):+.1f} %")
    for name in BOUNDED:
        row = next(iter(of(rows, "speedup", policy=name, bounded=False, video_frames=last)), None)
        if row is not None:
            gains.append(f"{SETTINGS[name]} {row['value']:.2f}")
    if not gains:
        return []
    same = [SETTINGS[name] for name in BOUNDED if len(_peaks(rows, name)) == 1]
    full = f" Budgets are full at {first} frames, so the work of {' and of '.join(same)} is the same at all lengths."
    return [
        f"**From {first} to {last} cached frames** the time of a chunk changes so: {', '.join(changes)} (asked: flat). "
        f"Speed-up at {last}: {', '.join(gains)} (asked: {ASKED:g}; the paper: {ASKED:g} to {PAPER_MOST:g})."
        f"{full if same else ''}{_again(growing, kernels)}\n"
    ]


def _peaks(rows: Sequence[Row], name: str) -> set[float]:
    return {row["value"] for row in of(rows, "peak_bytes", policy=name, blocks="one, multiplied", bounded=False)}


def _again(growing: Sequence[Row], kernels: Sequence[Row]) -> str:
    """Say how far a second run of the same settings was off."""
    off = []
    for row in growing:
        where = {name: row["config"][name] for name in ("policy", "video_frames", "bounded", "blocks")}
        where["sparse_attention"] = row["config"]["sparse_attention"]
        off += [abs(other["value"] / row["value"] - 1) for other in of(kernels, "chunk_ms", **where)]
    if not off:
        return ""
    return f" {len(off)} of these settings were measured a second time, up to {100 * max(off):.1f} % apart."


def _window(rows: Sequence[Row]) -> str:
    """Say which gains are left with a bounded window."""
    window = {row["config"]["policy"]: row["value"] for row in of(rows, "speedup", bounded=True)}
    gone = [f"{SETTINGS[name]} {value:.2f}" for name, value in window.items() if name != "dense" and value < 1 + SAME]
    left = [f"{SETTINGS[name]} {value:.2f}" for name, value in window.items() if name != "dense" and value >= 1 + SAME]
    return (
        f"**With a bounded window** these gains vanish (below 1 is slower than dense): {', '.join(gone) or 'none'}; "
        f"these are left: {', '.join(left) or 'none'}.\n"
    )


def _by_kernel(kernels: Sequence[Row]) -> list[str]:
    """Compare the kernels of sparse attention over the longest cache that they were measured with."""
    found = of(kernels, "speedup", bounded=False)
    if not found:
        return []
    frames = max(row["config"]["video_frames"] for row in found)
    body = []
    for kernel, words in KERNELS.items():
        line = [words]
        for name in SETTINGS:
            where = {"policy": name, "video_frames": frames, "sparse_attention": kernel, "bounded": False}
            ms, times = (next(iter(of(kernels, metric, **where)), None) for metric in ("chunk_ms", "speedup"))
            line.append(f"{ms['value']:.0f} ({times['value']:.2f})" if ms and times else "–")
        if any(of(found, "speedup", sparse_attention=kernel, policy=name) for name in SETTINGS):
            body.append(line)
    return [
        f"### Kernels of sparse attention, {frames} frames cached\n",
        "Milliseconds per chunk, and how many times as fast as the same run's dense chunk. Each kernel has a run of "
        "its own; dense and TempCache use none of them, and show how much runs differ. FlashAttention copies keys into "
        f"one piece at every forward. {measured_on(found)}\n",
        table(["kernel", *SETTINGS.values()], body),
    ]


def _peak_of(rows: Sequence[Row], row: Row) -> float:
    where = {name: row["config"][name] for name in ("policy", "video_frames", "blocks")}
    value: float = of(rows, "peak_bytes", **where)[-1]["value"]
    return value


def _plot(found: Sequence[Row], path: Path) -> None:
    figure, axis = figure_with(6.5, 4)
    lengths: set[int] = set()
    for name, words in SETTINGS.items():
        line = sorted(
            (row["config"]["video_frames"], row["value"])
            for row in found
            if row["config"]["policy"] == name and not row["config"]["bounded"]
        )
        lengths |= {x for x, _ in line}
        style = "--" if name == "ann_ca" else "-"  # AnnCA lies on dense
        axis.plot([x for x, _ in line], [y for _, y in line], style, marker="o", label=words)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.set_xticks(sorted(lengths), [str(x) for x in sorted(lengths)])
    axis.set_yticks(TICKS_MS, [str(y) for y in TICKS_MS])
    axis.set_xlabel("video frames cached")
    axis.set_ylabel("ms per chunk")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def sparse_videos(rows: Sequence[Row]) -> list[str]:
    """Show what sparse attention does to the embedded model's videos."""
    found = [row for row in of(rows, "faithfulness") if "sparse" in row["config"]]
    if not found:
        return []
    body = [
        [
            f"`{name}`",
            *(interval(next(iter(of(rows, metric, sparse=name)), None), digits) for metric, digits in _SEEN.items()),
        ]
        for name in (row["config"]["sparse"] for row in found)
    ]
    config = found[0]["config"]
    density = [row["value"] for row in of(rows, "density", what="ann_sa")]
    share = f" ({100 * min(density):.0f} to {100 * max(density):.0f} % of all pairs)" if density else ""
    return [
        "## Sparse attention and the embedded model's videos\n",
        f"Schedule `{config['schedule']}`, {config['latents']} latent frames, {config['captions']} held-out captions "
        "with the same seeds; intervals are 95 %. *Faithfulness* is the mean of the four that follow: sky, hills, the "
        "sprites' colours and the way they move, each 0 to 1. PSNR compares with the dense video. "
        f"{measured_on(found)}\n",
        table(["`--sparse`", *_SEEN_WORDS], body),
        f"The likely reason: attention of this small model is spread over all keys, and a bucket{share} misses most of "
        "what a query would read; the prompt's rows are few, and most stay. Models whose attention is narrower "
        "have not been measured.\n",
    ]


_SEEN = {
    "faithfulness": 2,
    "caption_sky": 2,
    "caption_hills": 2,
    "caption_colour": 2,
    "caption_motion": 2,
    "palette_error": 1,
    "psnr": 1,
}
_SEEN_WORDS = ("faithfulness", "sky", "hills", "colours", "paths", "palette error, levels", "PSNR, dB")


def endless(rows: Sequence[Row]) -> list[str]:
    """Show that a long render is as fast and as small late as it is early."""
    found = [row for row in rows if row["config"].get("when") in ("early", "late")]
    if not found:
        return []
    body = []
    for metric, clock, words, scale in (
        ("chunk_ms", "wall", "ms per chunk", 1.0),
        ("chunk_ms", "processor", "ms of processor time per chunk", 1.0),
        ("resident_bytes", None, "resident memory, MiB", 2.0**20),
    ):
        early, late = (of(found, metric, clock=clock, when=when)[-1] for when in ("early", "late"))
        change = 100 * (late["value"] / early["value"] - 1)
        body.append([words, f"{early['value'] / scale:.0f}", f"{late['value'] / scale:.0f}", f"{change:+.1f} %"])
    frames, config = of(rows, "video_frames", latents=found[0]["config"]["latents"])[-1], found[0]["config"]
    early, late = (of(found, "resident_bytes", when=when)[-1]["config"]["chunks"] for when in ("early", "late"))
    return [
        "## Without end\n",
        "Rollouts of more than 192 chunks run in parts of about 96: anchors are planned when they are needed, banks do "
        "not grow, latents and frames go to disk, and the bytes are those of one graph (after a hard cut keys may come "
        "in another order). Positions are computed from the index in float64, so no table ends; Future Forcing "
        "moves what it keeps to the positions just before the chunk. A cancel leaves a playable file.\n",
        f"`benchmarks/endless.py`: {config['latents']} latent frames with the embedded model on {config['device']}, "
        f"{frames['value']:.0f} video frames in the file ({frames['config']['expected']} expected). Medians. "
        f"{measured_on(found)}\n",
        table(["", f"chunks {early}", f"chunks {late}", "change"], body),
    ]
