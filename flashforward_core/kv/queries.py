"""Running statistics of queries before rotary positions, and the future queries that they predict.

Future Forcing (arXiv 2605.30083) rests on one observation: before rotary positions, the queries of a trained
autoregressive model hardly change from frame to frame.
Letters: B batch, T tokens per latent frame, L tokens of whole frames, H heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.layers import at_least_fp32, rotate
from .tokens import Grid, rotation_at


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStatistics:
    """Mean and spread over latent frames, for each token of a frame and each head."""

    frames: int
    """Latent frames seen."""
    mean_BTHD: Tensor
    deviation_BTH: Tensor
    """Sum over frames of the squared distance from the mean."""

    def update(self, q_BLHD: Tensor, *, grid: Grid) -> "QueryStatistics":
        """Return the statistics of all frames so far and the whole frames of ``q_BLHD``, before rotary positions."""
        return self.merge(query_statistics(q_BLHD, grid=grid))

    def merge(self, new: "QueryStatistics") -> "QueryStatistics":
        """Return the statistics of both; either both or none have one mean per head."""
        total = self.frames + new.frames
        step = new.mean_BTHD - self.mean_BTHD
        between = step.square().sum(dim=-1) * (self.frames * new.frames / total)
        return QueryStatistics(
            frames=total,
            mean_BTHD=self.mean_BTHD + step * (new.frames / total),
            deviation_BTH=self.deviation_BTH + new.deviation_BTH + between,
        )

    @property
    def stationarity_BTH(self) -> Tensor:
        """The mean's share of the queries' energy: 1 when every frame asks the same, 0 when they cancel."""
        energy = self.mean_BTHD.square().sum(dim=-1)
        return energy / (energy + self.deviation_BTH / self.frames)

    def per_head(self) -> "QueryStatistics":
        """Return one mean for all tokens of a frame, where the memory of T of them matters."""
        mean = self.mean_BTHD.mean(dim=1, keepdim=True)
        between = (self.mean_BTHD - mean).square().sum(dim=(1, 3)).unsqueeze(1)
        tokens = self.mean_BTHD.shape[1]
        deviation = (self.deviation_BTH.sum(dim=1, keepdim=True) + self.frames * between) / tokens
        return QueryStatistics(frames=self.frames, mean_BTHD=mean, deviation_BTH=deviation)


def query_statistics(q_BLHD: Tensor, *, grid: Grid) -> QueryStatistics:
    """Return the statistics of whole latent frames of queries, before rotary positions; float32 at least."""
    q_BFTHD = at_least_fp32(q_BLHD).unflatten(1, (-1, grid.frame_tokens))
    mean = q_BFTHD.mean(dim=1)
    deviation = (q_BFTHD - mean.unsqueeze(1)).square().sum(dim=(1, 4))
    return QueryStatistics(frames=q_BFTHD.shape[1], mean_BTHD=mean, deviation_BTH=deviation)


def proxies(statistics: QueryStatistics, *, frames: Sequence[int], grid: Grid, cells: int, cell_queries: int) -> Tensor:
    """Return predicted queries [B, G, R, H, D]: mean queries rotated to each of the future ``frames``.

    Of a frame's tokens a sample of ``cells`` runs of ``cell_queries``, evenly spaced, is taken (all when there are
    fewer): a group is one run in one frame, so G = len(frames) · cells.
    """
    mean = statistics.mean_BTHD
    cell_queries = min(cell_queries, grid.frame_tokens)
    cells = min(cells, grid.frame_tokens // cell_queries)
    count = cells * cell_queries
    inside = torch.arange(count, device=mean.device) * grid.frame_tokens // count
    places = torch.tensor(frames, device=mean.device)[:, None] * grid.frame_tokens + inside
    turn = rotation_at(places.flatten().unsqueeze(-1), grid=grid, dtype=mean.dtype)
    sampled = mean.expand(-1, grid.frame_tokens, -1, -1)[:, inside].repeat(1, len(frames), 1, 1)
    return rotate(sampled, turn).unflatten(1, (len(frames) * cells, cell_queries))
