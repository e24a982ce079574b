"""The GPU tests of the kernels, run by Triton's interpreter: it must be asked for before Triton is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")]

ROOT = Path(__file__).parents[2]


def test_kernels_equal_their_twins() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_kernels.py",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
