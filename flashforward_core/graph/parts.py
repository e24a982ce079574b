"""A long rollout as a chain of graphs, each of a few chunks: what is planned and held does not grow with the video.

A part's anchors are planned when its chunks first read them. What later parts read of earlier ones, and no more, is
carried: history, anchors' KV, what a KV policy keeps, and the decoder's state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..specs import RolloutSpec
from .passes import KV_SPACES, prune
from .schedules import chunk_tasks, history_chunks, remaining_blocks, spec_for
from .task import ForwardTask, Kind, Slot, Space, TaskGraph

PART_CHUNKS = 96
"""Chunks of a part, about: long enough that filling and draining the lanes at its ends costs little."""
CARRIED = (*KV_SPACES, Space.VAE_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive chunks, with the anchor blocks that they are the first to read."""

    chunks: range
    graph: TaskGraph
    """Slots that earlier parts wrote are among its inputs."""
    carried: frozenset[Slot]
    """What later parts read of this one and of those before it."""


def parts(
    spec: RolloutSpec, *, decode: bool = True, given_anchors: bool = False, size: int = PART_CHUNKS
) -> Iterator[Part]:
    """Yield the parts of ``build_graph(spec)`` in order, of at least ``size`` chunks but for the last.

    Together they have the tasks of the whole. Raises ``ValueError`` as ``build_graph`` does.
    """
    spec = spec_for(spec)
    planned = 0
    held: frozenset[Slot] = frozenset()
    for chunks in _ranges(spec, size):
        tasks: list[ForwardTask] = []
        for chunk in chunks:
            made, planned = chunk_tasks(spec, chunk, planned=planned, decode=decode, given_anchors=given_anchors)
            tasks.extend(made)
        if chunks.stop == spec.num_chunks:
            tasks.extend(remaining_blocks(spec, planned=planned, given_anchors=given_anchors))
        written = {slot for task in tasks for slot in task.writes}
        carried = _needed_later(spec, chunks.stop, planned=planned, decode=decode, of=held | written)
        graph = prune(TaskGraph(tuple(tasks), _inputs(tasks, written)), keep=carried)
        yield Part(chunks=chunks, graph=graph, carried=carried)
        held = carried


def _inputs(tasks: list[ForwardTask], written: set[Slot]) -> frozenset[Slot]:
    return frozenset(slot for task in tasks for slot in task.reads if slot not in written)


def _ranges(spec: RolloutSpec, size: int) -> Iterator[range]:
    """Cut where the pages of the history lie as they would in the whole, so that keys keep their order.

    Pages of the history that moves are a ring of one more than there are; a cut is where it begins anew. Just after a
    hard cut the history is short, and a ring would begin elsewhere; there keys may come in another order than in the
    whole, whose pages depend on all of it. With a KV policy there are no such pages, and any cut will do.
    """
    history = 0 if spec.compacts else spec.history.chunks
    ring = 1 if spec.compacts else history + 1 - -(-spec.history.sink // spec.chunk_frames)
    start = 0
    while start < spec.num_chunks:
        stop = history + -(-(start + size - history) // ring) * ring
        while stop < spec.num_chunks and len(history_chunks(spec, stop)) < history:
            stop += ring
        yield range(start, min(stop, spec.num_chunks))
        start = stop


def _needed_later(spec: RolloutSpec, chunk: int, *, planned: int, decode: bool, of: frozenset[Slot]) -> frozenset[Slot]:
    """Return what chunks from ``chunk`` on, and anchor blocks from ``planned`` on, read ``of`` what is there.

    Histories and anchors move forwards only: what ``chunk`` does not read of the past, no later chunk does.
    """
    if chunk >= spec.num_chunks:
        return frozenset()
    tasks, _ = chunk_tasks(spec, chunk, planned=len(spec.anchor_blocks()), decode=decode, given_anchors=True)
    read = {slot for task in tasks if task.kind is not Kind.COMPACT for slot in task.reads}  # no forward, no need
    first = min((slot.index for slot in read if slot.space is Space.ANCHOR_KV), default=len(spec.anchor_positions()))
    blocks = spec.anchor_blocks()
    seen = blocks[max(0, planned - spec.history.planner_blocks) : planned] if planned < len(blocks) else ()
    first = min([first, *(block[0] for block in seen)])
    return frozenset(
        slot
        for slot in of
        if (slot in read and slot.space in CARRIED) or (slot.space is Space.ANCHOR_KV and slot.index >= first)
    )
