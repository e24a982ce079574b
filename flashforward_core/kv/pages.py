"""Which page of which bank every KV slot lives in: decided from the graph alone, before anything runs.

A page is reused by a later chunk only when every task that uses it comes before that chunk in *every* order that the
graph allows. So no order can overwrite what is still to be read, and the order of the keys, and with it every byte of
the result, is the same for all of them. In the steady state this gives [anchors | sink | ring of H+1 pages], all of
which a forward reads: one dense slice.

Offsets count latent frames from the bank's start; nothing here imports torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..graph.task import ForwardTask, Role, Slot, Space, TaskGraph
from ..specs import RolloutSpec

ANCHOR_BANK = "anchor"
SCRATCH_BANK = "scratch"  # for forwards that neither publish KV nor read a chunk's


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A range of latent frames in a bank."""

    bank: str
    start: int
    """First latent frame, counted from the bank's start."""
    frames: int
    """How many latent frames are used."""
    front: bool = False
    """Whether it is a renderer bank's copy of an anchor, which may be dropped and fetched again."""

    @property
    def stop(self) -> int:
        return self.start + self.frames


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one forward reads and writes in its bank."""

    own: Page
    """Where it puts its own keys and values."""
    reads: tuple[tuple[Slot, Page], ...]
    """Everything else that it attends to."""
    publishes: tuple[tuple[Slot, Page], ...]
    """The slots it writes, each a part of ``own``; empty when its KV is for itself alone."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Rising (start, stop) in latent frames of all that is attended to; neighbours are joined."""
        joined: list[tuple[int, int]] = []
        for page in sorted([self.own, *(page for _, page in self.reads)], key=lambda page: page.start):
            if joined and joined[-1][1] == page.start:
                joined[-1] = (joined[-1][0], page.stop)
            else:
                assert not joined or joined[-1][1] < page.start, f"pages overlap at {page}"
                joined.append((page.start, page.stop))
        return tuple(joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Pages for a whole graph."""

    bank_frames: Mapping[str, int]
    """Length of each bank in latent frames."""
    views: Mapping[str, View]
    """By task id, for every forward."""
    homes: Mapping[Slot, Page]
    """Where a KV slot's writer puts it."""


def plan_pages(spec: RolloutSpec, graph: TaskGraph) -> PagePlan:
    """Give every forward of ``graph`` its own page and a page for each KV slot that it reads."""
    banks = _banks(graph)
    front = _front_frames(graph, banks)
    chunks = _chunk_pages(spec, graph, banks=banks, front=front)
    first = _first_anchor(spec, graph)
    anchors = {a: Page(bank=ANCHOR_BANK, start=a - first, frames=1) for a in range(first, len(spec.anchor_positions()))}
    views: dict[str, View] = {}
    homes: dict[Slot, Page] = {}
    for task in _forwards(graph):
        bank = banks[task.id]
        own = _own_page(spec, task, bank=bank, chunks=chunks, anchors=anchors)
        reads = []
        for slot in kv_slots(task.reads):
            if slot.space is Space.KV:
                reads.append((slot, chunks[bank, slot.index]))
            elif bank == ANCHOR_BANK:
                reads.append((slot, anchors[slot.index]))
            else:
                reads.append((slot, Page(bank=bank, start=slot.index % front[bank], frames=1, front=True)))
        publishes = tuple((s, own if s.space is Space.KV else anchors[s.index]) for s in kv_slots(task.writes))
        views[task.id] = View(own=own, reads=tuple(reads), publishes=publishes)
        homes.update(publishes)
    return PagePlan(bank_frames=_bank_frames(views.values()), views=views, homes=homes)


def kv_slots(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    return tuple(slot for slot in slots if slot.space in (Space.KV, Space.ANCHOR_KV))


def _first_anchor(spec: RolloutSpec, graph: TaskGraph) -> int:
    """Return the first anchor that ``graph`` touches: a part of a rollout has pages from there on only."""
    blocks = spec.anchor_blocks()
    planned = (blocks[task.index][0] for task in graph.tasks if task.role is Role.PLANNER)
    read = (slot.index for task in graph.tasks for slot in task.reads if slot.space is Space.ANCHOR_KV)
    return min((*planned, *read), default=0)


def _forwards(graph: TaskGraph) -> list[ForwardTask]:
    return [task for task in graph.tasks if task.is_forward]


def _banks(graph: TaskGraph) -> dict[str, str]:
    """Bank of each forward by task id: where it publishes, else what it reads, else what its like read."""
    named: dict[str, str] = {}
    by_kind: dict[tuple[str, int], str] = {}
    for task in _forwards(graph):
        found = {slot.bank for slot in (*task.reads, *task.writes) if slot.space is Space.KV}
        assert len(found) <= 1, f"{task.id} touches the banks {sorted(found)}; a forward has one"
        if task.role is Role.PLANNER:
            named[task.id] = ANCHOR_BANK
        elif found:
            named[task.id] = by_kind[task.kind, task.stage] = found.pop()
    for task in _forwards(graph):
        named.setdefault(task.id, by_kind.get((task.kind, task.stage), SCRATCH_BANK))
    return named


def _front_frames(graph: TaskGraph, banks: Mapping[str, str]) -> dict[str, int]:
    """Anchor pages before the chunks' pages of each bank: as many as one forward reads."""
    front: dict[str, int] = {}
    for task in _forwards(graph):
        anchors = [slot.index for slot in task.reads if slot.space is Space.ANCHOR_KV]
        assert anchors == list(range(anchors[0], anchors[0] + len(anchors))) if anchors else True, (
            f"{task.id} reads the anchors {anchors}, which are not consecutive"
        )
        front[banks[task.id]] = max(front.get(banks[task.id], 0), len(anchors))
    return front


def _chunk_pages(
    spec: RolloutSpec, graph: TaskGraph, *, banks: Mapping[str, str], front: Mapping[str, int]
) -> dict[tuple[str, int], Page]:
    """Page of each chunk in each bank that one of its forwards uses or that holds its KV."""
    before = _ancestors(graph)
    pages: dict[tuple[str, int], Page] = {}
    for bank in sorted(set(banks.values()) - {ANCHOR_BANK}):
        shelf: list[_Tenancy] = []
        for chunk, use in sorted(_uses(graph, banks, bank=bank, before=before).items()):
            free = (n for n, tenancy in enumerate(shelf) if tenancy.is_over_for(use))
            place = min(free, key=lambda n: shelf[n].last_chunk, default=len(shelf))
            if place == len(shelf):
                shelf.append(_Tenancy())
            shelf[place].add(chunk, use)
            start = front[bank] + place * spec.chunk_frames
            pages[bank, chunk] = Page(bank=bank, start=start, frames=len(spec.chunk(chunk)))
    return pages


@dataclass(slots=True)
class _Use:
    """How one chunk uses its page. Sets of tasks are bits by position in the graph."""

    ready: int = -1
    """Tasks that come before all forwards whose own page it is, in any order."""
    users: int = 0
    """Tasks that write or read the page."""
    published: bool = False
    """Whether it holds KV between tasks; otherwise each forward uses it for itself alone."""


@dataclass(slots=True)
class _Tenancy:
    """Who has had a page so far."""

    last_chunk: int = -1
    kept: int = 0
    """Users of the chunks whose KV was kept here."""
    passing: int = 0
    """Users of the chunks that used it within single tasks."""

    def is_over_for(self, use: _Use) -> bool:
        """Whether all that must be over comes before ``use``; single tasks of one lane never overlap anyway."""
        needed = self.kept | (self.passing if use.published else 0)
        return not needed & ~use.ready

    def add(self, chunk: int, use: _Use) -> None:
        self.last_chunk = chunk
        if use.published:
            self.kept |= use.users
        else:
            self.passing |= use.users


def _uses(graph: TaskGraph, banks: Mapping[str, str], *, bank: str, before: Sequence[int]) -> dict[int, _Use]:
    """Return, for one bank, how each chunk uses its page."""
    uses: dict[int, _Use] = {}
    for n, task in enumerate(graph.tasks):
        if banks.get(task.id) != bank:
            continue
        own = uses.setdefault(task.index, _Use())
        own.ready &= before[n]
        own.users |= 1 << n
        own.published |= any(slot.space is Space.KV for slot in task.writes)
        for slot in task.reads:
            if slot.space is Space.KV:
                uses.setdefault(slot.index, _Use()).users |= 1 << n
    for use in uses.values():
        if use.ready == -1:  # no forward here makes it: its KV comes from an earlier part, before anything runs
            use.ready, use.published = 0, True
    return uses


def _ancestors(graph: TaskGraph) -> list[int]:
    """Per task, the set of tasks that must come before it, as bits by position in the graph."""
    position = {task.id: n for n, task in enumerate(graph.tasks)}
    before: list[int] = []
    for task in graph.tasks:
        bits = 0
        for parent in graph.parents(task):
            n = position[parent.id]
            bits |= before[n] | 1 << n
        before.append(bits)
    return before


def _own_page(
    spec: RolloutSpec,
    task: ForwardTask,
    *,
    bank: str,
    chunks: Mapping[tuple[str, int], Page],
    anchors: Mapping[int, Page],
) -> Page:
    if bank != ANCHOR_BANK:
        return chunks[bank, task.index]
    block = spec.anchor_blocks()[task.index]
    return Page(bank=bank, start=anchors[block[0]].start, frames=len(block))


def _bank_frames(views: Iterable[View]) -> dict[str, int]:
    frames: dict[str, int] = {}
    for view in views:
        last = max(stop for _, stop in view.ranges)
        frames[view.own.bank] = max(frames.get(view.own.bank, 0), last)
    return frames
