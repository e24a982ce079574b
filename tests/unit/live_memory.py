"""Counts the bytes of tensors that are alive, on any device: what an allocator would have had to give."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is entered, ``peak`` is the most that operations' results took at once; what was there before is not.

    Meta tensors have sizes too, so a model of any size can be tried on any machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.peak = 0
        self._before: set[int] = set()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> "LiveMemory":
        """Do not count the memory of ``tensors``, nor of views on them."""
        self._before |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._before:
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)
