"""A block's parts around its attentions, recorded once and replayed for every block of every forward of their size.

Attention is launched as always, with keys of any number and place, so one recording serves every forward; the some
twenty other kernels of a block are three launches. Recordings read fixed memory, so each block's weights are copied
there first. Whole forwards (``graphs.Recordings``) are one launch each, but only of their own bank and number of keys.
"""

import contextlib
import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..model.layers import Rotation, Segments
from ..model.transformer import Block, BlockParts, CausalWanTransformer
from .graphs import Body, Recorder
from .replicas import tensors_in

ALONE_BLOCK_BYTES = 32 << 20
"""``memory.RECORDED_BLOCK_BYTES`` for a device that shares Python with no other: launching 1.3B takes less than its
smallest forward."""


class StandIn:
    """A block that takes on the weights of others: what is recorded of it serves them all."""

    def __init__(self, like: Block) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.block = copy.deepcopy(like)
        self._layout = _layout(like)
        self._own = _by_dtype(self.block)
        self._weights: dict[Block, list[list[Tensor]] | None] = {}
        self._now: Block | None = None

    def becomes(self, block: Block) -> bool:
        """Take on the weights of ``block``, on the current stream; return False if they differ in more than values."""
        if block is self._now:
            return True
        if block not in self._weights:
            self._weights[block] = _by_dtype(block) if _layout(block) == self._layout else None
        weights = self._weights[block]
        if weights is None:
            return False
        for own, others in zip(self._own, weights, strict=True):
            torch._foreach_copy_(own, others, non_blocking=True)
        self._now = block
        return True


def _layout(block: Block) -> Hashable:
    """Return what a recording of a block holds besides its weights' values."""
    tensors = list(tensors_in([block]))
    first = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
    weights = tuple((t.shape, t.stride(), t.dtype, first[id(t)]) for t in tensors)  # what is shared stays shared
    modules = tuple(
        (type(m), getattr(m, "eps", None), tuple(getattr(m, "alphas", {}).items())) for m in block.modules()
    )
    return weights, modules


def _by_dtype(block: Block) -> list[list[Tensor]]:
    """Return the weights in lists of one dtype each, which one launch copies; 8-bit numbers as bytes."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors_in([block]):
        stored = tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()
        found.setdefault(stored.dtype, []).append(stored)
    return list(found.values())


def block_bytes(model: CausalWanTransformer) -> int:
    """Return the size of one block's weights."""
    return sum(tensor.nbytes for tensor in tensors_in([model.blocks[0]]))


class RecordedParts:
    """The parts of one lane, role and size. What they return is memory that the next block overwrites."""

    def __init__(
        self, parts: BlockParts, recorder: Recorder, turn: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """``turn`` is held while something is recorded, or might have to be compiled."""
        self._parts = parts
        self._recorder = recorder
        self._turn_to_record = turn
        self._made: dict[str, Body] = {}
        self._inputs: dict[str, tuple[Any, ...]] = {}
        """Of each part: on CUDA always the same memory."""
        self._outputs: dict[str, Any] = {}
        self._fixed: dict[str, Tensor] = {}
        self._stand_in: StandIn | None = None
        self._gave_up = False
        self._time: Tensor | None = None
        """Of the forward under way, which is in the fixed memory, as are its positions."""
        self._turn: Rotation | None = None

    @property
    def parts(self) -> BlockParts:
        return BlockParts(self._before, self._between, self._finish)

    def _before(
        self, block: Block, x_BLC: Tensor, time_BF6C: Tensor, turn: Rotation, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        if time_BF6C is not self._time:
            self._time = time_BF6C
            self._fix("time", time_BF6C)
            self._turn = Rotation(self._fix("cos", turn.cos), self._fix("sin", turn.sin))
        q, k, v = self._run("before", block, self._fix("x", x_BLC), self._fixed["time"], self._turn, segments)
        return q, k, v

    def _between(
        self, block: Block, x_BLC: Tensor, attended_BLHD: Tensor, time_BF6C: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        attended = self._fix("attended", attended_BLHD)
        x, q = self._run("between", block, self._fixed["x"], attended, self._fixed["time"], segments)
        return x, q

    def _finish(
        self, block: Block, x_BLC: Tensor, attended_BLHD: Tensor, time_BF6C: Tensor, segments: Segments
    ) -> Tensor:
        attended = self._fix("attended", attended_BLHD)
        x: Tensor = self._run("finish", block, x_BLC, attended, self._fixed["time"], segments)
        return x

    def free(self) -> None:
        """Drop everything; only when the device has finished."""
        for kept in (self._made, self._inputs, self._outputs, self._fixed):
            kept.clear()
        self._time = self._turn = self._stand_in = None

    def _fix(self, name: str, tensor: Tensor) -> Tensor:
        """Put ``tensor`` where recordings read it."""
        if name not in self._fixed:
            self._fixed[name] = torch.empty_like(tensor)
        self._fixed[name].copy_(tensor, non_blocking=True)
        return self._fixed[name]

    def _run(self, name: str, block: Block, *args: Any) -> Any:
        part = getattr(self._parts, name)
        if self._stand_in is None:
            self._stand_in = StandIn(block)
        stand_in = self._stand_in
        if self._gave_up or not stand_in.becomes(block):
            with self._turn_to_record():
                return part(block, *args)
        self._inputs[name] = args
        if name not in self._made:

            def body() -> None:
                self._outputs[name] = part(stand_in.block, *self._inputs[name])

            with self._turn_to_record():
                made = self._recorder.record(body)
            if made is None:  # it has run; those that are recorded would not know where its like writes from now on
                self._gave_up = True
                return self._outputs[name]
            self._made[name] = made
        self._made[name]()
        return self._outputs[name]
