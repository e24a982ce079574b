"""Predict a placed graph's timeline and memory without running it."""

from collections.abc import Callable, Mapping

from ..graph.passes import KV_SPACES, TaskCost
from ..graph.task import Slot, TaskGraph
from .cost import rounds
from .events import TaskSpan, Timeline
from .placement import Placement

SlotBytes = Callable[[Slot], int]
FIRST, BEGINS, LAST = range(3)  # of what happens at the same time


def run_lanes(
    graph: TaskGraph, *, placement: Placement, cost: TaskCost, pair_ratio: float = 1.0
) -> tuple[TaskSpan, ...]:
    """Return when each task runs, if every lane takes its tasks in order, each as soon as its parents have ended.

    Forwards that run as one take ``pair_ratio`` of what they take one after the other, and have half of it each.
    Spans come in an order that respects the dependencies. A placement that cannot be run to its end is a bug.
    """
    by_id = graph.by_id()
    units = [list(placement.units(lane)) for lane in range(len(placement.lanes))]
    position = [0] * len(placement.lanes)
    free_at = [0.0] * len(placement.lanes)
    ends: dict[str, float] = {}
    spans: list[TaskSpan] = []
    waiting: dict[str, list[int]] = {}
    lanes = list(range(len(placement.lanes)))
    while lanes:
        lane = lanes.pop()
        if position[lane] == len(units[lane]):
            continue
        tasks = [by_id[task_id] for task_id in units[lane][position[lane]]]
        parents = [parent for task in tasks for parent in graph.parents(task)]
        missing = next((parent.id for parent in parents if parent.id not in ends), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(lane)
            continue
        start = max([free_at[lane], *(ends[parent.id] for parent in parents)])
        each = cost(tasks[0]) if len(tasks) == 1 else pair_ratio * sum(map(cost, tasks)) / len(tasks)
        for n, task in enumerate(tasks):
            spans.append(TaskSpan(task=task.id, lane=lane, start_s=start + n * each, end_s=start + (n + 1) * each))
        free_at[lane] = start + len(tasks) * each
        ends.update({task.id: free_at[lane] for task in tasks})
        position[lane] += 1
        lanes.extend([lane, *(other for task in tasks for other in waiting.pop(task.id, ()))])
    assert len(spans) == len(graph), "the placement's lanes wait for each other"
    return tuple(spans)


def simulate(
    graph: TaskGraph,
    *,
    placement: Placement,
    seconds: TaskCost | None = None,
    slot_bytes: SlotBytes | None = None,
    pair_ratio: float = 1.0,
) -> Timeline:
    """Predict a run of ``graph``. ``pair_ratio`` is as in ``run_lanes``.

    ``seconds`` gives each task's duration (``CostModel.of(spec)``); without it spans count in rounds and
    ``predicted_s`` is None. ``slot_bytes`` sizes KV slots; without it ``peak_kv_bytes`` is empty.
    """
    in_rounds = run_lanes(graph, placement=placement, cost=rounds)
    spans = in_rounds if seconds is None else run_lanes(graph, placement=placement, cost=seconds, pair_ratio=pair_ratio)
    return Timeline(
        source="simulated",
        lanes=placement.lanes,
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        rounds=max((span.end_s for span in in_rounds), default=0.0),
        predicted_s=None if seconds is None else max((span.end_s for span in spans), default=0.0),
        peak_kv_bytes=()
        if slot_bytes is None
        else peak_kv_bytes(graph, spans=spans, lanes=len(placement.lanes), slot_bytes=slot_bytes),
    )


def _lifetimes(graph: TaskGraph, spans: Mapping[str, TaskSpan]) -> dict[tuple[Slot, int], tuple[float, float, int]]:
    """Map (KV slot, lane that holds it) to when it is alive: from its write to its last reader there.

    The third number orders what ends with what begins at the same time: such slots go first, but for those whose last
    reader takes no time, a compaction without measured costs. What it makes is there beside what it reads.
    """
    alive: dict[tuple[Slot, int], tuple[float, float, int]] = {}
    for task in graph.tasks:
        span = spans[task.id]
        for slot in _kv(task.writes):  # the page is taken before the forward fills it
            alive[slot, span.lane] = (span.start_s, span.end_s, FIRST)
        for slot in _kv(task.reads):
            written = spans[graph.writers[slot].id].end_s if slot in graph.writers else 0.0
            start, end, order = alive.get((slot, span.lane), (written, span.end_s, FIRST))
            if span.end_s >= end:
                end, order = span.end_s, LAST if span.start_s == span.end_s else FIRST
            alive[slot, span.lane] = (start, end, order)
    return alive


def _kv(slots: tuple[Slot, ...]) -> list[Slot]:
    return [slot for slot in slots if slot.space in KV_SPACES]


def peak_kv_bytes(
    graph: TaskGraph, *, spans: tuple[TaskSpan, ...], lanes: int, slot_bytes: SlotBytes
) -> tuple[int, ...]:
    """Return the most KV alive at once on each lane.

    A lane holds the slots that its tasks write or read, so anchors count on every lane that reads them. A slot
    whose last reader ends when another is written gives its page over.
    """
    changes: list[list[tuple[float, int, int]]] = [[] for _ in range(lanes)]
    for (slot, lane), (start, end, order) in _lifetimes(graph, {span.task: span for span in spans}).items():
        size = slot_bytes(slot)
        changes[lane] += [(start, BEGINS, size), (end, order, -size)]
    return tuple(_peak(lane) for lane in changes)


def _peak(changes: list[tuple[float, int, int]]) -> int:
    alive = most = 0
    for _, _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most
