"""What two forwards of one batch attend to: each to its own context, which stays where it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model.attention import AttentionFn
from ..model.transformer import KVContext


class PairView:
    """Two views as one: a batch's first half writes and reads through the first, the rest through the second.

    Contexts are not joined, which would copy both at every block; attention runs once for each half, and everything
    else once. It is the forward's self-attention, and blocks are visited in order.
    """

    def __init__(self, views: Sequence[KVContext], attend: AttentionFn) -> None:
        self._views = views
        self._attend = attend
        self._contexts: list[tuple[Tensor, Tensor]] = []

    def extend(self, block: int, k_BLHD: Tensor, v_BLHD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one block's own keys and values; return them, as ``attend`` knows the rest."""
        halves = zip(self._views, k_BLHD.chunk(2), v_BLHD.chunk(2), strict=True)
        self._contexts = [view.extend(block, k, v) for view, k, v in halves]
        return k_BLHD, v_BLHD

    def attend(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        """Return what each half's queries read of its own context."""
        pairs = zip(q_BLHD.chunk(2), self._contexts, strict=True)
        return torch.cat([self._attend(q, *context) for q, context in pairs])
