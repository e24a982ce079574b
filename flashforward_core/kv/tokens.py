"""Cached tokens that a policy may thin out, head by head, and where their keys are rotated.

Letters: B batch, N cached tokens, M chosen ones, L own tokens, T tokens per latent frame, H heads, D head dim,
P rotary pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.config import ROPE_THETA, WanConfig
from ..model.layers import Rotation, at_least_fp32, rotate, rotate_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The tokens of one latent frame."""

    config: WanConfig
    rows: int
    columns: int

    @property
    def frame_tokens(self) -> int:
        return self.rows * self.columns

    def places(self, frames: Tensor) -> Tensor:
        """Return the places [F·T] of whole latent ``frames`` [F], in token order."""
        inside = torch.arange(self.frame_tokens, device=frames.device)
        return (frames[:, None] * self.frame_tokens + inside).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """The time pairs of keys as they came, from which moved keys are made every time.

    Half precision would go astray when moved again and again: by 30 % after a thousand chunks, for a small turn of a
    slow pair rounds to none.
    """

    time_BNHC: Tensor
    place_BNH: Tensor

    def take(self, index_BMH: Tensor) -> "Came":
        """Return those of the tokens at ``index_BMH``."""
        wide = index_BMH.unsqueeze(-1).expand(-1, -1, -1, self.time_BNHC.shape[-1])
        return Came(time_BNHC=self.time_BNHC.gather(1, wide), place_BNH=self.place_BNH.gather(1, index_BMH))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Keys and values of which every head may keep its own. Nothing here is changed in place."""

    k_BNHD: Tensor
    """Keys, rotated at their places."""
    v_BNHD: Tensor
    count_BNH: Tensor
    """How many tokens each one stands for, float32; 0 marks an empty one, which nobody attends to."""
    place_BNH: Tensor
    """frame · tokens per frame + row · columns + column, int64. May be negative after re-basing."""
    came: Came | None = None
    """Of tokens that have been moved, or stand beside such."""

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        parts = [self.k_BNHD, self.v_BNHD, self.count_BNH, self.place_BNH]
        parts += [self.came.time_BNHC, self.came.place_BNH] if self.came else []
        return sum(part.nbytes for part in parts)

    @property
    def bias_BHN(self) -> Tensor:
        """The bias on the logit, log m in float32; minus infinity where empty (FAST-AR, TempCache)."""
        return self.count_BNH.log().transpose(1, 2)

    def take(self, index_BMH: Tensor) -> "Tokens":
        """Return the tokens at ``index_BMH``."""
        wide = index_BMH.unsqueeze(-1).expand(-1, -1, -1, self.k_BNHD.shape[-1])
        return Tokens(
            k_BNHD=self.k_BNHD.gather(1, wide),
            v_BNHD=self.v_BNHD.gather(1, wide),
            count_BNH=self.count_BNH.gather(1, index_BMH),
            place_BNH=self.place_BNH.gather(1, index_BMH),
            came=self.came.take(index_BMH) if self.came else None,
        )

    def coming(self, channels: int) -> Came:
        """Return how the keys came; such as have not been moved came as they are. Time pairs take ``channels``."""
        # A copy: a slice would keep all of the keys in memory.
        return self.came or Came(time_BNHC=self.k_BNHD[..., :channels].clone(), place_BNH=self.place_BNH)


def whole_frames(k_BNHD: Tensor, v_BNHD: Tensor, *, frames: Tensor, grid: Grid) -> Tokens:
    """Return the tokens of whole latent ``frames`` [F], each standing for itself."""
    places = grid.places(frames)
    assert places.shape[0] == k_BNHD.shape[1], f"{len(frames)} frames have {len(places)} tokens, not {k_BNHD.shape[1]}"
    count_BNH = torch.ones(k_BNHD.shape[:3], device=k_BNHD.device)
    place_BNH = places.view(1, -1, 1).expand(k_BNHD.shape[:3]).contiguous()
    return Tokens(k_BNHD=k_BNHD, v_BNHD=v_BNHD, count_BNH=count_BNH, place_BNH=place_BNH)


def join(first: Tokens, second: Tokens) -> Tokens:
    """Return both, ``first``'s tokens first."""
    return Tokens(
        k_BNHD=torch.cat([first.k_BNHD, second.k_BNHD], dim=1),
        v_BNHD=torch.cat([first.v_BNHD, second.v_BNHD], dim=1),
        count_BNH=torch.cat([first.count_BNH, second.count_BNH], dim=1),
        place_BNH=torch.cat([first.place_BNH, second.place_BNH], dim=1),
        came=_join_came(first, second),
    )


def _join_came(first: Tokens, second: Tokens) -> Came | None:
    moved = first.came or second.came
    if moved is None:
        return None
    one, other = (tokens.coming(moved.time_BNHC.shape[-1]) for tokens in (first, second))
    return Came(
        time_BNHC=torch.cat([one.time_BNHC, other.time_BNHC], dim=1),
        place_BNH=torch.cat([one.place_BNH, other.place_BNH], dim=1),
    )


def rotation_at(place: Tensor, *, grid: Grid, dtype: torch.dtype) -> Rotation:
    """Return the rotation [..., P] of tokens at ``place`` [...]; each may be anywhere."""
    frame = place.div(grid.frame_tokens, rounding_mode="floor")
    inside = place - frame * grid.frame_tokens
    axes = (frame, inside // grid.columns, inside % grid.columns)
    angles = []
    for index, pairs in zip(axes, grid.config.rope_pairs, strict=True):
        step = torch.arange(pairs, dtype=torch.float64, device=place.device) / pairs
        angles.append(index.to(torch.float64).unsqueeze(-1) * ROPE_THETA**-step)
    angle = torch.cat(angles, dim=-1)
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))


def unrotate(x_BNHD: Tensor, place_BNH: Tensor, *, grid: Grid) -> Tensor:
    """Return queries or keys as they were before rotary positions, in float32 at least."""
    wide = at_least_fp32(x_BNHD)
    turn = rotation_at(place_BNH, grid=grid, dtype=wide.dtype)
    return rotate(wide, Rotation(turn.cos, -turn.sin))


def close_gaps(tokens: Tokens, *, grid: Grid, first: int, stop: int) -> Tokens:
    """Move the kept frames to the contiguous positions that end before ``stop`` (Future Forcing, RoPE correction).

    All tokens lie in frames ``first`` up to ``stop``. A frame is kept when any head keeps a token of it, and moves as
    a whole, so heads agree on what a position means; rows of a batch do not see each other. Frames that do not move
    keep their bytes.
    """
    frame_BNH = tokens.place_BNH.div(grid.frame_tokens, rounding_mode="floor")
    index = (frame_BNH - first).flatten(1)
    alive = (tokens.count_BNH > 0).flatten(1)
    kept = torch.zeros(index.shape[0], stop - first, dtype=torch.int64, device=index.device)
    kept.scatter_reduce_(1, index, alive.to(torch.int64), reduce="amax")
    later = kept.flip(1).cumsum(1).flip(1) - kept  # kept frames after each frame
    target_BNH = (stop - 1 - later).gather(1, index).view_as(frame_BNH)
    place_BNH = tokens.place_BNH + (target_BNH - frame_BNH) * grid.frame_tokens
    channels = 2 * grid.config.rope_pairs[0]
    came = tokens.coming(channels)
    delta_BNH = (place_BNH - came.place_BNH) // grid.frame_tokens
    k_BNHD = torch.cat([came.time_BNHC, tokens.k_BNHD[..., channels:]], dim=-1)
    k_BNHD = rotate_time(k_BNHD, delta=delta_BNH, config=grid.config)
    return Tokens(k_BNHD=k_BNHD, v_BNHD=tokens.v_BNHD, count_BNH=tokens.count_BNH, place_BNH=place_BNH, came=came)
