"""Loading holds no more than one full copy of the weights in memory, and none while they stay in the file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flashforward_core.model.config import WanConfig
from flashforward_core.model.transformer import CausalWanTransformer

LINUX = Path("/proc/self/status").exists()
pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not LINUX, reason="reads Linux's count of a process's pages")]

HERE = Path(__file__).resolve().parent
BIG = WanConfig(name="custom", dim=512, ffn_dim=2048, num_heads=4, num_layers=8, text_dim=64)
SMALL = WanConfig(name="custom", dim=128, ffn_dim=64, num_heads=1, num_layers=1, text_dim=16)
SLACK = 16 << 20  # bytes: the largest weight several times over, and the allocator's own


def weights(config: WanConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in CausalWanTransformer(config).named_parameters()}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def test_loading_holds_one_copy_at_most(tmp_path: Path) -> None:
    """In a process of its own: in this one, memory that tests before have freed would be used again."""
    path = tmp_path / "wan.safetensors"
    save_file(weights(BIG), path)
    save_file(weights(SMALL), tmp_path / "small.safetensors")
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "loading_memory.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    mapped, converted = map(int, done.stdout.split())
    size = path.stat().st_size
    assert size > 4 * SLACK
    assert mapped < SLACK
    assert 1.8 * size < converted < 2 * size + SLACK  # from bf16 to float32
