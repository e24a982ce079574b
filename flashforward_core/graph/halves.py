"""Decoding cut in two: the front layers of a chunk on one lane while the back ones of the last chunk run on another."""

from collections.abc import Iterable
from dataclasses import replace

from .task import BACK, FRONT, ForwardTask, Kind, Slot, Space, TaskGraph

BETWEEN = "between"
"""Bank of the slots that hold what the front gives the back."""


def in_halves(graph: TaskGraph) -> TaskGraph:
    """Return ``graph`` with two tasks in the place of each DECODE, whose states pass from chunk to chunk apart."""
    tasks = [half for task in graph.tasks for half in (_halves(task) if task.kind is Kind.DECODE else (task,))]
    return TaskGraph(tuple(tasks), halved(graph.inputs))


def halved(slots: Iterable[Slot]) -> frozenset[Slot]:
    """Return ``slots`` with both halves' states in the place of each state."""
    return frozenset(part for slot in slots for part in (_states(slot) if slot.space is Space.VAE_STATE else (slot,)))


def _states(slot: Slot) -> tuple[Slot, Slot]:
    return replace(slot, bank=FRONT), replace(slot, bank=BACK)


def _halves(task: ForwardTask) -> tuple[ForwardTask, ForwardTask]:
    latents = [slot for slot in task.reads if slot.space is not Space.VAE_STATE]
    frames = [slot for slot in task.writes if slot.space is not Space.VAE_STATE]
    before = [_states(slot) for slot in task.reads if slot.space is Space.VAE_STATE]
    (after,) = (_states(slot) for slot in task.writes if slot.space is Space.VAE_STATE)
    between = replace(after[0], bank=BETWEEN)
    front = replace(task, reads=(*latents, *(front for front, _ in before)), writes=(between, after[0]))
    back = replace(task, reads=(between, *(back for _, back in before)), writes=(*frames, after[1]))
    return front, back
