"""Load a checkpoint, mapped and then converted, and print by how many bytes private memory grew at most.

python loading_memory.py FILE
"""

import sys
import threading
from pathlib import Path

import torch

from flashforward_core.model.checkpoints import load_checkpoint


def private_bytes() -> int:
    """Memory that is no file's mapping."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def peak_growth(file: Path, dtype: torch.dtype, *, mapped: bool) -> int:
    before, peak, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = load_checkpoint(file, dtype=dtype, mapped=mapped)
    peak[0] = max(peak[0], private_bytes())
    done.set()
    watcher.join()
    del kept
    return peak[0] - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    load_checkpoint(path.with_name("small.safetensors"), mapped=True)  # imports and caches are no weights
    print(peak_growth(path, torch.bfloat16, mapped=True), peak_growth(path, torch.float32, mapped=False))
