"""What ``bench policies`` cannot measure, refused before anything is loaded."""

from collections.abc import Sequence

from ..kv_policy import FutureForcingOptions, TempCacheOptions, WindowOptions
from ..specs import RolloutSpec
from .policy_errors import EVERY

PARTS = ("look", "compare", "follow", "choices")
COUNTED = 4  # chunks of which one has its densities counted: counting takes time


def check(parts: Sequence[str], *, budgets: Sequence[int], whole: RolloutSpec) -> None:
    """Raise ``ValueError`` where a part would have nothing to measure in ``whole``, or no policy at a budget."""
    if not set(parts) <= set(PARTS):
        raise ValueError(f"parts={','.join(parts)!r} are unknown; use some of: {','.join(PARTS)}")
    least = max(kind().least_budget for kind in (WindowOptions, FutureForcingOptions, TempCacheOptions))
    for budget in budgets:
        if budget < least and set(parts) != {"look"}:
            raise ValueError(f"budgets={','.join(map(str, budgets))}: {budget} is below {least}; use {least} or more")
    for part in parts:
        for budget in budgets if part in ("follow", "choices") else (None,):
            latents, needed = whole.shape.latent_frames, least_latents(part, budget, chunk_frames=whole.chunk_frames)
            if latents < needed:
                what = part if budget is None else f"{part} at a budget of {budget}"
                raise ValueError(f"latents={latents} is too short for {what}; use latents={needed} or more")


def least_latents(part: str, budget: int | None, *, chunk_frames: int) -> int:
    """Return the least latent frames of a video in which ``part`` has something to measure.

    Chunks are measured as they are handed to a policy, as all but the last one are.
    """
    if part == "look":
        return COUNTED * chunk_frames + 1
    if part == "compare":
        return 2  # consistency is between frames
    assert budget is not None, "the others have one"
    chunk = budget // chunk_frames + 1  # the first that reads more than the budget
    if part == "choices":
        return chunk * chunk_frames + 1
    followed = -(-(chunk + 1) // EVERY) * EVERY  # chunks until one is compared
    return followed * chunk_frames + 1
