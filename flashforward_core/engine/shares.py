"""What each lane of a placement does by itself: its tasks, and what it exchanges with lanes of other machines.

Latents are small and are sent. The KV of an anchor is large, and every lane that renders needs it: a lane may be sent
it, or make it again from the anchor's latents by running the planner's commit itself, with the same bytes.
Nothing here imports torch.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..graph.task import ForwardTask, Slot, Space, TaskGraph
from .placement import Placement

SENT = (Space.LATENT, Space.ANCHOR_LATENT, Space.KV, Space.ANCHOR_KV)
"""What may leave its lane; decoder states and what KV policies keep stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One lane's part of a rollout."""

    order: tuple[str, ...]
    """Task ids as they run here."""
    graph: TaskGraph
    """These tasks; its inputs are written elsewhere or given."""
    arrives: Mapping[str, tuple[Slot, ...]]
    """By task id: what other lanes write and must be here before it, each slot once, at its first reader."""
    leaves: Mapping[str, tuple[Slot, ...]]
    """By task id: what it writes for other lanes."""
    again: frozenset[str]
    """Commits that another lane runs too."""


def shares_of(graph: TaskGraph, *, placement: Placement, encode: Collection[int] = ()) -> tuple[Share, ...]:
    """Part ``graph`` by lane. Lanes in ``encode`` make the KV of anchors again instead of being sent it."""
    by_id = graph.by_id()
    orders = []
    for lane, order in enumerate(placement.order):
        mine = [by_id[task_id] for task_id in order]
        orders.append(_with_commits(mine, graph) if lane in encode else mine)
    arrivals = [_arrivals(tasks, graph) for tasks in orders]
    sent = [(slot, lane) for lane, found in enumerate(arrivals) for slots in found.values() for slot in slots]
    wanted = {slot for slot, _ in sent}
    for slot in wanted:
        assert slot.space in SENT, f"{slot} cannot leave its lane"
    shares = []
    for lane, tasks in enumerate(orders):
        own = set(placement.order[lane])
        leaves = {task.id: tuple(slot for slot in task.writes if slot in wanted) for task in tasks if task.id in own}
        shares.append(
            Share(
                order=tuple(task.id for task in tasks),
                graph=_part(tasks),
                arrives=arrivals[lane],
                leaves={task_id: slots for task_id, slots in leaves.items() if slots},
                again=frozenset(task.id for task in tasks if task.id not in own),
            )
        )
    return tuple(shares)


def _with_commits(mine: Iterable[ForwardTask], graph: TaskGraph) -> list[ForwardTask]:
    """Put the commits of anchors that are made elsewhere before the first task here that reads their KV."""
    found: dict[str, ForwardTask] = {}
    mine = list(mine)
    own = {task.id for task in mine}

    def add(task: ForwardTask) -> None:
        for slot in task.reads:
            writer = graph.writers.get(slot) if slot.space is Space.ANCHOR_KV else None
            if writer is not None and writer.id not in own and writer.id not in found:
                add(writer)
        found[task.id] = task

    for task in mine:
        add(task)
    return list(found.values())


def _arrivals(tasks: Iterable[ForwardTask], graph: TaskGraph) -> dict[str, tuple[Slot, ...]]:
    """Return by task id what others write, at its first reader here."""
    here: set[Slot] = set()
    found: dict[str, tuple[Slot, ...]] = {}
    for task in tasks:
        missing = tuple(dict.fromkeys(slot for slot in task.reads if slot in graph.writers and slot not in here))
        if missing:
            found[task.id] = missing
        here.update(missing, task.writes)
    return found


def _part(tasks: Iterable[ForwardTask]) -> TaskGraph:
    tasks = tuple(tasks)
    written = {slot for task in tasks for slot in task.writes}
    return TaskGraph(tasks, frozenset(slot for task in tasks for slot in task.reads) - written)
