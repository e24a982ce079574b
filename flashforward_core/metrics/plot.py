"""Plots of one video's evaluation, as a PNG. Needs matplotlib, an optional extra."""

from pathlib import Path
from typing import Any

import numpy as np

from .evaluation import Evaluation, Layout
from .seams import latent_change


def require_matplotlib() -> Any:
    """Return matplotlib's Figure class. Raises ``ValueError`` that says what to install."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no window system, no global state
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install matplotlib") from error
    return Figure


def save_plot(found: Evaluation, path: Path, *, layout: Layout, title: str = "") -> None:
    """Write change, spectrum, colour and sharpness of a video to a PNG."""
    figure = require_matplotlib()(figsize=(11, 7), layout="constrained")
    changes, rhythm, colours, sharp = figure.subplots(2, 2).flatten()
    figure.suptitle(title or path.stem)
    _plot_change(changes, found, layout)
    _plot_spectrum(rhythm, found, layout)
    seconds = np.arange(found.series.frames) / layout.fps
    for channel, name in enumerate(("red", "green", "blue")):
        colours.plot(seconds, found.series.colour[:, channel], color=name, linewidth=1)
    colours.set(title=f"mean colour (drift {found.drift.colour:.1f} levels)", xlabel="seconds", ylabel="levels")
    sharp.plot(seconds, found.series.sharpness, linewidth=1)
    sharp.set(title=f"sharpness (drift {found.drift.sharpness:+.2f} octaves)", xlabel="seconds", ylabel="levels")
    figure.savefig(path, dpi=110, format="png")


def _plot_change(axes: Any, found: Evaluation, layout: Layout) -> None:
    change = latent_change(found.series)
    places = np.arange(1, len(change) + 1)
    axes.plot(places, change, color="0.6", linewidth=1)
    for period, colour, name in (
        (layout.chunk_frames, "tab:blue", "chunks"),
        (layout.anchor_stride, "tab:red", "anchors"),
    ):
        chosen = places % period == 0
        axes.plot(places[chosen], change[chosen], ".", color=colour, label=name)
    axes.legend()
    axes.set(title="change where latent frames meet", xlabel="latent frame", ylabel="levels")


def _plot_spectrum(axes: Any, found: Evaluation, layout: Layout) -> None:
    axes.plot(found.spectrum.cycles, found.spectrum.power, color="0.3", linewidth=1)
    for period, colour in ((layout.chunk_frames, "tab:blue"), (layout.anchor_stride, "tab:red")):
        axes.axvline(1 / period, color=colour, linestyle=":", label=f"every {period}")
    axes.legend()
    axes.set(title="its spectrum", xlabel="cycles per latent frame", ylabel="share of variance")
