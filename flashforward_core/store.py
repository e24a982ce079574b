"""Finished pieces of earlier rollouts, by the hash of all that they depend on; bounded, the longest unused go first."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any


class SlotStore:
    """Maps keys to values with an ``nbytes``, such as tensors. One thread uses it at a time.

    A key is the hash of everything that its value depends on, so a value can never be out of date; losing one costs
    time, never correctness.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[str, Any] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in self._values.values())

    def take(self, keys: Iterable[str]) -> list[Any]:
        """Return the values of ``keys``, which must all be there and count as used now. They are only to be read."""
        wanted = list(keys)
        for key in wanted:
            self._values.move_to_end(key)
        return [self._values[key] for key in wanted]

    def put(self, values: Mapping[str, Any], *, budget_bytes: int) -> bool:
        """Keep all of ``values`` and drop the longest unused others until ``budget_bytes`` suffices.

        Returns False, and changes nothing, when ``values`` alone are larger than that: a part of them is no use.
        """
        if sum(value.nbytes for value in values.values()) > budget_bytes:
            return False
        for key, value in values.items():
            self._values[key] = value
            self._values.move_to_end(key)
        self.shrink(budget_bytes)
        return True

    def shrink(self, budget_bytes: int) -> None:
        """Drop the longest unused values until the rest fits into ``budget_bytes``; 0 drops all."""
        held = self.num_bytes
        while held > budget_bytes:
            _, value = self._values.popitem(last=False)
            held -= value.nbytes
