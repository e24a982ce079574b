"""Kills lanes and machines of a Ray cluster in the middle of renders, and looks at what is left; prints a table.

    .venv/bin/python benchmarks/ray_faults.py --trials 20 --json faults.json

The cluster is two or three Ray nodes on this machine, with the embedded model on CPU lanes. A trial renders to a file
and, at a random point, kills or freezes a lane's process or kills a node. It passes when the run ends by itself with an
error that names the lane (or had finished), every chunk that was delivered has the bytes of a local render, and the
file is whole: the finished video, or a partial one that plays.
"""

import argparse
import json
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.engine.events import ChunkReady, Event, FramesReady, TaskFinished
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.ray_lanes import LaneLost
from flashforward_core.engine.ray_run import dismiss
from flashforward_core.engine.rollout import render
from flashforward_core.media import VideoWriter, probe, read_frames
from flashforward_core.model.loading import EMBEDDED_SIZE, load_embedded
from flashforward_core.specs import RolloutSpec, VideoShape

KINDS = ("lane killed", "node killed")
FROZEN, STARTING = (7, 14), (4, 11)  # trials that freeze a lane, and trials that strike while lanes start
PROMPT = "a red balloon drifts right over green hills at dusk"
STORE_BYTES = 200_000_000


@dataclass(slots=True, kw_only=True)
class Trial:
    """What happened."""

    number: int
    kind: str
    when: str
    """``rendering``, with ``after_s`` since the first task ended, or ``starting``, since the render was asked for."""
    after_s: float
    chunks: int
    """Finished chunks that had been delivered."""
    frames: int
    """Frames in the file that is left."""
    ended_s: float
    """How long after the kill the render ended; negative when it had finished before."""
    outcome: str
    passed: bool


class Bench:
    """A cluster, a backbone, and what a render gives without trouble."""

    def __init__(self, *, nodes: int, lanes: int, latent_frames: int, folder: Path) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args=self._options(head=True))
        self.others = [self.cluster.add_node(**self._options()) for _ in range(nodes - 1)]
        self.folder = folder
        self.backbone = load_embedded()
        self.texts = [self.backbone.text_encoder.encode([PROMPT])]
        width, height = EMBEDDED_SIZE
        self.spec = RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=latent_frames), seed=1)
        self.devices = DevicePlan(devices=(f"cpu*{lanes}",), ray_address=self.cluster.address)
        self.expected = render(self.backbone, self.spec, self.texts, devices=DevicePlan(devices=(f"cpu*{lanes}",)))

    def _options(self, *, head: bool = False) -> dict[str, Any]:
        calm = {"memory_monitor_refresh_ms": 0}  # else Ray itself ends lanes when others' work fills the memory
        more = {"include_dashboard": False, "_system_config": calm} if head else {}
        return {"num_cpus": 1, "object_store_memory": STORE_BYTES, **more}

    def render(self, out: Path, chunks: list[ChunkReady], *, on_first: Callable[[], None] = lambda: None) -> str:
        """Render to ``out`` and return the latents' hash. ``on_first`` is called when the first task has ended."""
        shape = self.spec.shape
        tasks = 0

        def on_event(event: Event) -> None:
            nonlocal tasks
            tasks += isinstance(event, TaskFinished)
            if tasks == 1 and isinstance(event, TaskFinished):
                on_first()
            if isinstance(event, ChunkReady):
                chunks.append(event)
            elif isinstance(event, FramesReady):
                writer.write(event.frames[0].numpy())

        with VideoWriter(out, width=shape.width, height=shape.height, fps=shape.fps) as writer:
            return render(
                self.backbone, self.spec, self.texts, devices=self.devices, decode=True, on_event=on_event
            ).sha256

    def mend(self) -> None:
        """Start a node for each that is gone."""
        alive = [node for node in self.others if "raylet" in node.all_processes]
        self.others = alive + [self.cluster.add_node(**self._options()) for _ in range(len(self.others) - len(alive))]
        while sum(node["Alive"] for node in ray.nodes()) != len(self.nodes()):  # until the dead are known to be dead
            time.sleep(0.2)

    def lanes_of(self, node: Any | None = None) -> list[psutil.Process]:
        """Return the lanes' processes, of one node or of all."""
        raylets = [other.all_processes["raylet"][0].process.pid for other in ([node] if node else self.nodes())]
        return [child for pid in raylets for child in psutil.Process(pid).children() if _is_lane(child)]

    def nodes(self) -> list[Any]:
        return [self.cluster.head_node, *self.others]


def _is_lane(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("ray::Lane") or "ray::LaneWorker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def strike(bench: Bench, kind: str, draw: random.Random) -> None:
    """Do the damage; where no lane runs yet, wait for one."""
    node = draw.choice(bench.others)
    if kind.startswith("node"):
        bench.cluster.remove_node(node, allow_graceful=False)
        return
    while not (lanes := bench.lanes_of()):
        time.sleep(0.05)
    draw.choice(lanes).send_signal(signal.SIGKILL if kind == "lane killed" else signal.SIGSTOP)


def run_trial(bench: Bench, number: int, *, length_s: float, draw: random.Random) -> Trial:
    """Render, strike at a random point of the ``length_s``, and judge what is left."""
    out = bench.folder / f"trial{number}.mp4"
    chunks: list[ChunkReady] = []
    struck_s: list[float] = []
    kind = "lane frozen" if number in FROZEN else KINDS[number % len(KINDS)]
    when = "starting" if number in STARTING else "rendering"
    after_s = draw.uniform(0.0, length_s)

    def later() -> None:
        struck_s.append(time.perf_counter())
        strike(bench, kind, draw)

    timer = threading.Timer(after_s, later)
    if when == "starting":
        timer.start()
    try:
        sha256 = bench.render(out, chunks, on_first=timer.start if when == "rendering" else lambda: None)
        outcome = "finished" if sha256 == bench.expected.sha256 else "finished with other bytes"
    except LaneLost as error:
        outcome = str(error)
    ended_s = time.perf_counter()
    timer.cancel()
    if timer.ident is not None:
        timer.join()
    frames, whole = judge_file(out, bench.spec.shape.video_frames)
    same = all(torch.equal(bench.expected.latents_BCFHW[:, :, list(c.frames)], c.latents) for c in chunks)
    return Trial(
        number=number,
        kind=kind if struck_s else "nothing: it had finished",
        when=when,
        after_s=round(after_s, 1),
        chunks=len(chunks),
        frames=frames,
        ended_s=round(ended_s - struck_s[0], 2) if struck_s else -1.0,
        outcome=outcome,
        passed=whole and same and outcome != "finished with other bytes",
    )


def judge_file(out: Path, frames: int) -> tuple[int, bool]:
    """Return how many frames the file that is left has, and whether it is as it should be."""
    partial = out.with_suffix(".partial.mp4")
    if out.exists():
        return probe(out).frames, probe(out).frames == frames and not partial.exists()
    if not partial.exists():
        return 0, True  # no frame was ready
    decoded = sum(len(part) for part in read_frames(partial, chunk=16))
    return decoded, decoded == probe(partial).frames > 0


def trials(bench: Bench, *, count: int, seed: int) -> Iterator[Trial]:
    """Run ``count`` trials, after one without damage that says how long a render takes."""
    draw = random.Random(seed)
    first_s: list[float] = []
    bench.render(bench.folder / "whole.mp4", [], on_first=lambda: first_s.append(time.perf_counter()))
    length_s = time.perf_counter() - first_s[0]
    print(f"a render takes {length_s:.1f} s from its first task on", file=sys.stderr)
    for number in range(1, count + 1):
        dismiss()
        bench.mend()
        yield run_trial(bench, number, length_s=length_s, draw=draw)
    dismiss()
    bench.mend()
    chunks: list[ChunkReady] = []
    assert bench.render(bench.folder / "last.mp4", chunks) == bench.expected.sha256, "the cluster is not what it was"


def table(rows: list[Trial]) -> str:
    """Return the trials as Markdown."""
    lines = ["| | what | when | chunks | frames kept | ended after s | how |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        mark = "" if row.passed else " **failed**"
        lines.append(
            f"| {row.number} | {row.kind} | {row.when}, {row.after_s} s | {row.chunks} | {row.frames} | "
            f"{row.ended_s} | {row.outcome}{mark} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--latent-frames", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(nodes=args.nodes, lanes=args.lanes, latent_frames=args.latent_frames, folder=Path(folder))
        try:
            for trial in trials(bench, count=args.trials, seed=args.seed):
                rows.append(trial)
                print(trial, file=sys.stderr, flush=True)
                if args.json:  # after each: a run that is stopped loses nothing
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        finally:
            dismiss()
            ray.shutdown()
            bench.cluster.shutdown()
    print(f"{platform.machine()}, {psutil.cpu_count()} cores, {time.strftime('%Y-%m-%d')}\n\n{table(rows)}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
