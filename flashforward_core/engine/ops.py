"""What each kind of task does, one function each, on the lane that runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..flow import keyed_noise_frames, predict_x0, renoise, timestep
from ..graph.halves import BETWEEN
from ..graph.task import ForwardTask, Kind, Role, Slot, Space
from ..kv.bank import Home, LaneBanks
from ..kv.bucket_attention import BucketAttention
from ..kv.padding import MergedPrompt, merge_padding
from ..kv.policies import PolicyState, PolicyView
from ..kv.sparse import SparseForward
from ..model.attention import AttentionBackend
from ..model.biased_attention import resolve_biased_attention
from ..model.transformer import CausalWanTransformer, TextContext
from ..model.vae import SETTLED_LATENTS, Decoder, StreamingDecoder
from ..specs import RolloutSpec
from .compaction import compacted, handed_over, kept_slot, policy_view, state_bytes
from .forward import Forwarder
from .lanes import Lane, LaneTensor


class NotFinite(RuntimeError):
    """A forward gave latents with NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What a rollout is given, besides weights."""

    spec: RolloutSpec
    texts: Sequence[Tensor]
    """Prompt embeddings [B, text_len, text_dim], indexed by ``PromptSpan.prompt``."""
    given: Mapping[Slot, Tensor] = field(default_factory=dict)
    """Finished latents [B, C, F, h, w] on the CPU: anchor blocks, or chunks of an earlier run; only to be read."""
    pinned: Mapping[int, Tensor] = field(default_factory=dict)
    """Anchors [B, C, h, w] on the CPU that stay as they are while the rest of their block is denoised, by index."""
    start: Tensor | None = None
    """Clean latents [B, C, spec.start_frames, h, w] on the CPU with which the video begins, normalised."""
    anchor_seeds: Mapping[int, int] = field(default_factory=dict)
    """Seeds of anchors whose noise is not the rollout's, by index."""

    @property
    def batch(self) -> int:
        return self.texts[0].shape[0]

    def frames_of(self, task: ForwardTask) -> tuple[int, ...]:
        """Absolute latent indices that a forward works on."""
        if task.role is not Role.PLANNER:
            return tuple(self.spec.chunk(task.index))
        positions = self.spec.anchor_positions()
        return tuple(positions[anchor] for anchor in self.spec.anchor_blocks()[task.index])

    def pins_of(self, task: ForwardTask) -> dict[int, Tensor]:
        """Return what stays as given while ``task`` denoises, [B, C, h, w], by place among its latent frames.

        Anchors are pinned by ``pinned``, else by the start where it covers them; a chunk by the start alone.
        """
        found: dict[int, Tensor] = {}
        anchors = self.spec.anchor_blocks()[task.index] if task.role is Role.PLANNER else ()
        for place, frame in enumerate(self.frames_of(task)):
            if anchors and anchors[place] in self.pinned:
                found[place] = self.pinned[anchors[place]]
            elif self.start is not None and frame < self.start.shape[2]:
                found[place] = self.start[:, :, frame]
        return found


@dataclass(slots=True, kw_only=True)
class LaneState:
    """What one lane works with. Only its own thread uses it."""

    lane: Lane
    models: Mapping[Role, CausalWanTransformer]
    attention: AttentionBackend
    sparse: BucketAttention | None
    """The kernel of sparse attention, where the rollout has any."""
    banks: LaneBanks
    decoder: Decoder | None
    forward: Forwarder
    contexts: dict[tuple[Role, int], TextContext] = field(default_factory=dict)
    """By role and prompt, computed once."""
    pair_texts: dict[int, TextContext] = field(default_factory=dict)
    """Prompts of ``contexts``, by their id, for two forwards as one batch."""
    merged: dict[tuple[Role, int], MergedPrompt] = field(default_factory=dict)
    """The same prompts with their padding as one row, where attention is sparse."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """What the running task has to have looked at when its device is done; they raise."""
    policy_bytes: dict[str, int] = field(default_factory=dict)
    """What a KV policy keeps now, by bank."""
    peak_policy_bytes: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of latents: float32, or what the weights have if that is wider."""
        return torch.promote_types(torch.float32, self.banks.dtype)


Values = Mapping[Slot, LaneTensor]
"""Everything that is written and still needed, except KV."""
Homes = Mapping[Slot, Home]
"""Where each KV slot is: the banks that it was written into, or an earlier run's page."""
Op = Callable[[ForwardTask, RunInputs, LaneState, Values, Homes], dict[Slot, Any]]


def denoise(task: ForwardTask, inputs: RunInputs, state: LaneState, values: Values, homes: Homes) -> dict[Slot, Any]:
    """Take latents one level down: predict x0, then renoise to the next level unless it is the clean one."""
    sigmas = inputs.spec.stages.sigmas
    x = latents_of(task, inputs, state, values)
    v, handed = _forward(task, x, inputs=inputs, state=state, values=values, homes=homes, sigma=sigmas[task.stage])
    return {**stepped(task, x, v, inputs=inputs, state=state), **handed}


def stepped(task: ForwardTask, x: Tensor, v: Tensor, *, inputs: RunInputs, state: LaneState) -> dict[Slot, Any]:
    """Return the latents that ``task`` writes: those of level ``stage + 1``, from ``x`` and the velocity there."""
    sigmas = inputs.spec.stages.sigmas
    x0 = predict_x0(x, v, sigma=sigmas[task.stage])
    state.checks.append(partial(_check_finite, state.lane.ops.fetch(torch.isfinite(x0).all()), task, state))
    x0 = _pin(x0, task, inputs)
    level = task.stage + 1
    if level < len(sigmas) - 1:
        x0 = renoise(x0, _noise(task, inputs, state, level=level), sigma=sigmas[level])
    return {slot: x0 for slot in task.writes if slot.space in (Space.LATENT, Space.ANCHOR_LATENT)}


def _check_finite(finite: Tensor, task: ForwardTask, state: LaneState) -> None:
    if not finite:
        unit = "anchor block" if task.role is Role.PLANNER else "chunk"
        raise NotFinite(
            f"{unit} {task.index} is not finite after stage {task.stage} (weights {state.banks.dtype}, "
            f"attention {state.attention.name}); use weight_dtype=fp32 or another attention"
        )


def commit(task: ForwardTask, inputs: RunInputs, state: LaneState, values: Values, homes: Homes) -> dict[Slot, Any]:
    """Publish the KV of latents at level ``task.stage``; the velocity is not used."""
    x = latents_of(task, inputs, state, values)
    sigma = inputs.spec.stages.sigmas[task.stage]
    return _forward(task, x, inputs=inputs, state=state, values=values, homes=homes, sigma=sigma)[1]


def compact(task: ForwardTask, inputs: RunInputs, state: LaneState, values: Values, homes: Homes) -> dict[Slot, Any]:
    """Add what a forward handed over to what the KV policy has kept of its bank."""
    frames = state.lane.ops.put(torch.tensor(inputs.frames_of(task)))
    own = values[task.reads[-1]].on(state.lane)
    config = state.models[Role.RENDERER].config
    kept = compacted(task, _kept(task, state, values), own, spec=inputs.spec, config=config, frames=frames)
    (slot,) = task.writes
    handed = sum(part.nbytes for block in own for part in (block.q_BLHD, block.k_BLHD, block.v_BLHD))
    # The bank's last state is still there, and so is what the forward has handed over.
    together = sum(state.policy_bytes.values()) + state_bytes(kept) + handed
    state.peak_policy_bytes = max(state.peak_policy_bytes, together)
    state.policy_bytes[slot.bank] = state_bytes(kept)
    return {slot: kept}


def _kept(task: ForwardTask, state: LaneState, values: Values) -> PolicyState | None:
    slot = kept_slot(task)
    kept: PolicyState | None = None if slot is None else values[slot].on(state.lane)
    return kept


def decode(task: ForwardTask, inputs: RunInputs, state: LaneState, values: Values, homes: Homes) -> dict[Slot, Any]:
    """Turn one finished chunk into uint8 frames [B, F, H, W, 3] on the device, after the previous chunk's state.

    A new scene's first chunk, after a hard cut, waits for the previous one and takes nothing from it.
    """
    assert state.decoder is not None, f"{state.lane.name} has no decoder"
    if task.half:
        return _decode_half(task, inputs, state, values)
    states = [values[slot] for slot in task.reads if slot.space is Space.VAE_STATE]
    before = [kept.moved_to(state.lane).on(state.lane) for kept in states]
    latents = latents_of(task, inputs, state, values)
    if _begins_scene(task, inputs):
        before = [state.decoder.still(latents[:, :, :1])]
    frames, after = state.decoder.decode_in_place(latents, before[0] if before else None)
    made = {Space.FRAMES: frames, Space.VAE_STATE: after}
    return {slot: made[slot.space] for slot in task.writes}


def _begins_scene(task: ForwardTask, inputs: RunInputs) -> bool:
    return task.index > 0 and inputs.spec.scene_start(task.index) == task.index


def _decode_half(task: ForwardTask, inputs: RunInputs, state: LaneState, values: Values) -> dict[Slot, Any]:
    """Run the front or the back half of the decoder's layers, as ``graph.halves`` has them.

    For a new scene the front begins with a still, whose frames the back leaves out.
    """
    assert isinstance(state.decoder, StreamingDecoder), f"{state.lane.name} has no decoder that runs in halves"
    read = {slot.bank: values[slot].moved_to(state.lane).on(state.lane) for slot in task.reads if slot.bank}
    before = None if _begins_scene(task, inputs) else read.get(task.half)
    still = SETTLED_LATENTS if _begins_scene(task, inputs) else 0
    if task.half == "back":
        frames, after = state.decoder.back(read[BETWEEN], before, skip=still)
        return {slot: frames if slot.space is Space.FRAMES else after for slot in task.writes}
    latents = latents_of(task, inputs, state, values)
    begun = torch.cat([latents[:, :, :1].expand(-1, -1, still, -1, -1), latents], dim=2) if still else latents
    between, after = state.decoder.front(begun, before)
    return {slot: between if slot.bank == BETWEEN else after for slot in task.writes}


OPS: Mapping[Kind, Op] = {Kind.DENOISE: denoise, Kind.COMMIT: commit, Kind.COMPACT: compact, Kind.DECODE: decode}


def latents_of(task: ForwardTask, inputs: RunInputs, state: LaneState, values: Values) -> Tensor:
    """Return the latents that ``task`` reads, on its lane: noise, given anchors, or what another task wrote."""
    (slot,) = (slot for slot in task.reads if slot.space in (Space.LATENT, Space.ANCHOR_LATENT))
    if slot in inputs.given:
        return state.lane.ops.put(inputs.given[slot]).to(state.dtype)
    if slot.level == 0:
        return _noise(task, inputs, state, level=0)
    latents: Tensor = values[slot].moved_to(state.lane).on(state.lane)
    return latents


def _pin(x0_BCFHW: Tensor, task: ForwardTask, inputs: RunInputs) -> Tensor:
    """Put what is given where it belongs, so that the rest of the block or chunk sees it at the next noise level."""
    pins = inputs.pins_of(task)
    if not pins:
        return x0_BCFHW
    frames = list(x0_BCFHW.unbind(2))
    for place, pin in pins.items():
        frames[place] = pin.to(x0_BCFHW)
    return torch.stack(frames, dim=2)


def _noise(task: ForwardTask, inputs: RunInputs, state: LaneState, *, level: int) -> Tensor:
    """Return keyed noise for every latent frame of ``task``; row b of the batch has the seed ``spec.seed + b``."""
    shape = inputs.spec.shape
    size = (state.models[Role.RENDERER].config.channels, shape.latent_height, shape.latent_width)
    purpose = "anchor" if task.role is Role.PLANNER else "render"
    noise = [
        keyed_noise_frames(range(seed, seed + inputs.batch), purpose, [frame], level, size)
        for seed, frame in zip(_seeds(task, inputs), inputs.frames_of(task), strict=True)
    ]
    return state.lane.ops.put(torch.cat(noise, dim=2).to(state.dtype))


def _seeds(task: ForwardTask, inputs: RunInputs) -> list[int]:
    """Return the seed of each latent frame's noise."""
    seed = inputs.spec.seed
    if task.role is not Role.PLANNER:
        return [seed] * len(inputs.frames_of(task))
    return [inputs.anchor_seeds.get(anchor, seed) for anchor in inputs.spec.anchor_blocks()[task.index]]


def _forward(
    task: ForwardTask,
    x_BCFHW: Tensor,
    *,
    inputs: RunInputs,
    state: LaneState,
    values: Values,
    homes: Homes,
    sigma: float,
) -> tuple[Tensor, dict[Slot, Any]]:
    """Run the transformer in its own page of its bank; return the velocity and what is handed to a KV policy."""
    assert task.role is not None
    frames = inputs.frames_of(task)
    device = state.lane.device
    kept = _kept(task, state, values)
    text, prompt = text_of(task, inputs=inputs, state=state, frame=frames[0])
    sparse = _sparse(task, inputs=inputs, state=state, prompt=prompt)
    inner, dtype = state.banks.open(task, homes), state.banks.dtype
    view = policy_view(task, inner, kept, attention=state.attention, dtype=dtype, sparse=sparse)
    v = state.forward(
        task,
        x_BCFHW,
        timestep_BF=torch.full((inputs.batch, len(frames)), timestep(sigma), dtype=state.dtype, device=device),
        frames=state.lane.ops.put(torch.tensor(frames)),
        text=text,
        prompt=prompt,
        view=view,
        sparse=sparse,
    )
    state.banks.close(task)
    return v, {slot: view.collected for slot in handed_over(task) if isinstance(view, PolicyView)}


def text_of(task: ForwardTask, *, inputs: RunInputs, state: LaneState, frame: int) -> tuple[TextContext, int]:
    """Return the prompt that holds at the task's first latent frame, as its role sees it, and its index."""
    assert task.role is not None
    key = (task.role, inputs.spec.prompt_at(frame))
    if key not in state.contexts:
        text = state.lane.ops.put(inputs.texts[key[1]]).to(state.banks.dtype)
        context = state.models[task.role].text_context(text, task.role)
        if inputs.spec.sparse is not None:
            state.merged[key] = merge_padding(context, text)
            context = state.merged[key].text
        state.contexts[key] = context
    return state.contexts[key], key[1]


def _sparse(task: ForwardTask, *, inputs: RunInputs, state: LaneState, prompt: int) -> SparseForward | None:
    """Return a forward's attention where the rollout has it sparse. A commit counts as the last stage."""
    spec = inputs.spec
    if spec.sparse is None:
        return None
    assert task.role is not None and state.sparse is not None
    stages = spec.stages.num_stages
    return SparseForward(
        spec.sparse,
        state.merged[task.role, prompt],
        stage=min(task.stage, stages - 1),
        num_stages=stages,
        num_blocks=state.models[task.role].config.num_layers,
        attend=state.attention.attend,
        attend_biased=resolve_biased_attention("auto", state.lane.device, dtype=state.banks.dtype).attend,
        kernel=state.sparse,
    )
