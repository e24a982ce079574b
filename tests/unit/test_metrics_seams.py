"""Seams and drift of videos whose seams and drift are known by construction."""

import numpy as np
import pytest

from flashforward_core.metrics import Layout, collect, evaluate, measure_drift
from flashforward_core.metrics.seams import anchor_seams, chunk_seams, latent_change, seam, spectrum

pytestmark = pytest.mark.cpu

LATENTS = 61
FRAMES = 4 * LATENTS - 3


def stepping(jumps: dict[int, int], *, usual: int = 2) -> np.ndarray:
    """Grey frames that change by 1 within a latent frame, and by ``usual`` or ``jumps[n]`` where n-1 and n meet."""
    steps = np.ones(FRAMES - 1, int)
    steps[::4] = [jumps.get(n, usual) for n in range(1, LATENTS)]
    signs = np.where(np.arange(FRAMES - 1) % 2, 1, -1)  # up and down, to stay within the range
    signs[::4] = np.where(np.arange(LATENTS - 1) % 2, 1, -1)
    levels = 128 + np.concatenate(([0], np.cumsum(steps * signs)))
    assert levels.min() >= 0 and levels.max() <= 255
    return levels.astype(np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2).repeat(3, 3)


def test_changes_are_read_where_latent_frames_meet() -> None:
    change = latent_change(collect([stepping({7: 9})]))
    assert change.tolist() == [9.0 if n == 7 else 2.0 for n in range(1, LATENTS)]


def test_seams_lie_at_chunk_starts_and_around_anchors() -> None:
    assert chunk_seams(10, chunk_frames=3) == {3, 6, 9}
    assert anchor_seams(12, anchors=[0, 10]) == {10, 11}  # not around latent frame 0


def test_a_video_without_seams_has_no_excess() -> None:
    found = evaluate([stepping({})])
    assert found.seam_chunk is not None and found.seam_anchor is not None
    assert found.seam_chunk.excess == found.seam_anchor.excess == 0
    assert found.seam_chunk.peak == found.seam_anchor.peak == 0


def test_chunk_seams_are_told_from_anchor_seams() -> None:
    found = evaluate([stepping(dict.fromkeys(range(3, LATENTS, 3), 5))])
    assert found.seam_chunk is not None and found.seam_anchor is not None
    assert found.seam_chunk.excess == pytest.approx(1.5)  # 5 against 2
    assert found.seam_anchor.excess == 0
    assert found.seam_chunk.peak > 20 > found.seam_anchor.peak


def test_pasted_anchors_are_told_from_chunk_seams() -> None:
    found = evaluate([stepping({n: 6 for a in range(0, LATENTS, 10) for n in (a, a + 1)})])
    assert found.seam_chunk is not None and found.seam_anchor is not None
    assert found.seam_anchor.excess == pytest.approx(2.0)  # 6 against 2
    assert found.seam_chunk.excess == 0
    assert found.seam_anchor.peak > 20 > found.seam_chunk.peak


def test_the_rhythm_of_four_frames_is_no_seam() -> None:
    """Every meeting of latent frames jumps ten times as far as frames within one; no meeting stands out."""
    found = evaluate([stepping({}, usual=10)])
    assert found.seam_chunk is not None and found.seam_chunk.excess == 0


def test_the_spectrum_is_that_of_a_wave() -> None:
    found = spectrum(10 + np.sin(2 * np.pi * np.arange(100) / 5))
    assert found.cycles[found.power.argmax()] == pytest.approx(1 / 5)
    assert found.power.sum() == pytest.approx(1)
    assert spectrum(np.full(50, 7.0)).power.sum() == 0


def test_a_video_that_starts_fast_and_calms_down_has_no_seams() -> None:
    settling = {n: round(3 + 60 * 0.7**n) for n in range(1, LATENTS)}
    found = evaluate([stepping(settling)])
    assert found.seam_chunk is not None and found.seam_anchor is not None
    # the steepest part of the curve sags below the mean of its neighbours
    assert abs(found.seam_chunk.excess) < 0.1 and abs(found.seam_anchor.excess) < 0.1


def test_seams_without_a_rest_are_not_measured() -> None:
    assert seam(np.ones(2), seams={1}, others={2}, period=3) is None
    assert evaluate([stepping({})[:9]]).seam_chunk is None  # three latent frames: one chunk


def test_layouts_without_seams_are_refused() -> None:
    with pytest.raises(ValueError, match="anchor_stride=1"):
        Layout(anchor_stride=1)


def test_colour_drift_is_the_distance_of_the_ends() -> None:
    frames = np.full((160, 8, 8, 3), 100, np.uint8)
    frames[-32:] += np.array([3, 0, 4], np.uint8)  # two seconds at 16 fps
    frames[60:80] = 0  # what happens between does not count
    assert measure_drift(collect([frames]), fps=16).colour == pytest.approx(5)


def test_sharpness_drift_is_in_octaves() -> None:
    frames = np.zeros((160, 8, 8, 3), np.uint8)
    frames[:, :, ::2] = 80
    frames[80:, :, ::2] = 20
    assert measure_drift(collect([frames]), fps=16).sharpness == pytest.approx(-2)
