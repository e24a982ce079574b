"""Named options that users choose between."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Map names to entries; an unknown name raises a ``ValueError`` that lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that files its argument under ``name`` (a second use is a bug)."""

        def file(entry: T) -> T:
            assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return file

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise ValueError(f"{self.kind}={name!r} is unknown; use one of: {known}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
