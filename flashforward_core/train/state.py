"""Where a run stands, as files: one if every process has the same weights, else one of each process's part."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

MARKER = "whole.txt"
"""Written last, so that a folder that has it has everything; it says in how many parts."""


def write_run(folder: Path, state: Mapping[str, Any], *, accelerator: Accelerator, sharded: bool) -> None:
    """Replace what ``folder`` holds once all of the new state is written; every process must take part.

    At any moment there is a whole state: the last one in ``folder``, or the new one beside it.
    """
    new = _beside(folder)
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)
    accelerator.wait_for_everyone()
    new.mkdir(parents=True, exist_ok=True)
    if sharded or accelerator.is_main_process:
        _save(state, new / _name(accelerator, sharded=sharded))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (new / MARKER).write_text(_form(accelerator, sharded=sharded) + "\n", encoding="utf-8")
        _put_in_place(folder)
    accelerator.wait_for_everyone()


def _save(state: Mapping[str, Any], path: Path) -> None:
    try:
        torch.save(dict(state), path)
    except RuntimeError as error:  # of a full disk, among others; torch's words for it name none
        free = shutil.disk_usage(path.parent).free >> 20
        raise OSError(
            f"{path} cannot be written ({str(error).splitlines()[0]}); {free} MiB are free there. The last saved state "
            "is still whole"
        ) from error


def _beside(folder: Path) -> Path:
    return folder.with_suffix(".new")


def _put_in_place(folder: Path) -> None:
    (folder / MARKER).unlink(missing_ok=True)  # first: what is half removed must not look whole
    shutil.rmtree(folder, ignore_errors=True)
    _beside(folder).rename(folder)


def read_run(folder: Path, *, accelerator: Accelerator, sharded: bool) -> dict[str, Any] | None:
    """Return this process's state, its tensors on the CPU, or None where there is none that is whole.

    A state in another number of parts raises ``ValueError``.
    """
    marker = folder / MARKER
    if accelerator.is_main_process and not marker.exists() and (_beside(folder) / MARKER).exists():
        _put_in_place(folder)  # the last run was stopped just before it did
    accelerator.wait_for_everyone()
    if not marker.exists():
        return None
    found, wanted = marker.read_text(encoding="utf-8").strip(), _form(accelerator, sharded=sharded)
    if found != wanted:
        raise ValueError(
            f"{folder} holds a state in {found!r}, this run needs {wanted!r}; go on with as many processes and the "
            "same shard=, or name another out="
        )
    path = folder / _name(accelerator, sharded=sharded)
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _name(accelerator: Accelerator, *, sharded: bool) -> str:
    return f"{accelerator.process_index if sharded else 0}.pt"


def _form(accelerator: Accelerator, *, sharded: bool) -> str:
    return f"{accelerator.num_processes} parts" if sharded else "one copy"
