"""Loading holds no more than one full copy of the weights in memory, and none while they stay in the file."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flashforward_core.model.checkpoints import load_checkpoint
from flashforward_core.model.config import WanConfig
from flashforward_core.model.transformer import CausalWanTransformer

STATUS = Path("/proc/self/status")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's count of a process's pages"),
]

CONFIG = WanConfig(name="custom", dim=512, ffn_dim=2048, num_heads=4, num_layers=8, text_dim=64)
SLACK = 16 << 20  # bytes: the largest weight several times over, and the interpreter's own


def private_bytes() -> int:
    """Memory that is no file's mapping."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def peak_growth(load: Callable[[], object]) -> int:
    """Bytes by which private memory grew at most while ``load`` ran."""
    before, peak, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = load()
    peak[0] = max(peak[0], private_bytes())
    done.set()
    watcher.join()
    del kept
    return peak[0] - before


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in bf16 under diffusers' names, as safetensors and as a trainer's pickle."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("big")
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in CausalWanTransformer(CONFIG).named_parameters()}
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(state, folder / "wan.safetensors")
    torch.save({"generator": state}, folder / "wan.pt")
    return {path.suffix: path for path in folder.iterdir()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_mapped_weights_take_no_memory(suffix: str, files: dict[str, Path]) -> None:
    size = files[suffix].stat().st_size
    assert size > 4 * SLACK
    assert peak_growth(lambda: load_checkpoint(files[suffix], dtype=torch.bfloat16, mapped=True)) < SLACK


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_converted_weights_are_there_once(suffix: str, dtype: torch.dtype, files: dict[str, Path]) -> None:
    copy = files[suffix].stat().st_size * dtype.itemsize // 2
    growth = peak_growth(lambda: load_checkpoint(files[suffix], dtype=dtype))
    assert 0.5 * copy < growth < copy + SLACK
