"""A block's parts around its attentions, recorded once for each block and replayed in every forward of their size.

Attention is launched as always, with keys of any number and place, so one recording serves every forward; the some
twenty other kernels of a block are three launches. Whole forwards (``graphs.Recordings``) are one launch each, but
only of their own bank and number of keys.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.compiled import PLAIN
from ..model.layers import Rotation, Segments
from ..model.transformer import Block, BlockParts
from .graphs import Body, Recorder


class RecordedParts:
    """The parts of one lane, role and size. What they return is memory that the next block overwrites."""

    def __init__(
        self, parts: BlockParts, recorder: Recorder | None, turn: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """``parts`` write into the memory that is their first argument (``compiled.WRITING``); ``turn`` is held while
        something is recorded. Without ``recorder`` nothing is: only ``directly`` runs them.
        """
        self._parts = parts
        self._recorder = recorder
        self._turn_to_record = turn
        self._directly = False
        self._made: dict[tuple[str, Block], Body] = {}
        self._recorded: set[str] = set()
        self._memory: dict[str, tuple[Tensor, ...]] = {}
        self._fixed: dict[str, Tensor] = {}
        self._time: Tensor | None = None
        """Of the forward under way, which is in the fixed memory, as are its positions."""
        self._turn: Rotation | None = None

    @property
    def records(self) -> bool:
        return self._recorder is not None

    @property
    def parts(self) -> BlockParts:
        return BlockParts(self._before, self._between, self._finish)

    def directly(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``compute(inputs, view, parts=…)`` with parts that run as they are: the same kernels and memory.

        A whole forward is recorded so, since a recording cannot hold others.
        """

        def computed(*args: Any) -> Tensor:
            self._directly = True
            try:
                return compute(*args, parts=self.parts)
            finally:
                self._directly = False

        return computed

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
        (x,) = self._run("finish", block, x_BLC, attended, self._fixed["time"], segments)
        return x

    def free(self) -> None:
        """Drop everything; only when the device has finished."""
        for kept in (self._made, self._recorded, self._memory, self._fixed):
            kept.clear()
        self._time = self._turn = None

    def _fix(self, name: str, tensor: Tensor) -> Tensor:
        """Put ``tensor`` where recordings read it, unless it is there."""
        if name not in self._fixed:
            self._fixed[name] = _like(tensor)
        if tensor is not self._fixed[name]:
            self._fixed[name].copy_(tensor, non_blocking=True)
        return self._fixed[name]

    def _run(self, name: str, block: Block, *args: Any) -> tuple[Tensor, ...]:
        key = name, block
        if key in self._made and not self._directly:
            self._made[key]()
            return self._memory[name]
        if name not in self._memory:
            self._memory[name] = self._memory_for(name, getattr(PLAIN, name)(block, *args))
        memory = self._memory[name]
        body = partial(getattr(self._parts, name), memory, block, *args)
        if self._directly:
            body()
            return memory
        assert self._recorder is not None, "parts that are not recorded run directly"
        first = name not in self._recorded  # runs while it is recorded: kernels load, libraries take their workspace
        self._recorded.add(name)
        with self._turn_to_record():
            self._made[key] = self._recorder.record(body, run=first)
        if not first:
            self._made[key]()
        return memory

    def _memory_for(self, name: str, made: Any) -> tuple[Tensor, ...]:
        """Return where a part writes; blocks hand their sum on in the memory that the next one reads."""
        if name == "finish":
            return (self._fixed["x"],)
        return tuple(_like(tensor) for tensor in made)


def _like(tensor: Tensor) -> Tensor:
    """Return memory that may be written in inference mode and outside of it."""
    with torch.inference_mode(False):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
