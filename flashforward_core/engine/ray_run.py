"""Runs a placed graph on lanes in other processes: keeps them fed, hands on what they leave, and delivers events."""

import itertools
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graph.task import ForwardTask, Kind, Role, Slot, TaskGraph
from ..model.roles import Backbone
from .budget import Fit
from .cost import num_keys, rounds
from .events import ChunkReady, Event, TaskFinished
from .executor import Delivery, task_failed
from .forward import FastOptions
from .lane_worker import LaneError, Rollout, packed_event
from .ops import RunInputs
from .placement import Placement
from .ray_lanes import Fleet, HeadLost, LaneLost, Node
from .reuse import Resume, whole
from .run import RunReport, bank_shape
from .shares import Share, shares_of
from .simulate import run_lanes
from .wire import Packed, pack, pack_modules, unpack

log = logging.getLogger(__name__)

AHEAD = 2  # tasks that a lane has been given: the one it runs and the next. A cancel waits for the first only
PROBE_BYTES = 1 << 24
ANCHOR_KV = ("auto", "send", "encode")
Callback = Callable[[Event], None]
CheckCancel = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Crew:
    """Lanes that hold one backbone's weights."""

    fleet: Fleet
    key: tuple[object, ...]
    renderer: Any
    """A weak reference to the weights' owner."""
    offsets: list[float]
    """What to add to each lane's clock to have this process's, in seconds."""
    speeds: list[float]
    """Multiplications and additions per second."""
    bandwidths: list[float]
    """Bytes per second from this process."""


_crews: list[Crew] = []
"""At most one: a GPU belongs to one actor. It is kept for the next rollout, as weights on a local device are."""
_numbers = itertools.count()


def run_on_ray(
    graph: TaskGraph,
    *,
    inputs: RunInputs,
    backbone: Backbone,
    placement: Placement,
    address: str,
    on_event: Callback | None = None,
    check_cancel: CheckCancel | None = None,
    poison: bool = False,
    resume: Resume | None = None,
    fast: FastOptions = FastOptions(),  # noqa: B008 (frozen)
    fit: Fit = Fit(),  # noqa: B008 (frozen)
    anchor_kv: str = "auto",
) -> RunReport:
    """Run ``graph`` on the Ray cluster at ``address``, an actor per lane; like ``run_placed`` in everything else.

    ``anchor_kv`` says how the KV of anchors comes to a lane: ``send`` it, ``encode`` it there again, or ``auto``,
    whichever is quicker as measured. Raises ``LaneLost`` when a lane's process or machine is gone; what was delivered
    by then is whole.
    """
    assert anchor_kv in ANCHOR_KV, anchor_kv
    part = resume or whole(graph, inputs.spec)
    assert not part.kv and not part.keep, "what is kept of a rollout stays on the machine that made it"
    run_lanes(graph, placement=placement, cost=rounds)  # asserts that lanes never wait for each other in a circle
    crew = crew_for(backbone, placement, address=address, check_cancel=check_cancel)
    encode = encoders(crew, graph, inputs=inputs, backbone=backbone, anchor_kv=anchor_kv)
    shares = shares_of(graph, placement=placement, encode=encode)
    number = next(_numbers)
    rollout = Rollout(run=number, inputs=inputs, pages=part.pages, fast=fast, fit=fit, poison=poison)
    driver = _Driver(crew, shares, number=number, on_event=on_event)
    try:
        driver.run(rollout, check_cancel=check_cancel)
    except LaneLost as error:
        _part_with(crew, error)
        raise type(error)(f"{error}; {len(driver.chunks)} of {inputs.spec.num_chunks} chunks were finished") from error
    except BaseException:
        _give_up(crew, number)
        raise
    peaks = _end(crew)
    spans = tuple(sorted(driver.deliver.spans, key=lambda span: span.start_s))
    return RunReport(spans=spans, peak_kv_bytes=tuple(peaks), kept={})


def crew_for(
    backbone: Backbone, placement: Placement, *, address: str, check_cancel: CheckCancel | None = None
) -> Crew:
    """Return lanes with the backbone's weights: those of the last rollout where they fit, else new ones."""
    renderer = backbone.models[Role.RENDERER]
    key = (address, placement.lanes, backbone.fingerprint, backbone.attention, torch.get_num_threads())
    if _crews and _crews[0].key == key and _crews[0].renderer() is renderer:
        return _crews[0]
    dismiss()
    fleet = Fleet.start(address, placement.lanes, num_threads=torch.get_num_threads())
    try:
        _load(fleet, backbone, check_cancel=check_cancel)
        crew = Crew(
            fleet=fleet,
            key=key,
            renderer=weakref.ref(renderer, lambda _: fleet.close()),
            offsets=_offsets(fleet),
            speeds=fleet.each("speed", check_cancel=check_cancel),
            bandwidths=_bandwidths(fleet),
        )
    except HeadLost:
        fleet.leave()
        raise
    except BaseException:
        fleet.close()
        raise
    _crews.append(crew)
    return crew


def dismiss() -> None:
    """End the lanes that are kept, if any."""
    while _crews:
        _crews.pop().fleet.close()


def _load(fleet: Fleet, backbone: Backbone, *, check_cancel: CheckCancel | None) -> None:
    """Have every lane load the weights from its own disk, or send them to those that cannot."""
    marks: list[str | None] = [None] * len(fleet.lanes)
    if backbone.source is not None:
        marks = fleet.each("load", backbone.source, check_cancel=check_cancel)
    if None in marks:
        plain = replace(backbone, models={}, vae=None, text_encoder=None)
        modules = fleet.put(pack_modules((dict(backbone.models), backbone.vae)))
        for lane, mark in enumerate(marks):
            if mark is None:
                marks[lane] = _answer(fleet, lane, "receive", plain, modules, check_cancel=check_cancel)
    check_marks(marks, nodes=fleet.nodes, fingerprint=backbone.fingerprint)


def check_marks(marks: Sequence[str | None], *, nodes: Sequence[Node], fingerprint: str) -> None:
    """Raise ``ValueError`` when a lane's weights are not this machine's, by their fingerprints."""
    for node, mark in zip(nodes, marks, strict=True):
        if mark != fingerprint:
            raise ValueError(
                f"the weights on {node} are not this machine's: fingerprint {str(mark)[:12]} instead of "
                f"{fingerprint[:12]}; copy the same files there"
            )


def _answer(fleet: Fleet, lane: int, method: str, *args: Any, check_cancel: CheckCancel | None = None) -> Any:
    ref = fleet.call(lane, method, *args)
    while not fleet.done([ref]):
        if check_cancel is not None:
            check_cancel()
    return fleet.value(ref, lane=lane)


def _offsets(fleet: Fleet) -> list[float]:
    """Compare clocks: a lane's answer is as old as half its way here, and the quickest of several is the best."""
    found = []
    for lane in range(len(fleet.lanes)):
        tries = []
        for _ in range(5):
            asked = time.perf_counter()
            theirs = _answer(fleet, lane, "clock")
            back = time.perf_counter()
            tries.append((back - asked, (asked + back) / 2 - theirs))
        found.append(min(tries)[1])
    return found


def _bandwidths(fleet: Fleet) -> list[float]:
    found = []
    for lane in range(len(fleet.lanes)):
        probe = fleet.put(pack(torch.zeros(PROBE_BYTES, dtype=torch.uint8)))
        began = time.perf_counter()
        found.append(_answer(fleet, lane, "weigh", probe) / (time.perf_counter() - began))
    return found


def encoders(crew: Crew, graph: TaskGraph, *, inputs: RunInputs, backbone: Backbone, anchor_kv: str) -> frozenset[int]:
    """Return the lanes that make the KV of anchors again instead of being sent it."""
    commits = [task for task in graph.tasks if task.role is Role.PLANNER and task.kind is Kind.COMMIT]
    lanes = range(len(crew.fleet.lanes))
    if anchor_kv != "auto" or not commits:
        return frozenset(lanes if anchor_kv == "encode" else ())
    flops = sum(_operations(task, inputs, backbone) for task in commits)
    num_bytes = sum(len(task.writes) for task in commits) * bank_shape(backbone, inputs).bank_bytes(frames=1)
    found = frozenset(lane for lane in lanes if flops / crew.speeds[lane] < num_bytes / crew.bandwidths[lane])
    log.info("anchors' KV: made again on %d of %d lanes, sent to the others", len(found), len(lanes))
    return found


def _operations(task: ForwardTask, inputs: RunInputs, backbone: Backbone) -> float:
    """Return the multiplications and additions of a forward's matrix products."""
    config = backbone.config
    tokens = inputs.batch * len(inputs.frames_of(task)) * inputs.spec.shape.tokens_per_frame
    weights = sum(part.numel() for part in backbone.models[Role.PLANNER].parameters())
    attention = 2 * config.num_layers * num_keys(task, inputs.spec) * config.dim
    return 2.0 * tokens * (weights + attention)


class _Driver:
    """One rollout: which task each lane is given next, and what lies ready for whom."""

    def __init__(self, crew: Crew, shares: Sequence[Share], *, number: int, on_event: Callback | None) -> None:
        self._crew, self._fleet, self._shares = crew, crew.fleet, shares
        self._number = number
        self._waiting = [deque(share.order) for share in shares]
        self._given: list[int] = [0] * len(shares)
        self._flying: dict[Any, tuple[int, str, Sequence[Any]]] = {}
        self._ready: dict[Slot, Any] = {}
        self._users = Counter(slot for share in shares for slots in share.arrives.values() for slot in slots)
        self._total = sum(len(share.order) for share in shares)
        self._starts: list[float] = []
        self.deliver = Delivery(on_event)
        self.chunks: set[int] = set()

    def run(self, rollout: Rollout, *, check_cancel: CheckCancel | None) -> None:
        """Run everything; callbacks run here, in the calling thread."""
        began = time.perf_counter()
        told = self._fleet.put(rollout)
        begins = self._fleet.each("begin", told, tuple(self._shares), check_cancel=check_cancel)
        self._starts = [start + offset - began for start, offset in zip(begins, self._crew.offsets, strict=True)]
        while len(self.deliver.spans) < self._total:
            for lane in range(len(self._shares)):
                self._feed(lane)
            assert self._flying, "every lane waits for another"
            for ref in self._fleet.done(self._flying):
                self._take(ref)
            if check_cancel is not None:
                check_cancel()

    def _feed(self, lane: int) -> None:
        """Give a lane what it can run, up to ``AHEAD`` tasks."""
        share, waiting = self._shares[lane], self._waiting[lane]
        while waiting and self._given[lane] < AHEAD:
            slots = share.arrives.get(waiting[0], ())
            if any(slot not in self._ready for slot in slots):
                return
            task_id = waiting.popleft()
            values = [self._ready[slot] for slot in slots]
            returns = 1 + len(share.leaves.get(task_id, ()))
            refs = self._fleet.call(lane, "run", self._number, task_id, slots, *values, returns=returns)
            first, *others = refs if returns > 1 else [refs]
            self._flying[first] = (lane, task_id, others)
            self._given[lane] += 1
            self._strike(slots)

    def _strike(self, slots: Sequence[Slot]) -> None:
        """Let go of what every lane that needs it has been sent."""
        for slot in slots:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._ready[slot]

    def _take(self, ref: Any) -> None:
        """Deliver a finished task and lay out what it left."""
        lane, task_id, others = self._flying.pop(ref)
        try:
            events = self._fleet.value(ref, lane=lane)
        except LaneError as error:
            cause = error.rebuilt()
            raise task_failed(error.task, cause) from cause
        except LaneLost:
            raise
        except Exception as error:
            raise task_failed(task_id, error) from error
        self._given[lane] -= 1
        self._ready.update(zip(self._shares[lane].leaves.get(task_id, ()), others, strict=True))
        self.deliver([self._here(event, lane=lane) for event in events])

    def _here(self, event: Event, *, lane: int) -> Event:
        """Return a lane's event with this process's lane, clock and memory."""
        if isinstance(event, TaskFinished):
            start = self._starts[lane]
            span = replace(event.span, lane=lane, start_s=event.span.start_s + start, end_s=event.span.end_s + start)
            return replace(event, span=span, total=self._total)
        if isinstance(event, ChunkReady):
            self.chunks.add(event.index)
        return packed_event(event, _copied)


def _copied(packed: Packed) -> torch.Tensor:
    with torch.inference_mode(False):
        return unpack(replace(packed, data=packed.data.copy()))


def _part_with(crew: Crew, error: Exception) -> None:
    """End what is left of lanes that are of no more use."""
    if isinstance(error, HeadLost):
        crew.fleet.leave()
    dismiss()


def _end(crew: Crew) -> list[int]:
    """Free what a finished rollout held; return each lane's peak. A lane that is lost now takes nothing with it."""
    try:
        return crew.fleet.each("end")
    except LaneLost as error:
        log.warning("the rollout is complete; the lanes are ended, for %s", error)
        _part_with(crew, error)
        return [0] * len(crew.fleet.lanes)


def _give_up(crew: Crew, number: int) -> None:
    """Stop a rollout: no lane begins another task of it, and all free what they hold. Never raises but for a user."""
    try:
        crew.fleet.each("stop", number, control=True)
        crew.fleet.each("end")
    except Exception as error:
        log.warning("the lanes are ended, since they could not be stopped: %s", error)
        _part_with(crew, error)
