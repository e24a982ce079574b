"""Blocks whose weights stay in host memory: copied to the device shortly before they run, on a stream of their own.

A lane has a few slots. Block n of those that stream always comes to lie in slot n mod slots, so its parameters are
views of fixed memory. While a block runs, the next ones are copied into the other slots; a copy waits for the block
that used its slot last, and a block for its copy. On a CPU copies happen at once.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..graph.task import Role
from .memory import SLOTS
from .transfer import stream_for

ALIGNMENT = 256  # bytes: compiled code is made for aligned weights
PIECE_BYTES = 64 << 20  # pinned memory is given in powers of two; small pieces keep what is lost small


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor lies in its block's memory."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_parameter: bool

    def view(self, memory: Tensor) -> Tensor:
        count = self.dtype.itemsize * _numel(self.shape)
        found = memory[self.start : self.start + count].view(self.dtype).view(self.shape)
        return nn.Parameter(found, requires_grad=False) if self.is_parameter else found


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class HostBlock(nn.Module):
    """One block's weights as bytes in host memory, pinned for CUDA devices. Stands in the block's place; never runs."""

    def __init__(self, block: nn.Module, *, pinned: bool) -> None:
        """Copy the weights of ``block``, which is not kept."""
        super().__init__()
        memo: dict[int, Any] = {}
        self._places: dict[int, _Place] = {}
        parts, end = [], 0
        for tensor in (*block.parameters(), *block.buffers()):
            shell = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(shell, requires_grad=False) if isinstance(tensor, nn.Parameter) else shell
            place = _Place(end, tensor.dtype, tuple(tensor.shape), isinstance(tensor, nn.Parameter))
            self._places[id(memo[id(tensor)])] = place
            parts.append((end, tensor.detach().reshape(-1).view(torch.uint8)))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end
        self._shell = [copy.deepcopy(block, memo)]  # in a list, so that it is no part of the model
        self.pieces = _pieces(parts, end, pinned=pinned)

    def on(self, memory: Tensor) -> nn.Module:
        """Return the block with its weights in ``memory``, which is to hold the bytes of ``pieces`` when it runs."""
        (shell,) = self._shell
        tensors = (*shell.parameters(), *shell.buffers())
        memo: dict[int, Any] = {id(tensor): self._places[id(tensor)].view(memory) for tensor in tensors}
        return copy.deepcopy(shell, memo)


def _pieces(parts: Sequence[tuple[int, Tensor]], num_bytes: int, *, pinned: bool) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):
        whole = torch.empty(num_bytes, dtype=torch.uint8)
        for start, part in parts:
            whole[start : start + part.numel()] = part
        return tuple(piece.pin_memory() for piece in torch.split(whole, PIECE_BYTES)) if pinned else (whole,)


class Copies(Protocol):
    """Fills slots. Only the lane's thread calls it, with the lane's stream as the current one."""

    def copy(self, slot: int, memory: Tensor, pieces: Sequence[Tensor]) -> None:
        """Copy ``pieces`` into ``memory`` when the block that was there has run."""
        ...

    def arrive(self, slot: int) -> None:
        """Let what the lane does from here on come after the slot's copy."""
        ...

    def leave(self, slot: int) -> None:
        """Note that what was asked of the lane so far is the last to read the slot."""
        ...


class HostCopies:
    """Copies at once."""

    def copy(self, slot: int, memory: Tensor, pieces: Sequence[Tensor]) -> None:
        _fill(memory, pieces)

    def arrive(self, slot: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass


class CudaCopies:
    """Copies on a stream of its own, in order with the lane's by events."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._stream = stream_for(device, f"weights of {name}")
        self._arrived: dict[int, Any] = {}
        self._left: dict[int, Any] = {}

    def copy(self, slot: int, memory: Tensor, pieces: Sequence[Tensor]) -> None:
        if slot in self._left:
            self._stream.wait_event(self._left[slot])
        else:  # the memory is new: whoever had it before may still be at work on the lane's stream
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            memory.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            _fill(memory, pieces)
        self._arrived[slot] = self._mark(self._stream)

    def arrive(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[slot])

    def leave(self, slot: int) -> None:
        self._left[slot] = self._mark(torch.cuda.current_stream(self._device))

    def _mark(self, stream: Any) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _fill(memory: Tensor, pieces: Sequence[Tensor]) -> None:
    start = 0
    for piece in pieces:
        memory[start : start + piece.numel()].copy_(piece, non_blocking=True)
        start += piece.numel()


class BlockStream:
    """One lane's slots. Only its own thread uses them; they are made there, on its stream, on first use."""

    def __init__(self, device: torch.device, *, name: str, copies: Copies | None = None) -> None:
        """``name`` is the lane's; ``copies`` fills the slots, as ``device`` does it if not given."""
        self._device = device
        own: Copies = CudaCopies(device, name) if device.type == "cuda" else HostCopies()
        self._copies = own if copies is None else copies
        self._slots: list[Tensor] = []
        self._holds: dict[int, HostBlock] = {}
        self._views: dict[HostBlock, nn.Module] = {}

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @contextmanager
    def block(self, chain: Sequence[HostBlock], place: int) -> Iterator[Any]:
        """Give block ``place`` of those that stream, ready to run, and start copying the ones that come next."""
        self._make_slots(chain)
        slot = place % self.num_slots
        self._load(chain, place)
        self._copies.arrive(slot)
        self._prefetch(chain, place)
        try:
            yield self._view(chain[place], slot)
        finally:
            self._copies.leave(slot)

    def free(self) -> None:
        """Drop slots and blocks; only when nothing more is asked of the lane."""
        self._views.clear()
        self._holds.clear()
        self._slots.clear()

    def _make_slots(self, chain: Sequence[HostBlock]) -> None:
        if not self._slots:
            size = max(host.num_bytes for host in chain)
            with torch.inference_mode(False):
                slots = range(min(SLOTS, len(chain)))
                self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in slots]

    def _prefetch(self, chain: Sequence[HostBlock], place: int) -> None:
        """Fill the slots of the blocks that follow, round to the first one: a forward comes after this one."""
        taken = {place % self.num_slots}
        for step in range(1, self.num_slots):
            following = (place + step) % len(chain)
            if following % self.num_slots in taken:
                return
            taken.add(following % self.num_slots)
            self._load(chain, following)

    def _load(self, chain: Sequence[HostBlock], place: int) -> None:
        slot, host = place % self.num_slots, chain[place]
        if self._holds.get(slot) is not host:
            self._copies.copy(slot, self._slots[slot], host.pieces)
            self._holds[slot] = host

    def _view(self, host: HostBlock, slot: int) -> nn.Module:
        if host not in self._views:
            with torch.inference_mode(False):
                self._views[host] = host.on(self._slots[slot])
        return self._views[host]


class StreamedBlock(nn.Module):
    """A block of one lane's model whose weights come when it is called."""

    def __init__(self, chain: Sequence[HostBlock], place: int, stream: BlockStream) -> None:
        """``chain`` has the model's host blocks in the order in which they run; this is the one at ``place``."""
        super().__init__()
        self._chain = tuple(chain)
        self._place = place
        self._stream = stream

    def forward(self, *args: Any) -> Any:
        with self._stream.block(self._chain, self._place) as block:
            return block(*args)

    def text_pair(self, *args: Any) -> Any:
        """Like ``Block.text_pair``."""
        with self._stream.block(self._chain, self._place) as block:
            return block.text_pair(*args)


def streamed(models: Mapping[Role, Any], stream: BlockStream) -> dict[Role, Any]:
    """Return the models of one lane, over the same memory, whose host blocks run through ``stream``."""
    memo: dict[int, Any] = {}
    for model in dict.fromkeys(models.values()):
        memo.update({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        chain = [block for block in model.blocks if isinstance(block, HostBlock)]
        memo.update({id(host): StreamedBlock(chain, place, stream) for place, host in enumerate(chain)})
    return copy.deepcopy(dict(models), memo)
