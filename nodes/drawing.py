"""Plots for the Report node, drawn with Pillow alone: lanes over time, and curves over a video."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from flashforward_core.engine.events import TaskSpan, Timeline

WIDTH = 1200  # pixels
LEFT, RIGHT, TOP, BOTTOM = 110, 20, 34, 26  # margins of a plot
ROW, CURVE = 30, 150  # heights of a lane and of a plot's area
PAPER, INK, FAINT = "#ffffff", "#222222", "#c8c8c8"
PLANNER, COMMIT, DECODE = "#c77f12", "#8a5cb8", "#777777"
STAGES = ("#2c5796", "#2c86a8", "#2f9277", "#6f9f2a")
FONT_SIZE = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a plot."""

    name: str
    colour: str
    values: Sequence[float]
    """Evenly spread over the plot's length."""


def tone(task: str) -> str:
    """Return a task's colour, by its id."""
    parts = task.split("/")
    if parts[0] == "decode":
        return DECODE
    if "commit" in parts or parts[0] == "compact":
        return COMMIT
    if parts[0] == "planner":
        return PLANNER
    return STAGES[int(parts[-1][1:]) % len(STAGES)] if parts[-1][:1] == "s" else FAINT


def lanes_plot(timeline: Timeline, *, title: str) -> Image.Image:
    """Draw what ran where and when, one row per lane, with a legend in the title's line."""
    image, draw = _sheet(TOP + ROW * len(timeline.lanes) + BOTTOM)
    _text(draw, (10, 8), title)
    unit = (WIDTH - LEFT - RIGHT) / max(timeline.length, 1e-9)
    for row, lane in enumerate(timeline.lanes):
        _text(draw, (10, TOP + row * ROW + 6), f"{lane.name} {lane.device}")
        draw.line([(LEFT, TOP + (row + 1) * ROW - 2), (WIDTH - RIGHT, TOP + (row + 1) * ROW - 2)], fill=FAINT)
    for span in timeline.spans:
        draw.rectangle(_box(span, unit), fill=tone(span.task))
    _legend(draw, [("planner", PLANNER), ("commit", COMMIT), *((f"stage {n}", STAGES[n]) for n in range(len(STAGES)))])
    _axis(draw, image.height - BOTTOM, last=timeline.length)
    return image


def _box(span: TaskSpan, unit: float) -> tuple[float, float, float, float]:
    left, top = LEFT + span.start_s * unit, TOP + span.lane * ROW
    right = max(left, LEFT + span.end_s * unit - 1)  # a gap between neighbours, where there is room for one
    return left, top, right, top + ROW - 5


def curves_plot(
    curves: Sequence[Curve], *, title: str, length_s: float, marks_s: Sequence[float] = (), marks: str = ""
) -> Image.Image:
    """Draw curves over a video's ``length_s`` seconds, from 0 up; ``marks_s`` are upright lines, named ``marks``."""
    image, draw = _sheet(TOP + CURVE + BOTTOM)
    _text(draw, (10, 8), title)
    top = max((value for curve in curves for value in curve.values), default=0.0) or 1.0
    across = WIDTH - LEFT - RIGHT
    for mark in marks_s:
        x = LEFT + across * mark / length_s
        draw.line([(x, TOP), (x, TOP + CURVE)], fill=FAINT)
    for curve in curves:
        step = across / max(len(curve.values) - 1, 1)
        points = [(LEFT + n * step, TOP + CURVE * (1 - value / top)) for n, value in enumerate(curve.values)]
        draw.line(points, fill=curve.colour, width=2)
    _text(draw, (10, TOP - 6), f"{top:.3g}")
    _text(draw, (10, TOP + CURVE - 12), "0")
    _legend(draw, [*((curve.name, curve.colour) for curve in curves), *([(marks, FAINT)] if len(marks_s) else [])])
    _axis(draw, TOP + CURVE, last=length_s)
    return image


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Put plots below each other."""
    whole = Image.new("RGB", (WIDTH, sum(image.height for image in images)), PAPER)
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    return whole


def _sheet(height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (WIDTH, height), PAPER)
    return image, ImageDraw.Draw(image)


def _text(draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str) -> None:
    draw.text(at, words, fill=INK, font=ImageFont.load_default(FONT_SIZE))


def _legend(draw: ImageDraw.ImageDraw, entries: Sequence[tuple[str, str]]) -> None:
    font = ImageFont.load_default(FONT_SIZE)
    x = WIDTH - RIGHT
    for name, colour in reversed(entries):
        x -= draw.textlength(name, font=font)
        draw.text((x, 8), name, fill=INK, font=font)
        draw.rectangle((x - 16, 12, x - 6, 22), fill=colour)
        x -= 32


def _axis(draw: ImageDraw.ImageDraw, y: float, *, last: float) -> None:
    """Write five times below a plot."""
    font = ImageFont.load_default(FONT_SIZE)
    for share in (0, 0.25, 0.5, 0.75, 1):
        words = f"{last * share:.3g} s"
        x = LEFT + (WIDTH - LEFT - RIGHT) * share - share * draw.textlength(words, font=font)
        draw.text((x, y + 4), words, fill=INK, font=font)
