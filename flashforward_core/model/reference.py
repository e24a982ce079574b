"""The oracle: any task by full recompute, with no cache.

What a task reads from KV slots stands for other forwards, which read slots in turn. All of them are put into one
sequence, each forward a *page* of it, and one forward with a dense mask lets every page see exactly what its task
read: so each page's keys and values come out as its writer computed them. Slow on purpose, and short.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..flow import keyed_noise_frames, predict_x0, renoise, timestep
from ..graph.schedules import build_graph
from ..graph.task import ForwardTask, Kind, Role, Slot, Space, TaskGraph
from ..specs import LATENT_CHANNELS, RolloutSpec
from .attention import AttentionFn
from .config import PATCH
from .layers import Segment
from .transformer import CausalWanTransformer


def task_frames(spec: RolloutSpec, task: ForwardTask) -> tuple[int, ...]:
    """Return the absolute latent indices that a forward works on."""
    if task.role is Role.PLANNER:
        positions = spec.anchor_positions()
        return tuple(positions[anchor] for anchor in spec.anchor_blocks()[task.index])
    return tuple(spec.chunk(task.index))


def latent_slot(task: ForwardTask) -> Slot:
    """Return the slot of the latents that a forward takes in."""
    space = Space.ANCHOR_LATENT if task.role is Role.PLANNER else Space.LATENT
    return Slot(space=space, index=task.index, level=task.stage)


def needed_tasks(graph: TaskGraph, task: ForwardTask) -> tuple[ForwardTask, ...]:
    """Return the forwards behind the KV that ``task`` reads, transitively, in the graph's order; ``task`` is last."""
    needed: dict[str, ForwardTask] = {}
    pending = [task]
    while pending:
        current = pending.pop()
        if current.id not in needed:
            needed[current.id] = current
            pending += [graph.writers[slot] for slot in _kv_reads(current)]
    return (*(t for t in graph.tasks if t.id in needed and t.id != task.id), task)


def _kv_reads(task: ForwardTask) -> list[Slot]:
    return [slot for slot in task.reads if slot.space in (Space.KV, Space.ANCHOR_KV)]


def visible_frames(spec: RolloutSpec, graph: TaskGraph, pages: Sequence[ForwardTask]) -> Tensor:
    """Return the mask [F, F] over the pages' latent frames: whether a row's frame attends to a column's."""
    starts, total = {}, 0
    for page in pages:
        starts[page.id] = total
        total += len(task_frames(spec, page))
    mask = torch.zeros(total, total, dtype=torch.bool)
    for page in pages:
        own = slice(starts[page.id], starts[page.id] + len(task_frames(spec, page)))
        mask[own, own] = True
        for slot in _kv_reads(page):
            writer = graph.writers[slot]
            first, count = starts[writer.id], len(task_frames(spec, writer))
            if slot.space is Space.ANCHOR_KV:  # one anchor of the block that its writer committed
                first, count = first + spec.anchor_blocks()[writer.index].index(slot.index), 1
            mask[own, first : first + count] = True
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A rollout to recompute: one unmerged model, so that a sequence may mix roles."""

    model: CausalWanTransformer
    spec: RolloutSpec
    graph: TaskGraph
    texts: Sequence[Tensor]
    """Prompt embeddings [B, text_len, text_dim], indexed by ``PromptSpan.prompt``."""

    def velocity(self, task: ForwardTask, latents: Mapping[Slot, Tensor]) -> Tensor:
        """Return v_BCFHW of ``task`` from the latents of every page, each at its own level."""
        pages = needed_tasks(self.graph, task)
        frames = [task_frames(self.spec, page) for page in pages]
        stops = torch.tensor([len(f) for f in frames]).cumsum(0).tolist()
        segments = [
            Segment(page.role or Role.RENDERER, stop - len(f), stop)
            for page, f, stop in zip(pages, frames, stops, strict=True)
        ]
        texts = [self.texts[self.spec.prompt_at(f[0])] for f in frames]
        x_BCFHW = torch.cat([latents[latent_slot(page)] for page in pages], dim=2)
        mask_FF = visible_frames(self.spec, self.graph, pages)
        v = self.model(
            x_BCFHW,
            timestep_BF=self._timesteps(pages, batch=x_BCFHW.shape[0]),
            text=[self.model.text_context(text, s.role) for text, s in zip(texts, segments, strict=True)],
            frames=torch.tensor([index for f in frames for index in f]),
            segments=segments,
            self_attend=_masked_attention(mask_FF, tokens=x_BCFHW[0, 0, 0].numel() // (PATCH[1] * PATCH[2])),
        )
        return v[:, :, -len(frames[-1]) :]

    def _timesteps(self, pages: Sequence[ForwardTask], *, batch: int) -> Tensor:
        sigmas = self.spec.stages.sigmas
        values = [timestep(sigmas[page.stage]) for page in pages for _ in task_frames(self.spec, page)]
        return torch.tensor(values, dtype=torch.float64).expand(batch, -1)

    def denoise(self, task: ForwardTask, latents: Mapping[Slot, Tensor], *, seeds: Sequence[int]) -> Tensor:
        """Return the latents that a DENOISE writes: x0, re-noised unless its stage is the last."""
        sigmas = self.spec.stages.sigmas
        x = latents[latent_slot(task)]
        x0 = predict_x0(x, self.velocity(task, latents), sigma=sigmas[task.stage])
        if task.stage == self.spec.stages.num_stages - 1:
            return x0
        noise = task_noise(self.spec, task, stage=task.stage + 1, seeds=seeds)
        return renoise(x0, noise, sigma=sigmas[task.stage + 1])


def _masked_attention(mask_FF: Tensor, *, tokens: int) -> AttentionFn:
    mask_LL = mask_FF.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)

    def attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL).transpose(1, 2)

    return attend


def task_noise(spec: RolloutSpec, task: ForwardTask, *, stage: int, seeds: Sequence[int]) -> Tensor:
    """Return the noise [B, C, F, h, w] that a task's latents have at ``stage``, float32."""
    purpose = "anchor" if task.role is Role.PLANNER else "render"
    shape = (LATENT_CHANNELS, spec.shape.latent_height, spec.shape.latent_width)
    return keyed_noise_frames(seeds, purpose, task_frames(spec, task), stage, shape)


def reference_rollout(
    model: CausalWanTransformer,
    spec: RolloutSpec,
    texts: Sequence[Tensor],
    *,
    seeds: Sequence[int] | None = None,
    graph: TaskGraph | None = None,
    given: Mapping[Slot, Tensor] | None = None,
) -> dict[Slot, Tensor]:
    """Return every latent slot of a rollout, from noise to clean, by full recompute of each task.

    ``model`` is unmerged. ``seeds`` has one per batch row, the spec's by default; ``graph`` is the whole rollout's by
    default; ``given`` holds inputs that are not noise, such as finished anchors.
    """
    graph = graph or build_graph(spec, decode=False)
    seeds = seeds or (spec.seed,)
    reference = Reference(model=model, spec=spec, graph=graph, texts=texts)
    latents: dict[Slot, Tensor] = dict(given or {})
    dtype = model.proj_out.weight.dtype
    with torch.no_grad():
        for task in graph.tasks:
            if task.is_forward and task.stage == 0 and latent_slot(task) not in latents:
                latents[latent_slot(task)] = task_noise(spec, task, stage=0, seeds=seeds).to(dtype)
            if task.kind is Kind.DENOISE:
                written = next(slot for slot in task.writes if slot.space in (Space.LATENT, Space.ANCHOR_LATENT))
                latents[written] = reference.denoise(task, latents, seeds=seeds)
    return latents


def rendered(spec: RolloutSpec, latents: Mapping[Slot, Tensor]) -> Tensor:
    """Return the finished video's latents [B, C, F, h, w] from a rollout's slots."""
    level = spec.stages.num_stages
    slots = [Slot(space=Space.LATENT, index=chunk, level=level) for chunk in range(spec.num_chunks)]
    return torch.cat([latents[slot] for slot in slots], dim=2)
