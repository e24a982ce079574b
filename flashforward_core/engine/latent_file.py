"""Where finished latents go: into one tensor, or through a file, so that a long video holds none of them."""

import hashlib
import tempfile
from typing import Protocol

import torch
from torch import Tensor

HASH_BYTES = 1 << 22  # read at a time


class LatentSink(Protocol):
    """Takes finished chunks in any order."""

    def write(self, frames: range, latents_BCFHW: Tensor) -> None:
        """Take the latents of consecutive latent frames."""
        ...

    def sha256(self) -> str:
        """Hash all latents as contiguous float32 [B, C, F, h, w]."""
        ...


class HeldLatents:
    """One tensor."""

    def __init__(self, out_BCFHW: Tensor) -> None:
        self.out_BCFHW = out_BCFHW

    def write(self, frames: range, latents_BCFHW: Tensor) -> None:
        self.out_BCFHW[:, :, frames.start : frames.stop] = latents_BCFHW

    def sha256(self) -> str:
        data = self.out_BCFHW.detach().to("cpu", torch.float32).contiguous()
        return hashlib.sha256(data.numpy().data).hexdigest()


class LatentFile:
    """A file without a name, in the folder for temporary ones; it is gone when this is."""

    def __init__(self, shape: tuple[int, int, int, int, int]) -> None:
        """``shape`` is [B, C, F, h, w] of all latents."""
        self._rows = shape[0] * shape[1]
        self._frames = shape[2]
        self._frame_bytes = shape[3] * shape[4] * torch.float32.itemsize
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this does)

    def write(self, frames: range, latents_BCFHW: Tensor) -> None:
        parts_RX = latents_BCFHW.detach().to("cpu", torch.float32).flatten(0, 1).flatten(1).contiguous()
        for row in range(self._rows):
            self._file.seek((row * self._frames + frames.start) * self._frame_bytes)
            self._file.write(parts_RX[row].numpy().data)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        self._file.seek(0)
        while block := self._file.read(HASH_BYTES):
            digest.update(block)
        return digest.hexdigest()
