"""Files of prompts: a ``.txt`` with one per line, or a ``.jsonl`` or ``.csv`` with one per row. Needs no torch."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..names import check_name

KINDS = (".txt", ".jsonl", ".csv")
MAX_BYTES = 64 << 20  # a prompt is a few hundred bytes; a film in place of the list is noticed before it fills memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One video to make."""

    number: int
    """From 1, by place in the file."""
    prompt: str
    seed: int
    out: str
    """Below the output folder, with ``/``."""
    seconds: float | None = None
    """None: as long as the command says."""

    @property
    def name(self) -> str:
        """For messages, which do not show prompts."""
        return f"prompt {self.number}"


def read_prompts(path: Path, *, seed: int) -> tuple[Wanted, ...]:
    """Return what the file asks for; the n-th prompt, from 0, has the seed ``seed + n`` unless the file gives one.

    In a ``.txt`` empty lines and lines that begin with ``#`` do not count. Rows have ``prompt`` and may have ``seed``,
    ``out`` and ``seconds``. Raises ``ValueError`` that names the file, the line and the field.
    """
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"prompts={str(path)!r} ends in {kind!r}; use one of: {', '.join(KINDS)}")
    if not path.is_file():
        raise ValueError(f"prompts={str(path)!r} is no file; give a file of prompts")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"prompts={str(path)!r} has {size} bytes, above {MAX_BYTES}; is this a file of prompts?")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    rows = {".txt": _lines, ".jsonl": _objects, ".csv": _table}[kind](text, path)
    found = tuple(_wanted(row, place, number=n, seed=seed) for n, (place, row) in enumerate(rows, start=1))
    if not found:
        raise ValueError(f"{path} holds no prompt; write at least one")
    _check_names(found, path)
    return found


Row = dict[str, Any]


def _lines(text: str, path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield f"{path} line {number}", {"prompt": line.strip()}


def _objects(text: str, path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(text.split("\n"), start=1):  # JSON strings may hold other line separators
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, or a number of thousands of digits
            raise ValueError(f"{place} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f'{place} is no JSON object; write {{"prompt": "…"}}')
        yield place, row


def _table(text: str, path: Path) -> Iterator[tuple[str, Row]]:
    reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
    try:
        for row in reader:
            place = f"{path} line {reader.line_num}"
            if None in row:
                raise ValueError(f'{place} has more fields than the first line; put texts with commas in "quotes"')
            yield place, {name: value for name, value in row.items() if value not in ("", None)}
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num} cannot be read as CSV: {error}") from error


def _wanted(row: Row, place: str, *, number: int, seed: int) -> Wanted:
    known = ("prompt", "seed", "out", "seconds")
    for name in row:
        if name not in known:
            raise ValueError(f"{place} has a field {name!r}; use: {', '.join(known)}")
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{place}: prompt is not given; write what to show")
    out = row.get("out", f"{number:04}.mp4")
    if not isinstance(out, str):
        raise ValueError(f"{place}: out={out!r} is no text; name a file such as clip.mp4")
    return Wanted(
        number=number,
        prompt=prompt.strip(),
        seed=_seed(row["seed"], place) if "seed" in row else seed + number - 1,
        out=_inside(out, place),
        seconds=_seconds(row["seconds"], place) if "seconds" in row else None,
    )


def _seed(value: Any, place: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,20}\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{place}: seed={value!r} is no whole number of 0 or more; use seed=0")
    return value


def _seconds(value: Any, place: str) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{place}: seconds={value!r} is no length above 0; use seconds=20")
    return seconds


def _inside(out: str, place: str) -> str:
    """Return a path that stays below the output folder; both slashes will do."""
    path = PurePosixPath(out.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in out or any(ord(letter) < 32 for letter in out):
        raise ValueError(f"{place}: out={out!r} leads out of the output folder; use a name such as clip.mp4")
    if path.suffix.lower() != ".mp4":
        raise ValueError(f"{place}: out={out!r} does not end in .mp4; use {path.name}.mp4")
    return str(path)


def _check_names(found: tuple[Wanted, ...], path: Path) -> None:
    first: dict[str, Wanted] = {}
    for wanted in found:
        try:
            check_name(Path(wanted.out))
        except ValueError as error:
            raise ValueError(f"{path}: prompt {wanted.number}: {error}") from None
        other = first.setdefault(wanted.out.casefold(), wanted)  # some file systems do not tell A.mp4 from a.mp4
        if other is not wanted:
            raise ValueError(f"{path}: prompts {other.number} and {wanted.number} both have out={wanted.out!r}")


def shard_of(wanted: tuple[Wanted, ...], shard: str | None) -> tuple[Wanted, ...]:
    """Return the part of ``I/N``: every N-th, from the I-th on. Without a shard, all."""
    if shard is None:
        return wanted
    part, count = parse_shard(shard)
    return wanted[part - 1 :: count]


def parse_shard(shard: str) -> tuple[int, int]:
    """Read ``I/N``."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard)
    part, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= count:
        raise ValueError(f"shard={shard!r} is no part; use 1/4 to 4/4 for four machines")
    return part, count
