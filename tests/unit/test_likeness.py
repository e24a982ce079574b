"""PSNR, SSIM and consistency against hand calculations and a plain loop."""

import math

import pytest
import torch

from flashforward_core.commands.likeness import C1, C2, SIGMA, WINDOW, Consistency, psnr, ssim

pytestmark = pytest.mark.cpu


def _noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_psnr_is_of_each_frame_and_equal_frames_count_as_100() -> None:
    frames = torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8)
    other = frames.clone()
    other[:, 1] = 51  # a fifth of the range: 20·log10(5) dB
    assert psnr(frames, other)[0].tolist() == pytest.approx([100, 20 * math.log10(5)])


def test_ssim_equals_the_formula_window_by_window() -> None:
    x, y = _noise(2, 2, 13, 12, 3), _noise(2, 2, 13, 12, 3, seed=1)
    luma = torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)
    at = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    row = torch.exp(-(at**2) / (2 * SIGMA**2))
    window = torch.outer(row, row) / torch.outer(row, row).sum()
    expected = []
    for a, b in zip(x.flatten(0, 1).double() / 255 @ luma, y.flatten(0, 1).double() / 255 @ luma, strict=True):
        values = []
        for i in range(13 - WINDOW + 1):
            for j in range(12 - WINDOW + 1):
                p, q = (z[i : i + WINDOW, j : j + WINDOW] for z in (a, b))
                mp, mq = (window * p).sum(), (window * q).sum()
                vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                both = (window * (p - mp) * (q - mq)).sum()
                values.append((2 * mp * mq + C1) * (2 * both + C2) / ((mp**2 + mq**2 + C1) * (vp + vq + C2)))
        expected.append(torch.stack(values).mean())
    torch.testing.assert_close(ssim(x, y).double().flatten(), torch.stack(expected), rtol=0, atol=1e-4)
    torch.testing.assert_close(ssim(x, x), torch.ones(2, 2))


def test_consistency_is_likeness_to_the_first_frame_and_to_the_one_before_in_any_parts() -> None:
    """White, white, black, black: black is the opposite of white. (1+1)/2, (-1-1)/2, (-1+1)/2 after the first."""
    video = torch.tensor([255, 255, 0, 0], dtype=torch.uint8).view(1, 4, 1, 1, 1).expand(1, 4, 16, 24, 3)
    for cuts in ([4], [1, 3], [2, 1, 1]):
        found = Consistency()
        for part in video.split(cuts, dim=1):
            found.add(part)
        assert found.per_video().tolist() == pytest.approx([0.0], abs=1e-6)
    steady = Consistency()
    steady.add(video[:, :1].expand(1, 5, 16, 24, 3))
    assert steady.per_video().tolist() == pytest.approx([1.0])
