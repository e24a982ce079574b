"""KV policies at work: what each bank's forwards read instead of the schedule's window (COMPACT tasks).

A forward that publishes its KV hands its keys, values and queries over per transformer block (``PolicyView``); the
COMPACT task that follows makes the next state of the bank from the last one and these. A state is written once and
never changed, as every slot. Anchors are not part of it.
Letters: B batch, L own tokens, N keys, H heads, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kv_policy import (
    FutureForcingOptions,
    KVPolicy,
    SparseOptions,
    TempCacheOptions,
    WindowOptions,
    moves_keys,
)
from ..model.attention import AttentionFn
from ..model.biased_attention import BiasedAttentionFn
from ..model.transformer import KVContext
from ..registry import Registry
from .future_forcing import Attended, compact, received
from .groups import GroupedContext, GroupPage, KeyGroups, group_page
from .queries import QueryStatistics, query_statistics
from .temp_cache import absorb_frames, squeeze
from .tokens import Grid, Tokens, close_gaps, join, unrotate, whole_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKV:
    """What one transformer block of a publishing forward hands over: rotated queries and keys, and values."""

    q_BLHD: Tensor
    k_BLHD: Tensor
    v_BLHD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """What a policy keeps for one transformer block."""

    tokens: Tokens
    attended: Attended | None = None
    """Future Forcing's history."""
    statistics: QueryStatistics | None = None
    """Future Forcing's mean queries."""
    weighted: bool = False
    """Whether tokens may stand for several, so that attention needs a bias."""
    groups: KeyGroups | None = None
    """The tokens' buckets, where forwards attend to them sparsely."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        parts: list[Tensor] = []
        if self.attended is not None:
            parts += [self.attended.mass_BNH, self.attended.chunks_BNH]
        if self.statistics is not None:
            parts += [self.statistics.mean_BTHD, self.statistics.deviation_BTH]
        return (
            self.tokens.num_bytes + sum(part.nbytes for part in parts) + (self.groups.num_bytes if self.groups else 0)
        )

    def grouped(self, options: SparseOptions) -> "BlockState":
        """Return the state with its tokens' buckets; empty tokens are hidden."""
        groups = group_page(self.tokens.k_BNHD, options=options, alive_BNH=self.tokens.count_BNH > 0)
        return replace(self, groups=groups)


PolicyState = tuple[BlockState, ...]
"""One per transformer block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Where a COMPACT task is."""

    frames: Tensor
    """Absolute latent indices [F] of the chunk that is added, on its device."""
    next_frame: int
    """The first latent frame after them."""
    chunk_frames: int
    grid: Grid


Compactor = Callable[[BlockState | None, OwnKV, Compaction, Any], BlockState]
"""(last state, or None at the start; the chunk's own; where; the policy's options) -> next state."""

COMPACTORS: Registry[Compactor] = Registry("kv policy")
"""``keep`` is not here: it yields no COMPACT task."""
NAMES: dict[type, str] = {
    WindowOptions: "window",
    FutureForcingOptions: "future_forcing",
    TempCacheOptions: "temp_cache",
}


@COMPACTORS.add("window")
def _window(state: BlockState | None, own: OwnKV, at: Compaction, options: WindowOptions) -> BlockState:
    tokens = _with_own(state, own, at)
    size = at.grid.frame_tokens
    budget, count = options.budget_frames * size, tokens.k_BNHD.shape[1]
    if count <= budget:
        return BlockState(tokens=tokens)
    sink = options.sink_frames * size
    latest = torch.arange(count - budget + sink, count, device=tokens.k_BNHD.device)
    kept = torch.cat([torch.arange(sink, device=latest.device), latest])
    batch, _, heads = tokens.count_BNH.shape
    tokens = tokens.take(kept.view(1, -1, 1).expand(batch, -1, heads))
    if moves_keys(options):
        tokens = close_gaps(tokens, grid=at.grid, first=0, stop=at.next_frame)
    return BlockState(tokens=tokens)


@COMPACTORS.add("future_forcing")
def _future_forcing(state: BlockState | None, own: OwnKV, at: Compaction, options: FutureForcingOptions) -> BlockState:
    tokens = _with_own(state, own, at)
    places = at.grid.places(at.frames).view(1, -1, 1).expand(own.q_BLHD.shape[:3])
    plain = unrotate(own.q_BLHD, places, grid=at.grid)
    fresh = query_statistics(plain, grid=at.grid)
    fresh = fresh.per_head() if options.per_head else fresh
    bias = tokens.bias_BHN if state is not None and state.weighted else None
    mass = received(own.q_BLHD, tokens.k_BNHD, stride=options.history_stride, bias_BHN=bias)
    if state is None:
        attended = Attended(mass_BNH=mass, chunks_BNH=torch.ones_like(mass))
        statistics = fresh
    else:
        assert state.attended is not None and state.statistics is not None, "the state is of another policy"
        attended = state.attended.append(own.k_BLHD.shape[1]).update(mass)
        statistics = state.statistics.merge(fresh)
    kept, attended = compact(
        tokens,
        attended,
        statistics,
        next_frame=at.next_frame,
        chunk_frames=at.chunk_frames,
        grid=at.grid,
        options=options,
    )
    weighted = bias is not None or (options.weigh_merged and kept is not tokens)
    return BlockState(tokens=kept, attended=attended, statistics=statistics, weighted=weighted)


@COMPACTORS.add("temp_cache")
def _temp_cache(state: BlockState | None, own: OwnKV, at: Compaction, options: TempCacheOptions) -> BlockState:
    cache = None if state is None else state.tokens
    tokens = absorb_frames(cache, own.q_BLHD, own.k_BLHD, own.v_BLHD, frames=at.frames, grid=at.grid, options=options)
    budget = options.budget_frames * at.grid.frame_tokens
    kept = squeeze(tokens)
    kept = kept if kept.k_BNHD.shape[1] <= budget else squeeze(kept, capacity=budget)
    return BlockState(tokens=kept, weighted=True)


def _with_own(state: BlockState | None, own: OwnKV, at: Compaction) -> Tokens:
    tokens = whole_frames(own.k_BLHD, own.v_BLHD, frames=at.frames, grid=at.grid)
    return tokens if state is None else join(state.tokens, tokens)


def next_state(state: PolicyState | None, own: Sequence[OwnKV], *, at: Compaction, policy: KVPolicy) -> PolicyState:
    """Return the bank's state after a chunk, block by block. ``state`` is None for a scene's first chunk."""
    compactor = COMPACTORS[NAMES[type(policy)]]
    last: Sequence[BlockState | None] = state or [None] * len(own)
    return tuple(compactor(block, chunk, at, policy) for block, chunk in zip(last, own, strict=True))


class GroupedView(KVContext, GroupedContext, Protocol):
    """A view of pages: a lane's bank's."""


class PolicyView:
    """A view that also reads a policy's state, and collects what a publishing forward hands over.

    Keys come as [anchors | state | own]. Its ``attend`` is the forward's self-attention, since tokens that stand for
    several have a bias, and blocks are visited in order.
    """

    def __init__(
        self,
        inner: GroupedView,
        state: PolicyState | None,
        *,
        attend: AttentionFn,
        attend_biased: BiasedAttentionFn,
        collects: bool,
    ) -> None:
        """``inner`` gives the keys of anchors and, last, the forward's own.

        ``collects`` says that the forward publishes.
        """
        self._inner = inner
        self._state = state
        self._attend = attend
        self._attend_biased = attend_biased
        self._collects = collects
        self._bias_BHN: Tensor | None = None
        self._own_k_v: tuple[Tensor, Tensor] | None = None
        self._inner_k_BNHD: Tensor | None = None
        self.collected: list[OwnKV] = []

    def extend(self, block: int, k_BLHD: Tensor, v_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one block's own keys and values; return all that the forward attends to."""
        k_BNHD, v_BNHD = self._inner.extend(block, k_BLHD, v_BLHD)
        self._own_k_v = (k_BLHD, v_BLHD) if self._collects else None
        self._inner_k_BNHD = k_BNHD
        self._bias_BHN = None
        if self._state is None:
            return k_BNHD, v_BNHD
        state = self._state[block]
        tokens = state.tokens
        front = k_BNHD.shape[1] - k_BLHD.shape[1]
        if state.weighted:
            self._bias_BHN = torch.nn.functional.pad(tokens.bias_BHN, (front, k_BLHD.shape[1]))
        return _insert(k_BNHD, tokens.k_BNHD, at=front), _insert(v_BNHD, tokens.v_BNHD, at=front)

    def groups(self, block: int, k_BNHD: Tensor, group: GroupPage) -> list[KeyGroups]:
        """Return the buckets of the keys that ``extend`` returned last: of anchors, of the state, and of its own."""
        assert self._inner_k_BNHD is not None, "a block attends to what it has extended"
        *anchors, own = self._inner.groups(block, self._inner_k_BNHD, group)
        if self._state is None:
            return [*anchors, own]
        kept = self._state[block].groups
        assert kept is not None, f"the tokens kept for block {block} were not grouped when they were compacted"
        return [*anchors, kept, own]

    def attend(self, q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """Attend to what ``extend`` returned last."""
        if self._own_k_v is not None:
            self.collected.append(OwnKV(q_BLHD=q_BLHD, k_BLHD=self._own_k_v[0], v_BLHD=self._own_k_v[1]))
        if self._bias_BHN is None:
            return self._attend(q_BLHD, k_BNHD, v_BNHD)
        return self._attend_biased(q_BLHD, k_BNHD, v_BNHD, self._bias_BHN)


def _insert(x_BNHD: Tensor, middle_BMHD: Tensor, *, at: int) -> Tensor:
    return torch.cat([x_BNHD[:, :at], middle_BMHD, x_BNHD[:, at:]], dim=1)
