"""What ``bench quality`` keeps of its videos besides numbers: frames, and curves over time, to be drawn later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..metrics.batched import Measured
from ..metrics.plot import require_matplotlib

SHOWN = 8
"""Frames that are kept of a video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One variant at one length; curves are means over the captions."""

    shown: np.ndarray
    """Frames of one video, from first to last, uint8 [8, H, W, 3]."""
    palette_error: np.ndarray
    """Distance from the caption's colours in each frame, in levels [F]."""
    sharpness: np.ndarray
    """Of each frame, in levels [F]."""
    cycles: np.ndarray
    """Frequencies, in cycles per latent frame."""
    power: np.ndarray
    """Spectrum of the change where latent frames meet, as shares of its variance."""

    @classmethod
    def of(cls, measured: Sequence[Measured], *, shown: np.ndarray) -> "Look":
        """Average over captions; videos must be equally long."""
        evaluations = [each.evaluation for each in measured]
        return cls(
            shown=shown,
            palette_error=np.mean([each.palette_error for each in measured], axis=0),
            sharpness=np.mean([each.series.sharpness for each in evaluations], axis=0),
            cycles=evaluations[0].spectrum.cycles,
            power=np.mean([each.spectrum.power for each in evaluations], axis=0),
        )


def _file(folder: Path, latents: int) -> Path:
    return folder / f"looks_{latents}.npz"


def keep_looks(looks: Mapping[str, Look], folder: Path, *, latents: int) -> None:
    """Add the variants' looks to those of this length that ``folder`` has."""
    folder.mkdir(parents=True, exist_ok=True)
    target = _file(folder, latents)
    both = read_looks(folder, latents=latents) | dict(looks)
    arrays = {
        f"{name}/{field.name}": getattr(look, field.name) for name, look in both.items() for field in fields(Look)
    }
    part = target.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    part.replace(target)


def read_looks(folder: Path, *, latents: int) -> dict[str, Look]:
    """Return the looks of this length by variant, none if there is no file."""
    source = _file(folder, latents)
    if not source.is_file():
        return {}
    with np.load(source) as arrays:
        names = dict.fromkeys(name.split("/")[0] for name in arrays.files)
        return {name: Look(**{f.name: arrays[f"{name}/{f.name}"] for f in fields(Look)}) for name in names}


def save_sheet(looks: Mapping[str, Look], path: Path) -> None:
    """Write a picture with a row of frames per variant, named at its left, at half the frames' size."""
    from PIL import Image, ImageDraw

    margin = 110
    strips = [(name, np.concatenate(list(look.shown), axis=1)) for name, look in looks.items()]
    height, width = strips[0][1].shape[0] // 2, strips[0][1].shape[1] // 2
    picture = Image.new("RGB", (margin + width, height * len(strips)), "white")
    draw = ImageDraw.Draw(picture)
    for row, (name, strip) in enumerate(strips):
        picture.paste(Image.fromarray(strip).resize((width, height), Image.Resampling.LANCZOS), (margin, row * height))
        draw.text((6, row * height + height // 2 - 6), name, fill="black")
    picture.save(path)


def save_curves(looks: Mapping[str, Look], path: Path, *, fps: float, periods: Mapping[str, int]) -> None:
    """Write a PNG of the palette's error, the sharpness and the spectrum, a line per variant.

    ``periods`` are marked in the spectrum: name -> latent frames.
    """
    figure = require_matplotlib()(figsize=(13, 4.2), layout="constrained")
    error, sharp, rhythm = figure.subplots(1, 3)
    for name, look in looks.items():
        seconds = np.arange(len(look.palette_error)) / fps
        error.plot(seconds, look.palette_error, label=name, linewidth=1)
        sharp.plot(seconds, look.sharpness, linewidth=1)
        rhythm.plot(look.cycles, look.power, linewidth=1)
    for name, period in periods.items():
        rhythm.axvline(1 / period, color="0.5", linestyle=":")
        rhythm.text(1 / period, 0.99, f" {name}", transform=rhythm.get_xaxis_transform(), va="top", fontsize="small")
    _name(error, title="distance from the caption's colours", x="seconds", y="levels")
    _name(sharp, title="sharpness", x="seconds", y="levels")
    _name(
        rhythm, title="rhythm of the change between latent frames", x="cycles per latent frame", y="share of variance"
    )
    error.legend(fontsize="small")
    figure.savefig(path, dpi=100, format="png")


def _name(axes: Any, *, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
