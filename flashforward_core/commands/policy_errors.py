"""What a policy's cache does to attention, chunk by chunk, while the rollout itself reads the whole history.

A rollout under a policy drifts away from the full cache's, and two drifting videos say little about which cache was
better. Here every policy is fed the same keys, values and queries, those of the full cache's rollout, and what the
queries of each chunk would read from its cache is compared with what they read from the whole.
Letters: B batch, L own tokens, N keys, F latent frames, H heads, D head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kv.policies import COMPACTORS, NAMES, BlockState, Compaction, OwnKV
from ..kv.tokens import Tokens, join, whole_frames
from ..kv_policy import KVPolicy, WindowOptions
from ..model.layers import at_least_fp32

MOST = "most_attention"
"""As many tokens as the budget allows, chosen by the attention that they are about to get. Nobody can know it."""
EVERY = 2  # chunks of which one is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions(WindowOptions):
    """Keep everything, and follow what ``policies`` would have kept."""

    policies: Mapping[str, KVPolicy] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    """By policy: the error of attention's output, relative to its size, a block and chunk at a time."""
    kept: dict[str, list[float]] = field(default_factory=dict)
    """By policy: the share of the history's tokens that it holds."""
    shares: dict[int, list[float]] = field(default_factory=dict)
    """By age in latent frames: the share of attention that a frame of the history gets from the chunk's last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(BlockState):
    """The whole history, and what each policy keeps of it."""

    others: Mapping[str, BlockState] = field(default_factory=dict)


NAMES[FollowOptions] = "follow"


@COMPACTORS.add("follow")
def _follow(state: BlockState | None, own: OwnKV, at: Compaction, options: FollowOptions) -> BlockState:
    fresh = whole_frames(own.k_BLHD, own.v_BLHD, frames=at.frames, grid=at.grid)
    kept = state.others if isinstance(state, Followed) else {}
    budget = options.budget_frames * at.grid.frame_tokens
    if state is not None and state.tokens.k_BNHD.shape[1] > budget and at.next_frame // at.chunk_frames % EVERY == 0:
        _compare(state.tokens, kept, own, at, options)
    others = {
        name: COMPACTORS[NAMES[type(policy)]](kept.get(name), own, at, policy)
        for name, policy in options.policies.items()
    }
    return Followed(tokens=fresh if state is None else join(state.tokens, fresh), others=others)


def _compare(whole: Tokens, kept: Mapping[str, BlockState], own: OwnKV, at: Compaction, options: FollowOptions) -> None:
    truth_BLHD, mass_BNH = _attend(own, whole, weighted=False)
    size = at.grid.frame_tokens
    for age, share in enumerate(mass_BNH.unflatten(1, (-1, size)).sum(dim=2).mean(dim=(0, 2)).flip(0).tolist(), 1):
        options.shares.setdefault(age, []).append(share)
    most = mass_BNH.argsort(dim=1, descending=True, stable=True)[:, : options.budget_frames * size]
    caches = {name: (state.tokens, state.weighted) for name, state in kept.items()}
    for name, (tokens, weighted) in (caches | {MOST: (whole.take(most), False)}).items():
        found_BLHD, _ = _attend(own, tokens, weighted=weighted)
        error = (found_BLHD - truth_BLHD).square().sum() / truth_BLHD.square().sum()
        options.errors.setdefault(name, []).append(error.sqrt().item())
        held = (tokens.count_BNH > 0).sum() / whole.count_BNH.numel()
        options.kept.setdefault(name, []).append(held.item())


def _attend(own: OwnKV, cached: Tokens, *, weighted: bool) -> tuple[Tensor, Tensor]:
    """Return what the chunk's queries read from ``cached`` and their own, and each cached key's mean weight [B, N, H].

    In float32 at least, with the weights written out: the embedded model's are small.
    """
    q, k, v = (
        at_least_fp32(x)
        for x in (
            own.q_BLHD,
            torch.cat([cached.k_BNHD, own.k_BLHD], dim=1),
            torch.cat([cached.v_BNHD, own.v_BLHD], dim=1),
        )
    )
    logits_BHLN = torch.einsum("blhd,bnhd->bhln", q, k) * q.shape[-1] ** -0.5
    if weighted:
        bias_BHN = torch.nn.functional.pad(cached.bias_BHN, (0, own.k_BLHD.shape[1]))
        logits_BHLN = logits_BHLN + bias_BHN.unsqueeze(2)
    weights_BHLN = logits_BHLN.softmax(dim=-1)
    mass_BNH = weights_BHLN.mean(dim=2).transpose(1, 2)[:, : cached.k_BNHD.shape[1]]
    return torch.einsum("bhln,bnhd->blhd", weights_BHLN, v), mass_BNH
