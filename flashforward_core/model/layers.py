"""Parts of the transformer: norms, rotary positions, linears that know the roles.

Letters: B batch, F latent frames, T tokens per latent frame, L tokens (F·T), H heads, D head width, C width,
P rotary pairs of a head (D / 2).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graph.task import Role
from .config import ROPE_THETA, WanConfig


def at_least_fp32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 when it is that already: the islands where bf16 loses too much."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class Segment:
    """Latent frames ``start`` up to ``stop`` of a sequence, which one role works on."""

    role: Role
    start: int
    stop: int


MAX_PERIOD = 10_000.0  # of the timestep's sinusoid

Segments = tuple[Segment, ...]
"""They tile the sequence in order; a single one covers all of it."""


class LayerNorm(nn.Module):
    """Layer norm computed in float32 at least; parameters only when ``affine``."""

    def __init__(self, dim: int, *, eps: float, affine: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., C], still in float32 at least."""
        x = at_least_fp32(x)
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)


class RMSNorm(nn.Module):
    """RMS norm over the full width (before heads are split), computed in float32 at least."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., C], still in float32 at least."""
        x = at_least_fp32(x)
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class RoleLinear(nn.Linear):
    """A linear whose roles add low-rank updates of their own; ``weight`` and ``bias`` are the base's, by name too."""

    def __init__(self, base: nn.Linear) -> None:
        """Share ``base``'s parameters; no role has an update yet."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.alphas: dict[str, float] = {}

    def add_role(self, role: Role, *, rank: int, alpha: float) -> None:
        """Give ``role`` factors A (random) and B (zero), so that nothing changes until they are trained or loaded."""
        like = {"bias": False, "device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_A[role.value] = nn.Linear(self.in_features, rank, **like)
        self.lora_B[role.value] = nn.Linear(rank, self.out_features, **like)
        nn.init.zeros_(self.lora_B[role.value].weight)
        self.alphas[role.value] = alpha

    def scale(self, role: Role) -> float:
        """Return alpha / rank of a role's update."""
        return self.alphas[role.value] / self.lora_A[role.value].out_features

    def forward(self, x: Tensor, segments: Segments) -> Tensor:  # type: ignore[override]
        """Return the base's output for ``x`` [B, L, C] plus, in each segment, its role's update."""
        out = F.linear(x, self.weight, self.bias)
        if len(segments) == 1:
            return self._updated(out, x, segments[0].role)
        tokens = x.shape[1] // segments[-1].stop
        ranges = [(s.role, slice(s.start * tokens, s.stop * tokens)) for s in segments]
        return torch.cat([self._updated(out[:, at], x[:, at], role) for role, at in ranges], dim=1)

    def _updated(self, out: Tensor, x: Tensor, role: Role) -> Tensor:
        if role.value not in self.lora_A:
            return out
        return out + self.scale(role) * self.lora_B[role.value](self.lora_A[role.value](x))

    def merged_weight(self, role: Role) -> Tensor:
        """Return weight + scale·B·A for ``role``, computed in float32 at least, in the weight's dtype."""
        weight = self.weight.detach()
        if role.value not in self.lora_A:
            return weight
        down, up = self.lora_A[role.value].weight.detach(), self.lora_B[role.value].weight.detach()
        update = self.scale(role) * (at_least_fp32(up) @ at_least_fp32(down))
        return (at_least_fp32(weight) + update).to(weight.dtype)


def project(layer: nn.Module, x: Tensor, segments: Segments) -> Tensor:
    """Apply ``layer`` to ``x`` [B, L, C]; a plain linear costs nothing more, whatever the roles."""
    return layer(x, segments) if isinstance(layer, RoleLinear) else layer(x)


def sinusoid(timestep: Tensor, *, dim: int) -> Tensor:
    """Return [..., dim] in float64, cosines first; float32 angles of up to 1000 would lose four digits."""
    half = dim // 2
    step = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angles = timestep.to(torch.float64)[..., None] * MAX_PERIOD**-step
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(pairs: int, *, device: torch.device) -> Tensor:
    """Radians per position of one axis's rotary pairs, float64 [pairs]."""
    return ROPE_THETA ** -(torch.arange(pairs, dtype=torch.float64, device=device) / pairs)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of every token's rotary angles, each [L, 1, P]."""

    cos: Tensor
    sin: Tensor


def rotation(config: WanConfig, *, frames: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens in frame, row, column order.

    ``frames`` [F], or [B, F] where a batch's rows differ, holds absolute latent indices, on the device that uses them.
    Angles are computed in float64 from the index itself, so there is no table and no longest video; ``dtype`` is that
    of the result.
    """
    if frames.ndim == 2:  # a sequence of all rows' latent frames, cut up again
        turn = rotation(config, frames=frames.flatten(), rows=rows, columns=columns, dtype=dtype)
        return Rotation(*(part_LP.unflatten(0, (frames.shape[0], -1)) for part_LP in (turn.cos, turn.sin)))
    device = frames.device
    axes = (frames, torch.arange(rows, device=device), torch.arange(columns, device=device))
    shape = (frames.shape[0], rows, columns)
    parts = []
    for axis, (index, pairs) in enumerate(zip(axes, config.rope_pairs, strict=True)):
        angles = index.to(torch.float64)[:, None] * _frequencies(pairs, device=device)
        view = [1, 1, 1, pairs]
        view[axis] = shape[axis]
        parts.append(angles.view(view).expand(*shape, pairs))
    angles_LP = torch.cat(parts, dim=-1).reshape(-1, 1, config.head_dim // 2)
    return Rotation(angles_LP.cos().to(dtype), angles_LP.sin().to(dtype))


def rotate(x_BLHD: Tensor, by: Rotation) -> Tensor:
    """Rotate adjacent pairs of ``x_BLHD``; the result has the rotation's dtype."""
    first, second = x_BLHD.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (first * by.cos - second * by.sin, first * by.sin + second * by.cos)
    return torch.stack(turned, dim=-1).flatten(-2)


def rotate_time(k_BNHD: Tensor, *, delta: int | Tensor, config: WanConfig) -> Tensor:
    """Return stored rotated keys moved by ``delta`` latent frames (a number, or on the keys' device [N] or [B, N, H]).

    Rotations compose, so only the time pairs turn, by the difference; rows and columns stay. Same shape and dtype.
    """
    time = config.rope_pairs[0]
    shift = torch.as_tensor(delta, dtype=torch.float64, device=k_BNHD.device)
    shift = shift.unsqueeze(-1) if shift.dim() == 3 else shift.reshape(-1, 1, 1)
    angles = shift * _frequencies(time, device=k_BNHD.device)
    wide = torch.promote_types(k_BNHD.dtype, torch.float32)
    by = Rotation(angles.cos().to(wide), angles.sin().to(wide))
    turned = rotate(k_BNHD[..., : 2 * time], by).to(k_BNHD.dtype)
    return torch.cat((turned, k_BNHD[..., 2 * time :]), dim=-1)
