"""Runs a task graph: in the calling thread in any order, or spread over lanes as placed. Both give the same bytes."""

import logging
import queue
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..graph.task import ForwardTask, TaskGraph
from ..model.roles import Backbone
from .budget import Fit
from .cost import rounds
from .events import Event, TaskFinished, TaskSpan
from .forward import FastOptions
from .lanes import IDLE_S, CallerLane, Signals, open_lanes
from .ops import RunInputs
from .placement import Placement
from .replicas import device_of
from .reuse import Resume, whole
from .run import Launched, Run, RunReport
from .simulate import run_lanes

log = logging.getLogger(__name__)

POLL_S = 0.04  # how often the calling thread looks for a cancel: at least every 50 ms
Callback = Callable[[Event], None]


NO_MEMORY = ("out of memory", "can't allocate memory")  # as the allocators of CUDA and of CPUs say it


class TaskFailed(RuntimeError):
    """A task raised; the message starts with its id and the cause is chained."""


def task_failed(task_id: str, error: BaseException) -> TaskFailed:
    """Return what to raise for a task that raised ``error``; too little memory comes with what to do about it.

    The tensors that the error's frames hold are let go: whoever keeps the error does not keep a forward's memory.
    """
    traceback.clear_frames(error.__traceback__)
    advice = ""
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY):
        advice = "; use order=memory, a smaller size, less history or more devices"
    failed = TaskFailed(f"{task_id}: {error}{advice}")
    failed.__cause__ = error
    return failed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    task: str
    error: BaseException


class Delivery:
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
    run = Run(whole(graph, inputs.spec), inputs, backbone, lanes=[lane], poison=poison)
    deliver = Delivery(on_event)
    try:
        for task_id in order or by_id:
            events: list[Event] = []
            try:
                lane.submit(partial(_collect, events, run, by_id[task_id]))
            except Exception as error:  # whatever it is, it is raised with the task's name
                raise task_failed(task_id, error) from error
            deliver(events)
        return run.report(deliver.spans)
    finally:
        run.free()


def _collect(events: list[Event], run: Run, task: ForwardTask) -> None:
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
    fit: Fit = Fit(),  # noqa: B008 (frozen)
) -> RunReport:
    """Run ``graph`` on one thread per lane. Callbacks run on the calling thread, except ``before_task``.

    Whatever a callback raises stops every lane within one forward and then propagates; so does a task's error, as
    ``TaskFailed``. Threads are joined and banks are freed in every case. ``before_task`` runs on the lane's thread
    before each task. ``resume`` says what of a larger rollout ``graph`` is, and brings the rest's KV;
    ``fast`` how forwards may be sped up, ``fit`` how it is held in memory.
    """
    run_lanes(graph, placement=placement, cost=rounds)  # asserts that lanes never wait for each other in a circle
    signals = Signals()
    inbox: queue.SimpleQueue[list[Event] | _Failure] = queue.SimpleQueue()
    deliver = Delivery(on_event)
    by_id = graph.by_id()
    with open_lanes([(lane.name, lane.device) for lane in placement.lanes]) as lanes:
        part = resume or whole(graph, inputs.spec)
        run = Run(part, inputs, backbone, lanes=lanes, poison=poison, fast=fast, fit=fit)
        step = partial(_step, run=run, signals=signals, inbox=inbox, before_task=before_task)
        try:
            for index, lane in enumerate(lanes):
                for unit in placement.units(index):
                    lane.submit(partial(step, tuple(by_id[task_id] for task_id in unit), lane=index))
            _receive(inbox, deliver=deliver, total=len(graph), check_cancel=check_cancel)
            return run.report(deliver.spans)
        finally:
            signals.stop()
            for lane in lanes:
                lane.close()
            run.free()
            _log_other_failures(inbox)


def runner(ray_address: str) -> Callable[..., RunReport]:
    """Return what runs placed graphs: ``run_placed``, or its like on the Ray cluster at an address."""
    if not ray_address:
        return run_placed
    from .ray_run import run_on_ray

    return partial(run_on_ray, address=ray_address)


def _step(
    tasks: tuple[ForwardTask, ...],
    *,
    lane: int,
    run: Run,
    signals: Signals,
    inbox: "queue.SimpleQueue[list[Event] | _Failure]",
    before_task: Callable[[ForwardTask], None] | None,
) -> None:
    """Wait until the parents are launched, launch a task, or two as one, and tell the others.

    On the lane's thread; never raises.
    """
    parents = [parent.id for task in tasks for parent in run.graph.parents(task)]
    here = run.states[lane].lane
    # While there is nothing to launch, what is done is delivered; waiting for the device would have it run dry.
    while (ready := signals.wait(parents, most_s=IDLE_S if here.deliver() else None)) is None:
        pass
    if not ready:
        return
    try:
        if before_task is not None:
            for task in tasks:
                before_task(task)
        launched = run.launch_pair(tasks, lane=lane) if len(tasks) > 1 else [run.launch(tasks[0], lane=lane)]
    except BaseException as error:  # the calling thread raises it: a thread has nobody to raise it to
        signals.stop()
        inbox.put(_Failure(task=" and ".join(task.id for task in tasks), error=error))
        return
    here.defer(launched[-1].end, partial(_finish, launched, run=run, signals=signals, inbox=inbox))
    for task in tasks:
        signals.finish(task.id)


def _finish(
    launched: Sequence[Launched], *, run: Run, signals: Signals, inbox: "queue.SimpleQueue[list[Event] | _Failure]"
) -> None:
    """Deliver what its device has done, one task or two. Never raises."""
    for one in launched:
        try:
            inbox.put(run.complete(one))
        except Exception as error:
            signals.stop()
            inbox.put(_Failure(task=one.task.id, error=error))
            return


def _receive(
    inbox: "queue.SimpleQueue[list[Event] | _Failure]",
    *,
    deliver: Delivery,
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
            raise task_failed(item.task, item.error) from item.error
        deliver(item)


def _log_other_failures(inbox: "queue.SimpleQueue[list[Event] | _Failure]") -> None:
    """Report what failed on other lanes while the run was ending: only one error can propagate."""
    while not inbox.empty():
        item = inbox.get()
        if isinstance(item, _Failure):
            log.error("%s also failed: %s", item.task, item.error)
