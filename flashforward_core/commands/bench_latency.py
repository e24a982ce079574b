"""``bench latency``: how long forwards, rollouts, decoding and whole jobs take, on the devices that are there.

Everything is measured through the engine that users run. Forwards are timed where they happen, inside rollouts, by the
lanes' own marks (events on CUDA), so nothing that a user pays for is left out.
"""

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ..engine.budget import sizes_of
from ..engine.cost import CostKey, CostModel, load_cost, num_keys, save_cost
from ..engine.events import Timeline
from ..engine.forward import CHOICES
from ..engine.memory import DoesNotFit, predict_memory
from ..engine.placement import DECODES, LANES_APART, LAYOUTS, ORDERS, Placement, lanes_for, place
from ..engine.simulate import simulate
from ..graph.halves import in_halves
from ..graph.schedules import SCHEDULES, build_graph
from ..graph.task import Role, TaskGraph
from ..kv_policy import KV_POLICIES, KeepOptions
from ..model.attention import ATTENTION
from ..model.config import MODELS
from ..registry import Registry
from ..specs import MAX_DEVICES, TEMPORAL_FACTOR, RolloutSpec
from .bench_engine import Bench, Timed, check_choices, forward_seconds, pair_seconds, steady_rate, write_traces
from .bench_kernels import attention_times, decode_rates, forward_errors
from .bench_models import DECODERS, PRECISIONS
from .bench_rows import RowBook, check_target
from .simulate import costs_path

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--model", default="embedded", help=f"one of: {', '.join(MODELS)} (embedded)")
    parser.add_argument("--resolution", help="480p, 720p, 128x192 (embedded) or WIDTHxHEIGHT in pixels")
    parser.add_argument(
        "--latents", type=int, nargs="+", default=[21], metavar="N", help="lengths in latent frames (21)"
    )
    parser.add_argument(
        "--devices", nargs="+", default=["auto"], metavar="LIST", help="device lists to compare, such as cpu*2 (auto)"
    )
    parser.add_argument("--metrics", nargs="+", default=list(METRICS), help=f"some of: {', '.join(METRICS)} (all)")
    parser.add_argument("--schedules", nargs="+", default=["flashforward"], help=f"some of: {', '.join(SCHEDULES)}")
    parser.add_argument("--layouts", nargs="+", default=["auto"], help=f"some of: auto, {', '.join(LAYOUTS)} (auto)")
    parser.add_argument("--order", default="latency", help=f"one of: {', '.join(ORDERS)} (latency)")
    parser.add_argument(
        "--decode", nargs="+", default=["auto"], help=f"where jobs decode, some of: {', '.join(DECODES)} (auto)"
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["auto"],
        help=f"kernels to compare, some of: auto, {', '.join(ATTENTION)} (auto)",
    )
    parser.add_argument("--precision", default="fp32", help=f"one of: {', '.join(PRECISIONS)} (fp32)")
    parser.add_argument("--decoder", default="wan", help=f"of the large models, one of: {', '.join(DECODERS)} (wan)")
    parser.add_argument("--compile", default="auto", help=f"one of: {', '.join(CHOICES)} (auto)")
    parser.add_argument("--graphs", default="auto", help=f"one of: {', '.join(CHOICES)} (auto)")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs of each rollout; the fastest counts (1)"
    )
    parser.add_argument("--predict", type=int, nargs="*", default=[], metavar="N", help="also predict for N devices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument("--commit", metavar="NAME", help="what rows say was measured (this checkout's commit)")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="write measured and simulated timelines")
    parser.add_argument("--fit", action="store_true", help="keep the fitted costs, for simulate and the Plan node")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="where --fit keeps them (costs.json in the cache folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure what was asked for; a metric that fails is reported in one line, and the others still run."""
    _check(args)
    benches = Bench.each(args)
    for schedule in args.schedules:
        for latents in args.latents:
            benches[0].spec(schedule, latents)  # raises for sizes and lengths that no video has
    if args.fit:
        load_cost(costs_path(args), key=_cost_key(benches[0]))  # raises for a file of something else
    wanted = [(bench, name) for bench in benches for name in args.metrics if bench is benches[0] or name not in ONCE]
    failed = [f"{name} ({bench.attention})" for bench, name in wanted if not _measured(bench, name)]
    if args.fit and not _measured(benches[0], FIT):
        failed.append(FIT)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return int(bool(failed))


def _check(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for what cannot be measured or kept; ``Bench.each`` checks what other suites have too."""
    check_choices(args, metrics=METRICS, schedules=SCHEDULES, layouts=("auto", *LAYOUTS), decode=DECODES)
    for latents in args.latents:
        if latents < 1:
            raise ValueError(f"latents={latents} is below 1; use latents=21")
    if args.repeats < 1:
        raise ValueError(f"repeats={args.repeats} is below 1; use repeats=1")
    for lanes in args.predict:
        if not 1 <= lanes <= MAX_DEVICES:
            raise ValueError(f"predict={lanes} is outside 1 to {MAX_DEVICES}; use predict=4")
    if args.traces is not None:
        check_target("traces", args.traces, folder=True)
    if args.costs is not None or args.fit:
        check_target("costs", costs_path(args))


def _cost_key(bench: Bench) -> CostKey:
    args = bench.args
    return CostKey(device=bench.book.machine, model=args.model, resolution=bench.resolution, precision=args.precision)


FIT = "fit"
COMPACTED_LATENTS = 24
ONCE = ("decode_fps", "forward_error")
"""Metrics that attention has no part in, or that measure every kernel themselves."""


def _measured(bench: Bench, name: str) -> bool:
    try:
        _fit(bench) if name == FIT else METRICS[name](bench)
    except Exception as error:  # out of memory, a kernel that this device has not, a package that is missing
        reason = str(error).strip().partition("\n")[0]
        print(f"FAILED {name} ({bench.attention}): {type(error).__name__}: {reason}", flush=True)
        log.debug("where %s failed", name, exc_info=error)
        return False
    return True


def _fit(bench: Bench) -> None:
    """Keep the costs of forwards and of decoding; what was not measured now stays as an earlier fit has it."""
    key, path = _cost_key(bench), costs_path(bench.args)
    earlier = load_cost(path, key=key)
    cost = earlier if earlier is not None and not bench.has_forwards else bench.cost
    decode_frame_s = bench.decode_frame_s or (0.0 if earlier is None else earlier.decode_frame_s)
    pair_ratio = bench.pair_ratio or (1.0 if earlier is None else earlier.pair_ratio)
    compact_frame_s = {**({} if earlier is None else earlier.compact_frame_s), **bench.compact_frame_s}
    fitted = replace(cost, decode_frame_s=decode_frame_s, compact_frame_s=compact_frame_s, pair_ratio=pair_ratio)
    save_cost(path, key=key, cost=fitted)
    print(f"costs of {key.device} kept in {path}")


METRICS: Registry[Callable[[Bench], None]] = Registry("metrics")


@METRICS.add("forward_ms")
def _forward_ms(bench: Bench) -> None:
    """Forwards by context. A run that still compiles is no steady state, and fails."""
    latents = max(bench.args.latents)
    spec = bench.spec("flashforward", latents)
    timed = bench.single("flashforward", latents)
    if timed.compilations:
        raise RuntimeError(f"the timed run compiled {timed.compilations} graphs; use latents that are a multiple of 3")
    medians = forward_seconds(build_graph(spec, decode=False), spec, timed.result)
    for (role, keys), seconds in sorted(medians.items(), key=lambda item: (item[0][0].value, item[0][1])):
        context = keys // spec.shape.tokens_per_frame
        bench.book.add("forward_ms", seconds * 1000, "ms", role=role.value, context=context, latents=latents)


@METRICS.add("forward_error")
def _forward_error(bench: Bench) -> None:
    for config, error in forward_errors(bench.backbone, bench.spec("flashforward", 3), fast=bench.plan("auto").fast):
        bench.book.add("forward_error", error, "relative", **config)


@METRICS.add("attention_ms")
def _attention_ms(bench: Bench) -> None:
    """The kernel alone, at every context of the renderer; ``first_ms`` is what its first call in a thread takes."""
    spec = bench.spec("flashforward", max(bench.args.latents))
    for context, seconds, first_s in attention_times(bench.backbone, spec, device=bench.device):
        bench.book.add("attention_ms", seconds * 1000, "ms", context=context, first_ms=first_s * 1000)


@METRICS.add("rollout_s")
def _rollout_s(bench: Bench) -> None:
    """The denoiser alone, side by side, with what was predicted and how much memory it took.

    Layouts are compared for the first schedule; the others run in the first layout.
    """
    args = bench.args
    for latents in args.latents:
        for schedule in args.schedules:
            spec = bench.spec(schedule, latents)
            layouts = args.layouts if schedule == args.schedules[0] else args.layouts[:1]
            for devices, layout in product(args.devices, layouts):
                try:
                    _one_rollout(bench, spec, devices=devices, layout=layout)
                except DoesNotFit as error:
                    print(f"skipped rollout_s of {latents} latents with {schedule} on {devices}: {error}", flush=True)
            for count in args.predict:
                for layout in layouts if count > 1 else ["single"]:
                    _one_prediction(bench, spec, lanes=count, layout=layout)


def _one_rollout(bench: Bench, spec: RolloutSpec, *, devices: str, layout: str) -> None:
    plan = bench.plan(devices, layout=layout)
    names = plan.resolve()
    if len(names) == 1 and layout != bench.args.layouts[0]:
        print(f"skipped rollout_s: layout={layout!r} changes nothing for devices={devices!r}, which is one lane")
        return
    latents = spec.shape.latent_frames
    alone = names == (str(bench.device),)
    timed = bench.single(spec.schedule, latents) if alone else bench.timed(spec, plan)
    graph = build_graph(spec, decode=False)
    chosen = "single" if alone else layout
    placement = place(graph, lanes=lanes_for(names), layout=chosen, order=plan.order)
    spans = timed.result.timeline.spans
    measured_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    config = {
        "latents": latents,
        "schedule": spec.schedule,
        "layout": placement.layout,
        "devices": len(names),
        "device_list": devices,
        "order": plan.order,
        "source": "measured",
        "sha256": timed.result.sha256[:16],
    }
    medians = forward_seconds(graph, spec, timed.result)
    longest = max(keys for role, keys in medians if role is Role.RENDERER)
    config["context"] = longest // spec.shape.tokens_per_frame
    found = {"forwards": graph.counts()["total"], "repeats": bench.args.repeats}
    found["denoise_ms"] = medians[Role.RENDERER, longest] * 1000
    bench.book.add("rollout_s", timed.seconds, "s", **config, **found)
    predicted = simulate(graph, placement=placement, seconds=bench.cost.of(spec))
    assert predicted.predicted_s is not None
    error = abs(measured_s - predicted.predicted_s) / measured_s
    bench.book.add("makespan_error", error, "ratio", **config, measured_s=measured_s, predicted_s=predicted.predicted_s)
    _add_launches(bench, timed, **config)
    _add_peaks(bench, timed, graph=graph, spec=spec, placement=placement, **config)
    _write_traces(bench, spec, placement, measured=timed.result.timeline, simulated=predicted)


def _write_traces(bench: Bench, spec: RolloutSpec, placement: Placement, **timelines: Timeline) -> None:
    if bench.args.traces is not None:
        write_traces(bench.args.traces, trace_name(bench.book.common, spec, placement), **timelines)


def trace_name(config: Mapping[str, Any], spec: RolloutSpec, placement: Placement) -> str:
    """Name a rollout's timelines by what its rows' configs share and how it ran."""
    run = f"{spec.schedule}_{spec.shape.latent_frames}_{placement.layout}_{len(placement.lanes)}"
    return f"{config['model']}_{config['resolution']}_{config['attention']}_{run}"


def _add_launches(bench: Bench, timed: Timed, **config: Any) -> None:
    """File how long the lanes' threads were launching forwards, all together, and what may have held them up."""
    lanes = timed.result.timeline.launches
    counts = {
        name: sum(getattr(lane, name) for lane in lanes) for name in ("eager", "recorded", "replayed", "in_parts")
    }
    found = {"waited_s": sum(lane.waited_s for lane in lanes), "compilations": timed.compilations}
    total = sum(lane.launching_s for lane in lanes)
    bench.book.add("launching_s", total, "s", **config, **counts, **found, first_s=timed.first_s)


def _add_peaks(
    bench: Bench, timed: Timed, *, graph: TaskGraph, spec: RolloutSpec, placement: Placement, **config: Any
) -> None:
    """File each CUDA device's peak beside what was predicted for it."""
    predicted = predict_memory(graph, spec=spec, placement=placement, sizes=sizes_of(bench.backbone))
    by_name = {memory.device: memory for memory in predicted}
    for name, peak in timed.peak_bytes.items():
        found = by_name[name]
        parts = {"weights_bytes": found.weights_bytes, "kv_bytes": found.kv_bytes, "predicted_bytes": found.peak_bytes}
        error = abs(peak - found.peak_bytes) / peak
        bench.book.add("peak_bytes", peak, "bytes", **config, device=name, **parts, error=error)


def _one_prediction(bench: Bench, spec: RolloutSpec, *, lanes: int, layout: str) -> None:
    order = bench.args.order
    placement, predicted = add_prediction(bench.book, spec, cost=bench.cost, lanes=lanes, layout=layout, order=order)
    _write_traces(bench, spec, placement, predicted=predicted)


def add_prediction(
    book: RowBook, spec: RolloutSpec, *, cost: CostModel, lanes: int, layout: str, order: str = "latency"
) -> tuple[Placement, Timeline]:
    """File how long a rollout would take on ``lanes`` devices by ``cost``; return what would run where and when."""
    graph, seconds = build_graph(spec, decode=False), cost.of(spec)
    placement = place(graph, lanes=lanes_for([""] * lanes), layout=layout, order=order)
    predicted = simulate(graph, placement=placement, seconds=seconds)
    keys = max(num_keys(task, spec) for task in graph.tasks if task.role is Role.RENDERER)
    config = {"latents": spec.shape.latent_frames, "schedule": spec.schedule, "layout": placement.layout}
    config |= {"devices": lanes, "order": order, "source": "predicted", "context": keys // spec.shape.tokens_per_frame}
    book.add("rollout_s", predicted.predicted_s or 0.0, "s", **config, rounds=predicted.rounds)
    return placement, predicted


@METRICS.add("lane_scaling")
def _lane_scaling(bench: Bench) -> None:
    """Forwards per second of several lanes over those of one, in the middle of a wavefront."""
    latents = max(bench.args.latents)
    spec = bench.spec("flashforward_no_anchors", latents)
    for devices in bench.args.devices:
        lanes = len(bench.plan(devices).resolve())
        if lanes == 1:
            print(f"skipped lane_scaling: lanes=1 of devices={devices!r} is below 2; use more devices, such as cpu*2")
            continue
        alone = steady_rate(bench.single(spec.schedule, latents).result.timeline.spans)
        plan = bench.plan(devices, layout="interleaved")
        rate = steady_rate(bench.timed(spec, plan).result.timeline.spans)
        bench.book.add("lane_scaling", rate / alone, "ratio", devices=lanes, device_list=devices, forwards_per_s=rate)


@METRICS.add("batched_ms")
def _batched_ms(bench: Bench) -> None:
    """Two forwards as one batch, beside one of the same context; then a whole rollout each way."""
    latents = max(bench.args.latents)
    spec, alone = bench.spec("flashforward", latents), bench.single("flashforward", latents)
    graph, plan = build_graph(spec, decode=False), bench.plan(str(bench.device), layout="single", batch_diagonal=True)
    timed = bench.timed(spec, plan)
    placement = place(graph, lanes=lanes_for([str(bench.device)]), order=plan.order, pairable=plan.pairable(spec))
    keys, seconds = pair_seconds(placement, spec, graph, timed.result)
    one = forward_seconds(graph, spec, alone.result)[Role.RENDERER, keys]
    bench.pair_ratio = seconds / (2 * one)
    context = keys // spec.shape.tokens_per_frame
    config = {"context": context, "latents": latents, "batched": 2, "pairs": len(placement.pairs)}
    found = {"alone_ms": one * 1000, "ratio": bench.pair_ratio, "compilations": timed.compilations}
    rollouts = {"rollout_s": timed.seconds, "rollout_alone_s": alone.seconds}
    bench.book.add("batched_ms", seconds * 1000, "ms", **config, **found, **rollouts)


@METRICS.add("compact_ms")
def _compact_ms(bench: Bench) -> None:
    """KV policies' compactions, median per latent frame added; 24 latent frames fill the largest default budget."""
    for name in KV_POLICIES:
        policy = KV_POLICIES[name]()
        if isinstance(policy, KeepOptions):
            continue
        spec = replace(bench.spec("self_forcing", COMPACTED_LATENTS), kv_policy=policy)
        timed = bench.timed(spec, bench.plan(str(bench.device), layout="single"))
        spans = [span for span in timed.result.timeline.spans if span.task.startswith("compact/")]
        seconds = statistics.median(span.end_s - span.start_s for span in spans[len(spans) // 2 :]) / spec.chunk_frames
        bench.compact_frame_s[name] = seconds
        bench.book.add("compact_ms", 1000 * seconds, "ms", policy=name, budget=policy.budget_frames)


@METRICS.add("decode_fps")
def _decode_fps(bench: Bench) -> None:
    """Video frames per second of the decoder alone, each way it can be run."""
    if bench.backbone.vae is None:
        raise ValueError("there is no autoencoder to time; install diffusers")
    best = 0.0
    compiles = bench.plan("auto").fast.compiles(bench.device)
    for mode, fps in decode_rates(bench.backbone.vae, bench.spec("flashforward", 6).shape, compiles=compiles):
        bench.book.add("decode_fps", fps, "frames/s", mode=mode)
        best = max(best, fps)
    bench.decode_frame_s = TEMPORAL_FACTOR / best if best else 0.0


@METRICS.add("job_s")
def _job_s(bench: Bench) -> None:
    """From the call to the finished mp4, and to its first frames, for each place to decode."""
    with tempfile.TemporaryDirectory() as folder:
        for latents in bench.args.latents:
            for devices in bench.args.devices:
                for decode in bench.args.decode:
                    _one_job(bench, latents, devices=devices, decode=decode, video=Path(folder) / "job.mp4")


def _one_job(bench: Bench, latents: int, *, devices: str, decode: str, video: Path) -> None:
    spec, plan = bench.spec("flashforward", latents), bench.plan(devices, decode=decode)
    names = plan.resolve()
    if len(names) <= (apart := LANES_APART.get(decode, 0)):
        few = f"lanes={len(names)} of devices={devices!r} is below {apart + 1} for decode={decode!r}"
        print(f"skipped job_s: {few}; use decode='shared' or more devices")
        return
    timed = bench.timed(spec, plan, video=video)
    config = {"latents": latents, "devices": len(names), "device_list": devices}
    config |= {"schedule": spec.schedule, "decode": decode, "encoder": "h264" if timed.encoded else "none"}
    config |= {"decoder": bench.args.decoder, "order": plan.order, "source": "measured"}
    spans = timed.result.timeline.spans
    denoiser = max(span.end_s for span in spans if not span.task.startswith("decode/"))
    decoding = sum(span.end_s - span.start_s for span in spans if span.task.startswith("decode/"))
    if bench.args.decoder == "wan":
        bench.decode_frame_s = bench.decode_frame_s or decoding / latents
    found = {"denoiser_s": denoiser, "decoding_s": decoding, "ratio": timed.seconds / denoiser}
    bench.book.add("job_s", timed.seconds, "s", **config, **found)
    assert timed.first_frames_s is not None
    bench.book.add("first_frames_s", timed.first_frames_s, "s", **config)
    graph = build_graph(spec, decode=True)
    graph = in_halves(graph) if decode == "split" else graph
    placement = place(graph, lanes=lanes_for(names), layout=plan.layout, order=plan.order, decode=plan.decode)
    _add_peaks(bench, timed, graph=graph, spec=spec, placement=placement, **config)
    if bench.args.traces is not None:
        name = f"{bench.args.model}_{bench.resolution}_{bench.attention}_job_{latents}_{decode}_{len(names)}"
        write_traces(bench.args.traces, name, measured=timed.result.timeline)
