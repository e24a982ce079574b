"""Several rollouts on the same lanes, a few at a time: the next one's planner fills the gaps of the one before.

Each gives the bytes that it gives alone. One that fails is told to the caller and the others go on; whatever else is
raised stops all lanes within one forward.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from ..graph.schedules import build_graph
from ..model.roles import Backbone
from ..specs import RolloutSpec
from .budget import Fit
from .dispatch import in_flight_for
from .events import ChunkReady, Event, LaneInfo, TaskFinished, TaskSpan, Timeline
from .executor import POLL_S
from .inputs import checked_inputs, empty_latents
from .lanes import DevicePlan, open_lanes
from .placement import lanes_for
from .reuse import whole
from .rollout import CheckCancel, RenderResult, latents_sha256, render
from .run import Run
from .shared_lanes import NO_ROLLOUT, Failed, Item, Quiet, SharedLanes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout of several."""

    spec: RolloutSpec
    texts: Sequence[Tensor]
    """Prompt embeddings [B, text_len, text_dim], indexed by ``PromptSpan.prompt``."""


Outcome = RenderResult | Exception
OnEvent = Callable[[int, Event], None]
OnDone = Callable[[int, Outcome], None]


@dataclass(slots=True, kw_only=True)
class _Open:
    """A rollout under way, as the calling thread sees it."""

    run: Run
    out: Tensor
    """Room for the finished latents."""
    spans: list[TaskSpan] = field(default_factory=list)
    error: Exception | None = None

    def take(self, event: Event) -> Event:
        """Keep what an event brings; return it with the finished tasks counted."""
        if isinstance(event, ChunkReady):
            self.out[:, :, event.frames.start : event.frames.stop] = event.latents
        elif isinstance(event, TaskFinished):
            self.spans.append(event.span)
            return replace(event, done=len(self.spans))
        return event


def render_many(
    backbone: Backbone,
    jobs: Iterable[Job],
    *,
    devices: DevicePlan = DevicePlan(),  # noqa: B008 (frozen)
    decode: bool = False,
    in_flight: int | None = None,
    on_event: OnEvent | None = None,
    on_done: OnDone | None = None,
    check_cancel: CheckCancel | None = None,
) -> Timeline:
    """Render every job over ``devices``; return when all have ended what ran where, with task ids ``3/decode/c0``.

    Jobs are numbered from 0 as they come and are taken from ``jobs`` when one of ``in_flight`` places is free (None: as
    many as lanes, at least two): that bounds memory. The last ones end together if ``jobs`` has a length.
    ``on_event(number, event)`` tells what ``render``'s events tell, ``on_done(number, outcome)`` how a job ended, once
    each, in the order in which they end. A job whose inputs do not fit, whose task fails or for which ``on_event``
    raises an ``Exception`` ends with that error, and the others go on. What ``jobs``, ``on_done`` and ``check_cancel``
    raise, and a ``KeyboardInterrupt``, stops all lanes within one forward and propagates. All callbacks run on the
    calling thread. Forwards are not recorded: a recording belongs to one rollout's memory. On a Ray cluster jobs run
    one after another. Raises ``ValueError`` for options that do not go with several rollouts.
    """
    _check(devices, in_flight=2 if in_flight is None else in_flight)
    if decode and backbone.vae is None:
        raise ValueError("decode=True needs a backbone with an autoencoder; load one, or decode the latents elsewhere")
    if devices.ray_address:
        return _one_by_one(
            backbone,
            enumerate(jobs),
            devices=devices,
            decode=decode,
            on_event=on_event,
            on_done=on_done,
            check_cancel=check_cancel,
        )
    lanes = lanes_for(devices.resolve())
    with open_lanes([(lane.name, lane.device) for lane in lanes]) as opened:
        shared = SharedLanes(opened)
        batch = _Batch(backbone, shared, lanes, devices=devices, decode=decode, on_event=on_event, on_done=on_done)
        try:
            for index, lane in enumerate(opened):
                lane.submit(partial(shared.work, index))
            places = in_flight_for(len(lanes)) if in_flight is None else in_flight
            batch.run(jobs, in_flight=places, check_cancel=check_cancel)
        finally:
            shared.stop()
            for lane in opened:
                lane.close()
            batch.free()
    return Timeline(source="measured", lanes=lanes, spans=tuple(sorted(batch.spans, key=lambda span: span.start_s)))


def _check(devices: DevicePlan, *, in_flight: int) -> None:
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight} is below 1; use in_flight=2")
    if devices.layout not in ("auto", "interleaved"):
        raise ValueError(f"layout={devices.layout!r} does not go with several rollouts; use layout='auto'")
    if devices.order != "latency":
        raise ValueError(f"order={devices.order!r} does not go with several rollouts; use order='latency'")
    if devices.decode in ("own", "any", "split"):
        raise ValueError(
            f"decode={devices.decode!r} does not go with several rollouts, whose decoding changes lanes; use 'auto'"
        )
    if devices.fast.batch_diagonal:
        raise ValueError("batch_diagonal=True does not go with several rollouts; use batch_diagonal=False")
    if devices.memory.offload == "on":
        raise ValueError("offload='on' does not go with several rollouts, which share weights; use offload='off'")
    if devices.memory.budget_gib:
        raise ValueError(
            f"budget_gib={devices.memory.budget_gib:g} does not go with several rollouts, whose memory adds up as they "
            "come; use budget_gib=0, and in_flight=1 for less"
        )


def _one_by_one(
    backbone: Backbone,
    jobs: Iterator[tuple[int, Job]],
    *,
    devices: DevicePlan,
    decode: bool,
    on_event: OnEvent | None,
    on_done: OnDone | None,
    check_cancel: CheckCancel | None,
) -> Timeline:
    """Let jobs run one after another, each as ``render`` does it."""
    began, spans, lanes = time.perf_counter(), [], lanes_for(devices.resolve())
    cancelled: list[BaseException] = []

    def check() -> None:
        try:
            if check_cancel is not None:
                check_cancel()
        except BaseException as error:
            cancelled.append(error)
            raise

    for number, job in jobs:
        later = time.perf_counter() - began
        tell = None if on_event is None else partial(on_event, number)
        outcome: Outcome
        try:
            outcome = render(
                backbone, job.spec, job.texts, devices=devices, decode=decode, on_event=tell, check_cancel=check
            )
            lanes = outcome.timeline.lanes
            spans += _moved(outcome.timeline.spans, number=number, later=later)
        except Exception as error:  # a rollout's failure is its own outcome; the others go on
            if cancelled:
                raise
            outcome = error
        if on_done is not None:
            on_done(number, outcome)
    return Timeline(source="measured", lanes=lanes, spans=tuple(spans))


def _moved(spans: Iterable[TaskSpan], *, number: int, later: float) -> list[TaskSpan]:
    """Return a rollout's spans on the clock of all, with its number before the task ids."""
    return [
        replace(span, task=f"{number}/{span.task}", start_s=span.start_s + later, end_s=span.end_s + later)
        for span in spans
    ]


@dataclass(slots=True)
class _Batch:
    """The calling thread's part: opens rollouts, delivers what comes, closes them."""

    backbone: Backbone
    shared: SharedLanes
    lanes: tuple[LaneInfo, ...]
    devices: DevicePlan = field(kw_only=True)
    decode: bool = field(kw_only=True)
    on_event: OnEvent | None = field(kw_only=True)
    on_done: OnDone | None = field(kw_only=True)
    spans: list[TaskSpan] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    open: dict[int, _Open] = field(default_factory=dict)

    def run(self, jobs: Iterable[Job], *, in_flight: int, check_cancel: CheckCancel | None) -> None:
        last = len(jobs) - 1 if isinstance(jobs, Sized) else NO_ROLLOUT
        coming, more = enumerate(jobs), True
        while more or self.open:
            while more and len(self.open) < in_flight:
                number, job = next(coming, (NO_ROLLOUT, None))
                more = job is not None
                if job is not None:
                    self._admit(number, job)
                if job is None or number == last:
                    self.shared.no_more()
            if self.open:
                self._receive(check_cancel)

    def free(self) -> None:
        """Drop what is under way; only when the lanes have ended."""
        for opened in self.open.values():
            opened.run.free()
        self.open.clear()

    def _admit(self, number: int, job: Job) -> None:
        try:
            inputs = checked_inputs(self.backbone, job.spec, job.texts)
            graph = build_graph(inputs.spec, decode=self.decode)
            out = empty_latents(self.backbone, inputs, frames=inputs.spec.shape.latent_frames)
            lanes = self.shared.lanes
            fast = replace(self.devices.fast, graphs="off")
            fit = Fit(options=self.devices.memory)
            run = Run(whole(graph, inputs.spec), inputs, self.backbone, lanes=lanes, poison=False, fast=fast, fit=fit)
        except Exception as error:  # as above: told as this rollout's
            self._tell(number, error)
            return
        self.open[number] = _Open(run=run, out=out)
        self.shared.admit(number, run)

    def _receive(self, check_cancel: CheckCancel | None) -> None:
        """Deliver what comes next, or nothing after a while."""
        try:
            number, item = self.shared.inbox.get(timeout=POLL_S)
        except queue.Empty:
            number, item = NO_ROLLOUT, []
        if check_cancel is not None:
            check_cancel()
        if number == NO_ROLLOUT:
            if isinstance(item, Failed):
                raise item.error
            return
        opened = self.open[number]
        if isinstance(item, Quiet):
            assert opened.error is not None, f"rollout {number} was dropped for no reason"
            self._close(number, opened.error)
        elif opened.error is not None:
            self._log_other(number, item)
        elif isinstance(item, Failed):
            opened.error = item.error
        else:
            self._deliver(number, opened, item)

    def _log_other(self, number: int, item: Item) -> None:
        if isinstance(item, Failed):  # only one error can be told
            log.error("rollout %d: %s also failed", number, item.error)

    def _deliver(self, number: int, opened: _Open, events: list[Event]) -> None:
        try:
            for event in events:
                counted = opened.take(event)
                if self.on_event is not None:
                    self.on_event(number, counted)
        except Exception as error:  # as above: told when the rollout is closed
            opened.error = error
            self.shared.drop(number)
            return
        if len(opened.spans) == len(opened.run.graph):
            report = opened.run.report(opened.spans)
            timeline = Timeline(
                source="measured", lanes=self.lanes, spans=report.spans, peak_kv_bytes=report.peak_kv_bytes
            )
            digest = latents_sha256(opened.out)
            self._close(number, RenderResult(latents_BCFHW=opened.out, timeline=timeline, sha256=digest))

    def _close(self, number: int, outcome: Outcome) -> None:
        opened = self.open.pop(number)
        opened.run.free()
        self.shared.forget(number)
        self.spans += _moved(opened.spans, number=number, later=opened.run.began - self.began)
        self._tell(number, outcome)

    def _tell(self, number: int, outcome: Outcome) -> None:
        if self.on_done is not None:
            self.on_done(number, outcome)
