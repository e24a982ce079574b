"""Both roles in one block-causal forward: the packed sequence and its mask (FlashForward, phase 1).

The packed latent frames of a clip are [clean anchors | noisy anchors | noisy chunks]: the planner's commits, the
planner's denoising and the renderer's denoising. Who sees whom is read off the task graph that inference runs, so
training and inference cannot disagree about a schedule. The planner has a tenth of the frames and the harder job, so
some steps pack it alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import ForwardTask, Kind, Role, Slot, Space
from flashforward_core.model.attention import AttentionFn, sdpa
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
    def num_chunk_frames(self) -> int:
        """Packed frames of the renderer; 0 when the planner is packed alone."""
        return len(self.frames) - 2 * self.num_anchors

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Role of each part; the anchors are the planner's."""
        split, end = 2 * self.num_anchors, len(self.frames)
        planner = Segment(Role.PLANNER, 0, split)
        return (planner, Segment(Role.RENDERER, split, end)) if self.num_chunk_frames else (planner,)

    def chunk_frame(self, latent_frame: int) -> int:
        """Packed position of the renderer's ``latent_frame``."""
        return 2 * self.num_anchors + latent_frame


def pack(spec: RolloutSpec, *, padded_to: RolloutSpec | None = None, planner_only: bool = False) -> Packing:
    """Lay out ``spec``; ``padded_to`` a longer one keeps that one's shape, with the frames past the end unused.

    ``planner_only`` leaves the renderer's chunks out. Only schedules with in-flight history and anchors can be packed
    this way: another one raises ``ValueError``.
    """
    if spec.schedule != "flashforward":
        raise ValueError(f"schedule={spec.schedule!r} has no packed training; use schedule='flashforward'")
    whole = padded_to or spec
    positions = whole.anchor_positions()
    chunks = range(0 if planner_only else whole.shape.latent_frames)
    frames = (*positions, *positions, *chunks)
    count = len(positions)
    visible = torch.eye(len(frames), dtype=torch.bool)  # an unused frame sees itself: softmax needs one key
    used = torch.zeros(len(frames), dtype=torch.bool)
    graph = build_graph(spec, decode=False)
    for task in graph.tasks:
        if task.kind is Kind.DENOISE and task.stage > 0:
            continue  # all stages have the same edges, each among its own level
        if planner_only and task.role is Role.RENDERER:
            continue
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
    """Attend under the frame mask ``visible`` [P, P], materialised: the oracle of ``GroupedAttention``."""
    mask = visible.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)

    def attend(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BNHD, v_BNHD))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


class GroupedAttention:
    """Attend under a frame mask without one: queries that see the same keys share a dense call.

    Chunks that see equally many keys are batched, so a steady wavefront is a single call of the fastest kernel. The
    memory is that of each group's gathered keys and values.
    """

    def __init__(self, visible: Tensor, tokens: int, *, device: torch.device) -> None:
        """Group the frames of ``visible`` [P, P], ``tokens`` per frame."""
        self.tokens = tokens
        groups: dict[tuple[int, ...], list[int]] = {}
        for frame, row in enumerate(visible.tolist()):
            groups.setdefault(tuple(i for i, seen in enumerate(row) if seen), []).append(frame)
        batches: dict[tuple[int, int], list[tuple[list[int], tuple[int, ...]]]] = {}
        for keys, queries in groups.items():
            batches.setdefault((len(queries), len(keys)), []).append((queries, keys))
        self.batches = [
            tuple(torch.tensor([group[part] for group in members], device=device) for part in (0, 1))
            for members in batches.values()
        ]
        order = torch.cat([queries.flatten() for queries, _ in self.batches])
        self.restore = torch.argsort(order)

    def __call__(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        """Return [B, L, H, D] for queries, keys and values of the whole packed sequence."""
        q, k, v = (x.unflatten(1, (-1, self.tokens)) for x in (q_BLHD, k_BLHD, v_BLHD))
        pieces = []
        for queries_GQ, keys_GK in self.batches:
            out = sdpa(_gather(q, queries_GQ), _gather(k, keys_GK), _gather(v, keys_GK))
            pieces.append(out.reshape(q.shape[0], -1, *q.shape[2:]))
        return torch.cat(pieces, dim=1).index_select(1, self.restore).flatten(1, 2)


def _gather(x_BPTHD: Tensor, frames_GN: Tensor) -> Tensor:
    """Return [B·G, N·T, H, D]: each group's frames in a row."""
    picked = x_BPTHD.index_select(1, frames_GN.flatten())
    return picked.reshape(-1, frames_GN.shape[1] * x_BPTHD.shape[2], *x_BPTHD.shape[3:])
