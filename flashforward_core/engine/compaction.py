"""COMPACT tasks and the forwards around them: what a KV policy keeps of each bank, from chunk to chunk."""

import torch

from ..graph.schedules import OWN
from ..graph.task import ForwardTask, Slot, Space
from ..kv.bank import BankView
from ..kv.policies import Compaction, OwnKV, PolicyState, PolicyView, next_state
from ..kv.sparse import SparseForward
from ..kv.tokens import Grid
from ..model.attention import AttentionBackend
from ..model.biased_attention import resolve_biased_attention
from ..model.config import PATCH, WanConfig
from ..specs import RolloutSpec


def kept_slot(task: ForwardTask) -> Slot | None:
    """Return the slot of what the policy has kept so far, if ``task`` reads one."""
    return next((s for s in task.reads if s.space is Space.POLICY_STATE and not s.bank.endswith(OWN)), None)


def handed_over(task: ForwardTask) -> tuple[Slot, ...]:
    """Return the slots in which ``task`` hands its keys, values and queries over: one or none."""
    return tuple(s for s in task.writes if s.space is Space.POLICY_STATE and s.bank.endswith(OWN))


def policy_view(
    task: ForwardTask,
    inner: BankView,
    kept: PolicyState | None,
    *,
    attention: AttentionBackend,
    dtype: torch.dtype,
    sparse: SparseForward | None = None,
) -> BankView | PolicyView:
    """Return what a forward attends to under the rollout's policy; ``inner`` itself where it has no part in it.

    ``dtype`` is that of keys. ``sparse`` is the forward's attention, if it is sparse anywhere.
    """
    collects = bool(handed_over(task))
    view: BankView | PolicyView = inner
    if kept is not None or collects:
        view = _with_kept(inner, kept, collects=collects, attention=attention, dtype=dtype, sparse=sparse)
    if sparse is not None:
        sparse.over(view)
    return view


def _with_kept(
    inner: BankView,
    kept: PolicyState | None,
    *,
    collects: bool,
    attention: AttentionBackend,
    dtype: torch.dtype,
    sparse: SparseForward | None,
) -> PolicyView:
    return PolicyView(
        inner,
        kept,
        attend=attention.attend if sparse is None else sparse.self_attend,
        attend_biased=(
            resolve_biased_attention("auto", inner.own_tokens.device, dtype=dtype).attend
            if sparse is None
            else sparse.self_attend_biased
        ),
        collects=collects,
    )


def compacted(
    task: ForwardTask,
    kept: PolicyState | None,
    own: list[OwnKV],
    *,
    spec: RolloutSpec,
    config: WanConfig,
    frames: torch.Tensor,
) -> PolicyState:
    """Return what the policy keeps once the chunk of ``task`` is added. ``frames`` are its indices, on its device."""
    shape = spec.shape
    grid = Grid(config=config, rows=shape.latent_height // PATCH[1], columns=shape.latent_width // PATCH[2])
    at = Compaction(frames=frames, next_frame=spec.chunk(task.index).stop, chunk_frames=spec.chunk_frames, grid=grid)
    state = next_state(kept, own, at=at, policy=spec.kv_policy)
    if spec.sparse is None or not spec.sparse.video:
        return state
    stages = spec.stages.num_stages
    # No later stage reads a bank than the one that it is filled after, but commits of given chunks count as the last.
    before_given = task.index + 1 < spec.start_chunks
    last_reader = stages - 1 if before_given else min(task.stage, stages - 1)
    place = {"stage": last_reader, "num_stages": stages, "num_blocks": len(state)}
    return tuple(
        block.grouped(spec.sparse) if spec.sparse.is_sparse(block=n, **place) else block
        for n, block in enumerate(state)
    )


def state_bytes(state: PolicyState) -> int:
    """Return the memory of what is kept."""
    return sum(block.num_bytes for block in state)
