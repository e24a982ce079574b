"""Which lane runs which task, and in which order.

A stage's bank lives on one lane, so a stage never moves. The planner's tasks are free to move, since the clean
anchors have to reach every lane that renders anyway: the layouts differ in where they go.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from ..graph.passes import TaskCost, remaining_path
from ..graph.task import FRONT, ForwardTask, Kind, Role, Space, TaskGraph
from ..registry import Registry
from .cost import rounds
from .events import LaneInfo
from .pairing import Pairable

ORDERS = ("latency", "memory")
DECODES = ("auto", "own", "shared", "any", "split")

LANES_APART = {"own": 1, "split": 2}
"""How many lanes do nothing but decode, by what ``decode`` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A graph spread over lanes."""

    layout: str
    """The layout that was chosen; never ``auto``."""
    lanes: tuple[LaneInfo, ...]
    assign: Mapping[str, int]
    """Task id -> lane."""
    order: tuple[tuple[str, ...], ...]
    """Task ids per lane, in running order. Lanes that keep to it never wait for each other in a circle."""
    pairs: Mapping[str, str] = field(default_factory=dict)
    """Forwards that run as one batch of two: the earlier in its lane's order -> the one right after it."""

    def units(self, lane: int) -> Iterator[tuple[str, ...]]:
        """Yield a lane's tasks in running order, those that run as one together."""
        seconds = set(self.pairs.values())
        for task_id in self.order[lane]:
            if task_id not in seconds:
                yield (task_id, self.pairs[task_id]) if task_id in self.pairs else (task_id,)


def lanes_for(devices: Iterable[str]) -> tuple[LaneInfo, ...]:
    """Return one lane per device name, called lane0, lane1, …"""
    return tuple(LaneInfo(name=f"lane{index}", device=device) for index, device in enumerate(devices))


def stage_groups(graph: TaskGraph) -> dict[str, int]:
    """Map each renderer task's id to its group: stages that share a bank form one group, in stage order.

    A policy's compactions belong to the stage whose bank they compact.
    FlashForward and HiAR have a bank per stage, so each stage is a group; clean history has one bank and one group.
    """
    tasks = [task for task in graph.tasks if task.role is Role.RENDERER]
    home: dict[str, str] = {}  # a union-find over the names of stages and banks

    def root(name: str) -> str:
        while home.setdefault(name, name) != name:
            name = home[name]
        return name

    for task in tasks:
        for earlier, later in pairwise(_names(task)):
            home[root(later)] = root(earlier)
    ranks: dict[str, int] = {}
    for task in sorted(tasks, key=lambda task: (task.kind is not Kind.DENOISE, task.stage)):
        ranks.setdefault(root(_names(task)[0]), len(ranks))
    return {task.id: ranks[root(_names(task)[0])] for task in tasks}


def _names(task: ForwardTask) -> list[str]:
    """Name the banks that a renderer task touches and, if it denoises, its stage."""
    spaces = (Space.KV, Space.POLICY_STATE)
    banks = [slot.bank for slot in (*task.writes, *task.reads) if slot.space in spaces]
    return [f"denoise {task.stage}", *banks] if task.kind is Kind.DENOISE else banks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Homes:
    """Where tasks may run: a lane, or any of several."""

    groups: Mapping[str, int]
    """Renderer task's id -> group."""
    group_lane: Mapping[int, int]
    planner: tuple[int, ...]
    """Lanes that the planner may use, best first."""
    decode: int
    decodes: tuple[int, ...] = ()
    """Lanes that decoding may use, if not just its own."""
    front: int | None = None
    """The lane of the decoder's front half, if it runs in halves."""

    def lanes_of(self, task: ForwardTask) -> tuple[int, ...]:
        if task.kind is Kind.DECODE:
            if task.half == FRONT and self.front is not None:
                return (self.front,)
            return self.decodes or (self.decode,)
        if task.role is Role.PLANNER:
            return self.planner
        return (self.group_lane[self.groups[task.id]],)


Layout = Callable[[Mapping[str, int], int], _Homes]
LAYOUTS: Registry[Layout] = Registry("layout")
"""Name -> (groups, number of lanes) -> homes."""


def _spread(groups: Mapping[str, int], lanes: int) -> dict[int, int]:
    """Give each group a lane, evenly and in order."""
    count = max(groups.values(), default=0) + 1
    used = min(count, lanes)
    return {group: group * used // count for group in range(count)}


def _decode_lane(group_lane: Mapping[int, int], lanes: int) -> int:
    """The last lane that holds no stage, else the last stage's, where the clean latents are."""
    last = max(group_lane.values())
    return lanes - 1 if last < lanes - 1 else last


@LAYOUTS.add("interleaved")
def _interleaved(groups: Mapping[str, int], lanes: int) -> _Homes:
    """Let planner tasks take whichever lane is idle, but a lane of decoding's own."""
    group_lane = _spread(groups, lanes)
    decode = _decode_lane(group_lane, lanes)
    own_decode = lanes - 1 - max(group_lane.values()) >= 2
    planner = tuple(lane for lane in reversed(range(lanes)) if not (own_decode and lane == decode))
    return _Homes(groups=groups, group_lane=group_lane, planner=planner, decode=decode)


@LAYOUTS.add("prelude")
def _prelude(groups: Mapping[str, int], lanes: int) -> _Homes:
    """Run the whole planner first, from lane 0 on; it spreads only where anchor blocks are independent."""
    group_lane = _spread(groups, lanes)
    decode = _decode_lane(group_lane, lanes)
    return _Homes(groups=groups, group_lane=group_lane, planner=tuple(range(lanes)), decode=decode)


@LAYOUTS.add("streaming")
def _streaming(groups: Mapping[str, int], lanes: int) -> _Homes:
    """Give the planner the last lane; decoding gets another free lane, or shares the planner's."""
    if lanes < 2:
        raise ValueError(f"devices={lanes} is below 2 for layout='streaming'; use layout='interleaved' or more devices")
    group_lane = _spread(groups, lanes - 1)
    decode = lanes - 2 if max(group_lane.values()) < lanes - 2 else lanes - 1
    return _Homes(groups=groups, group_lane=group_lane, planner=(lanes - 1,), decode=decode)


@LAYOUTS.add("single")
def _single(groups: Mapping[str, int], lanes: int) -> _Homes:
    """Run everything on lane 0."""
    return _Homes(groups=groups, group_lane=dict.fromkeys(groups.values(), 0), planner=(0,), decode=0)


def place(
    graph: TaskGraph,
    *,
    lanes: Sequence[LaneInfo],
    layout: str = "auto",
    order: str = "latency",
    decode: str = "auto",
    pairable: Pairable | None = None,
) -> Placement:
    """Spread ``graph`` over ``lanes``.

    ``auto`` takes the shortest of the layouts, counted in rounds, so that a call is placed alike on every machine,
    and predictions are of what runs. ``order`` is ``latency`` (a diagonal wavefront; first frames early) or
    ``memory`` (a lane finishes a stage's chunks before its next stage, so one of its banks lives at a time).
    ``decode`` is ``own`` (the last lane does nothing else), ``shared`` (the last stage's lane decodes), ``any``
    (whichever lane is idle; the decoder's state moves along), ``split`` (the last two lanes do nothing else, each
    with half of the decoder's layers; for graphs of ``graph.halves``) or ``auto`` (a lane that holds no stage, if
    there is one). With ``pairable`` a lane runs two forwards that are ready as one, where that says they may.
    Raises ``ValueError`` for unknown names and for lanes that are too few.
    """
    if not lanes:
        raise ValueError("devices=0 is below 1; use devices=1 or more")
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use one of: {', '.join(ORDERS)}")
    if layout != "auto" and layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of: auto, {', '.join(LAYOUTS)}")
    if decode not in DECODES:
        raise ValueError(f"decode={decode!r} is unknown; use one of: {', '.join(DECODES)}")
    if not any(task.kind is Kind.DECODE for task in graph.tasks):
        decode = "auto"
    apart = LANES_APART.get(decode, 0)
    if len(lanes) <= apart:
        raise ValueError(
            f"devices={len(lanes)} is below {apart + 1} for decode={decode!r}; use decode='shared' or more devices"
        )
    cost = _rounds_with_decoding if decode == "any" else rounds
    names = [layout]
    if layout == "auto":
        names = ["single"] if len(lanes) - apart == 1 else ["interleaved", "prelude", "streaming"]
    home = partial(_homes, stage_groups(graph), lanes=len(lanes), decode=decode)
    found = [
        _schedule(graph, homes=home(name), layout=name, lanes=tuple(lanes), order=order, cost=cost, pairable=pairable)
        for name in names
    ]
    return min(found, key=lambda pair: pair[0])[1]


def _rounds_with_decoding(task: ForwardTask) -> float:
    """Count decoding a chunk as two forwards: only what takes time can be spread evenly."""
    return 2.0 if task.kind is Kind.DECODE else rounds(task)


def _homes(groups: Mapping[str, int], layout: str, *, lanes: int, decode: str) -> _Homes:
    """Return where a layout puts things when decoding goes as asked."""
    if decode == "any":
        return replace(LAYOUTS[layout](groups, lanes), decodes=tuple(reversed(range(lanes))))
    if decode == "own":
        return replace(LAYOUTS[layout](groups, lanes - 1), decode=lanes - 1)
    if decode == "split":
        return replace(LAYOUTS[layout](groups, lanes - 2), front=lanes - 2, decode=lanes - 1)
    homes = LAYOUTS[layout](groups, lanes)
    return replace(homes, decode=max(homes.group_lane.values())) if decode == "shared" else homes


Urgency = tuple[int, float, int]
"""Sorts ready tasks, the most urgent first; the last part is unique."""
_NEVER: Urgency = (2, 0.0, 0)


def _urgency(graph: TaskGraph, *, by_path: bool, cost: TaskCost) -> dict[str, Urgency]:
    """Rank every task: decoding at once, so that frames leave early; then by the longest remaining path if ``by_path``.

    On one lane no order is shorter than another, so the graph's order stands: it finishes a chunk before the next.
    Forwards that are to run in pairs need others beside them, which the diagonals of a wavefront have.
    """
    remaining = remaining_path(graph, cost=cost)
    ranks: dict[str, Urgency] = {}
    for index, task in enumerate(graph.tasks):
        if task.kind is Kind.DECODE:
            ranks[task.id] = (0, 0.0, index)
        else:
            ranks[task.id] = (1, -remaining[task.id] if by_path else 0.0, index)
    return ranks


class _Scheduler:
    """List scheduling: an idle lane takes the most urgent ready task that may run on it."""

    def __init__(
        self,
        graph: TaskGraph,
        *,
        homes: _Homes,
        num_lanes: int,
        urgency: Mapping[str, Urgency],
        pairable: Pairable | None,
    ) -> None:
        self.tasks = graph.by_id()
        self.homes = homes
        self.urgency = urgency
        self.children: dict[str, list[str]] = {}
        self.missing = dict.fromkeys(self.tasks, 0)
        self.ready: dict[tuple[int, ...], list[tuple[Urgency, str]]] = {}
        self.idle = set(range(num_lanes))
        self.assign: dict[str, int] = {}
        self.order: list[list[str]] = [[] for _ in range(num_lanes)]
        self.pairable = pairable
        self.pairs: dict[str, str] = {}
        for task in graph.tasks:
            for parent in graph.parents(task):
                self._add_edge(parent.id, task.id)

    def _add_edge(self, parent: str, child: str) -> None:
        self.children.setdefault(parent, []).append(child)
        self.missing[child] = self.missing.get(child, 0) + 1

    def add_barrier(self, name: str, *, members: Sequence[str], waiters: Sequence[str]) -> None:
        """Hold ``waiters`` back until all ``members`` have ended. ``name`` must be no task's id."""
        if members:
            for member in members:
                self._add_edge(member, name)
            for waiter in waiters:
                self._add_edge(name, waiter)

    def run(self, cost: TaskCost) -> float:
        """Fill ``assign`` and ``order``; return the time at which the last task ends."""
        for task_id in [name for name, count in self.missing.items() if not count]:
            self._release(task_id)
        now = 0.0
        running: list[tuple[float, Urgency, str]] = []
        while True:
            for task_id in self._start_all():
                both = [task_id, *([self.pairs[task_id]] if task_id in self.pairs else [])]
                end = now + sum(cost(self.tasks[one]) for one in both)
                for one in both:
                    heapq.heappush(running, (end, self.urgency[one], one))
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] == now:
                self._finish(heapq.heappop(running)[2])
        assert len(self.assign) == len(self.tasks), "barriers wait for each other"
        return now

    def _release(self, name: str) -> None:
        if name not in self.tasks:
            self._finish(name)  # a barrier takes no time
            return
        heap = self.ready.setdefault(self.homes.lanes_of(self.tasks[name]), [])
        heapq.heappush(heap, (self.urgency[name], name))

    def _finish(self, name: str) -> None:
        if name in self.assign:
            self.idle.add(self.assign[name])
        for child in self.children.get(name, ()):
            self.missing[child] -= 1
            if not self.missing[child]:
                self._release(child)

    def _start_all(self) -> list[str]:
        """Give every idle lane that can have one a task."""
        started: list[str] = []
        while True:
            open_heaps = [lanes for lanes, heap in self.ready.items() if heap and self.idle.intersection(lanes)]
            if not open_heaps:
                return started
            lanes = min(open_heaps, key=lambda lanes: self.ready[lanes][0])
            _, task_id = heapq.heappop(self.ready[lanes])
            lane = max((lane for lane in lanes if lane in self.idle), key=self._urgency_of_pinned)
            self.idle.remove(lane)
            started.append(task_id)
            partner = self._partner(task_id, lane)
            if partner is not None:
                self.pairs[task_id] = partner
            for one in (task_id,) if partner is None else (task_id, partner):
                self.assign[one] = lane
                self.order[lane].append(one)

    def _partner(self, task_id: str, lane: int) -> str | None:
        """Take the most urgent ready task that may run on ``lane`` as one with ``task_id``, if there is any."""
        heap = self.ready.get((lane,), [])
        if self.pairable is None:
            return None
        found = [entry for entry in heap if self.pairable(self.tasks[task_id], self.tasks[entry[1]])]
        if not found:
            return None
        best = min(found)
        heap.remove(best)
        heapq.heapify(heap)
        return best[1]

    def _urgency_of_pinned(self, lane: int) -> Urgency:
        """How urgent the work is that only ``lane`` can do; a task that is free to choose disturbs the least urgent."""
        heap = self.ready.get((lane,))
        return heap[0][0] if heap else _NEVER


def _schedule(
    graph: TaskGraph,
    *,
    homes: _Homes,
    layout: str,
    lanes: tuple[LaneInfo, ...],
    order: str,
    cost: TaskCost,
    pairable: Pairable | None,
) -> tuple[float, Placement]:
    """Return the makespan and the placement of one layout."""
    groups = homes.groups
    used = 1 if layout == "single" else len(lanes)
    urgency = _urgency(graph, by_path=used > 1 or pairable is not None, cost=cost)
    scheduler = _Scheduler(graph, homes=homes, num_lanes=len(lanes), urgency=urgency, pairable=pairable)
    if layout == "prelude":
        planner = [task.id for task in graph.tasks if task.role is Role.PLANNER]
        scheduler.add_barrier("the planner", members=planner, waiters=list(groups))
    if order == "memory":
        for lane in range(len(lanes)):
            here = sorted(group for group, home in homes.group_lane.items() if home == lane)
            for earlier, later in pairwise(here):
                members = [task_id for task_id, group in groups.items() if group == earlier]
                waiters = [task_id for task_id, group in groups.items() if group == later]
                scheduler.add_barrier(f"group {earlier}", members=members, waiters=waiters)
    makespan = scheduler.run(cost)
    order_of_lanes = tuple(tuple(ids) for ids in scheduler.order)
    placed = Placement(layout=layout, lanes=lanes, assign=scheduler.assign, order=order_of_lanes, pairs=scheduler.pairs)
    return makespan, placed
