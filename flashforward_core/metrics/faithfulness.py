"""Whether a video of a procedural scene shows what its caption says, judged by the palette and by motion.

The sky and the hills have known colours in known rows. A sprite is where pixels are nearer to its colour than to any
other that the scene or the palette has; its centre's path tells how it moves.
"""

from dataclasses import dataclass, field

import numpy as np

from ..scenes import (
    COLOURS,
    HEIGHT,
    HILLS,
    SKIES,
    WIDTH,
    Mover,
    SceneWords,
    disc_colour,
    far_hill_colour,
    near_hill_colour,
    sky_colour,
)
from .drift import ends

TOP, HORIZON, BOTTOM = slice(0, 8), slice(56, 64), slice(120, 128)  # rows of sky, sky and near hills, in any scene
SKY_ROWS = (3.5, 59.5)  # the middles of the first two
STEP = 2  # sprites are looked for in every second row and column
NEAR = 0.3  # greatest distance of a sprite's pixel from its colour, in RGB of 0..1
LEAST_PIXELS = 25  # of every second row and column: a fifth of the smallest sprite
VISIBLE_SHARE = 0.7  # a sprite that crosses is out of the picture for up to a quarter of the time
LAG = 4  # frames between the positions that tell a direction
JUMP = 24.0  # pixels: a sprite that leaves and enters again has not moved
BOTH_WAYS = 0.15  # least share of steps each way of something that goes to and fro


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneReport:
    """What a caption promised and how much of it is there, all 0..1 but for the palette."""

    sky: float
    """Share of frames whose sky is nearer to the caption's than to any other."""
    hills: float
    """The same for the hills."""
    colour: float
    """Mean over sprites: how much of the time pixels of its colour are there."""
    motion: float
    """Share of sprites whose path is as the caption says."""
    palette_error: float
    """Mean distance of sky and hills from the caption's colours, in levels of 255."""
    palette_drift: float
    """Growth of that distance from the beginning to the end."""

    @property
    def faithfulness(self) -> float:
        return (self.sky + self.hills + self.colour + self.motion) / 4


@dataclass(slots=True, kw_only=True)
class SceneProbe:
    """Looks at frames one by one; ``report`` sums up."""

    words: SceneWords
    _strips: list[np.ndarray] = field(default_factory=list)
    """Per frame: median colours of top, horizon and bottom [3, 3], 0..1."""
    _centres: list[np.ndarray] = field(default_factory=list)
    """Per frame: each sprite's centre (x, y) in pixels, NaN where it is not seen."""

    def __call__(self, frame_HWC: np.ndarray) -> None:
        """Take the next frame, uint8 of the scenes' size; another size raises ``ValueError``."""
        if frame_HWC.shape != (HEIGHT, WIDTH, 3):
            height, width = frame_HWC.shape[:2]
            raise ValueError(f"size={width}x{height} is not that of procedural scenes; use {WIDTH}x{HEIGHT}")
        strips = [np.median(frame_HWC[rows].reshape(-1, 3), axis=0) for rows in (TOP, HORIZON, BOTTOM)]
        self._strips.append(np.stack(strips) / 255)
        self._centres.append(self._find(frame_HWC[::STEP, ::STEP].astype(np.float32) / 255))

    def report(self, *, fps: float) -> SceneReport:
        """Judge all frames so far."""
        return judge(self.words, np.stack(self._strips), np.stack(self._centres), fps=fps)

    def _find(self, image_HWC: np.ndarray) -> np.ndarray:
        """Return each sprite's centre in pixels of the whole picture [sprites, 2]; NaN for too few pixels."""
        plain = background(self.words, rows=image_HWC.shape[0])
        others = np.stack([_squared(image_HWC, colour) for colour in plain]).min(axis=0)
        by_colour = {name: _squared(image_HWC, np.array(rgb, np.float32)) for name, rgb in COLOURS.items()}
        nearest = np.minimum(others, np.stack(list(by_colour.values())).min(axis=0))
        centres = np.full((len(self.words.movers), 2), np.nan)
        for i, mover in enumerate(self.words.movers):
            own = by_colour[mover.colour]
            rows, columns = np.nonzero((own <= nearest) & (own < NEAR**2))
            if len(rows) >= LEAST_PIXELS:
                centres[i] = STEP * np.median(columns), STEP * np.median(rows)
        return centres


def judge(words: SceneWords, strips_FSC: np.ndarray, centres_FM2: np.ndarray, *, fps: float) -> SceneReport:
    """Judge a video by each frame's strips, in 0..1, and by its movers' centres in pixels, NaN where it is not seen."""
    error = palette_error(words, strips_FSC)
    first, last = ends(len(error), fps=fps)
    seen = [float(np.isfinite(centres_FM2[:, i, 0]).mean()) for i in range(len(words.movers))]
    moves = [_moves_as(mover, centres_FM2[:, i]) for i, mover in enumerate(words.movers)]
    skies = {sky: _expected_strips(words.hills, sky)[:2] for sky in SKIES}
    hills = {name: _expected_strips(name, words.sky)[2:] for name in HILLS}
    return SceneReport(
        sky=_share_nearest(strips_FSC[:, :2], skies, words.sky),
        hills=_share_nearest(strips_FSC[:, 2:], hills, words.hills),
        colour=float(np.mean([min(1.0, share / VISIBLE_SHARE) for share in seen])),
        motion=float(np.mean(moves)),
        palette_error=float(error.mean()),
        palette_drift=float(error[last].mean() - error[first].mean()),
    )


def palette_error(words: SceneWords, strips_FSC: np.ndarray) -> np.ndarray:
    """Return the distance of sky and hills from the caption's colours in each frame, in levels of 255 [F]."""
    expected = _expected_strips(words.hills, words.sky)
    found: np.ndarray = 255 * np.linalg.norm(strips_FSC - expected, axis=2).mean(axis=1)
    return found


def _expected_strips(hills: str, sky: str) -> np.ndarray:
    """Return the colours of top, horizon and bottom [3, 3]."""
    return np.array([*(sky_colour(sky, row) for row in SKY_ROWS), near_hill_colour(hills, sky)])


def _share_nearest(strips_FSC: np.ndarray, choices: dict[str, np.ndarray], right: str) -> float:
    """Return the share of frames whose strips are nearest to the choice ``right``."""
    distance = np.stack([np.linalg.norm(strips_FSC - colours, axis=2).sum(axis=1) for colours in choices.values()])
    return float((distance.argmin(axis=0) == list(choices).index(right)).mean())


def background(words: SceneWords, *, rows: int) -> list[np.ndarray]:
    """Return the colours that are no sprite: the sky by row [rows, 1, 3], then hills, sun and sails [3]."""
    sky = np.array([sky_colour(words.sky, STEP * row) for row in range(rows)], np.float32)
    plain = (near_hill_colour(words.hills, words.sky), far_hill_colour(words.hills, words.sky), disc_colour(words.sky))
    return [sky[:, None], *(np.array(colour, np.float32) for colour in plain)]


def _squared(image_HWC: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Return each pixel's squared distance from a colour."""
    found: np.ndarray = np.square(image_HWC - colour).sum(axis=2)
    return found


def _moves_as(mover: Mover, centres_F2: np.ndarray) -> float:
    """Return 1 when a sprite's path fits its caption, else 0; one that is hardly seen fits nothing."""
    steps = centres_F2[LAG:] - centres_F2[:-LAG]
    steps = steps[np.isfinite(steps).all(axis=1)]
    steps = steps[np.abs(steps).max(axis=1, initial=0) < JUMP]
    if len(steps) < LAG:
        return 0.0
    right, left = (float((sign * steps[:, 0] > 0.5).mean()) for sign in (1, -1))
    up, down = (float((sign * steps[:, 1] > 0.5).mean()) for sign in (-1, 1))
    if mover.motion.endswith("left"):
        return float(left > 0.5)
    if mover.motion.endswith("right"):
        return float(right > 0.5)
    return float(min(up, down) > BOTH_WAYS)
