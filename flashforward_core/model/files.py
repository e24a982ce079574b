"""Reading weight files, with errors that name the file, what was expected and what was found."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

CHUNK_BYTES = 1 << 20
SAMPLES = 64  # pieces of a large file that tell it from others


def require(path: Path, *, what: str) -> Path:
    """Return ``path``; a missing one raises ``FileNotFoundError`` that says what it should be."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: expected {what}")
    return path


def read_json(path: Path, *, what: str) -> dict[str, Any]:
    """Read a JSON object; anything else raises ``ValueError`` naming the file."""
    require(path, what=what)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # no JSON, no text, nested without end, a folder
        raise ValueError(f"{path} is not {what}: it is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not {what}: expected a JSON object, found a {type(found).__name__}")
    return found


def read_tensors(path: Path, *, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: tensors on the CPU, and its metadata. A damaged one raises ``ValueError``."""
    size = require(path, what=what).stat().st_size
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        message = f"{path} is not {what}: expected a complete safetensors file, found {size} bytes ({error})"
        raise ValueError(message) from error


def fingerprint(paths: Iterable[Path]) -> str:
    """Return the SHA-256 over the files' names and bytes, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda p: (p.name, str(p))):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def quick_fingerprint(paths: Iterable[Path]) -> str:
    """Return a SHA-256 over names, sizes and evenly spaced pieces, which tell large weights apart without reading them.

    A file of up to 64 MiB goes in whole.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda p: (p.name, str(p))):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        step = max(CHUNK_BYTES, size // SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(CHUNK_BYTES))
    return digest.hexdigest()
