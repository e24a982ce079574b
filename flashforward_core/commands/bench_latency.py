"""``bench latency``: how long forwards, rollouts, decoding and whole jobs take, on the devices that are there.

Everything is measured through the engine that users run. Forwards are timed where they happen, inside rollouts, by the
lanes' own marks (events on CUDA), so nothing that a user pays for is left out.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..engine.cost import CostKey, CostModel, num_keys, save_cost
from ..engine.events import Event, FramesReady, TaskSpan
from ..engine.executor import TaskFailed
from ..engine.forward import CHOICES, FastOptions
from ..engine.lanes import DevicePlan
from ..engine.placement import DECODES, LAYOUTS, lanes_for, place
from ..engine.rollout import RenderResult, render
from ..engine.simulate import simulate
from ..graph.schedules import SCHEDULES, build_graph, spec_for
from ..graph.task import ForwardTask, Kind, Role, TaskGraph
from ..media import VideoWriter
from ..model.attention import ATTENTION, resolve_attention
from ..model.compiled import num_compilations
from ..model.config import EMBEDDED, MODELS
from ..model.roles import Backbone
from ..registry import Registry
from ..specs import RolloutSpec, VideoShape
from .bench_kernels import decode_rates, forward_errors
from .bench_models import PRECISIONS, bench_backbone, bench_texts
from .bench_rows import RowBook, machine
from .simulate import RESOLUTIONS, size_of

WARM_LATENTS = 21
"""Enough for one anchor block and every shape that a rollout of whole chunks compiles."""


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
    parser.add_argument("--decode", default="auto", help=f"where a job decodes, one of: {', '.join(DECODES)} (auto)")
    parser.add_argument("--attention", default="auto", help=f"one of: auto, {', '.join(ATTENTION)} (auto)")
    parser.add_argument("--precision", default="fp32", help=f"one of: {', '.join(PRECISIONS)} (fp32)")
    parser.add_argument("--compile", default="auto", help=f"one of: {', '.join(CHOICES)} (auto)")
    parser.add_argument("--graphs", default="auto", help=f"one of: {', '.join(CHOICES)} (auto)")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs of each rollout; the fastest counts (1)"
    )
    parser.add_argument("--predict", type=int, nargs="*", default=[], metavar="N", help="also predict for N devices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="write measured and simulated timelines")
    parser.add_argument("--fit", action="store_true", help="keep the fitted costs, for simulate and the Plan node")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="where --fit keeps them (costs.json in the cache folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure what was asked for; a metric that fails is reported, and the others still run."""
    bench = Bench.of(args)
    failed = [name for name in args.metrics if not _measured(bench, name)]
    if args.fit:
        key = CostKey(
            device=bench.book.machine, model=args.model, resolution=bench.resolution, precision=args.precision
        )
        path = args.costs or args.cache_folder / "costs.json"
        save_cost(path, key=key, cost=replace(bench.cost, decode_frame_s=bench.decode_frame_s))
        print(f"costs of {key.device} kept in {path}")
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return int(bool(failed))


def _measured(bench: "Bench", name: str) -> bool:
    try:
        METRICS[name](bench)
    except (TaskFailed, RuntimeError) as error:  # out of memory, or a kernel that this device has not
        print(f"{name}: {type(error).__name__}: {error}")
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One rollout and what it took."""

    result: RenderResult
    seconds: float
    """Wall clock, from the call to the result."""
    first_frames_s: float | None
    peak_bytes: tuple[int, ...]
    """Most memory allocated on each CUDA device in use, weights included; empty on a CPU."""
    compilations: int
    """Graphs compiled during the run: 0 when the warm-up has seen every shape."""


@dataclass
class Bench:
    """What the metrics share: settings, the model, and the fitted costs."""

    args: argparse.Namespace
    resolution: str
    book: RowBook
    decode_frame_s: float = 0.0
    _warm: set[tuple[tuple[str, ...], bool]] = field(default_factory=set)
    _singles: dict[tuple[str, int], Timed] = field(default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Bench":
        """Check the options; ``ValueError`` names what is wrong."""
        if args.model not in MODELS:
            raise ValueError(f"model={args.model!r} is unknown; use one of: {', '.join(MODELS)}")
        if args.precision not in PRECISIONS:
            raise ValueError(f"precision={args.precision!r} is unknown; use one of: {', '.join(PRECISIONS)}")
        for name in args.metrics:
            METRICS[name]  # raises for unknown names, before anything is measured
        embedded = MODELS[args.model] is EMBEDDED
        resolution = args.resolution or ("128x192" if embedded else "480p")
        if embedded and size_of(resolution) != RESOLUTIONS["128x192"]:
            raise ValueError(f"resolution={resolution!r} does not fit model='embedded'; use 128x192, its only size")
        device = DevicePlan(devices=(args.devices[0],)).resolve()[0]
        attention = resolve_attention(args.attention, device, dtype=PRECISIONS[args.precision]).name
        common = {"model": args.model, "resolution": resolution, "attention": attention, "precision": args.precision}
        common |= {"compile": args.compile, "graphs": args.graphs}
        return cls(args, resolution, RowBook(path=args.json, machine=machine(device), common=common))

    @cached_property
    def device(self) -> torch.device:
        """Where the weights are made and single lanes run."""
        return torch.device(DevicePlan(devices=(self.args.devices[0],)).resolve()[0])

    @cached_property
    def backbone(self) -> Backbone:
        wants_frames = bool({"job_s", "decode_fps"} & set(self.args.metrics))
        return bench_backbone(
            self.args.model,
            device=self.device,
            precision=self.args.precision,
            attention=self.args.attention,
            decoder=wants_frames,
        )

    @cached_property
    def texts(self) -> list[torch.Tensor]:
        return bench_texts(self.backbone)

    def spec(self, schedule: str, latents: int) -> RolloutSpec:
        width, height = size_of(self.resolution)
        return spec_for(
            RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=latents), schedule=schedule)
        )

    def plan(self, devices: str, *, layout: str = "auto", decode: str = "auto") -> DevicePlan:
        fast = FastOptions(compile=self.args.compile, graphs=self.args.graphs)
        return DevicePlan(devices=(devices,), layout=layout, decode=decode, fast=fast)

    def timed(self, spec: RolloutSpec, plan: DevicePlan, *, video: Path | None = None) -> Timed:
        """Run ``spec`` ``repeats`` times and return the fastest, after a short warm-up of ``plan``'s devices.

        ``video`` is written too.
        """
        if (plan.devices, video is None) not in self._warm:
            short = replace(spec.shape, latent_frames=min(WARM_LATENTS, spec.shape.latent_frames))
            warm = spec_for(replace(spec, shape=short))
            render(self.backbone, warm, self.texts, devices=plan, decode=video is not None)
            self._warm.add((plan.devices, video is None))
        runs = [self._once(spec, plan, video=video) for _ in range(self.args.repeats)]
        return min(runs, key=lambda run: run.seconds)

    def _once(self, spec: RolloutSpec, plan: DevicePlan, *, video: Path | None) -> Timed:
        devices = sorted({name for name in plan.resolve() if name != "cpu"})
        for name in devices:
            torch.cuda.reset_peak_memory_stats(name)
        compiled = num_compilations()
        began, first = time.perf_counter(), None
        if video is None:
            result = render(self.backbone, spec, self.texts, devices=plan)
        else:
            with VideoWriter(video, width=spec.shape.width, height=spec.shape.height, fps=spec.shape.fps) as writer:

                def write(event: Event) -> None:
                    nonlocal first
                    if isinstance(event, FramesReady):
                        first = time.perf_counter() - began if first is None else first
                        writer.write(event.frames[0].numpy())

                result = render(self.backbone, spec, self.texts, devices=plan, decode=True, on_event=write)
        seconds = time.perf_counter() - began
        peaks = tuple(torch.cuda.max_memory_allocated(name) for name in devices)
        return Timed(
            result=result,
            seconds=seconds,
            first_frames_s=first,
            peak_bytes=peaks,
            compilations=num_compilations() - compiled,
        )

    def single(self, schedule: str, latents: int) -> Timed:
        """Return a rollout on one lane of the first device; measured once."""
        key = (schedule, latents)
        if key not in self._singles:
            self._singles[key] = self.timed(self.spec(schedule, latents), self.plan(str(self.device), layout="single"))
        return self._singles[key]

    @cached_property
    def cost(self) -> CostModel:
        """Costs fitted to the forwards of one lane, by the number of keys."""
        latents = max(self.args.latents)
        spec = self.spec("flashforward", latents)
        medians = forward_seconds(build_graph(spec, decode=False), spec, self.single("flashforward", latents).result)
        return CostModel.fit({keys: seconds for (_, keys), seconds in medians.items()})


def forward_seconds(graph: TaskGraph, spec: RolloutSpec, result: RenderResult) -> dict[tuple[Role, int], float]:
    """Return the median seconds of a run's denoising forwards, by role and number of keys."""
    tasks: Mapping[str, ForwardTask] = graph.by_id()
    found: dict[tuple[Role, int], list[float]] = {}
    for span in result.timeline.spans:
        task = tasks[span.task]
        if task.kind is Kind.DENOISE and task.role is not None:
            found.setdefault((task.role, num_keys(task, spec)), []).append(span.end_s - span.start_s)
    return {key: statistics.median(times) for key, times in found.items()}


def steady_rate(spans: Sequence[TaskSpan]) -> float:
    """Return tasks per second in the middle half of a run, when every lane has work."""
    start, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    low, high = start + (end - start) / 4, end - (end - start) / 4
    done = sorted(span.end_s for span in spans if low <= span.end_s <= high)
    if len(done) < 2:
        raise ValueError(f"latents are too few for a steady rate: {len(spans)} forwards; use latents=41 or more")
    return (len(done) - 1) / (done[-1] - done[0])


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


@METRICS.add("rollout_s")
def _rollout_s(bench: Bench) -> None:
    """The denoiser alone, side by side, with what was predicted and how much memory it took."""
    for latents in bench.args.latents:
        for schedule in bench.args.schedules:
            for devices in bench.args.devices:
                for layout in bench.args.layouts:
                    _one_rollout(bench, bench.spec(schedule, latents), devices=devices, layout=layout)
            for count in bench.args.predict:
                _one_prediction(bench, bench.spec(schedule, latents), lanes=count)


def _one_rollout(bench: Bench, spec: RolloutSpec, *, devices: str, layout: str) -> None:
    plan = bench.plan(devices, layout=layout)
    names = plan.resolve()
    if layout == "streaming" and len(names) == 1:
        return  # the planner and the stages need a device each
    timed = bench.timed(spec, plan)
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(names), layout=layout, order=plan.order)
    predicted = simulate(graph, placement=placement, seconds=bench.cost.of(spec))
    spans = timed.result.timeline.spans
    measured_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    config = {
        "latents": spec.shape.latent_frames,
        "schedule": spec.schedule,
        "layout": placement.layout,
        "devices": len(names),
        "device_list": devices,
        "source": "measured",
        "sha256": timed.result.sha256[:16],
    }
    bench.book.add("rollout_s", timed.seconds, "s", **config, forwards=graph.counts()["total"])
    assert predicted.predicted_s is not None
    error = abs(measured_s - predicted.predicted_s) / measured_s
    bench.book.add("makespan_error", error, "ratio", **config, measured_s=measured_s, predicted_s=predicted.predicted_s)
    for index, peak in enumerate(timed.peak_bytes):
        kv = timed.result.timeline.peak_kv_bytes
        bench.book.add("peak_bytes", peak, "bytes", **config, device=index, kv_bytes=list(kv), **_weights(bench))
    if bench.args.traces is not None:
        name = f"{bench.args.model}_{spec.schedule}_{spec.shape.latent_frames}_{placement.layout}_{len(names)}"
        write_traces(bench.args.traces, name, measured=timed.result.timeline, simulated=predicted)


def _weights(bench: Bench) -> dict[str, int]:
    models = set(bench.backbone.models.values())
    tensors = {t.data_ptr(): t.nbytes for model in models for t in (*model.parameters(), *model.buffers())}
    return {"weights_bytes": sum(tensors.values())}


def write_traces(folder: Path, name: str, **timelines: Any) -> None:
    """Write each timeline as JSON and as a Chrome trace."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    for source, timeline in timelines.items():
        (folder / f"{name}_{source}.json").write_text(json.dumps(timeline.to_json()))
        (folder / f"{name}_{source}.trace.json").write_text(json.dumps(timeline.to_chrome_trace()))


def _one_prediction(bench: Bench, spec: RolloutSpec, *, lanes: int) -> None:
    graph, seconds = build_graph(spec, decode=False), bench.cost.of(spec)
    placement = place(graph, lanes=lanes_for([""] * lanes), cost=seconds)
    predicted = simulate(graph, placement=placement, seconds=seconds)
    config = {"latents": spec.shape.latent_frames, "schedule": spec.schedule, "layout": placement.layout}
    bench.book.add("rollout_s", predicted.predicted_s or 0.0, "s", **config, devices=lanes, source="predicted")


@METRICS.add("lane_scaling")
def _lane_scaling(bench: Bench) -> None:
    """Forwards per second of several lanes over those of one, in the middle of a wavefront."""
    spec = bench.spec("flashforward_no_anchors", max(bench.args.latents))
    rates = {}
    for devices in dict.fromkeys([str(bench.device), *bench.args.devices]):
        plan = bench.plan(devices, layout="interleaved")
        rates[devices] = steady_rate(bench.timed(spec, plan).result.timeline.spans)
        lanes = len(plan.resolve())
        scaling = rates[devices] / rates[str(bench.device)]
        bench.book.add(
            "lane_scaling", scaling, "ratio", devices=lanes, device_list=devices, forwards_per_s=rates[devices]
        )


@METRICS.add("decode_fps")
def _decode_fps(bench: Bench) -> None:
    """Video frames per second of the decoder alone, each way it can be run."""
    best = 0.0
    compiles = bench.plan("auto").fast.compiles(bench.device)
    for mode, fps in decode_rates(bench.backbone.vae, bench.spec("flashforward", 6).shape, compiles=compiles):
        bench.book.add("decode_fps", fps, "frames/s", mode=mode)
        best = max(best, fps)
    bench.decode_frame_s = 4 / best if best else 0.0  # a latent frame is four video frames


@METRICS.add("job_s")
def _job_s(bench: Bench) -> None:
    """From the call to the finished mp4, and to its first frames."""
    with tempfile.TemporaryDirectory() as folder:
        for latents in bench.args.latents:
            for devices in bench.args.devices:
                spec = bench.spec("flashforward", latents)
                plan = bench.plan(devices, decode=bench.args.decode)
                timed = bench.timed(spec, plan, video=Path(folder) / "job.mp4")
                config = {"latents": latents, "devices": len(plan.resolve()), "device_list": devices}
                config |= {"schedule": spec.schedule, "decode": bench.args.decode}
                denoiser = max(s.end_s for s in timed.result.timeline.spans if not s.task.startswith("decode/"))
                bench.book.add(
                    "job_s", timed.seconds, "s", **config, denoiser_s=denoiser, ratio=timed.seconds / denoiser
                )
                assert timed.first_frames_s is not None
                bench.book.add("first_frames_s", timed.first_frames_s, "s", **config)
