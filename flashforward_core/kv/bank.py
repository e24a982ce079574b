"""The KV of one lane: preallocated banks, pages within them, and the view that one forward attends to.

The contract: a forward writes its own page in place and reads one dense slice (a gathered copy where its pages are not
neighbours). A page is taken only when every task that uses its slot has finished; anything else raises an
``AssertionError`` that names both slots. Banks are made on first use and dropped after their last.

Letters: B batch, L own tokens, N tokens of a bank, H heads, D head dim, R stored elements of a token's head: D, or
more where keys and values are packed (``packing.py``).
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..graph.task import ForwardTask, Slot
from .groups import GroupPage, KeyGroups
from .packing import Form
from .pages import Page, PagePlan, View, kv_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class BankShape:
    """Sizes that every bank of a rollout shares."""

    batch: int
    num_blocks: int
    """Transformer blocks."""
    frame_tokens: int
    """Tokens per latent frame."""
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of keys and values as forwards give and take them."""
    packed: bool = False
    """Whether banks hold them in 8 bits."""

    @property
    def form(self) -> Form:
        return Form(dtype=self.dtype, packed=self.packed)

    @property
    def row(self) -> int:
        """Stored elements of one token's head."""
        return self.form.width(self.head_dim)

    def bank_bytes(self, frames: int) -> int:
        tokens = frames * self.frame_tokens
        rows = 2 * self.num_blocks * self.batch * tokens * self.num_heads
        return rows * self.row * self.form.stored_dtype.itemsize


class Home(Protocol):
    """Where a KV slot can be copied from."""

    def home(self, slot: Slot) -> Tensor:
        """Return the slot's page as it is stored, [2, blocks, B, tokens, H, R], only to be read."""
        ...


class Ledger:
    """Who still needs what: the unfinished tasks of every slot and of every bank. Shared by all lanes."""

    def __init__(self, tasks: Iterable[ForwardTask], plan: PagePlan) -> None:
        self._lock = threading.Lock()
        self._slots: dict[Slot, set[str]] = {}
        self._banks: dict[str, set[str]] = {}
        for task in tasks:
            for slot in (*task.writes, *task.reads):
                self._slots.setdefault(slot, set()).add(task.id)
            for slot in kv_slots(task.reads):  # a reader elsewhere copies the page out of its home bank
                if slot not in plan.homes:
                    continue  # an earlier run's page, which is no bank's
                self._banks.setdefault(plan.homes[slot].bank, set()).add(task.id)
            if task.id in plan.views:
                self._banks.setdefault(plan.views[task.id].own.bank, set()).add(task.id)

    def finish(self, task: ForwardTask) -> tuple[Slot, ...]:
        """Strike ``task`` off; return the slots that nobody needs any more."""
        with self._lock:
            for users in self._banks.values():
                users.discard(task.id)
            slots = tuple(dict.fromkeys((*task.writes, *task.reads)))
            for slot in slots:
                self._slots[slot].discard(task.id)
            return tuple(slot for slot in slots if not self._slots[slot])

    def unfinished(self, slot: Slot) -> tuple[str, ...]:
        """Ids of the tasks that have yet to write or read ``slot``."""
        with self._lock:
            return tuple(sorted(self._slots[slot]))

    def bank_is_done(self, bank: str) -> bool:
        with self._lock:
            return not self._banks.get(bank)


Groups = dict[int, KeyGroups]
"""A page's buckets by transformer block, filled as sparse blocks ask for them."""


class Held(NamedTuple):
    """What a page holds."""

    slot: Slot
    page: Page
    groups: Groups


class BankView:
    """One forward's keys and values: the ``KVContext`` that a transformer extends."""

    def __init__(
        self, buffer: Tensor, view: View, *, frame_tokens: int, form: Form, groups: Sequence[tuple[Page, Groups]] = ()
    ) -> None:
        """``buffer`` is [2, blocks, B, N, H, R]: keys, then values, as ``form`` stores them.

        ``groups`` are those of every page that is attended to, the own one included.
        """
        self._buffer = buffer
        self._form = form
        self._groups = [
            (page.frames * frame_tokens, known) for page, known in sorted(groups, key=lambda entry: entry[0].start)
        ]
        self.kind = (view.own.bank, view.own.frames, view.ranges)
        """What forwards that read and write memory of the same place and size share, wherever their own page is."""
        self._own = slice(view.own.start * frame_tokens, view.own.stop * frame_tokens)
        self._ranges = [slice(start * frame_tokens, stop * frame_tokens) for start, stop in view.ranges]

    @property
    def num_keys(self) -> int:
        """Tokens that the forward attends to, its own included."""
        return sum(part.stop - part.start for part in self._ranges)

    @property
    def own_tokens(self) -> Tensor:
        """Token indices of the own page in its bank, on the bank's device."""
        return torch.arange(self._own.start, self._own.stop, device=self._buffer.device)

    def indexed(self) -> "IndexedView | None":
        """Return the view with its own page given by ``own_tokens``; None when the pages are no single slice."""
        one = len(self._ranges) == 1
        return IndexedView(self._buffer, self._ranges[0], own=self.own_tokens, form=self._form) if one else None

    def extend(self, block: int, k_BLHD: Tensor, v_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one block's own keys and values in place; return all that the forward attends to, [B, keys, H, D]."""
        return self._extend(self._buffer[0, block], k_BLHD), self._extend(self._buffer[1, block], v_BLHD)

    def groups(self, block: int, k_BNHD: Tensor, group: GroupPage) -> list[KeyGroups]:
        """Return the buckets of each page in ``k_BNHD``, what ``extend`` returned; new pages' are found and kept."""
        found, start = [], 0
        for tokens, known in self._groups:
            if block not in known:
                known[block] = group(k_BNHD[:, start : start + tokens])
            found.append(known[block])
            start += tokens
        assert start == k_BNHD.shape[1], f"the pages have {start} tokens and the keys {k_BNHD.shape[1]}"
        return found

    def _extend(self, stored_BNHR: Tensor, own_BLHD: Tensor) -> Tensor:
        stored_BNHR[:, self._own] = self._form.store(own_BLHD)
        if len(self._ranges) == 1:
            return self._form.load(stored_BNHR[:, self._ranges[0]])
        return self._form.load(torch.cat([stored_BNHR[:, part] for part in self._ranges], dim=1))


class IndexedView:
    """A view whose own page is where a tensor on the device says: one recorded forward serves every page of a ring."""

    def __init__(self, buffer: Tensor, keys: slice, *, own: Tensor, form: Form) -> None:
        """``buffer`` is as in BankView, ``keys`` all tokens that are attended to, ``own`` the own tokens' indices."""
        self._buffer = buffer
        self._form = form
        self._keys = keys
        self.own = own

    @property
    def dtype(self) -> torch.dtype:
        return self._form.dtype

    def at(self, own: Tensor) -> "IndexedView":
        """Return the view with another tensor of indices."""
        return IndexedView(self._buffer, self._keys, own=own, form=self._form)

    def extend(self, block: int, k_BLHD: Tensor, v_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``BankView.extend``."""
        keys, values = self._buffer[0, block], self._buffer[1, block]
        _write(keys, self.own, self._form.store(k_BLHD))
        _write(values, self.own, self._form.store(v_BLHD))
        return self._form.load(keys[:, self._keys]), self._form.load(values[:, self._keys])


def _write(stored_BNHR: Tensor, own: Tensor, rows_BLHR: Tensor) -> None:
    """Put rows where ``own`` says, as 8-byte numbers where they divide: a copy by index moves number by number."""
    wide = torch.int64 if rows_BLHR.shape[-1] * rows_BLHR.itemsize % torch.int64.itemsize == 0 else rows_BLHR.dtype
    stored_BNHR.view(wide).index_copy_(1, own, rows_BLHR.contiguous().view(wide))


class LaneBanks:
    """All banks of one lane. Only the lane's own thread calls what changes them."""

    def __init__(
        self,
        plan: PagePlan,
        *,
        shape: BankShape,
        ledger: Ledger,
        device: torch.device,
        poison: bool = False,
        copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        """``copy(target, source)`` fills a page from another lane's.

        ``poison`` fills pages with NaN when they are made and when they are freed, so that a stray read shows.
        """
        self._plan = plan
        self._shape = shape
        self._ledger = ledger
        self._device = device
        self._poison = poison
        self._copy = copy
        self._buffers: dict[str, Tensor] = {}
        self._held: dict[tuple[str, int], Held] = {}
        self._own_groups: dict[str, Groups] = {}
        """Of the forwards under way, by task id."""
        self.peak_bytes = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, and so of the weights."""
        return self._shape.dtype

    def open(self, task: ForwardTask, homes: Mapping[Slot, Home]) -> BankView:
        """Take ``task``'s own page, fetch the pages that are not here yet, and return what it attends to.

        ``homes`` says where each slot was written, on which lane or in which earlier run. Raises ``AssertionError``
        when a page is still needed.
        """
        self._sweep()
        view = self._plan.views[task.id]
        buffer = self._buffer(view.own.bank)
        for slot, page in view.reads:
            if self._holds(page) != slot:
                self._take(page, by=str(slot))
                self._copy(self._tokens(buffer, page), homes[slot].home(slot))
                self._held[page.bank, page.start] = Held(slot, page, {})
        self._take(view.own, by=", ".join(str(slot) for slot, _ in view.publishes) or task.id)
        own = self._own_groups[task.id] = {}
        groups = [(page, self._held[page.bank, page.start].groups) for _, page in view.reads]
        return BankView(
            buffer,
            view,
            frame_tokens=self._shape.frame_tokens,
            form=self._shape.form,
            groups=[*groups, (view.own, own)],
        )

    def close(self, task: ForwardTask) -> None:
        """Keep what ``task`` published; give its own page back when it published nothing."""
        view, groups = self._plan.views[task.id], self._own_groups.pop(task.id)
        for slot, page in view.publishes:  # a part of the forward's own page, as anchors are, has a mean of its own
            self._held[page.bank, page.start] = Held(slot, page, groups if page == view.own else {})
        if self._poison and not view.publishes:
            self._tokens(self._buffers[view.own.bank], view.own).fill_(self._shape.form.poison)

    def home(self, slot: Slot) -> Tensor:
        """Return the page that ``slot`` was written into, [2, blocks, B, tokens, H, R]: not a copy, read only."""
        page = self._plan.homes[slot]
        assert self._holds(page) == slot, f"{slot} is not in its home page"
        return self._tokens(self._buffers[page.bank], page)

    def free(self) -> None:
        """Drop everything; a second call does nothing."""
        self._buffers.clear()
        self._held.clear()
        self._own_groups.clear()

    def _holds(self, page: Page) -> Slot | None:
        held = self._held.get((page.bank, page.start))
        return held.slot if held else None

    def _take(self, page: Page, *, by: str) -> None:
        if page.front:
            return  # a copy: its home page is what must last
        for start in range(page.start, page.stop):
            held = self._held.pop((page.bank, start), None)
            waiting = self._ledger.unfinished(held.slot) if held else ()
            assert not waiting, f"{by} takes the page of {held and held.slot}, which {waiting[0]} still needs"

    def _sweep(self) -> None:
        """Forget pages that nobody needs any more, and banks that no task will use again."""
        for bank in [name for name in self._buffers if self._ledger.bank_is_done(name)]:
            del self._buffers[bank]
        for key, (slot, page, _) in list(self._held.items()):
            if page.bank not in self._buffers:
                del self._held[key]
            elif self._poison and not self._ledger.unfinished(slot):
                self._tokens(self._buffers[page.bank], page).fill_(self._shape.form.poison)
                del self._held[key]

    def _buffer(self, bank: str) -> Tensor:
        if bank not in self._buffers:
            frames = self._plan.bank_frames[bank]
            size = self._shape
            dims = (2, size.num_blocks, size.batch, frames * size.frame_tokens, size.num_heads, size.row)
            with torch.inference_mode(False):  # so that any thread may write in place, in inference mode or not
                made = torch.empty(dims, dtype=size.form.stored_dtype, device=self._device)
            self._buffers[bank] = made.fill_(size.form.poison) if self._poison else made
            held = sum(buffer.nbytes for buffer in self._buffers.values())
            self.peak_bytes = max(self.peak_bytes, held)
        return self._buffers[bank]

    def _tokens(self, buffer: Tensor, page: Page) -> Tensor:
        size = self._shape.frame_tokens
        return buffer[:, :, :, page.start * size : page.stop * size]
