"""Benchmark rows: one number each, with everything needed to compare it."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def machine(device: torch.device | str) -> str:
    """Name the hardware behind ``device``."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"


def commit() -> str:
    """Return the short commit of this code, or ``unknown`` outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, none if it is not there. Anything else than a list of rows raises ``ValueError``."""
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"{path} is no file that rows can be kept in; choose another")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError too
        raise ValueError(f"{path} holds no JSON ({error}); delete it or choose another file") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "metric" in row for row in rows):
        raise ValueError(f"{path} holds no benchmark rows; choose another file")
    return rows


def check_target(name: str, path: Path, *, folder: bool = False) -> None:
    """Raise ``ValueError`` if no file (or ``folder``) can be at ``path``; folders that are missing could be made."""
    if path.exists() and not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{name}={str(path)!r} is no {'folder' if folder else 'file'}; choose another path")
    place = next(place for place in ([path] if folder else []) + list(path.parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"{name}={str(path)!r} is below {str(place)!r}, which is no folder; choose another path")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{name}={str(path)!r} is in a folder that you may not write to; choose another path")


@dataclass(slots=True, kw_only=True)
class RowBook:
    """Collects rows, prints them, and keeps them in a file after each one, so that a stopped run loses nothing."""

    path: Path | None
    machine: str
    common: dict[str, Any]
    """What every row's config holds."""
    rows: list[Row] = field(default_factory=list)
    commit: str = field(default_factory=commit)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a file that rows cannot be added to, since measuring takes long."""
        if self.path is not None:
            check_target("json", self.path)
            read_rows(self.path)

    def add(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        ci95: float | None = None,
        values: Sequence[float] | None = None,
        **config: Any,
    ) -> Row:
        """File one number; ``config`` adds to what all rows share, ``ci95`` is half of an interval's width.

        ``values`` are what ``value`` is the mean of, in an order that other rows have too: for differences in pairs.
        """
        row = {
            "metric": metric,
            "value": value,
            "unit": unit,
            "config": {**self.common, **config},
            "machine": self.machine,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
        }
        if ci95 is not None:
            row["ci95"] = ci95
        if values is not None:
            row["values"] = list(values)
        self.rows.append(row)
        shown = " ".join(f"{name}={text}" for name, text in row["config"].items())
        print(f"{metric:<15} {value:>14.6g} {unit:<9} {shown}", flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps([*read_rows(self.path), row], indent=1) + "\n", encoding="utf-8")
            part.replace(self.path)
        return row
