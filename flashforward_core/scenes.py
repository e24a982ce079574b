"""What the embedded model's captions promise: its procedural scenes, their palette and their grammar. Torch-free.

``train/synthetic.py`` draws by it, and ``metrics`` judges by it. Colours are sRGB in 0..1; rows count from the top.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

WIDTH, HEIGHT, FPS = 192, 128, 16
HELD_OUT = 1_000_000  # scenes from this number on are never trained on

Colour = tuple[float, float, float]

# sky at the top, sky at the horizon, light that tints the land
SKIES: dict[str, tuple[Colour, Colour, Colour]] = {
    "dawn": ((0.45, 0.55, 0.85), (0.98, 0.80, 0.72), (0.95, 0.85, 0.85)),
    "noon": ((0.25, 0.55, 0.95), (0.75, 0.90, 1.00), (1.00, 1.00, 1.00)),
    "dusk": ((0.35, 0.20, 0.50), (0.98, 0.50, 0.25), (0.80, 0.60, 0.55)),
    "night": ((0.02, 0.03, 0.12), (0.10, 0.14, 0.32), (0.40, 0.44, 0.60)),
}
HILLS: dict[str, Colour] = {
    "green": (0.30, 0.62, 0.25),
    "brown": (0.55, 0.38, 0.22),
    "snowy": (0.88, 0.92, 0.97),
    "golden": (0.85, 0.68, 0.28),
}
COLOURS: dict[str, Colour] = {
    "red": (0.86, 0.12, 0.14),
    "orange": (0.98, 0.55, 0.08),
    "yellow": (0.98, 0.90, 0.20),
    "blue": (0.12, 0.30, 0.92),
    "purple": (0.58, 0.18, 0.78),
    "white": (0.97, 0.97, 0.97),
}
KINDS = ("ball", "boat", "balloon", "bird")
MOTIONS = ("bounces", "drifts left", "drifts right", "circles", "crosses left", "crosses right")

# A clip begins as its caption says, give or take a little: what a caption leaves wide open, few stages average away.
HABITATS: dict[str, tuple[float, float]] = {
    "bird": (32, 8),
    "balloon": (50, 11),
    "ball": (68, 9),
    "boat": (88, 12),
}
"""Row of the centre, and seconds of one turn of its motion."""
LIGHTS: dict[str, tuple[float, float]] = {"dawn": (45, 56), "noon": (96, 23), "dusk": (147, 56), "night": (60, 23)}
"""Column and row of the sun or moon."""

HORIZON_ROW = 96  # where the sky's gradient ends
NEAR_SHADE, FAR_SHADE = 0.85, 0.6  # of the land's colour; the far hills' rest is the horizon's haze
SUN, MOON = (1.0, 0.95, 0.70), (0.93, 0.94, 0.98)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """A sprite, as a caption names it."""

    colour: str
    kind: str
    motion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneWords:
    """What a caption of a procedural scene says."""

    sky: str
    hills: str
    movers: tuple[Mover, ...]


def _one_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in words)


_MOVER = rf"an? ({_one_of(COLOURS)}) ({_one_of(KINDS)}) ({_one_of(MOTIONS)})"
_CAPTION = re.compile(rf"({_MOVER}(?: and {_MOVER})*) over ({_one_of(HILLS)}) hills at ({_one_of(SKIES)})\.?")


def parse_caption(caption: str) -> SceneWords | None:
    """Read a caption of a procedural scene; None for any other text."""
    match = _CAPTION.fullmatch(caption.strip().lower())
    if match is None:
        return None
    movers = tuple(Mover(colour=c, kind=k, motion=m) for c, k, m in re.findall(_MOVER, match[1]))
    hills, sky = match.groups()[-2:]
    return SceneWords(sky=sky, hills=hills, movers=movers)


def advice(prompt: str) -> str:
    """Say what the embedded model understands, to whoever asks it for something else; empty for its own captions."""
    if parse_caption(prompt) is not None:
        return ""
    return (
        "the embedded model knows only captions such as 'a red balloon drifts right over green hills at dusk' "
        f"(sprites: {', '.join(KINDS)}; ways to move: {', '.join(MOTIONS)}); of other prompts it makes what it can"
    )


def _mix(first: Colour, second: Colour, share: float) -> Colour:
    """Return ``first`` with a ``share`` of ``second``."""
    red, green, blue = (a + share * (b - a) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _tinted(hills: str, sky: str, shade: float) -> Colour:
    red, green, blue = (shade * land * light for land, light in zip(HILLS[hills], SKIES[sky][2], strict=True))
    return red, green, blue


def sky_colour(sky: str, row: float) -> Colour:
    """Return the sky's colour at a pixel row."""
    top, horizon, _ = SKIES[sky]
    return _mix(top, horizon, min(1.0, max(0.0, row / HORIZON_ROW)))


def near_hill_colour(hills: str, sky: str) -> Colour:
    """Return the colour of the near hills, which fill the picture's bottom."""
    return _tinted(hills, sky, NEAR_SHADE)


def far_hill_colour(hills: str, sky: str) -> Colour:
    """Return the colour of the far hills, which the horizon's haze lightens."""
    return _mix(SKIES[sky][1], _tinted(hills, sky, 1.0), FAR_SHADE)


def disc_colour(sky: str) -> Colour:
    """Return the colour of the sun or moon."""
    return MOON if sky == "night" else SUN


@dataclass(frozen=True, slots=True, kw_only=True)
class Sprite:
    """One moving thing; phases in turns, lengths in pixels, times in seconds."""

    kind: str
    colour: str
    motion: str
    radius: float
    centre_y: float
    period_s: float
    phase: float
    phase_y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that a clip shows; what the caption leaves open was drawn at random."""

    sky: str
    hills: str
    sprites: tuple[Sprite, ...]
    light_x: float
    light_y: float
    ridge_phases: tuple[float, ...]
    scroll: float
    """Near-hill speed in pixels per second."""
    time_s: float
    """Scene time of the clip's first frame."""

    @property
    def caption(self) -> str:
        movers = " and ".join(
            f"a{'n' if s.colour == 'orange' else ''} {s.colour} {s.kind} {s.motion}" for s in self.sprites
        )
        return f"{movers} over {self.hills} hills at {self.sky}"


def _near(rng: random.Random, centre: float, by: float) -> float:
    return rng.uniform(centre - by, centre + by)


def _sample_sprite(rng: random.Random, kind: str, colour: str) -> Sprite:
    row, period_s = HABITATS[kind]
    return Sprite(
        kind=kind,
        colour=colour,
        motion=rng.choice(MOTIONS),
        radius=_near(rng, 15, 1),
        centre_y=_near(rng, row, 4),
        period_s=_near(rng, period_s, 0.03 * period_s),
        phase=_near(rng, 0.2, 0.04),
        phase_y=_near(rng, 0.5, 0.1),
    )


def _ridge_phases(rng: random.Random, hills: str) -> tuple[float, ...]:
    """Return phases near those that hills of this sort have: each sort has a line of its own."""
    own = random.Random(f"ridge-{hills}")
    return tuple(_near(rng, own.random(), 0.06) for _ in range(6))


def sample_scene(seed: int, *, anytime: bool = False) -> Scene:
    """Draw scene number ``seed``; the same number gives the same scene everywhere.

    A clip of it begins where the scene does, or with ``anytime`` at some moment of its first minute.
    """
    rng = random.Random(f"scene-{seed}")
    count = 2 if rng.random() < 0.4 else 1
    kinds, colours = rng.sample(KINDS, count), rng.sample(tuple(COLOURS), count)
    sky, hills = rng.choice(tuple(SKIES)), rng.choice(tuple(HILLS))
    light_x, light_y = LIGHTS[sky]
    return Scene(
        sky=sky,
        hills=hills,
        sprites=tuple(_sample_sprite(rng, *looks) for looks in zip(kinds, colours, strict=True)),
        light_x=_near(rng, light_x, 8),
        light_y=_near(rng, light_y, 3),
        ridge_phases=_ridge_phases(rng, hills),
        scroll=_near(rng, 7, 0.5),
        time_s=rng.uniform(0, 60) if anytime else 0.0,
    )
