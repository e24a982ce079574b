"""Metrics against values worked out by hand."""

import numpy as np
import pytest

from flashforward_core.metrics import measure, psnr

pytestmark = pytest.mark.cpu


def grey(levels: list[int]) -> np.ndarray:
    return np.array(levels, np.uint8)[:, None, None, None].repeat(16, 1).repeat(24, 2).repeat(3, 3)


def test_psnr_is_per_frame() -> None:
    noisy = grey([100, 100, 100])
    noisy[1] += 1  # error 1 everywhere: 20·log10(255)
    noisy[2, :8] += 10  # error 10 in half: 10·log10(255² / 50)
    expected = [np.inf, 20 * np.log10(255), 10 * np.log10(255**2 / 50)]
    np.testing.assert_allclose(psnr(noisy, grey([100, 100, 100])), expected, rtol=1e-6)  # float32 differences


def test_psnr_of_other_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="equal shapes"):
        psnr(grey([1, 2]), grey([1]))


def test_flicker_is_vbenchs() -> None:
    # differences 10, 10, 30: mean 50 / 3
    assert measure([grey([0, 10, 20, 50])]).flicker == pytest.approx((255 - 50 / 3) / 255)


def test_a_still_video_has_no_motion_and_full_marks() -> None:
    found = measure([grey([7] * 12)])
    assert (found.frames, found.flicker, found.motion) == (12, 1.0, 0.0)


def test_motion_is_the_share_of_pixels_that_changed() -> None:
    frames = np.zeros((20, 32, 64, 3), np.uint8)
    for i, frame in enumerate(frames):
        frame[8:16, 2 * i : 2 * i + 8] = 255  # 2 pixels a frame: after 8 frames all of the 8x8 square has moved on
    assert measure([frames]).motion == pytest.approx(2 * 8 * 8 / (32 * 64))


def test_noise_below_the_threshold_is_not_motion() -> None:
    rng = np.random.default_rng(0)
    assert measure([rng.integers(100, 112, (12, 16, 24, 3), dtype=np.uint8)]).motion == 0


def test_chunks_do_not_change_the_result() -> None:
    video = np.random.default_rng(0).integers(0, 256, (21, 16, 24, 3), dtype=np.uint8)
    assert measure(np.array_split(video, 5)) == measure([video])


def test_one_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="1 frames"):
        measure([grey([1])])
