"""Several rollouts on the same lanes: which task of which rollout a lane runs next.

A rollout alone leaves lanes idle while its first anchors are planned and while its last chunks leave the pipeline. Here
a lane takes, of all rollouts under way, the most urgent task that can start, so the next rollout fills these gaps.
Within a rollout nothing changes: a stage and its bank stay on one lane, and any order gives the same bytes.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph.passes import TaskCost, remaining_path
from ..graph.task import ForwardTask, Kind, Role, TaskGraph
from .cost import rounds
from .placement import stage_groups

Urgency = tuple[float, ...]
"""Sorts tasks that can start, the most urgent first; unique, for its last two parts are rollout and place."""
Ready = tuple[Urgency, int, str]
"""Urgency, rollout, task id."""


def in_flight_for(num_lanes: int) -> int:
    """Return how many rollouts are under way at a time unless told: as many as lanes, at least two.

    One renders and the next one's planner fills its gaps. A lane then holds as many stages' KV as one that runs a
    rollout alone, two rollouts' on one lane.
    """
    return max(2, num_lanes)


@dataclass(slots=True, kw_only=True)
class _Rollout:
    tasks: Mapping[str, ForwardTask]
    lane_of: Mapping[str, int]
    """Task id -> lane; the planner's tasks may run on any and have no entry."""
    urgency: Mapping[str, Urgency]
    children: Mapping[str, Sequence[str]]
    missing: dict[str, int]
    """Task id -> parents that have not been launched."""
    left: set[str] = field(default_factory=set)
    """Tasks that have not been launched."""


class Dispatcher:
    """Knows what can start where. Callers with several threads hold a lock around every call."""

    def __init__(self, *, num_lanes: int, cost: TaskCost = rounds) -> None:
        self._num_lanes = num_lanes
        self._cost = cost
        self._rollouts: dict[int, _Rollout] = {}
        self._pinned: list[list[Ready]] = [[] for _ in range(num_lanes)]
        self._free: list[Ready] = []

    def admit(self, number: int, graph: TaskGraph) -> None:
        """Let the rollout's tasks run; the lower its ``number``, the more urgent they are. Numbers are not reused."""
        children: dict[str, list[str]] = {}
        for task in graph.tasks:
            for parent in graph.parents(task):
                children.setdefault(parent.id, []).append(task.id)
        self._rollouts[number] = made = _Rollout(
            tasks=graph.by_id(),
            lane_of=lanes_of(graph, number=number, num_lanes=self._num_lanes),
            urgency=urgencies(graph, number=number, num_lanes=self._num_lanes, cost=self._cost),
            children=children,
            missing={task.id: len(graph.parents(task)) for task in graph.tasks},
            left=set(graph.by_id()),
        )
        self._release(number, made, [name for name, count in made.missing.items() if not count])

    def take(self, lane: int) -> tuple[int, ForwardTask] | None:
        """Return the rollout and task that ``lane`` is to start now, or None when there is none for it yet."""
        heaps = [heap for heap in (self._pinned[lane], self._free) if heap]
        while heaps:
            heap = min(heaps, key=lambda heap: heap[0])
            _, number, task_id = heapq.heappop(heap)
            if number in self._rollouts:  # else it has been dropped
                return number, self._rollouts[number].tasks[task_id]
            heaps = [heap for heap in heaps if heap]
        return None

    def next_of(self, lane: int) -> Urgency:
        """Say how urgent the work is that only ``lane`` can do: a task for any lane disturbs the least urgent."""
        return self._pinned[lane][0][0] if self._pinned[lane] else (float("inf"),)

    def finish(self, number: int, task: ForwardTask) -> None:
        """Let what reads ``task``'s results start."""
        rollout = self._rollouts.get(number)
        if rollout is None:
            return
        rollout.left.discard(task.id)
        for child in rollout.children.get(task.id, ()):
            rollout.missing[child] -= 1
        now = [child for child in rollout.children.get(task.id, ()) if not rollout.missing[child]]
        self._release(number, rollout, now)
        if not rollout.left:
            del self._rollouts[number]

    def drop(self, number: int) -> None:
        """Start no more tasks of a rollout; one that has ended, or was never admitted, is left alone."""
        self._rollouts.pop(number, None)

    def no_more(self) -> None:
        """Say that no rollout follows: those under way end together, so that lanes do not run dry one by one."""
        turn = float(min(self._rollouts, default=0))
        for rollout in self._rollouts.values():
            rollout.urgency = {task_id: (kind, turn, *rest) for task_id, (kind, _, *rest) in rollout.urgency.items()}
        for heap in (*self._pinned, self._free):
            heap[:] = [
                (self._rollouts[number].urgency[task_id], number, task_id)
                for _, number, task_id in heap
                if number in self._rollouts
            ]
            heapq.heapify(heap)

    def _release(self, number: int, rollout: _Rollout, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            heap = self._pinned[rollout.lane_of[task_id]] if task_id in rollout.lane_of else self._free
            heapq.heappush(heap, (rollout.urgency[task_id], number, task_id))


def _decodes(graph: TaskGraph) -> bool:
    return any(task.kind is Kind.DECODE for task in graph.tasks)


def lanes_of(graph: TaskGraph, *, number: int, num_lanes: int) -> dict[str, int]:
    """Give each stage of a rollout, and its decoding, a lane; rollouts are turned against each other.

    Without decoding each one starts where the last one's stages ended, so lanes that hold none, or more than others,
    change. Decoding makes its lane the busiest by far, so then each one is turned by one lane.
    """
    groups = stage_groups(graph)
    count = max(groups.values(), default=0) + 1
    used = min(count, num_lanes)
    offset = -number if _decodes(graph) else number * count
    found = {task_id: (group * used // count + offset) % num_lanes for task_id, group in groups.items()}
    last = num_lanes - 1 if used < num_lanes else used - 1  # a lane without a stage, else the last stage's
    decode = (last + offset) % num_lanes
    return {**found, **{task.id: decode for task in graph.tasks if task.kind is Kind.DECODE}}


def urgencies(graph: TaskGraph, *, number: int, num_lanes: int, cost: TaskCost) -> dict[str, Urgency]:
    """Rank a rollout's tasks among those of all rollouts.

    Decoding comes first, so that frames leave early, then the first anchor block, since a whole rollout waits for it.
    Of the rest an earlier rollout's come first; on two lanes rollouts that decode share them instead, for they are
    turned against each other and so keep two decoding lanes busy. Last, the longest remaining path comes first; on one
    lane, the graph's order.
    """
    remaining = dict.fromkeys(graph.by_id(), 0.0) if num_lanes == 1 else remaining_path(graph, cost=cost)
    fair = _decodes(graph) and num_lanes == 2
    ranks: dict[str, Urgency] = {}
    for index, task in enumerate(graph.tasks):
        first = task.role is Role.PLANNER and task.index == 0 and num_lanes > 1 and not fair
        kind = 0 if task.kind is Kind.DECODE else 1 if first else 2
        turn = 0 if fair else number
        ranks[task.id] = (kind, turn, 0.0 if kind == 0 else -remaining[task.id], number, index)
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueForecast:
    """How several rollouts go on the same lanes, as simulated."""

    length: float
    """Until the last task ends, in the unit of the cost."""
    busy: tuple[float, ...]
    """How long each lane computes."""
    ends: tuple[float, ...]
    """When each rollout ends."""

    @property
    def utilisation(self) -> float:
        """The share of all lanes' time that is spent computing, from the first task's start to the last one's end."""
        return sum(self.busy) / (len(self.busy) * self.length) if self.length else 1.0


def simulate_queue(
    graphs: Sequence[TaskGraph], *, num_lanes: int, in_flight: int | None = None, cost: TaskCost = rounds
) -> QueueForecast:
    """Play ``graphs`` on lanes that do what a ``Dispatcher`` tells them, ``in_flight`` of them at a time.

    None is what ``in_flight_for`` says.
    """
    in_flight = in_flight_for(num_lanes) if in_flight is None else in_flight
    dispatcher = Dispatcher(num_lanes=num_lanes, cost=cost)
    waiting = list(range(len(graphs)))[::-1]
    left = [len(graph) for graph in graphs]
    busy, ends = [0.0] * num_lanes, [0.0] * len(graphs)
    running: list[tuple[float, int, int, ForwardTask]] = []
    idle, now = set(range(num_lanes)), 0.0
    for _ in range(min(in_flight, len(graphs))):
        number = waiting.pop()
        dispatcher.admit(number, graphs[number])
    if not waiting:
        dispatcher.no_more()
    while True:
        for lane in sorted(idle, key=dispatcher.next_of, reverse=True):
            taken = dispatcher.take(lane)
            if taken is not None:
                busy[lane] += cost(taken[1])
                heapq.heappush(running, (now + cost(taken[1]), lane, taken[0], taken[1]))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, lane, number, task = heapq.heappop(running)
            dispatcher.finish(number, task)
            left[number] -= 1
            if not left[number]:
                ends[number] = now
                if waiting:
                    following = waiting.pop()
                    dispatcher.admit(following, graphs[following])
                    if not waiting:
                        dispatcher.no_more()
        idle = set(range(num_lanes)) - {lane for _, lane, _, _ in running}
    assert not waiting and not any(left), "rollouts wait for each other"
    return QueueForecast(length=now, busy=tuple(busy), ends=tuple(ends))
