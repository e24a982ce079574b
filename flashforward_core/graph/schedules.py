"""The schedules: which forwards a rollout runs, and what each of them reads and writes.

Sources: FlashForward (arXiv 2609.32540), HiAR (arXiv 2603.08703), Self-Forcing, N-C-Causal-rCM (last stage).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ..registry import Registry
from ..specs import RolloutSpec
from .anchors import anchors_for
from .passes import prune
from .task import ForwardTask, Kind, Role, Slot, Space, TaskGraph


class Memory(StrEnum):
    """Whose KV a chunk reads from the chunks before it."""

    SAME_STAGE = "same_stage"  # what the same stage published in flight, at that stage's input level
    LAST_STAGE = "last_stage"  # what the last stage published in flight
    CLEAN = "clean"  # a clean re-encode of the finished chunk
    OUTPUT_LEVEL = "output_level"  # a re-encode of the same stage's output, one per stage


OWN = ".own"
"""Ends the bank's name of what a forward hands over to the KV policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What tells one schedule from another."""

    memory: Memory
    """Whose KV a chunk reads from the chunks before it."""
    uses_anchors: bool
    """Whether a planner makes anchors first, which every chunk then reads."""


SCHEDULES: Registry[Schedule] = Registry("schedule")
SCHEDULES.add("flashforward")(Schedule(memory=Memory.SAME_STAGE, uses_anchors=True))
SCHEDULES.add("self_forcing")(Schedule(memory=Memory.CLEAN, uses_anchors=False))
SCHEDULES.add("hiar")(Schedule(memory=Memory.OUTPUT_LEVEL, uses_anchors=False))
SCHEDULES.add("last_stage")(Schedule(memory=Memory.LAST_STAGE, uses_anchors=False))
SCHEDULES.add("flashforward_no_anchors")(Schedule(memory=Memory.SAME_STAGE, uses_anchors=False))
SCHEDULES.add("clean_history_anchors")(Schedule(memory=Memory.CLEAN, uses_anchors=True))


def spec_for(spec: RolloutSpec) -> RolloutSpec:
    """Return ``spec`` with what its schedule does not use taken out: anchors, for schedules without a planner.

    A schedule that needs anchors and has none raises ``ValueError``, so does a schedule that is left with
    nothing to read.
    """
    schedule = SCHEDULES[spec.schedule]
    if schedule.uses_anchors and spec.anchors is None:
        raise ValueError(
            f"anchors=None, but schedule={spec.schedule!r} reads anchors; "
            "set anchors, or use schedule='flashforward_no_anchors'"
        )
    return spec if schedule.uses_anchors or spec.anchors is None else replace(spec, anchors=None)


def history_chunks(spec: RolloutSpec, chunk: int) -> tuple[int, ...]:
    """Return the earlier chunks whose KV ``chunk`` reads, in order.

    The sink pins the first chunks of the scene and counts within the history. A hard cut starts a new scene with
    the first chunk that begins at or after it; chunks before that are forgotten.
    """
    scene = range(spec.scene_start(chunk), chunk)
    if len(scene) <= spec.history.chunks:
        return tuple(scene)
    sink = -(-spec.history.sink // spec.chunk_frames)
    return (*scene[:sink], *scene[len(scene) - (spec.history.chunks - sink) :])


def _latent(space: Space, index: int, level: int) -> Slot:
    return Slot(space=space, index=index, level=level)


def _anchor_kv(spec: RolloutSpec, anchor: int) -> Slot:
    return Slot(space=Space.ANCHOR_KV, index=anchor, level=spec.stages.num_stages, bank="anchor")


def _kv(spec: RolloutSpec, memory: Memory, *, chunk: int, stage: int) -> Slot:
    """The slot in which stage ``stage`` of later chunks finds the KV of ``chunk``."""
    last = spec.stages.num_stages - 1
    level, bank = {
        Memory.SAME_STAGE: (stage, f"stage{stage}"),
        Memory.LAST_STAGE: (last, f"stage{last}"),
        Memory.CLEAN: (last + 1, "clean"),
        Memory.OUTPUT_LEVEL: (stage + 1, f"stage{stage}"),
    }[memory]
    return Slot(space=Space.KV, index=chunk, level=level, bank=bank)


def _policy_state(kv: Slot) -> Slot:
    """What a policy keeps of the bank of ``kv`` once that chunk has been added."""
    return replace(kv, space=Space.POLICY_STATE)


def _handed_over(kv: Slot) -> Slot:
    """What a forward gives the policy, in place of publishing ``kv``: keys, values and queries."""
    return replace(kv, space=Space.POLICY_STATE, bank=kv.bank + OWN)


def _published(spec: RolloutSpec, kv: Slot) -> Slot:
    return _handed_over(kv) if spec.compacts else kv


def _compact(spec: RolloutSpec, memory: Memory, *, chunk: int, stage: int) -> ForwardTask:
    """Add what ``chunk`` handed over to what its bank has kept so far in this scene."""
    kv = _kv(spec, memory, chunk=chunk, stage=stage)
    before = (replace(_policy_state(kv), index=chunk - 1),) if chunk > spec.scene_start(chunk) else ()
    return ForwardTask(
        kind=Kind.COMPACT,
        role=Role.RENDERER,
        index=chunk,
        stage=kv.level,
        reads=(*before, _handed_over(kv)),
        writes=(_policy_state(kv),),
    )


def _planner_block(spec: RolloutSpec, block: int, *, given: bool) -> Iterator[ForwardTask]:
    """Denoise one anchor block, then commit it; only commit it when its latents are given."""
    blocks, stages = spec.anchor_blocks(), spec.stages.num_stages
    scene = spec.scene_anchors(spec.anchor_positions()[blocks[block][0]])
    seen = blocks[max(0, block - spec.history.planner_blocks) : block]
    history = tuple(_anchor_kv(spec, anchor) for earlier in seen for anchor in earlier if anchor in scene)
    for stage in range(0 if not given else stages, stages):
        yield ForwardTask(
            kind=Kind.DENOISE,
            role=Role.PLANNER,
            index=block,
            stage=stage,
            reads=(_latent(Space.ANCHOR_LATENT, block, stage), *history),
            writes=(_latent(Space.ANCHOR_LATENT, block, stage + 1),),
        )
    yield ForwardTask(
        kind=Kind.COMMIT,
        role=Role.PLANNER,
        index=block,
        stage=stages,
        reads=(_latent(Space.ANCHOR_LATENT, block, stages), *history),
        writes=tuple(_anchor_kv(spec, anchor) for anchor in blocks[block]),
    )


def _gamma(spec: RolloutSpec, chunk: int) -> tuple[int, ...]:
    """Return the anchors that a chunk reads: its scene's, or the last scene's before it where its own has none."""
    if spec.anchors is None:
        return ()
    frames = spec.chunk(chunk)
    scene = spec.scene_anchors(frames.start)
    if not scene:
        scene = spec.scene_anchors(spec.anchor_positions()[scene.start - 1])
    return anchors_for(spec.anchors, frames, spec.shape.latent_frames, scene=scene)


def _context(spec: RolloutSpec, memory: Memory, *, chunk: int, stage: int) -> tuple[Slot, ...]:
    """KV that a forward of the renderer attends to: anchors, then history, oldest first."""
    anchors = (_anchor_kv(spec, anchor) for anchor in _gamma(spec, chunk))
    if spec.compacts:
        history = range(chunk - 1, chunk) if chunk > spec.scene_start(chunk) else range(0)
        return (*anchors, *(_policy_state(_kv(spec, memory, chunk=j, stage=stage)) for j in history))
    return (*anchors, *(_kv(spec, memory, chunk=j, stage=stage) for j in history_chunks(spec, chunk)))


def _commit(spec: RolloutSpec, memory: Memory, *, chunk: int, stage: int) -> ForwardTask:
    """Re-encode the output of ``stage``, seeing what the denoising saw."""
    return ForwardTask(
        kind=Kind.COMMIT,
        role=Role.RENDERER,
        index=chunk,
        stage=stage + 1,
        reads=(_latent(Space.LATENT, chunk, stage + 1), *_context(spec, memory, chunk=chunk, stage=stage)),
        writes=(_published(spec, _kv(spec, memory, chunk=chunk, stage=stage)),),
    )


def _render_chunk(spec: RolloutSpec, memory: Memory, chunk: int) -> Iterator[ForwardTask]:
    """Denoise one chunk through all stages, with the commits and compactions that its schedule and policy ask for."""
    last = spec.stages.num_stages - 1
    for stage in range(last + 1):
        kv = _kv(spec, memory, chunk=chunk, stage=stage)
        in_flight = memory is Memory.SAME_STAGE or (memory is Memory.LAST_STAGE and stage == last)
        commits = memory is Memory.OUTPUT_LEVEL or (memory is Memory.CLEAN and stage == last)
        yield ForwardTask(
            kind=Kind.DENOISE,
            role=Role.RENDERER,
            index=chunk,
            stage=stage,
            reads=(_latent(Space.LATENT, chunk, stage), *_context(spec, memory, chunk=chunk, stage=stage)),
            writes=(_latent(Space.LATENT, chunk, stage + 1), *((_published(spec, kv),) if in_flight else ())),
        )
        if commits:
            yield _commit(spec, memory, chunk=chunk, stage=stage)
        if spec.compacts and (in_flight or commits):
            yield _compact(spec, memory, chunk=chunk, stage=stage)


def _given_chunk(spec: RolloutSpec, memory: Memory, chunk: int) -> Iterator[ForwardTask]:
    """Commit a chunk whose clean latents are given, at t=0, once for each bank in which later chunks look for it."""
    clean = spec.stages.num_stages
    banks = {_kv(spec, memory, chunk=chunk, stage=stage): stage for stage in reversed(range(clean))}
    for kv, stage in sorted(banks.items()):
        yield ForwardTask(
            kind=Kind.COMMIT,
            role=Role.RENDERER,
            index=chunk,
            stage=clean,
            reads=(_latent(Space.LATENT, chunk, clean), *_context(spec, memory, chunk=chunk, stage=stage)),
            writes=(_published(spec, kv),),
        )
        if spec.compacts:
            yield _compact(spec, memory, chunk=chunk, stage=stage)


def _decode(spec: RolloutSpec, chunk: int) -> ForwardTask:
    """Decode one finished chunk; the decoder's state passes from chunk to chunk."""
    before = (_latent(Space.VAE_STATE, chunk - 1, 0),) if chunk else ()
    return ForwardTask(
        kind=Kind.DECODE,
        role=None,
        index=chunk,
        stage=0,
        reads=(_latent(Space.LATENT, chunk, spec.stages.num_stages), *before),
        writes=(_latent(Space.FRAMES, chunk, 0), _latent(Space.VAE_STATE, chunk, 0)),
    )


def _graph_of(tasks: list[ForwardTask]) -> TaskGraph:
    """Check and prune tasks in order; what is read and never written is given."""
    written = {slot for task in tasks for slot in task.writes}
    given = {slot for task in tasks for slot in task.reads} - written
    noise_or_anchors = (Space.LATENT, Space.ANCHOR_LATENT)
    assert all(slot.space in noise_or_anchors for slot in given), "a schedule reads KV that it never writes"
    return prune(TaskGraph(tuple(tasks), frozenset(given)))


def build_graph(spec: RolloutSpec, *, decode: bool = True, given_anchors: bool = False) -> TaskGraph:
    """Return the whole rollout as tasks, chunk by chunk, each anchor block just before the first chunk that reads it.

    Inputs are the noise (level 0), or with ``given_anchors`` the finished anchor latents (level S) in place of the
    anchors' noise; and so are the latents of the chunks that ``spec.start_frames`` covers. Raises ``ValueError`` where
    ``spec`` and its schedule do not fit (see ``spec_for``).
    """
    spec = spec_for(spec)
    tasks: list[ForwardTask] = []
    planned = 0
    for chunk in range(spec.num_chunks):
        made, planned = chunk_tasks(spec, chunk, planned=planned, decode=decode, given_anchors=given_anchors)
        tasks.extend(made)
    tasks.extend(remaining_blocks(spec, planned=planned, given_anchors=given_anchors))
    return _graph_of(tasks)


def chunk_tasks(
    spec: RolloutSpec, chunk: int, *, planned: int, decode: bool, given_anchors: bool
) -> tuple[list[ForwardTask], int]:
    """Return one chunk's tasks, after those of the anchor blocks from ``planned`` on that it is the first to read.

    With them comes how many anchor blocks are planned then. ``spec`` is as ``spec_for`` returns it.
    """
    schedule, blocks, gamma = SCHEDULES[spec.schedule], spec.anchor_blocks(), _gamma(spec, chunk)
    tasks: list[ForwardTask] = []
    while planned < len(blocks) and gamma and blocks[planned][0] <= gamma[-1]:
        tasks.extend(_planner_block(spec, planned, given=given_anchors))
        planned += 1
    if chunk < spec.start_chunks:
        tasks.extend(_given_chunk(spec, schedule.memory, chunk))
    else:
        tasks.extend(_render_chunk(spec, schedule.memory, chunk))
    if decode:
        tasks.append(_decode(spec, chunk))
    return tasks, planned


def remaining_blocks(spec: RolloutSpec, *, planned: int, given_anchors: bool) -> list[ForwardTask]:
    """Return the tasks of the anchor blocks from ``planned`` on: no chunk reads them, but they are results."""
    blocks = range(planned, len(spec.anchor_blocks()))
    return [task for block in blocks for task in _planner_block(spec, block, given=given_anchors)]


def planner_graph(spec: RolloutSpec) -> TaskGraph:
    """Return only the planner's tasks: anchors from noise, without the commits that no later block reads.

    A schedule without a planner raises ``ValueError``.
    """
    spec = spec_for(spec)
    if spec.anchors is None:
        raise ValueError(f"schedule={spec.schedule!r} plans no anchors; use schedule='flashforward'")
    tasks = [task for block in range(len(spec.anchor_blocks())) for task in _planner_block(spec, block, given=False)]
    return _graph_of(tasks)
