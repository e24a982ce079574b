"""Both roles in one block-causal forward: the packed sequence and its mask (FlashForward, phase 1).

The packed latent frames of a clip are [clean anchors | noisy anchors | noisy chunks]: the planner's commits, the
planner's denoising and the renderer's denoising. Who sees whom is read off the task graph that inference runs, so
training and inference cannot disagree about a schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import ForwardTask, Kind, Role, Slot, Space
from flashforward_core.model.attention import AttentionFn
from flashforward_core.model.layers import Segment
from flashforward_core.specs import RolloutSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where everything of one clip lies in the packed sequence; P packed frames, A anchors."""

    frames: tuple[int, ...]
    """Absolute latent index of each packed frame."""
    num_anchors: int
    blocks: tuple[tuple[int, ...], ...]
    """Anchor indices of each planner block."""
    visible: Tensor
    """Bool [P, P]: row's queries see column's keys."""
    used: Tensor
    """Bool [P]: packed frames that count; a clip shorter than the packing leaves the rest unused."""

    @property
    def segments(self) -> tuple[Segment, Segment]:
        """Role of each part; the anchors are the planner's."""
        split = 2 * self.num_anchors
        return Segment(Role.PLANNER, 0, split), Segment(Role.RENDERER, split, len(self.frames))

    def chunk_frame(self, latent_frame: int) -> int:
        """Packed position of the renderer's ``latent_frame``."""
        return 2 * self.num_anchors + latent_frame


def pack(spec: RolloutSpec, *, padded_to: RolloutSpec | None = None) -> Packing:
    """Lay out ``spec``; ``padded_to`` a longer one keeps that one's shape, with the frames past the end unused.

    Only schedules with in-flight history and anchors can be packed this way: another one raises ``ValueError``.
    """
    if spec.schedule != "flashforward":
        raise ValueError(f"schedule={spec.schedule!r} has no packed training; use schedule='flashforward'")
    whole = padded_to or spec
    positions = whole.anchor_positions()
    frames = (*positions, *positions, *range(whole.shape.latent_frames))
    count = len(positions)
    visible = torch.eye(len(frames), dtype=torch.bool)  # an unused frame sees itself: softmax needs one key
    used = torch.zeros(len(frames), dtype=torch.bool)
    graph = build_graph(spec, decode=False)
    for task in graph.tasks:
        if task.kind is Kind.DENOISE and task.stage > 0:
            continue  # all stages have the same edges, each among its own level
        own = _own_frames(task, spec, count)
        seen = [_seen_frames(slot, spec, count) for slot in task.reads]
        columns = own + [frame for group in seen for frame in group]
        visible[torch.tensor(own).unsqueeze(1), torch.tensor(columns)] = True
        used[own] = True
    return Packing(frames=frames, num_anchors=count, blocks=whole.anchor_blocks(), visible=visible, used=used)


def _own_frames(task: ForwardTask, spec: RolloutSpec, num_anchors: int) -> list[int]:
    if task.role is Role.RENDERER:
        return [2 * num_anchors + frame for frame in spec.chunk(task.index)]
    offset = 0 if task.kind is Kind.COMMIT else num_anchors
    return [offset + anchor for anchor in spec.anchor_blocks()[task.index]]


def _seen_frames(slot: Slot, spec: RolloutSpec, num_anchors: int) -> list[int]:
    if slot.space is Space.ANCHOR_KV:
        return [slot.index]
    if slot.space is Space.KV:
        return [2 * num_anchors + frame for frame in spec.chunk(slot.index)]
    return []  # the task's own latent


def dense_attention(visible: Tensor, tokens: int) -> AttentionFn:
    """Attend under the frame mask ``visible`` [P, P], materialised; for CPUs and as the oracle of the other."""
    mask = visible.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)

    def attend(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


def frame_mask(visible: Tensor, tokens: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask function for the frame mask ``visible`` [P, P] on its device."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible[query // tokens, key // tokens]

    return allowed


def flex_attention_under(block_mask: object) -> AttentionFn:
    """Attend sparsely under a FlexAttention block mask; call inside a compiled region."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
        return flex_attention(q, k, v, block_mask=block_mask).transpose(1, 2)  # type: ignore[union-attr,arg-type]

    return attend
