"""Rectified flow: x_sigma = (1-sigma)·x0 + sigma·noise, and the network predicts v = noise - x0.

Everything here computes in float32 at least (never half precision), and noise depends on nothing but its key.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

PURPOSES = ("anchor", "render")
"""What noise is for: planned anchors, or rendered latent frames."""


def timestep(sigma: float) -> float:
    """Return the network's timestep, 1000·sigma."""
    return 1000.0 * sigma


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in one dtype of float32 or more."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def predict_x0(x: Tensor, v: Tensor, *, sigma: float | Tensor) -> Tensor:
    """Return x0 = x - sigma·v in float32 at least, where ``x`` is at noise level ``sigma``."""
    x, v = _wide(x, v)
    return x - sigma * v


def renoise(x0: Tensor, noise: Tensor, *, sigma: float | Tensor) -> Tensor:
    """Return (1-sigma)·x0 + sigma·noise in float32 at least."""
    x0, noise = _wide(x0, noise)
    return (1 - sigma) * x0 + sigma * noise


def noise_seed(seed: int, purpose: str, latent_frame: int, stage: int) -> int:
    """Return the generator's seed: the first 8 bytes of blake2b of the key, as a big-endian unsigned integer."""
    assert purpose in PURPOSES, f"noise purpose {purpose!r} is none of {PURPOSES}"
    key = f"{seed}|{purpose}|{latent_frame}|{stage}".encode()
    return int.from_bytes(hashlib.blake2b(key).digest()[:8], "big")


def keyed_noise(seed: int, purpose: str, latent_frame: int, stage: int, shape: Sequence[int]) -> Tensor:
    """Return one latent frame's noise, float32 [C, h, w] on the CPU.

    ``stage`` 0 is the noise that a rollout starts from; the renoise after stage k uses stage k+1. The same key gives
    the same bytes on any machine, in any order, however the frames are grouped.
    """
    generator = torch.Generator("cpu").manual_seed(noise_seed(seed, purpose, latent_frame, stage))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def keyed_noise_frames(
    seeds: int | Sequence[int], purpose: str, latent_frames: Iterable[int], stage: int, shape: Sequence[int]
) -> Tensor:
    """Return the noise of several latent frames, float32 [B, C, F, h, w] on the CPU; one seed per batch row."""
    rows = [seeds] if isinstance(seeds, int) else list(seeds)
    frames = list(latent_frames)
    stacked = [torch.stack([keyed_noise(s, purpose, f, stage, shape) for f in frames], dim=1) for s in rows]
    return torch.stack(stacked)
