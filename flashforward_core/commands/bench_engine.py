"""Rollouts run to be timed: the shared model, warm-ups, and what is read off a run."""

import argparse
import contextlib
import json
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..engine.cost import CostModel, num_keys
from ..engine.events import Event, FramesReady, TaskSpan
from ..engine.forward import CHOICES, FastOptions
from ..engine.lanes import OTHER_DEVICES, DevicePlan
from ..engine.memory import DoesNotFit
from ..engine.placement import ORDERS, Placement
from ..engine.rollout import RenderResult, render
from ..graph.schedules import build_graph, spec_for
from ..graph.task import ForwardTask, Kind, Role, TaskGraph
from ..model.attention import resolve_attention
from ..model.compiled import gave_up, num_compilations
from ..model.config import EMBEDDED, MODELS
from ..model.roles import Backbone
from ..specs import RolloutSpec, VideoShape
from .bench_models import DECODERS, PRECISIONS, bench_backbone, bench_texts
from .bench_rows import RowBook, machine
from .simulate import RESOLUTIONS, size_of

log = logging.getLogger(__name__)

CONTEXT = 21
"""Latent frames that a forward attends to, its own included: what Self-Forcing, HiAR and FlashForward publish."""
FITTED_LATENTS = 81
"""Enough for costs: most forwards have the longest context, and every other occurs."""
WARM_LATENTS = 21
"""Enough for one anchor block and every shape that a rollout of whole chunks compiles."""
WARM_RECORDED_LATENTS = 51
"""Where lanes record: twelve chunks have a full history, so every stage is recorded; two whole anchor blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One rollout and what it took."""

    result: RenderResult
    seconds: float
    """Wall clock, from the call to the result."""
    first_frames_s: float | None
    peak_bytes: Mapping[str, int]
    """Most memory allocated on each CUDA device in use, by its name, weights included; empty on a CPU."""
    compilations: int
    """Graphs compiled during the run: 0 when the warm-up has seen every shape."""
    first_s: float = 0.0
    """Wall clock of the first of the repeats, which has the most to set up."""
    encoded: bool = False
    """Whether an mp4 was written."""


class Models:
    """The backbone to measure, made when first used, and its prompt; every kernel's bench shares them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._args = args
        self._device = device

    @cached_property
    def backbone(self) -> Backbone:
        wants_frames = bool({"job_s", "decode_fps"} & set(self._args.metrics))
        began = time.perf_counter()
        made = bench_backbone(
            self._args.model,
            device=self._device,
            precision=self._args.precision,
            attention="auto",
            decoder=self._args.decoder if wants_frames else None,
        )
        print(f"weights of {self._args.model} made in {time.perf_counter() - began:.1f} s", flush=True)
        return made

    @cached_property
    def texts(self) -> list[torch.Tensor]:
        return bench_texts(self.backbone)


def check_choices(args: argparse.Namespace, **known: Iterable[str]) -> None:
    """Raise ``ValueError`` for the first option, or word of an option's list, that is not among the known ones."""
    for name, choices in known.items():
        given = getattr(args, name)
        for word in [given] if isinstance(given, str) else given:
            if word not in (names := tuple(choices)):
                raise ValueError(f"{name}={word!r} is unknown; use one of: {', '.join(names)}")


def devices_of(entry: str) -> tuple[str, ...]:
    """Return the device of each lane; one that is not here raises ``ValueError``, since rows name what was asked."""
    asked = dict.fromkeys(part.strip().partition("*")[0] for part in entry.split(","))
    count = torch.cuda.device_count()
    present = {"auto", "", "cpu", *(["cuda"] if count else []), *(f"cuda:{n}" for n in range(count))}
    missing = [name for name in asked if name not in present and re.fullmatch(rf"(cuda|{OTHER_DEVICES})(:\d+)?", name)]
    if missing:
        here = f"{len(asked) - len(missing)} of its {len(asked)} devices present"
        raise ValueError(f"devices={entry!r} has {here} (not {', '.join(missing)}); use auto, cpu*2 or what is there")
    return DevicePlan(devices=(entry,)).resolve()


def bench_spec(schedule: str, *, latents: int, resolution: str) -> RolloutSpec:
    """Return a rollout whose forwards attend to ``CONTEXT`` latent frames at most, whatever the schedule."""
    width, height = size_of(resolution)
    shape = VideoShape(width=width, height=height, latent_frames=latents)
    spec = spec_for(RolloutSpec(shape=shape, schedule=schedule))
    anchors = 0 if spec.anchors is None else spec.anchors.context
    history = replace(spec.history, chunks=(CONTEXT - anchors) // spec.chunk_frames - 1)
    return replace(spec, history=history)


@dataclass(kw_only=True)
class Bench:
    """What the metrics of one attention kernel share: settings, the model, and the fitted costs."""

    args: argparse.Namespace
    resolution: str
    attention: str
    device: torch.device
    """Where the weights are made and single lanes run."""
    models: Models
    book: RowBook
    decode_frame_s: float = 0.0
    """Seconds per latent frame: the decoder's alone if that is measured, else those of the first job."""
    compact_frame_s: dict[str, float] = field(default_factory=dict)
    pair_ratio: float | None = None
    _warm: set[tuple[tuple[str, ...], str, bool, bool]] = field(default_factory=set)
    _singles: dict[tuple[str, int, str], Timed] = field(default_factory=dict)

    @classmethod
    def each(cls, args: argparse.Namespace) -> "list[Bench]":
        """Return one per attention kernel. Check the options; ``ValueError`` names what is wrong."""
        check_choices(args, model=MODELS, decoder=DECODERS, precision=PRECISIONS, order=ORDERS)
        check_choices(args, compile=CHOICES, graphs=CHOICES)
        embedded = MODELS[args.model] is EMBEDDED
        resolution = args.resolution or ("128x192" if embedded else "480p")
        if embedded and size_of(resolution) != RESOLUTIONS["128x192"]:
            raise ValueError(f"resolution={resolution!r} does not fit model='embedded'; use 128x192, its only size")
        resolution = "128x192" if embedded else resolution  # by either order of its name, costs are filed under one
        lanes = [name for entry in args.devices for name in devices_of(entry)]
        if len(kinds := {torch.device(name).type for name in lanes}) > 1:
            asked = f"devices={' '.join(args.devices)!r} are of several kinds ({', '.join(sorted(kinds))})"
            raise ValueError(f"{asked}, and rows name the hardware of one; measure each kind with a call of its own")
        device = torch.device(lanes[0])
        dtype = PRECISIONS[args.precision]
        names = dict.fromkeys(resolve_attention(name, device, dtype=dtype).name for name in args.attention)
        common = {"model": args.model, "resolution": resolution, "precision": args.precision}
        common |= {"compile": args.compile, "graphs": args.graphs}
        models, named = Models(args, device), {"commit": args.commit} if args.commit else {}
        return [
            cls(
                args=args,
                resolution=resolution,
                attention=name,
                device=device,
                models=models,
                book=RowBook(path=args.json, machine=machine(device), common={**common, "attention": name}, **named),
            )
            for name in names
        ]

    @cached_property
    def backbone(self) -> Backbone:
        return replace(self.models.backbone, attention=self.attention)

    def spec(self, schedule: str, latents: int) -> RolloutSpec:
        return bench_spec(schedule, latents=latents, resolution=self.resolution)

    def plan(
        self, devices: str, *, layout: str = "auto", decode: str = "auto", batch_diagonal: bool = False
    ) -> DevicePlan:
        fast = FastOptions(compile=self.args.compile, graphs=self.args.graphs, batch_diagonal=batch_diagonal)
        return DevicePlan(devices=(devices,), layout=layout, order=self.args.order, decode=decode, fast=fast)

    def timed(self, spec: RolloutSpec, plan: DevicePlan, *, video: Path | None = None) -> Timed:
        """Run ``spec`` ``repeats`` times and return the fastest, after a short warm-up of ``plan``'s devices.

        ``video`` is written too.
        """
        key = (plan.devices, spec.schedule, video is None, plan.fast.batch_diagonal)  # lengths have plans of their own
        if key not in self._warm:
            began = time.perf_counter()
            enough = WARM_RECORDED_LATENTS if _records(plan) else WARM_LATENTS
            short = replace(spec.shape, latent_frames=min(enough, spec.shape.latent_frames))
            warm = spec_for(replace(spec, shape=short))
            render(self.backbone, warm, self.models.texts, devices=plan, decode=video is not None)
            self._warm.add(key)
            print(f"warm-up on {','.join(plan.devices)}: {time.perf_counter() - began:.1f} s", flush=True)
        runs = [self._once(spec, plan, video=video) for _ in range(self.args.repeats)]
        return replace(min(runs, key=lambda run: run.seconds), first_s=runs[0].seconds)

    def _once(self, spec: RolloutSpec, plan: DevicePlan, *, video: Path | None) -> Timed:
        devices = sorted({name for name in plan.resolve() if name != "cpu"})
        for name in devices:
            torch.cuda.reset_peak_memory_stats(name)
        compiled = num_compilations()
        began, first = time.perf_counter(), None
        with frames_to(video, spec.shape) as (write, encoded):

            def on_event(event: Event) -> None:
                nonlocal first
                if isinstance(event, FramesReady):
                    first = time.perf_counter() - began if first is None else first
                    write(event.frames[0])

            decode = video is not None
            result = render(
                self.backbone,
                spec,
                self.models.texts,
                devices=plan,
                decode=decode,
                on_event=on_event if decode else None,
            )
        seconds = time.perf_counter() - began
        if self.plan("auto").fast.compiles(self.device) and gave_up():
            raise RuntimeError("blocks could not be compiled (see the warning), so these are no times of compiled ones")
        return Timed(
            result=result,
            seconds=seconds,
            first_frames_s=first,
            peak_bytes={name: torch.cuda.max_memory_allocated(name) for name in devices},
            compilations=num_compilations() - compiled,
            encoded=encoded,
        )

    def single(self, schedule: str, latents: int, *, order: str | None = None) -> Timed:
        """Return a rollout on one lane of the first device; measured once. ``order`` replaces what the options say."""
        key = (schedule, latents, order or self.args.order)
        if key not in self._singles:
            plan = replace(self.plan(str(self.device), layout="single"), order=key[2])
            self._singles[key] = self.timed(self.spec(schedule, latents), plan)
        return self._singles[key]

    @property
    def has_forwards(self) -> bool:
        """Whether forwards of one lane have been timed."""
        return bool(self._singles)

    @cached_property
    def cost(self) -> CostModel:
        """Costs fitted to the forwards of one lane, by the number of keys.

        Of the lengths asked for, one that has every context often and is no longer than that needs. Where one lane
        cannot hold what several share, it holds one stage's bank at a time, or runs a shorter rollout.
        """
        lengths = sorted(set(self.args.latents), key=lambda n: (n < FITTED_LATENTS, abs(n - FITTED_LATENTS)))
        refused: DoesNotFit | None = None
        for latents, order in product(lengths, dict.fromkeys((self.args.order, "memory"))):
            try:
                result = self.single("flashforward", latents, order=order).result
            except DoesNotFit as error:
                refused = error
                continue
            spec = self.spec("flashforward", latents)
            medians = forward_seconds(build_graph(spec, decode=False), spec, result)
            return CostModel.fit({keys: seconds for (_, keys), seconds in medians.items()})
        assert refused is not None, "there is a length to fit"
        raise refused


def _records(plan: DevicePlan) -> bool:
    """Return whether ``plan``'s lanes record forwards."""
    devices = [torch.device(name) for name in plan.resolve()]
    return any(plan.fast.records(device) for device in devices)


@contextlib.contextmanager
def frames_to(path: Path | None, shape: VideoShape) -> Iterator[tuple[Callable[[Any], None], bool]]:
    """Open a video file at ``path``; yield what takes frames [F, H, W, 3] and whether they are encoded.

    Without PyAV, or a path, frames are dropped.
    """
    try:
        from ..media import VideoWriter
    except ModuleNotFoundError:
        if path is not None:
            log.warning("PyAV is not installed, so jobs end with the last frames and write no mp4")
        path = None
    if path is None:
        yield (lambda frames: None), False
        return
    with VideoWriter(path, width=shape.width, height=shape.height, fps=shape.fps) as writer:
        yield (lambda frames: writer.write(frames.numpy())), True


def forward_seconds(graph: TaskGraph, spec: RolloutSpec, result: RenderResult) -> dict[tuple[Role, int], float]:
    """Return the median seconds of a run's denoising forwards, by role and number of keys."""
    tasks: Mapping[str, ForwardTask] = graph.by_id()
    found: dict[tuple[Role, int], list[float]] = {}
    for span in result.timeline.spans:
        task = tasks[span.task]
        if task.kind is Kind.DENOISE and task.role is not None:
            found.setdefault((task.role, num_keys(task, spec)), []).append(span.end_s - span.start_s)
    return {key: statistics.median(times) for key, times in found.items()}


def pair_seconds(placement: Placement, spec: RolloutSpec, graph: TaskGraph, result: RenderResult) -> tuple[int, float]:
    """Return the longest context that two forwards of one batch both had, in keys, and such pairs' median seconds."""
    tasks, spans = graph.by_id(), {span.task: span for span in result.timeline.spans}
    found: dict[int, list[float]] = {}
    for pair in placement.pairs.items():
        keys = {num_keys(tasks[one], spec) for one in pair}
        if len(keys) == 1:
            found.setdefault(keys.pop(), []).append(spans[pair[1]].end_s - spans[pair[0]].start_s)
    if not found:
        raise ValueError("no two forwards with the same context ran as one; use more latents")
    longest = max(found)
    return longest, statistics.median(found[longest])


def steady_rate(spans: Sequence[TaskSpan]) -> float:
    """Return tasks per second in the middle half of a run, when every lane has work."""
    start, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    low, high = start + (end - start) / 4, end - (end - start) / 4
    done = sorted(span.end_s for span in spans if low <= span.end_s <= high)
    if len(done) < 2:
        raise ValueError(f"latents are too few for a steady rate: {len(spans)} forwards; use latents=41 or more")
    return (len(done) - 1) / (done[-1] - done[0])


def write_traces(folder: Path, name: str, **timelines: Any) -> None:
    """Write each timeline as JSON and as a Chrome trace."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, timeline in timelines.items():
        (folder / f"{name}_{source}.json").write_text(json.dumps(timeline.to_json()))
        (folder / f"{name}_{source}.trace.json").write_text(json.dumps(timeline.to_chrome_trace()))
