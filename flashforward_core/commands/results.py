"""What became of each prompt of a file: one JSON line each, in the folder of the videos. Needs no torch."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DONE, FAILED = "done", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line."""

    path: str
    """Below the folder, with ``/``."""
    prompt: str
    seed: int
    seconds: float
    """Length of the video."""
    status: str
    """``done`` or ``failed``."""
    settings: str
    """A hash of all that the video depends on: with other settings it is made again."""
    sha256: str | None = None
    """Of the latents."""
    file_sha256: str | None = None
    render_s: float | None = None
    """From its first task to its finished file; other videos may have been under way."""
    error: str | None = None


def settings_hash(**facts: Any) -> str:
    """Hash what a video depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Results:
    """The lines of a folder. Each shard writes a file of its own and reads all of them."""

    def __init__(self, folder: Path, *, shard: str | None = None) -> None:
        self.folder = folder
        self.path = folder / ("results.jsonl" if shard is None else f"results-{shard.replace('/', '-of-')}.jsonl")
        self._found: dict[str, list[Mapping[str, Any]]] = {}
        for path in sorted(folder.glob("results*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._remember(line)

    def is_done(self, path: str, *, settings: str) -> bool:
        """Whether a video with these settings is recorded and its file is as it was written."""
        target = self.folder / path
        digests = {
            line.get("file_sha256")
            for line in self._found.get(path, ())
            if line.get("status") == DONE and line.get("settings") == settings
        }
        return bool(digests) and target.is_file() and file_sha256(target) in digests

    def add(self, result: Result) -> None:
        """Append a line; it is on the disk when this returns."""
        line = json.dumps(asdict(result), ensure_ascii=False)
        with self.path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = end and file.read(1) != b"\n"  # the last run ended in the middle of a line
            file.write((("\n" if torn else "") + line + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._remember(line)

    def _remember(self, line: str) -> None:
        """Keep a line; one that cannot be read, such as half a line, counts for nothing."""
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            return
        if isinstance(found, dict) and isinstance(found.get("path"), str):
            self._found.setdefault(found["path"], []).append(found)
