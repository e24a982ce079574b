"""``bench ray``: the same rollout on lanes of this process and on Ray lanes, in turns, and what Ray adds per task.

A ratio of two runs means little on a machine that does other things too, so they come in pairs, the first of a pair
being the other one each time, and figures are medians over the pairs.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ..engine.budget import sizes_of
from ..engine.events import TaskSpan
from ..engine.forward import CHOICES
from ..engine.lanes import DevicePlan
from ..engine.placement import LAYOUTS
from ..engine.ray_lanes import check_address, local_cluster
from ..engine.ray_run import dismiss
from ..engine.rollout import RenderResult, render
from ..model.attention import ATTENTION
from ..model.config import MODELS
from ..specs import RolloutSpec
from .bench_engine import WARM_LATENTS, Bench
from .bench_models import PRECISIONS

LOCAL = "local"
SPARE_BYTES = 1 << 30
HERE, RAY = "in_process", "ray"
COMPILED_DIFFERENCE = 0.05
"""Of latents' norms: what four stages make of 1.2 % in each bf16 forward, which is its error against float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument(
        "--ray", default=LOCAL, metavar="ADDRESS", help="local (a cluster of its own), auto or HOST:PORT (local)"
    )
    parser.add_argument("--model", default="embedded", help=f"one of: {', '.join(MODELS)} (embedded)")
    parser.add_argument("--resolution", help="480p, 720p, 128x192 (embedded) or WIDTHxHEIGHT in pixels")
    parser.add_argument("--latents", type=int, default=81, metavar="N", help="length in latent frames (81)")
    parser.add_argument(
        "--devices", nargs="+", default=["auto"], metavar="LIST", help="device lists, such as cpu*2 or cuda:0 (auto)"
    )
    parser.add_argument("--layout", default="auto", help=f"one of: auto, {', '.join(LAYOUTS)} (auto)")
    parser.add_argument("--precision", default="fp32", help=f"one of: {', '.join(PRECISIONS)} (fp32)")
    parser.add_argument("--attention", default="auto", help=f"one of: auto, {', '.join(ATTENTION)} (auto)")
    parser.add_argument("--compile", default="auto", help=f"one of: {', '.join(CHOICES)} (auto)")
    parser.add_argument("--graphs", default="auto", help=f"one of: {', '.join(CHOICES)} (auto)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="pairs of runs (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument("--commit", metavar="NAME", help="what rows say was measured (this checkout's commit)")
    parser.set_defaults(metrics=[], decoder="wan", order="latency")


def run(args: argparse.Namespace) -> int:
    """Measure each device list; raises ``ValueError`` when the latents differ, since the times then compare nothing.

    Two processes may compile a block to different kernels, the fastest each one found: then latents of the two ways
    differ by roundings, up to ``COMPILED_DIFFERENCE``, and a row says how much.
    """
    if args.repeats < 1:
        raise ValueError(f"repeats={args.repeats} is below 1; use repeats=3")
    if args.ray != LOCAL:
        check_address(args.ray)
    args.attention = [args.attention]
    (bench,) = Bench.each(args)
    with _cluster(bench) as address:
        for devices in args.devices:
            plan = bench.plan(devices, layout=args.layout)
            _compare(bench, {HERE: plan, RAY: replace(plan, ray_address=address)}, pairs=args.repeats)
    return 0


@contextlib.contextmanager
def _cluster(bench: Bench) -> Iterator[str]:
    """Yield the address to run at: of a cluster that lives as long as the context, if it is to be a local one."""
    own: contextlib.AbstractContextManager[str] = contextlib.nullcontext(bench.args.ray)
    if bench.args.ray == LOCAL:
        sizes = sizes_of(bench.backbone)  # weights are sent once, whole; the rest is latents, and KV of anchors
        store_bytes = SPARE_BYTES + 2 * (sizes.outer_bytes + sizes.blocks_bytes)
        own = local_cluster(gpus=torch.cuda.device_count(), store_bytes=store_bytes)
    with own as found:
        try:
            yield found
        finally:
            dismiss()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One rollout and what it took."""

    seconds: float
    """From the call to the result."""
    spans: Sequence[TaskSpan]
    sha256: str
    latents_BCFHW: Tensor
    processor_s: float
    """Of this process and all that it has started, such as a cluster of its own: other work adds none."""


def _processor_s() -> float:
    """Return the processor time so far of this process and those under it that live."""
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def _compare(bench: Bench, plans: dict[str, DevicePlan], *, pairs: int) -> None:
    spec = bench.spec("flashforward", bench.args.latents)
    short = replace(spec.shape, latent_frames=min(WARM_LATENTS, spec.shape.latent_frames))
    for way, plan in plans.items():
        began = time.perf_counter()
        _once(bench, bench.spec("flashforward", short.latent_frames), plan)
        print(f"warm-up {way} on {','.join(plan.devices)}: {time.perf_counter() - began:.1f} s", flush=True)
    runs: dict[str, list[_Run]] = {HERE: [], RAY: []}
    for number in range(pairs):
        for way in (HERE, RAY) if number % 2 == 0 else (RAY, HERE):
            runs[way].append(_once(bench, spec, plans[way]))
            print(f"{way}: {runs[way][-1].seconds:.3f} s", flush=True)
    lanes = plans[HERE].resolve()
    compiled = any(plans[HERE].fast.compiles(torch.device(name)) for name in lanes)
    alike = list(runs.values()) if compiled else [[*runs[HERE], *runs[RAY]]]
    for several in alike:
        if len(digests := {one.sha256 for one in several}) > 1:
            raise ValueError(f"latents differ between the runs: sha256 {', '.join(sorted(digests))}")
    _file(bench, runs, devices=",".join(plans[HERE].devices), lanes=len(lanes))


def _difference(runs: dict[str, list[_Run]]) -> float:
    """Return how far the two ways' latents are apart, of their norm; ``ValueError`` for too far."""
    here, ray = (runs[way][0].latents_BCFHW for way in (HERE, RAY))
    if (difference := float((ray - here).norm() / here.norm())) > COMPILED_DIFFERENCE:
        raise ValueError(
            f"latents differ by {difference:.1%} between {HERE} and {RAY}; {COMPILED_DIFFERENCE:.0%} may be"
        )
    return difference


def _once(bench: Bench, spec: RolloutSpec, plan: DevicePlan) -> _Run:
    computed, began = _processor_s(), time.perf_counter()
    result: RenderResult = render(bench.backbone, spec, bench.models.texts, devices=plan)
    seconds, computed = time.perf_counter() - began, _processor_s() - computed
    return _Run(
        seconds=seconds,
        spans=result.timeline.spans,
        sha256=result.sha256,
        latents_BCFHW=result.latents_BCFHW,
        processor_s=computed,
    )


def _file(bench: Bench, runs: dict[str, list[_Run]], *, devices: str, lanes: int) -> None:
    tasks, difference = len(runs[HERE][0].spans), _difference(runs)
    config = {"latents": bench.args.latents, "device_list": devices, "devices": lanes, "tasks": tasks}
    config |= {"pairs": len(runs[HERE]), "sha256": runs[HERE][0].sha256[:16]}
    for way, several in runs.items():
        seconds = [one.seconds for one in several]
        found: dict[str, Any] = {"lanes": way, "all_s": [round(one, 4) for one in seconds]}
        bench.book.add("rollout_s", statistics.median(seconds), "s", **config, **found)
        gap_s = statistics.median(gap for one in several for gap in gaps(one.spans))
        bench.book.add("task_gap_ms", gap_s * 1000, "ms", **config, lanes=way)
        processor_s = statistics.median(one.processor_s for one in several)
        bench.book.add("processor_s", processor_s, "s", **config, lanes=way)
        around_s = statistics.median(one.seconds - _makespan(one.spans) for one in several)
        bench.book.add("around_s", around_s, "s", **config, lanes=way)
    both = list(zip(runs[HERE], runs[RAY], strict=True))
    ratios = [ray.seconds / here.seconds for here, ray in both]
    bench.book.add("ray_ratio", statistics.median(ratios), "ratio", **config, all=[round(one, 4) for one in ratios])
    ratios = [ray.processor_s / here.processor_s for here, ray in both]
    bench.book.add("ray_processor_ratio", statistics.median(ratios), "ratio", **config)
    added = [(ray.seconds - here.seconds) * lanes / tasks for here, ray in both]
    bench.book.add("ray_difference", difference, "ratio", **config)
    bench.book.add("ray_task_overhead_ms", statistics.median(added) * 1000, "ms", **config)


def gaps(spans: Sequence[TaskSpan]) -> list[float]:
    """Return the seconds between one task's end and the next one's start, for every two that follow on a lane."""
    by_lane: dict[int, list[TaskSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        by_lane.setdefault(span.lane, []).append(span)
    return [after.start_s - before.end_s for lane in by_lane.values() for before, after in pairwise(lane)]


def _makespan(spans: Sequence[TaskSpan]) -> float:
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)
