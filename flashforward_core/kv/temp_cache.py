"""TempCache: tokens that say the same again are kept once, with their number on the logit (FAST-AR, arXiv 2602.01801).

Merging keeps the most recent key, the count-weighted mean of the values, and adds log m to the logit. It is exact
when the keys are equal (Lemma 5.1), also for tokens that were merged before.
Letters: B batch, N tokens, L own tokens of one latent frame, H heads, D head dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..kv_policy import TempCacheOptions
from ..model.layers import at_least_fp32
from .ann import nearest
from .tokens import Grid, Tokens, join, unrotate, whole_frames


def merge_groups(tokens: Tokens, root_BNH: Tensor, *, priority_BNH: Tensor) -> Tokens:
    """Merge every token into the group of ``root_BNH``, the index of one of its members; others become empty.

    The group takes the key and the place of its member with the highest priority (the last of equals).
    """
    count = tokens.count_BNH
    total = torch.zeros_like(count).scatter_add_(1, root_BNH, count)
    wide_root = root_BNH.unsqueeze(-1).expand_as(tokens.v_BNHD)
    v = at_least_fp32(tokens.v_BNHD)
    weighted = torch.zeros_like(v).scatter_add_(1, wide_root, v * count.unsqueeze(-1).to(v.dtype))
    mean = weighted / total.unsqueeze(-1).to(v.dtype).clamp(min=1)
    alone = (total == count).unsqueeze(-1)  # nothing joined: keep the very bytes
    newest = _newest_member(root_BNH, priority_BNH.masked_fill(count == 0, -torch.inf))
    moved = tokens.take(newest)
    is_root = root_BNH == torch.arange(root_BNH.shape[1], device=root_BNH.device).view(1, -1, 1)
    return Tokens(
        k_BNHD=moved.k_BNHD,
        v_BNHD=torch.where(alone, tokens.v_BNHD, mean.to(tokens.v_BNHD.dtype)),
        count_BNH=torch.where(is_root, total, 0.0),
        place_BNH=moved.place_BNH,
    )


def _newest_member(root_BNH: Tensor, priority_BNH: Tensor) -> Tensor:
    """Return per root the index of its member with the highest priority; elsewhere a token's own index."""
    own = torch.arange(root_BNH.shape[1], device=root_BNH.device).view(1, -1, 1).expand_as(root_BNH)
    best = torch.full_like(priority_BNH, -torch.inf).scatter_reduce_(1, root_BNH, priority_BNH, reduce="amax")
    wins = priority_BNH == best.gather(1, root_BNH)
    winner = torch.full_like(root_BNH, -1).scatter_reduce_(1, root_BNH, own.where(wins, -1), reduce="amax")
    return torch.where(winner >= 0, winner, own)


def absorb(cache: Tokens | None, own: Tokens, q_BLHD: Tensor, *, grid: Grid, options: TempCacheOptions) -> Tokens:
    """Add the tokens of one latent frame, merging those whose query finds a similar key in the ``cache``.

    ``q_BLHD`` holds the frame's own rotated queries. Matching is on keys and queries as they were before rotary
    positions. Several tokens may join one cached token; then the most similar one's key stays.
    """
    if cache is None:
        return own
    num_cached = cache.k_BNHD.shape[1]
    cached_plain = unrotate(cache.k_BNHD, cache.place_BNH, grid=grid)
    own_plain = unrotate(own.k_BNHD, own.place_BNH, grid=grid)
    q_plain = unrotate(q_BLHD, own.place_BNH, grid=grid)
    match_BLH = nearest(q_plain, cached_plain, options=options.ann, alive_BNH=cache.count_BNH > 0)
    matched = cached_plain.gather(1, match_BLH.unsqueeze(-1).expand_as(own_plain))
    similarity_BLH = cosine_similarity(own_plain, matched, dim=-1)
    joins = (similarity_BLH >= options.threshold) & (cache.count_BNH.gather(1, match_BLH) > 0)
    every = torch.arange(num_cached + q_BLHD.shape[1], device=q_BLHD.device).view(1, -1, 1)
    every = every.expand(own.count_BNH.shape[0], -1, own.count_BNH.shape[2])
    root_BNH = torch.cat([every[:, :num_cached], torch.where(joins, match_BLH, every[:, num_cached:])], dim=1)
    below = similarity_BLH.new_full(cache.count_BNH.shape, -2.0)  # older than any of the frame's own
    return merge_groups(join(cache, own), root_BNH, priority_BNH=torch.cat([below, similarity_BLH], dim=1))


def absorb_frames(
    cache: Tokens | None,
    q_BLHD: Tensor,
    k_BLHD: Tensor,
    v_BLHD: Tensor,
    *,
    frames: Tensor,
    grid: Grid,
    options: TempCacheOptions,
) -> Tokens:
    """Add several whole latent ``frames`` [F] in order; later ones may join earlier ones."""
    size = grid.frame_tokens
    for n in range(len(frames)):
        at = slice(n * size, (n + 1) * size)
        own = whole_frames(k_BLHD[:, at], v_BLHD[:, at], frames=frames[n : n + 1], grid=grid)
        cache = absorb(cache, own, q_BLHD[:, at], grid=grid, options=options)
    assert cache is not None, "there are frames"
    return cache


def squeeze(tokens: Tokens, *, capacity: int | None = None) -> Tokens:
    """Return ``tokens`` without empty ones, as far as heads allow: all heads get the same number.

    Without ``capacity`` it is what the fullest head needs (which waits for the device once). With it, the tokens of
    the latest places stay. The order of those that stay is kept.
    """
    alive = tokens.count_BNH > 0
    if capacity is None:
        capacity = int(alive.sum(dim=1).max())
    capacity = min(capacity, alive.shape[1])
    rank = torch.where(alive, tokens.place_BNH, torch.iinfo(torch.int64).min)
    return tokens.take(rank.argsort(dim=1, descending=True, stable=True)[:, :capacity].sort(dim=1).values)
