"""Numbers about videos: faithfulness to a reference, flicker, motion.

Frames are [F, H, W, 3] uint8 RGB arrays. Whatever takes an iterable of them reads it once and holds a few frames only,
so that a video of any length can be measured (``media.read_frames`` gives such an iterable).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

MOTION_LAG = 8  # frames; half a second at 16 fps
MOTION_THRESHOLD = 12  # levels of luma, above what H.264 at ordinary quality adds
LUMA_709 = np.array([0.2126, 0.7152, 0.0722], np.float32)


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
        return 10 * np.log10(255**2 / np.square(error, dtype=np.float64).mean(axis=(1, 2, 3)))


def measure(chunks: Iterable[np.ndarray]) -> VideoMetrics:
    """Measure a video given as arrays of frames. Raises ``ValueError`` for fewer than two frames.

    A video of up to 8 frames is compared with its first frame for ``motion``.
    """
    differences: list[float] = []
    moved: list[float] = []
    held: deque[np.ndarray] = deque(maxlen=MOTION_LAG)  # the frames before this one
    count = 0
    for frame in _frames(chunks):
        if held:
            differences.append(float(np.abs(frame.astype(np.int16) - held[-1]).mean()))
        if len(held) == MOTION_LAG:
            moved.append(_moved_share(held[0], frame))
        held.append(frame)
        count += 1
    if count < 2:
        raise ValueError(f"the video has {count} frames; flicker and motion need 2 or more")
    moved = moved or [_moved_share(held[0], held[-1])]
    return VideoMetrics(frames=count, flicker=(255 - float(np.mean(differences))) / 255, motion=float(np.mean(moved)))


def _frames(chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for chunk in chunks:
        yield from chunk


def _moved_share(before_HWC: np.ndarray, after_HWC: np.ndarray) -> float:
    change = (after_HWC.astype(np.float32) - before_HWC) @ LUMA_709
    return float((np.abs(change) > MOTION_THRESHOLD).mean())
