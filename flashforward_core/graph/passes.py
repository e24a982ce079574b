"""Passes over a task graph: drop what nobody reads, find readers and longest paths, write it as JSON."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from .task import ForwardTask, Kind, Role, Slot, Space, TaskGraph, slot_from_str

KV_SPACES = (Space.KV, Space.ANCHOR_KV, Space.POLICY_STATE)
TaskCost = Callable[[ForwardTask], float]
"""Duration of a task, in whatever unit the caller counts."""


def prune(graph: TaskGraph, *, keep: Collection[Slot] = ()) -> TaskGraph:
    """Drop KV writes that no task reads, and the commits and compactions that then write nothing.

    Latents, frames and decoder states stay: they are results. ``keep`` names KV slots to write all the same.
    """
    needed = set(keep)
    kept: list[ForwardTask] = []
    for task in reversed(graph.tasks):
        writes = tuple(slot for slot in task.writes if slot.space not in KV_SPACES or slot in needed)
        if not writes and task.kind in (Kind.COMMIT, Kind.COMPACT):
            continue
        needed.update(task.reads)
        kept.append(
            ForwardTask(
                kind=task.kind, role=task.role, index=task.index, stage=task.stage, reads=task.reads, writes=writes
            )
        )
    return TaskGraph(tuple(reversed(kept)), frozenset(graph.inputs & needed))


def readers(graph: TaskGraph) -> dict[Slot, tuple[ForwardTask, ...]]:
    """Map every slot, inputs included, to the tasks that read it, in the graph's order."""
    found: dict[Slot, list[ForwardTask]] = {slot: [] for slot in graph.inputs}
    for task in graph.tasks:
        for slot in dict.fromkeys(task.reads):
            found.setdefault(slot, []).append(task)
        for slot in task.writes:
            found.setdefault(slot, [])
    return {slot: tuple(tasks) for slot, tasks in found.items()}


def last_readers(graph: TaskGraph) -> dict[str, tuple[Slot, ...]]:
    """Map a task's id to the slots that nobody reads after it, when tasks run in the graph's order.

    A slot that nobody reads appears nowhere: it is a result.
    """
    found: dict[str, list[Slot]] = {}
    for slot, tasks in readers(graph).items():
        if tasks:
            found.setdefault(tasks[-1].id, []).append(slot)
    return {task_id: tuple(slots) for task_id, slots in found.items()}


def remaining_path(graph: TaskGraph, *, cost: TaskCost) -> dict[str, float]:
    """Map a task's id to the cost of the longest path from its start to the end of the graph."""
    after: dict[str, float] = {}
    remaining: dict[str, float] = {}
    for task in reversed(graph.tasks):
        remaining[task.id] = cost(task) + after.get(task.id, 0.0)
        for parent in graph.parents(task):
            after[parent.id] = max(after.get(parent.id, 0.0), remaining[task.id])
    return remaining


def critical_path(graph: TaskGraph, *, cost: TaskCost) -> tuple[ForwardTask, ...]:
    """Return the chain of tasks whose total cost no placement can beat."""
    remaining = remaining_path(graph, cost=cost)
    children: dict[str, list[ForwardTask]] = {}
    for task in graph.tasks:
        for parent in graph.parents(task):
            children.setdefault(parent.id, []).append(task)
    path: list[ForwardTask] = []
    options: Collection[ForwardTask] = graph.tasks
    while options:
        path.append(max(options, key=lambda task: remaining[task.id]))
        options = children.get(path[-1].id, ())
    return tuple(path)


def to_json(graph: TaskGraph) -> dict[str, Any]:
    """Return the graph as plain data, ready for ``json.dumps``."""
    return {
        "tasks": [
            {
                "id": task.id,
                "kind": task.kind.value,
                "role": None if task.role is None else task.role.value,
                "index": task.index,
                "stage": task.stage,
                "reads": [str(slot) for slot in task.reads],
                "writes": [str(slot) for slot in task.writes],
            }
            for task in graph.tasks
        ]
    }


def from_json(data: Mapping[str, Any]) -> TaskGraph:
    """Read back ``to_json``; slots that are read and never written are the inputs."""
    tasks = tuple(
        ForwardTask(
            kind=Kind(entry["kind"]),
            role=None if entry["role"] is None else Role(entry["role"]),
            index=entry["index"],
            stage=entry["stage"],
            reads=tuple(slot_from_str(text) for text in entry["reads"]),
            writes=tuple(slot_from_str(text) for text in entry["writes"]),
        )
        for entry in data["tasks"]
    )
    written = {slot for task in tasks for slot in task.writes}
    read = {slot for task in tasks for slot in task.reads}
    return TaskGraph(tasks, frozenset(read - written))
