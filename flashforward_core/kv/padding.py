"""A prompt's zero-padded rows, merged into one: they all have the same key and value, so it is exact.

Wan attends to all 512 rows of a padded prompt. n equal rows act like one with log n on its logit.
Letters: B batch, N rows of a prompt, C text width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..model.transformer import TextContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPrompt:
    """A prompt whose padding is at most one row, the last."""

    text: TextContext
    bias_N: Tensor
    """On the rows' logits, float32: 0, but log n for the last row when it stands for n."""
    padded: bool
    """Whether the last row is the padding's, which no policy may drop."""
    _codes: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def codes(self, block: int, make: Callable[[], Tensor]) -> Tensor:
        """Return the buckets of a transformer block's rows, which ``make`` finds the first time."""
        if block not in self._codes:
            self._codes[block] = make()
        return self._codes[block]


def merge_padding(text: TextContext, text_BNC: Tensor) -> MergedPrompt:
    """Return ``text`` without all but one of the rows that are zero in ``text_BNC`` up to its end, in every prompt.

    Prompts of a batch may differ in length: the shorter ones keep some rows of padding, which is as exact. Looks at
    the embeddings on the host, so it is for once per prompt.
    """
    used = (text_BNC != 0).any(dim=-1).any(dim=0).nonzero()
    length = int(used.max()) + 1 if len(used) else 0
    merged = text_BNC.shape[1] - length
    kept = length + min(merged, 1)
    bias_N = torch.zeros(kept, dtype=torch.float32, device=text_BNC.device)
    if merged:
        bias_N[-1] = math.log(merged)
    pairs = tuple((k[:, :kept], v[:, :kept]) for k, v in text.pairs)
    return MergedPrompt(text=TextContext(text.role, pairs), bias_N=bias_N, padded=merged > 0)
