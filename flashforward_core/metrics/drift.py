"""Drift: how far the end of a video has moved away from its beginning."""

import math
from dataclasses import dataclass

import numpy as np

from .series import VideoSeries

WINDOW_S = 2.0  # long enough to average what moves through the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Beginning and end are the first and last two seconds, or thirds of a shorter video."""

    colour: float
    """Distance of the mean colours of end and beginning, in levels of 255 (Euclidean over RGB)."""
    sharpness: float
    """log2 of the sharpness at the end over that at the beginning: 0 unchanged, -1 half."""


def measure_drift(series: VideoSeries, *, fps: float) -> Drift:
    """Compare the end with the beginning."""
    first, last = ends(series.frames, fps=fps)
    colour = series.colour[last].mean(axis=0) - series.colour[first].mean(axis=0)
    sharp_first, sharp_last = (float(series.sharpness[part].mean()) for part in (first, last))
    flat = 1e-6  # levels: a plain picture has no sharpness to compare
    return Drift(
        colour=float(np.linalg.norm(colour)), sharpness=math.log2(max(sharp_last, flat) / max(sharp_first, flat))
    )


def ends(frames: int, *, fps: float) -> tuple[slice, slice]:
    """Return the frames of the beginning and of the end."""
    length = max(1, min(round(WINDOW_S * fps), frames // 3))
    return slice(0, length), slice(frames - length, frames)
