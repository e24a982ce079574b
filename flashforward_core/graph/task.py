"""Tasks and the slots they read and write: the one structure that every consumer shares."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Space(StrEnum):
    """What a slot holds."""

    LATENT = "latent"  # one chunk
    KV = "kv"  # one chunk, in one bank
    ANCHOR_LATENT = "anchor_latent"  # one anchor block
    ANCHOR_KV = "anchor_kv"  # one anchor, so that Γ is visible in the edges
    FRAMES = "frames"  # one chunk's video frames
    VAE_STATE = "vae_state"  # the decoder's causal cache after one chunk, or what its halves hand over
    POLICY_STATE = "policy_state"  # what a KV policy keeps of a bank after one chunk, or what it is to take in


FRONT, BACK = "front", "back"
"""Banks of the states of a decoder's halves."""


class Kind(StrEnum):
    """What a task does."""

    DENOISE = "denoise"  # writes the next latent and, in the in-flight schedules, its KV
    COMMIT = "commit"  # writes KV only
    COMPACT = "compact"  # a KV policy: new pages from old
    DECODE = "decode"


class Role(StrEnum):
    """Which of the backbone's two jobs a forward does."""

    PLANNER = "planner"
    RENDERER = "renderer"

    @property
    def row(self) -> int:
        """Row of the role embedding."""
        return 0 if self is Role.PLANNER else 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """A value with one writer. ``level`` 0 is pure noise and S is clean."""

    space: Space
    index: int
    level: int = 0
    bank: str = ""
    """Whose KV it is: stage0, stage1, …, clean or anchor; or whose state of a decoder's halves. Else empty."""

    def __str__(self) -> str:
        parts = [self.space.value, str(self.index), str(self.level)]
        return "/".join([*parts, self.bank] if self.bank else parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTask:
    """One unit of work. The KV slots in ``reads`` are exactly what its attention sees besides itself."""

    kind: Kind
    role: Role | None
    """None for tasks that run no transformer (decode)."""
    index: int
    """Chunk for the renderer and decode, anchor block for the planner."""
    stage: int
    """Stage of a DENOISE; level at which a COMMIT encodes; 0 for DECODE."""
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    id: str = field(init=False, repr=False, compare=False)
    """Readable and unique: ``renderer/denoise/c7/s2``, ``planner/commit/b1``, ``decode/c7``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self._id())

    def _id(self) -> str:
        unit = "b" if self.role is Role.PLANNER else "c"
        if self.kind is Kind.DENOISE:
            return f"{self.role}/denoise/{unit}{self.index}/s{self.stage}"
        if self.kind is Kind.COMMIT:
            tail = "" if self.role is Role.PLANNER else f"/l{self.stage}"
            level = next((slot.level for slot in self.writes), self.stage)
            if self.role is Role.RENDERER and level != self.stage:  # clean KV that stands in for another level's
                tail += f"/s{level}"
            return f"{self.role}/commit/{unit}{self.index}{tail}"
        if self.kind is Kind.COMPACT:
            return f"compact/c{self.index}/s{self.stage}"
        return f"decode/c{self.index}{'/front' if self.half == FRONT else ''}"

    @property
    def half(self) -> str:
        """Which half of the decoder's layers a DECODE runs, ``front`` or ``back``; empty for all of them."""
        banks = {slot.bank for slot in self.writes if slot.space is Space.VAE_STATE}
        return next((name for name in (FRONT, BACK) if name in banks), "")

    @property
    def is_forward(self) -> bool:
        """Whether it runs the transformer."""
        return self.kind in (Kind.DENOISE, Kind.COMMIT)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks in a topological order, checked: one writer per slot, every read written or given, no cycle."""

    tasks: tuple[ForwardTask, ...]
    inputs: frozenset[Slot] = frozenset()
    """Slots that are given: noise (level 0) and whatever a caller supplies, such as finished anchors."""
    writers: Mapping[Slot, ForwardTask] = field(init=False, repr=False, compare=False)
    _parents: dict[str, tuple[ForwardTask, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        writers: dict[Slot, ForwardTask] = {}
        for task in self.tasks:
            for slot in task.writes:
                if slot in writers or slot in self.inputs:
                    raise ValueError(f"slot {slot} is written twice: by {task.id} and before")
                writers[slot] = task
        ready = set(self.inputs)
        for task in self.tasks:
            for slot in task.reads:
                if slot in ready:
                    continue
                why = "a cycle, or tasks out of order" if slot in writers else "nothing writes it"
                raise ValueError(f"{task.id} reads {slot} before it exists: {why}")
            ready.update(task.writes)
        object.__setattr__(self, "writers", writers)

    def __iter__(self) -> Iterator[ForwardTask]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def parents(self, task: ForwardTask) -> tuple[ForwardTask, ...]:
        """Tasks that write what ``task`` reads, each once, in reading order."""
        if task.id not in self._parents:  # asked for by everything that walks the graph
            found = (self.writers[slot] for slot in task.reads if slot in self.writers)
            self._parents[task.id] = tuple(dict.fromkeys(found))
        return self._parents[task.id]

    def by_id(self) -> dict[str, ForwardTask]:
        return {task.id: task for task in self.tasks}

    def counts(self) -> dict[str, int]:
        """Forwards by role and kind, with the total: the proof that FlashForward's renderer never commits."""
        names = [f"{role}_{kind}" for role in Role for kind in (Kind.DENOISE, Kind.COMMIT)]
        found = dict.fromkeys(names, 0)
        for task in self.tasks:
            if task.is_forward:
                found[f"{task.role}_{task.kind}"] += 1
        return {**found, "total": sum(found.values())}


def sort_topologically(tasks: Iterable[ForwardTask], inputs: Iterable[Slot] = ()) -> TaskGraph:
    """Order ``tasks`` by their reads, keeping the given order where it is free; cycles raise ``ValueError``."""
    pending = list(tasks)
    given = frozenset(inputs)
    ready: set[Slot] = set(given)
    ordered: list[ForwardTask] = []
    while pending:
        later = []
        for task in pending:
            if all(slot in ready for slot in task.reads):
                ordered.append(task)
                ready.update(task.writes)
            else:
                later.append(task)
        if len(later) == len(pending):
            break  # nothing moves: TaskGraph names the first slot in the way
        pending = later
    return TaskGraph((*ordered, *pending), given)


def slot_from_str(text: str) -> Slot:
    """Read back ``str(slot)``."""
    parts: list[Any] = text.split("/")
    bank = parts[3] if len(parts) == 4 else ""
    return Slot(space=Space(parts[0]), index=int(parts[1]), level=int(parts[2]), bank=bank)
