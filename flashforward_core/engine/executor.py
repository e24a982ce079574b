"""Runs a task graph: in the calling thread in any order, or spread over lanes as placed. Both give the same bytes."""

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph.task import ForwardTask, Slot, Space, TaskGraph
from ..kv.bank import BankShape, Home, LaneBanks, Ledger
from ..kv.pages import kv_slots
from ..model.attention import resolve_attention
from ..model.roles import Backbone
from ..model.vae import StreamingDecoder
from .cost import rounds
from .events import AnchorBlockReady, ChunkReady, Event, FramesReady, TaskFinished, TaskSpan
from .forward import FastOptions, Forwarders, kind_of
from .lanes import CallerLane, Lane, LaneTensor, Signals, open_lanes
from .ops import OPS, LaneState, RunInputs
from .placement import Placement
from .replicas import backbone_on, device_of
from .reuse import Resume, kept_kv, whole
from .simulate import run_lanes
from .transfer import Mark

log = logging.getLogger(__name__)

POLL_S = 0.04  # how often the calling thread looks for a cancel: at least every 50 ms
Callback = Callable[[Event], None]


class TaskFailed(RuntimeError):
    """A task raised; the message starts with its id and the cause is chained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a finished run tells besides its events."""

    spans: tuple[TaskSpan, ...]
    """In the order of their starts; lanes as in the placement."""
    peak_kv_bytes: tuple[int, ...]
    """Most bytes that each lane's banks had at once."""
    kept: Mapping[Slot, Tensor]
    """Pages that were to be kept, on the CPU."""


@dataclass(frozen=True, slots=True)
class _HostPage:
    """A page from an earlier run, which banks copy as they copy another lane's."""

    page: Tensor

    def home(self, slot: Slot) -> Tensor:
        return self.page


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    task: str
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A task that its device has been asked for."""

    task: ForwardTask
    lane: int
    start: Mark
    end: Mark
    checks: Sequence[Callable[[], None]]
    ready: Sequence[Event]


class _Run:
    """One rollout under way: its slots, its banks, and what has finished."""

    def __init__(
        self,
        resume: Resume,
        inputs: RunInputs,
        backbone: Backbone,
        *,
        lanes: Sequence[Lane],
        poison: bool,
        fast: FastOptions = FastOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.graph = graph = resume.graph
        self.inputs = inputs
        self.keep = resume.keep
        self.kept: dict[Slot, Tensor] = {}
        plan = resume.pages
        self.ledger = Ledger(graph.tasks, plan)
        self.values: dict[Slot, LaneTensor] = {}
        self.homes: dict[Slot, Home] = {slot: _HostPage(page) for slot, page in resume.kv.items()}
        self.marks: dict[str, Mark] = {}
        self.lane_of: dict[str, int] = {}
        self.began = time.perf_counter()
        shape = bank_shape(backbone, inputs)
        prompts = {task: inputs.spec.prompt_at(inputs.frames_of(task)[0]) for task in graph.tasks if task.is_forward}
        uses = [kind_of(task, plan.views[task.id], prompt=prompt) for task, prompt in prompts.items()]
        forwarders = Forwarders(fast, uses=uses, devices=[lane.device for lane in lanes])
        devices: dict[torch.device, Backbone] = {}
        self.states: list[LaneState] = []
        for lane in lanes:
            if lane.device not in devices:
                devices[lane.device] = backbone_on(backbone, lane.device)
            local = devices[lane.device]
            banks = LaneBanks(
                plan, shape=shape, ledger=self.ledger, device=lane.device, poison=poison, copy=lane.ops.copy
            )
            attention = resolve_attention(backbone.attention, lane.device, dtype=backbone.dtype)
            decoder = None if local.vae is None else StreamingDecoder(local.vae)
            forward = forwarders.make(local.models, attention, device=lane.device)
            state = LaneState(
                lane=lane, models=local.models, attention=attention, banks=banks, decoder=decoder, forward=forward
            )
            self.states.append(state)

    def launch(self, task: ForwardTask, *, lane: int) -> "_Launched":
        """Ask the lane's device for one task, in the lane's thread, and publish what it will write.

        Whoever reads it orders its own device behind ``marks``; nothing here waits for a CUDA device.
        """
        state = self.states[lane]
        device = state.lane.ops
        for parent in self.graph.parents(task):
            if self.lane_of[parent.id] != lane:
                device.wait_for(self.marks[parent.id])
        start = device.mark()
        outputs = OPS[task.kind](task, self.inputs, state, self.values, self.homes)
        ready = self._ready(task, outputs, lane=state.lane)
        self.kept.update({slot: device.fetch(state.banks.home(slot).clone()) for slot in kept_kv(task, self.keep)})
        checks, state.checks = state.checks, []
        self.marks[task.id] = end = device.mark()
        self.lane_of[task.id] = lane
        self.values.update({slot: LaneTensor(state.lane.name, value) for slot, value in outputs.items()})
        self.homes.update(dict.fromkeys(kv_slots(task.writes), state.banks))
        for slot in self.ledger.finish(task):
            self.values.pop(slot, None)
        return _Launched(task=task, lane=lane, start=start, end=end, checks=checks, ready=ready)

    def complete(self, launched: "_Launched") -> list[Event]:
        """Return what has become ready, once the device is done; raise what its checks found."""
        for check in launched.checks:
            check()
        start_s, end_s = (mark.time_s - self.began for mark in (launched.start, launched.end))
        span = TaskSpan(task=launched.task.id, lane=launched.lane, start_s=start_s, end_s=end_s)
        return [TaskFinished(span=span, done=0, total=len(self.graph)), *launched.ready]

    def _ready(self, task: ForwardTask, outputs: Mapping[Slot, Any], *, lane: Lane) -> list[Event]:
        """Return the events of finished results, with tensors on their way to the CPU."""
        clean = self.inputs.spec.stages.num_stages
        found: list[Event] = []
        for slot, value in outputs.items():
            if slot.space is Space.LATENT and slot.level == clean:
                frames = self.inputs.spec.chunk(task.index)
                found.append(ChunkReady(index=task.index, frames=frames, latents=lane.ops.fetch(value)))
            elif slot.space is Space.ANCHOR_LATENT and slot.level == clean:
                found.append(AnchorBlockReady(index=task.index, latents=lane.ops.fetch(value)))
            elif slot.space is Space.FRAMES:
                found.append(FramesReady(index=task.index, frames=lane.ops.fetch(value)))
        return found

    def report(self, spans: Sequence[TaskSpan]) -> RunReport:
        peaks = tuple(state.banks.peak_bytes + state.peak_policy_bytes for state in self.states)
        in_order = tuple(sorted(spans, key=lambda span: span.start_s))
        return RunReport(spans=in_order, peak_kv_bytes=peaks, kept=self.kept)

    def free(self) -> None:
        """Drop latents, contexts and banks."""
        self.values.clear()
        self.homes.clear()
        for state in self.states:
            state.banks.free()
            state.forward.free()
            state.contexts.clear()


class _Delivery:
    """Hands events to the caller, in its own thread, and counts finished tasks."""

    def __init__(self, on_event: Callback | None) -> None:
        self._on_event = on_event
        self.spans: list[TaskSpan] = []

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TaskFinished):
                self.spans.append(event.span)
                event = TaskFinished(span=event.span, done=len(self.spans), total=event.total)
            if self._on_event is not None:
                self._on_event(event)


def run_sequential(
    graph: TaskGraph,
    *,
    inputs: RunInputs,
    backbone: Backbone,
    order: Sequence[str] | None = None,
    on_event: Callback | None = None,
    poison: bool = False,
) -> RunReport:
    """Run every task in the calling thread, in the graph's order or in ``order``, task ids in any topological order.

    ``poison`` fills free pages with NaN. Raises ``TaskFailed``.
    """
    by_id = graph.by_id()
    lane = CallerLane(device=device_of(backbone))
    run = _Run(whole(graph, inputs.spec), inputs, backbone, lanes=[lane], poison=poison)
    deliver = _Delivery(on_event)
    try:
        for task_id in order or by_id:
            events: list[Event] = []
            try:
                lane.submit(partial(_collect, events, run, by_id[task_id]))
            except Exception as error:
                raise TaskFailed(f"{task_id}: {error}") from error
            deliver(events)
        return run.report(deliver.spans)
    finally:
        run.free()


def _collect(events: list[Event], run: _Run, task: ForwardTask) -> None:
    launched = run.launch(task, lane=0)
    launched.end.wait()
    events.extend(run.complete(launched))


def run_placed(
    graph: TaskGraph,
    *,
    inputs: RunInputs,
    backbone: Backbone,
    placement: Placement,
    on_event: Callback | None = None,
    check_cancel: Callable[[], None] | None = None,
    before_task: Callable[[ForwardTask], None] | None = None,
    poison: bool = False,
    resume: Resume | None = None,
    fast: FastOptions = FastOptions(),  # noqa: B008 (frozen)
) -> RunReport:
    """Run ``graph`` on one thread per lane. Callbacks run on the calling thread, except ``before_task``.

    Whatever a callback raises stops every lane within one forward and then propagates; so does a task's error, as
    ``TaskFailed``. Threads are joined and banks are freed in every case. ``before_task`` runs on the lane's thread
    before each task. ``resume`` says what of a larger rollout ``graph`` is, and brings the rest's KV;
    ``fast`` how forwards may be sped up.
    """
    run_lanes(graph, placement=placement, cost=rounds)  # asserts that lanes never wait for each other in a circle
    signals = Signals()
    inbox: queue.SimpleQueue[list[Event] | _Failure] = queue.SimpleQueue()
    deliver = _Delivery(on_event)
    by_id = graph.by_id()
    with open_lanes([(lane.name, lane.device) for lane in placement.lanes]) as lanes:
        run = _Run(resume or whole(graph, inputs.spec), inputs, backbone, lanes=lanes, poison=poison, fast=fast)
        step = partial(_step, run=run, signals=signals, inbox=inbox, before_task=before_task)
        try:
            for index, task_ids in enumerate(placement.order):
                for task_id in task_ids:
                    lanes[index].submit(partial(step, by_id[task_id], lane=index))
            _receive(inbox, deliver=deliver, total=len(graph), check_cancel=check_cancel)
            return run.report(deliver.spans)
        finally:
            signals.stop()
            for lane in lanes:
                lane.close()
            run.free()
            _log_other_failures(inbox)


def _step(
    task: ForwardTask,
    *,
    lane: int,
    run: _Run,
    signals: Signals,
    inbox: "queue.SimpleQueue[list[Event] | _Failure]",
    before_task: Callable[[ForwardTask], None] | None,
) -> None:
    """Wait until the parents are launched, launch the task, tell the others. On the lane's thread; never raises."""
    parents = [parent.id for parent in run.graph.parents(task)]
    here = run.states[lane].lane
    if not signals.are_finished(parents):
        here.settle()  # deliver what is done while there is nothing to launch
    if not signals.wait(parents):
        return
    try:
        if before_task is not None:
            before_task(task)
        launched = run.launch(task, lane=lane)
    except BaseException as error:  # the calling thread raises it: a thread has nobody to raise it to
        signals.stop()
        inbox.put(_Failure(task=task.id, error=error))
        return
    here.defer(launched.end, partial(_finish, launched, run=run, signals=signals, inbox=inbox))
    signals.finish(task.id)


def _finish(
    launched: _Launched, *, run: _Run, signals: Signals, inbox: "queue.SimpleQueue[list[Event] | _Failure]"
) -> None:
    """Deliver a task that its device has done. Never raises."""
    try:
        inbox.put(run.complete(launched))
    except Exception as error:
        signals.stop()
        inbox.put(_Failure(task=launched.task.id, error=error))


def _receive(
    inbox: "queue.SimpleQueue[list[Event] | _Failure]",
    *,
    deliver: _Delivery,
    total: int,
    check_cancel: Callable[[], None] | None,
) -> None:
    """Deliver events until every task has finished."""
    while len(deliver.spans) < total:
        try:
            item = inbox.get(timeout=POLL_S)
        except queue.Empty:
            item = []
        if check_cancel is not None:
            check_cancel()
        if isinstance(item, _Failure):
            raise TaskFailed(f"{item.task}: {item.error}") from item.error
        deliver(item)


def _log_other_failures(inbox: "queue.SimpleQueue[list[Event] | _Failure]") -> None:
    """Report what failed on other lanes while the run was ending: only one error can propagate."""
    while not inbox.empty():
        item = inbox.get()
        if isinstance(item, _Failure):
            log.error("%s also failed: %s", item.task, item.error)


def bank_shape(backbone: Backbone, inputs: RunInputs) -> BankShape:
    config = backbone.config
    return BankShape(
        batch=inputs.batch,
        num_blocks=config.num_layers,
        frame_tokens=inputs.spec.shape.tokens_per_frame,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=backbone.dtype,
    )
