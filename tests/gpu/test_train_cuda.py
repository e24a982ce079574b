"""Two GPUs train as one does on the same batches, with parts of the weights (FSDP2 over NCCL) or with copies."""

import runpy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).resolve().parents[1] / "unit" / "two_processes.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_does_with_parts_or_copies_of_the_weights(tmp_path: Path) -> None:
    worker = runpy.run_path(str(WORKER))
    worker["run_both"](tmp_path, device="cuda")
    worker["check"](tmp_path, worker["trained"](tmp_path / "alone", Accelerator(), sharded=False))
