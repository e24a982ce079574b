"""The same measurements for many videos at once, on whatever device their frames are.

``collect`` and ``SceneProbe`` take one frame after the other through numpy; here a batch of videos goes through torch,
so that frames that a decoder left on a GPU never leave it. Legend: B videos, F frames, H rows, W columns, S sprites.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..scenes import COLOURS, HEIGHT, WIDTH, SceneWords
from .evaluation import Evaluation, Layout, evaluation_of
from .faithfulness import BOTTOM, HORIZON, LEAST_PIXELS, NEAR, STEP, TOP, background, judge, palette_error
from .series import LUMA_709, MOTION_LAG, MOTION_THRESHOLD, VideoSeries

LAYOUT = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is known of one video once all its frames were seen."""

    evaluation: Evaluation
    palette_error: np.ndarray
    """Distance of sky and hills from the caption's colours in each frame, in levels [F]."""


class BatchedProbe:
    """Looks at the frames of several procedural scenes, as they are decoded; ``report`` sums up."""

    def __init__(self, words: Sequence[SceneWords], *, device: torch.device | str) -> None:
        """Take what each video's caption says, in the order of the batch."""
        self.words = list(words)
        rows = HEIGHT // STEP
        plain = [np.stack([np.broadcast_to(c, (rows, 1, 3)) for c in background(w, rows=rows)]) for w in words]
        self._background = torch.tensor(np.stack(plain), device=device)  # [B, colours, H/2, 1, 3]
        self._palette = torch.tensor(list(COLOURS.values()), device=device)
        self._luma = torch.tensor(LUMA_709, device=device)
        names = list(COLOURS)
        most = max(len(w.movers) for w in words)
        movers = [[names.index(m.colour) for m in w.movers] for w in words]
        self._movers = torch.tensor([m + m[:1] * (most - len(m)) for m in movers], device=device)  # [B, S]
        self._before: Tensor | None = None
        self._lumas: Tensor | None = None  # of the last 8 frames
        self._parts: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def __call__(self, frames_BFHWC: Tensor) -> None:
        """Take the next frames of every video, uint8 of the scenes' size; another size raises ``ValueError``."""
        if frames_BFHWC.shape[2:] != (HEIGHT, WIDTH, 3):
            height, width = frames_BFHWC.shape[2:4]
            raise ValueError(f"size={width}x{height} is not that of procedural scenes; use {WIDTH}x{HEIGHT}")
        pixels = frames_BFHWC.float()
        luma = (pixels * self._luma).sum(-1)
        self._note("colour", pixels.mean((2, 3)))
        self._note("sharpness", (luma.diff(dim=2).abs().mean((2, 3)) + luma.diff(dim=3).abs().mean((2, 3))) / 2)
        self._note("change", self._changes(pixels))
        self._note("moved", self._moves(luma))
        self._note("strips", _strip_medians(frames_BFHWC))
        self._note("centres", self._centres(pixels[:, :, ::STEP, ::STEP] / 255))

    def report(self, *, layout: Layout = LAYOUT) -> list[Measured]:
        """Judge all frames so far, video by video. Fewer than two frames raise ``ValueError``."""
        found = {name: torch.cat(parts, dim=1).double().cpu().numpy() for name, parts in self._parts.items()}
        return [self._measured({n: values[row] for n, values in found.items()}, row, layout) for row in self._rows]

    @property
    def _rows(self) -> range:
        return range(len(self.words))

    def _measured(self, found: dict[str, np.ndarray], row: int, layout: Layout) -> Measured:
        frames = len(found["colour"])
        if frames < 2:
            raise ValueError(f"the video has {frames} frames; flicker and motion need 2 or more")
        moved = found["moved"]
        if not len(moved):
            assert self._lumas is not None
            first, last = self._lumas[row, 0], self._lumas[row, -1]
            moved = np.array([float(((last - first).abs() > MOTION_THRESHOLD).float().mean())])
        words = self.words[row]
        series = VideoSeries(change=found["change"], moved=moved, colour=found["colour"], sharpness=found["sharpness"])
        centres = found["centres"][:, : len(words.movers)]
        report = judge(words, found["strips"], centres, fps=layout.fps)
        return Measured(
            evaluation=evaluation_of(series, scene=report, layout=layout),
            palette_error=palette_error(words, found["strips"]),
        )

    def _note(self, name: str, values: Tensor) -> None:
        self._parts.setdefault(name, []).append(values)

    def _changes(self, pixels: Tensor) -> Tensor:
        """Return each frame's mean difference from the one before, where there is one [B, F]."""
        joined = pixels if self._before is None else torch.cat((self._before, pixels), dim=1)
        self._before = pixels[:, -1:].clone()
        return joined.diff(dim=1).abs().mean((2, 3, 4))

    def _moves(self, luma: Tensor) -> Tensor:
        """Return the share of pixels that changed within 8 frames, for frames with one 8 before [B, F]."""
        joined = luma if self._lumas is None else torch.cat((self._lumas, luma), dim=1)
        self._lumas = joined[:, -MOTION_LAG:].clone()
        moved = (joined[:, MOTION_LAG:] - joined[:, :-MOTION_LAG]).abs() > MOTION_THRESHOLD
        return moved.float().mean((2, 3))

    def _centres(self, image: Tensor) -> Tensor:
        """Return each sprite's centre in pixels of the whole picture [B, F, S, 2]; NaN for too few pixels."""
        plain = self._background.unsqueeze(1)  # [B, 1, colours, H/2, 1, 3]
        nearest = torch.stack([((image - plain[:, :, i]) ** 2).sum(-1) for i in range(plain.shape[2])]).amin(0)
        coloured = torch.stack([((image - colour) ** 2).sum(-1) for colour in self._palette], dim=1)  # [B, colours, F…]
        nearest = torch.minimum(nearest, coloured.amin(1))
        own = torch.stack([coloured[row, picked] for row, picked in enumerate(self._movers)])  # [B, S, F, H/2, W/2]
        mask = (own <= nearest.unsqueeze(1)) & (own < NEAR**2)
        centres = STEP * torch.stack((_median_place(mask.sum(3)), _median_place(mask.sum(4))), dim=-1)
        seen = (mask.sum((3, 4)) >= LEAST_PIXELS).unsqueeze(-1)
        return torch.where(seen, centres, torch.nan).transpose(1, 2)


def _strip_medians(frames_BFHWC: Tensor) -> Tensor:
    """Return the median colours of top, horizon and bottom, 0..1 [B, F, 3, 3]."""
    strips = [frames_BFHWC[:, :, rows].movedim(-1, 2).flatten(3) for rows in (TOP, HORIZON, BOTTOM)]
    return torch.stack([_median_of_bytes(strip.contiguous()) for strip in strips], dim=2) / 255


def _median_of_bytes(values: Tensor) -> Tensor:
    """Return the median over the last axis of uint8 values: the mean of both middle ones, as numpy's.

    The k-th smallest is the least number that k values do not exceed, which eight counts find: no sorting.
    """
    count = values.shape[-1]
    middles = []
    for rank in ((count + 1) // 2, count // 2 + 1):
        low = torch.zeros(values.shape[:-1], dtype=torch.int16, device=values.device)
        high = torch.full_like(low, 255)
        for _ in range(8):
            middle = (low + high) // 2
            enough = (values <= middle.to(torch.uint8).unsqueeze(-1)).sum(-1) >= rank
            low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        middles.append(high)
    return (middles[0].float() + middles[1].float()) / 2


def _median_place(counts: Tensor) -> Tensor:
    """Return the median place of what ``counts`` [..., N] counts at places 0..N-1; any number where it is nothing."""
    sums = counts.cumsum(-1)
    total = sums[..., -1:]
    middles = [(sums < rank).sum(-1) for rank in ((total + 1) // 2, total // 2 + 1)]
    return (middles[0].float() + middles[1].float()) / 2
