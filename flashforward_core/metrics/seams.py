"""Seams: whether a video changes more where chunks meet, or where anchors lie, than elsewhere.

Latent frame 0 is one video frame, every later one is four, so latent frames n-1 and n meet between the video frames
4n-4 and 4n-3. An autoencoder leaves a rhythm of four frames in any video; only meetings of latent frames are therefore
compared with each other, and only with their neighbours, since videos change more at some times than at others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..specs import TEMPORAL_FACTOR
from .series import VideoSeries

RUNNING = 11  # latent frames of the running median
FLOOR = 0.01  # levels; less is no change


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """How strongly the change where latent frames meet repeats, by period."""

    cycles: np.ndarray
    """Frequencies, in cycles per latent frame, above 0 and up to 1/2."""
    power: np.ndarray
    """Share of the variance at each frequency; the sum is 1, or 0 for a video that never varies."""

    def at(self, period: float) -> float:
        """Return the power at ``period`` latent frames over the median power; 0 when nothing varies."""
        nearest = int(np.abs(self.cycles - 1 / period).argmin())
        middle = float(np.median(self.power))
        return float(self.power[nearest]) / middle if middle > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """The seams of one kind."""

    excess: float
    """Geometric mean, over the seams, of change / (median change where other latent frames meet nearby), minus 1."""
    peak: float
    """Power at the seams' period over the median power; about 1 without a rhythm."""
    count: int
    """Seams that were measured."""


def latent_change(series: VideoSeries) -> np.ndarray:
    """Return the change where latent frames n-1 and n meet, for n = 1, 2, …, in levels."""
    return series.change[::TEMPORAL_FACTOR]


def chunk_seams(latent_frames: int, *, chunk_frames: int) -> set[int]:
    """Return every n at which latent frames n-1 and n belong to different chunks."""
    return set(range(chunk_frames, latent_frames, chunk_frames))


def anchor_seams(latent_frames: int, *, anchors: Sequence[int]) -> set[int]:
    """Return every n at which an anchor and a neighbour of it meet; not the first, since latent frame 0 is special."""
    return {n for anchor in anchors for n in (anchor, anchor + 1) if 1 < n < latent_frames}


def seam(change: np.ndarray, *, seams: set[int], others: set[int], period: float) -> Seam | None:
    """Measure ``seams``, without those that are among ``others`` too, against all that is neither.

    ``change`` is ``latent_change``. None when either side has nothing to compare.
    """
    rest = set(range(2, len(change) + 1)) - seams - others  # latent frame 0 is one video frame: no measure
    reach = math.ceil(period / 2) + 1
    near = {n: [m for m in range(n - reach, n + reach + 1) if m in rest] for n in sorted(seams - others)}
    ratios = [
        math.log(max(FLOOR, change[n - 1]) / max(FLOOR, float(np.median([change[m - 1] for m in around]))))
        for n, around in near.items()
        if around
    ]
    if not ratios:
        return None
    return Seam(excess=math.expm1(sum(ratios) / len(ratios)), peak=spectrum(change).at(period), count=len(ratios))


def spectrum(change: np.ndarray) -> Spectrum:
    """Return the spectrum of ``latent_change`` over its running median, under a Hann window.

    The median is of 11 meetings: it follows how much a video moves, and not what stands out every third or tenth time.
    """
    relative = _over_running_median(change)
    relative = relative - relative.mean()
    power = np.abs(np.fft.rfft(relative * np.hanning(len(change)))) ** 2
    power, cycles = power[1:], np.fft.rfftfreq(len(change))[1:]
    total = float(power.sum())
    still = total <= 1e-18 * len(change) ** 2  # what rounding leaves of values about 1
    return Spectrum(cycles=cycles, power=np.zeros_like(power) if still else power / total)


def _over_running_median(change: np.ndarray) -> np.ndarray:
    padded = np.pad(change, RUNNING // 2, mode="reflect" if len(change) > RUNNING // 2 else "edge")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, RUNNING), axis=1)
    relative: np.ndarray = np.divide(change, usual, out=np.ones(len(change)), where=usual > 0)
    return relative
