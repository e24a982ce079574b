"""Γ: which anchors a chunk reads. Always consecutive anchors, and as many as the plan's context asks for."""

from collections.abc import Callable

from ..registry import Registry
from ..specs import AnchorPlan

Rule = Callable[[AnchorPlan, range], int]
RULES: Registry[Rule] = Registry("anchor_rule")
"""Name -> (plan, the chunk's latent frames) -> index of the first anchor read, before it is clamped to the range."""


def _twice_middle(frames: range) -> int:
    """Twice the middle of a chunk, so that an even chunk's half frame stays an integer."""
    return frames[0] + frames[-1]


@RULES.add("nearest")
def nearest(plan: AnchorPlan, frames: range) -> int:
    """Centre the window on the chunk; a tie goes to the later window."""
    first_centre = plan.stride * (plan.context - 1)  # twice the centre of window 0
    return (_twice_middle(frames) - first_centre + plan.stride) // (2 * plan.stride)


@RULES.add("aligned")
def aligned(plan: AnchorPlan, frames: range) -> int:
    """Start with the anchor block whose span covers the chunk's middle."""
    span = plan.block_frames * plan.stride
    return _twice_middle(frames) // (2 * span) * plan.block_frames


@RULES.add("floor")
def floor(plan: AnchorPlan, frames: range) -> int:
    """Start with the last anchor at or before the chunk's first latent frame."""
    return frames[0] // plan.stride


def anchors_for(plan: AnchorPlan, frames: range, latent_frames: int, *, scene: range | None = None) -> tuple[int, ...]:
    """Return Γ of the chunk that covers ``frames``: ``plan.context`` consecutive anchor indices.

    All anchors when there are fewer. ``scene`` holds the anchors to choose from; by default those of the whole video.
    An unknown ``plan.rule`` raises ``ValueError``. The rules are ours: FlashForward's paper says only that a chunk
    reads three consecutive anchors.
    """
    among = range(len(plan.positions(latent_frames))) if scene is None else scene
    size = min(plan.context, len(among))
    first = max(among.start, min(RULES[plan.rule](plan, frames), among.stop - size))
    return tuple(range(first, first + size))
