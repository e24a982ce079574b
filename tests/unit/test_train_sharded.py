"""Two processes on the CPU train as one does on the same batches, with parts of the weights or with copies."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

pytestmark = pytest.mark.cpu
WORKER = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def worker() -> dict[str, Any]:
    return runpy.run_path(str(WORKER))


def test_two_processes_train_as_one_does_with_parts_or_copies_of_the_weights(
    worker: dict[str, Any], tmp_path: Path
) -> None:
    """With parts the run is stopped and resumed; averaged weights, the LoRA file, and what is refused."""
    worker["run_both"](tmp_path, device="cpu")
    worker["check"](tmp_path, worker["trained"](tmp_path / "alone", Accelerator(cpu=True), sharded=False))


def test_one_process_has_nobody_to_share_weights_with(worker: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard=True is for several processes; start them with torchrun"):
        worker["trained"](tmp_path, Accelerator(cpu=True), sharded=True)
