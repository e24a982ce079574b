"""One pass over a video: a few numbers per frame, from which every metric is computed.

Frames are [F, H, W, 3] uint8 RGB arrays. Whatever takes an iterable of them reads it once and holds a few frames only,
so that a video of any length can be measured (``media.read_frames`` gives such an iterable).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

MOTION_LAG = 8  # frames; half a second at 16 fps
MOTION_THRESHOLD = 12  # levels of luma, above what H.264 at ordinary quality adds
LUMA_709 = np.array([0.2126, 0.7152, 0.0722], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSeries:
    """What is kept of a video of F frames; levels are 0..255."""

    change: np.ndarray
    """Mean absolute difference of frame t and t+1, in levels [F-1]."""
    moved: np.ndarray
    """Share of pixels whose luma changed by more than 12 levels within 8 frames [F-8], or since the first frame [1]."""
    colour: np.ndarray
    """Mean RGB, in levels [F, 3]."""
    sharpness: np.ndarray
    """Mean absolute luma difference of neighbouring pixels, in levels [F]."""

    @property
    def frames(self) -> int:
        return len(self.colour)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoMetrics:
    """What ``measure`` finds."""

    frames: int
    flicker: float
    """VBench's temporal flickering: (255 - mean absolute difference of consecutive frames) / 255; 1 is still."""
    motion: float
    """Share of pixels whose luma changes by more than 12 of 255 levels within 8 frames: 0 is still."""


def psnr(frames_FHWC: np.ndarray, reference_FHWC: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each frame, in dB [F]; infinite where frames are equal.

    Raises ``ValueError`` when the two differ in shape.
    """
    if frames_FHWC.shape != reference_FHWC.shape:
        raise ValueError(f"frames are {frames_FHWC.shape} and the reference {reference_FHWC.shape}; use equal shapes")
    error = frames_FHWC.astype(np.float32) - reference_FHWC
    with np.errstate(divide="ignore"):
        found: np.ndarray = 10 * np.log10(255**2 / np.square(error, dtype=np.float64).mean(axis=(1, 2, 3)))
    return found


def collect(chunks: Iterable[np.ndarray], *, on_frame: Callable[[np.ndarray], None] | None = None) -> VideoSeries:
    """Read a video given as arrays of frames; ``on_frame`` sees each frame too. Fewer than two raise ``ValueError``."""
    change: list[float] = []
    moved: list[float] = []
    colour: list[np.ndarray] = []
    sharpness: list[float] = []
    before: np.ndarray | None = None
    lumas: deque[np.ndarray] = deque(maxlen=MOTION_LAG)  # of the frames before this one
    for frame in _frames(chunks):
        if on_frame is not None:
            on_frame(frame)
        luma = frame @ LUMA_709
        if before is not None:
            change.append(float(np.abs(frame.astype(np.int16) - before).mean()))
        if len(lumas) == MOTION_LAG:
            moved.append(_moved_share(lumas[0], luma))
        colour.append(frame.mean(axis=(0, 1), dtype=np.float64))
        sharpness.append(float(np.abs(np.diff(luma, axis=0)).mean() + np.abs(np.diff(luma, axis=1)).mean()) / 2)
        lumas.append(luma)
        before = frame.astype(np.int16)
    if len(colour) < 2:
        raise ValueError(f"the video has {len(colour)} frames; flicker and motion need 2 or more")
    moved = moved or [_moved_share(lumas[0], lumas[-1])]
    return VideoSeries(
        change=np.array(change), moved=np.array(moved), colour=np.stack(colour), sharpness=np.array(sharpness)
    )


def summarise(series: VideoSeries) -> VideoMetrics:
    """Return flicker and motion."""
    flicker = (255 - float(series.change.mean())) / 255
    return VideoMetrics(frames=series.frames, flicker=flicker, motion=float(series.moved.mean()))


def measure(chunks: Iterable[np.ndarray]) -> VideoMetrics:
    """Measure a video given as arrays of frames. Raises ``ValueError`` for fewer than two frames.

    A video of up to 8 frames is compared with its first frame for ``motion``.
    """
    return summarise(collect(chunks))


def _frames(chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for chunk in chunks:
        yield from chunk


def _moved_share(before_HW: np.ndarray, after_HW: np.ndarray) -> float:
    return float((np.abs(after_HW - before_HW) > MOTION_THRESHOLD).mean())
