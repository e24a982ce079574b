"""The flow's arithmetic and the identity of its noise."""

import hashlib

import pytest
import torch

from flashforward_core.flow import keyed_noise, keyed_noise_frames, noise_seed, predict_x0, renoise, timestep
from flashforward_core.specs import StageSchedule

pytestmark = pytest.mark.cpu


def test_timesteps_of_the_four_stages() -> None:
    found = [timestep(sigma) for sigma in StageSchedule().sigmas]
    assert found == pytest.approx([1000, 937.5, 833.3333, 625, 0], abs=1e-4)  # the published values' digits


def test_velocity_gives_x0_back_at_every_sigma() -> None:
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 1, 16, 3, 4, 4, generator=generator, dtype=torch.float64)
    for sigma in StageSchedule().sigmas:
        x = renoise(x0, noise, sigma=sigma)
        assert (predict_x0(x, noise - x0, sigma=sigma) - x0).abs().max() < 1e-14  # float64 rounding near 1


def test_pure_noise_and_clean_are_the_ends() -> None:
    x0, noise = torch.randn(2, 1, 16, 1, 2, 2)
    assert torch.equal(renoise(x0, noise, sigma=1.0), noise)
    assert torch.equal(renoise(x0, noise, sigma=0.0), x0)


def test_half_precision_is_never_computed_in() -> None:
    x = torch.full((1,), 1.0, dtype=torch.bfloat16)
    v = torch.full((1,), 2.0**-6, dtype=torch.bfloat16)
    x0 = predict_x0(x, v, sigma=0.1)
    assert x0.dtype is torch.float32
    assert float(x0) == pytest.approx(1 - 0.1 * 2**-6, abs=1e-7)  # bf16 next to 1 is 4e-3 apart
    assert renoise(x, v, sigma=0.1).dtype is torch.float32
    assert predict_x0(x.double(), v, sigma=0.1).dtype is torch.float64


def test_seed_is_the_big_endian_head_of_blake2b() -> None:
    digest = hashlib.blake2b(b"7|anchor|20|0").digest()
    assert noise_seed(7, "anchor", 20, 0) == sum(byte << 8 * (7 - n) for n, byte in enumerate(digest[:8]))


def test_noise_bytes_are_frozen() -> None:
    """Saved seeds must give the same video for ever; these bytes were computed once."""
    noise = keyed_noise(0, "render", 0, 0, (16, 4, 6))
    assert noise.dtype is torch.float32 and noise.shape == (16, 4, 6)
    assert hashlib.sha256(noise.numpy().tobytes()).hexdigest()[:16] == "538355db9a5d8e5d"


def test_noise_follows_every_part_of_its_key() -> None:
    keys = [(0, "render", 0, 0), (1, "render", 0, 0), (0, "anchor", 0, 0), (0, "render", 1, 0), (0, "render", 0, 1)]
    found = [keyed_noise(*key, (16, 4, 4)) for key in keys]
    for n, one in enumerate(found):
        assert abs(float(one.mean())) < 0.25 and 0.8 < float(one.std()) < 1.2  # 256 draws: 4 standard errors
        assert all(not torch.equal(one, other) for other in found[n + 1 :])


def test_unknown_purpose_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="'anchors'"):
        keyed_noise(0, "anchors", 0, 0, (16, 2, 2))


def test_frames_are_stacked_with_a_seed_per_row() -> None:
    noise = keyed_noise_frames([3, 4], "render", range(6, 9), 2, (16, 2, 2))
    assert noise.shape == (2, 16, 3, 2, 2)
    assert torch.equal(noise[1, :, 2], keyed_noise(4, "render", 8, 2, (16, 2, 2)))
