"""Future Forcing: keep what coming frames will look at (arXiv 2605.30083). Training-free.

Mean queries stand for those of coming chunks. A cached token's score is λ · the attention that they would give it +
(1 − λ) · the attention that it has got so far. The lowest are evicted, each one's value merged into the kept token
that the future would look at in the same way, and the kept frames close up so that distances stay as trained.
Ours: a token with merged values draws the attention of all its members, by a bias on its logit (docs/decisions.md).
Letters: B batch, G groups of predicted queries, N cached tokens, M kept, E evicted, H heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kv_policy import AnnOptions, FutureForcingOptions
from ..model.layers import at_least_fp32
from .ann import nearest
from .attention_mass import attention_mass
from .queries import QueryStatistics, proxies
from .tokens import Grid, Tokens, close_gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """Attention that each cached token has got, on average over the chunks that could see it."""

    mass_BNH: Tensor
    chunks_BNH: Tensor
    """Chunks that could see it, float32."""

    def update(self, mass_BNH: Tensor) -> "Attended":
        """Return the running mean with one more chunk's ``mass_BNH``."""
        chunks = self.chunks_BNH + 1
        return Attended(mass_BNH=self.mass_BNH + (mass_BNH - self.mass_BNH) / chunks, chunks_BNH=chunks)

    def append(self, count: int) -> "Attended":
        """Return room for ``count`` more tokens, which nobody has seen yet."""
        fresh = self.mass_BNH.new_zeros(self.mass_BNH.shape[0], count, self.mass_BNH.shape[2])
        return Attended(
            mass_BNH=torch.cat([self.mass_BNH, fresh], dim=1), chunks_BNH=torch.cat([self.chunks_BNH, fresh], dim=1)
        )

    def take(self, index_BMH: Tensor) -> "Attended":
        """Return what the tokens at ``index_BMH`` have got."""
        return Attended(mass_BNH=self.mass_BNH.gather(1, index_BMH), chunks_BNH=self.chunks_BNH.gather(1, index_BMH))


def received(q_BLHD: Tensor, k_BNHD: Tensor, *, stride: int, bias_BHN: Tensor | None = None) -> Tensor:
    """Return each key's mean attention weight [B, N, H] from every ``stride``-th query; fast kernels return none."""
    return attention_mass(q_BLHD[:, ::stride].unsqueeze(1), k_BNHD, bias_BHN=bias_BHN).squeeze(1)


def future_frames(options: FutureForcingOptions, *, next_frame: int, chunk_frames: int) -> Sequence[int]:
    """Return the latent frames in the middle of the coming chunks that are looked at."""
    return [next_frame + (ahead - 1) * chunk_frames + chunk_frames // 2 for ahead in options.lookahead]


def future_profile(
    tokens: Tokens,
    statistics: QueryStatistics,
    *,
    next_frame: int,
    chunk_frames: int,
    grid: Grid,
    options: FutureForcingOptions,
) -> Tensor:
    """Return the attention [B, G, N, H] that groups of predicted queries would give to ``tokens``."""
    frames = future_frames(options, next_frame=next_frame, chunk_frames=chunk_frames)
    q_BGRHD = proxies(statistics, frames=frames, grid=grid, cells=options.cells, cell_queries=options.cell_queries)
    return attention_mass(q_BGRHD, tokens.k_BNHD, bias_BHN=tokens.bias_BHN)


def hybrid_scores(profile_BGNH: Tensor, attended_BNH: Tensor, *, future_weight: float) -> Tensor:
    """Return λ · future + (1 − λ) · history, [B, N, H]."""
    return future_weight * profile_BGNH.mean(dim=1) + (1 - future_weight) * attended_BNH


def split(scores_BNH: Tensor, *, keep: int, sink: int, recent: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the ``keep`` tokens with the highest scores and of the others, both rising.

    The first ``sink`` and the last ``recent`` tokens are kept whatever their score. Every head keeps as many.
    """
    scores = scores_BNH.clone()
    scores[:, :sink] = torch.inf
    scores[:, scores.shape[1] - recent :] = torch.inf
    order = scores.argsort(dim=1, descending=True, stable=True)
    return order[:, :keep].sort(dim=1).values, order[:, keep:].sort(dim=1).values


def merge_evicted(
    tokens: Tokens, profile_BGNH: Tensor, *, kept_BMH: Tensor, evicted_BEH: Tensor, weigh: bool
) -> Tokens:
    """Return the kept tokens, with the evicted ones' values merged in.

    An evicted token joins the kept one whose profile has the most similar direction. The merged value is the mean of
    its members', weighted by their future attention; the key stays the kept token's. With ``weigh`` its count grows as
    much as its members' future attention exceeds its own, at most to their counts' sum: a key that the predicted
    queries pass by, and others may not, must not become the loudest.
    """
    kept = tokens.take(kept_BMH)
    if not evicted_BEH.shape[1]:
        return kept
    profile_BNHG = profile_BGNH.permute(0, 2, 3, 1)
    of_kept, of_evicted = (_pick(profile_BNHG, index) for index in (kept_BMH, evicted_BEH))
    directions = torch.nn.functional.normalize(of_kept, dim=-1, eps=torch.finfo(of_kept.dtype).tiny)
    largest = of_evicted.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(of_kept.dtype).tiny)
    target_BEH = nearest(of_evicted / largest, directions, options=AnnOptions(method="exact"))
    future_BNH = profile_BGNH.mean(dim=1)
    weight, joining = future_BNH.gather(1, kept_BMH), future_BNH.gather(1, evicted_BEH)
    total = weight.scatter_add(1, target_BEH, joining)
    share = joining / total.gather(1, target_BEH).clamp(min=torch.finfo(total.dtype).tiny)
    v = at_least_fp32(kept.v_BNHD)
    step = (at_least_fp32(_pick(tokens.v_BNHD, evicted_BEH)) - _pick(v, target_BEH)) * share.unsqueeze(-1).to(v.dtype)
    merged = v.scatter_add(1, target_BEH.unsqueeze(-1).expand_as(step), step)
    count = kept.count_BNH
    if weigh:
        louder = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        drawn = count * louder.clamp(min=1).to(count.dtype)  # a weight of 0 must not silence the token
        count = drawn.minimum(count.scatter_add(1, target_BEH, tokens.count_BNH.gather(1, evicted_BEH)))
    return replace(kept, v_BNHD=merged.to(kept.v_BNHD.dtype), count_BNH=count)


def _pick(x_BNHD: Tensor, index_BMH: Tensor) -> Tensor:
    return x_BNHD.gather(1, index_BMH.unsqueeze(-1).expand(-1, -1, -1, x_BNHD.shape[-1]))


def compact(
    tokens: Tokens,
    attended: Attended,
    statistics: QueryStatistics,
    *,
    next_frame: int,
    chunk_frames: int,
    grid: Grid,
    options: FutureForcingOptions,
) -> tuple[Tokens, Attended]:
    """Return at most the budget of tokens, ready for the chunk that starts at ``next_frame``, and their history.

    ``tokens`` are in the order in which they came, whole frames of sink first. Within the budget nothing changes.
    """
    keep = options.budget_frames * grid.frame_tokens
    if tokens.k_BNHD.shape[1] <= keep:
        return tokens, attended
    profile = future_profile(
        tokens, statistics, next_frame=next_frame, chunk_frames=chunk_frames, grid=grid, options=options
    )
    scores = hybrid_scores(profile, attended.mass_BNH, future_weight=options.future_weight)
    sink, recent = (frames * grid.frame_tokens for frames in (options.sink_frames, options.recent_frames))
    kept, evicted = split(scores, keep=keep, sink=sink, recent=recent)
    survivors = merge_evicted(tokens, profile, kept_BMH=kept, evicted_BEH=evicted, weigh=options.weigh_merged)
    return close_gaps(survivors, grid=grid, first=0, stop=next_frame), attended.take(kept)
