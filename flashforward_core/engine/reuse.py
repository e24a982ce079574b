"""Exact prefix reuse: run only what depends on a change, and give the bytes of a full run.

Every slot has a key, the hash of all that its bytes depend on: weights, device and kernels, sizes, noise, prompts,
given anchors, and the keys and page order of everything that its task reads. In-flight KV cannot be recomputed without
its whole chain, so a run keeps snapshots of it on the host, at the chunks where something new comes in: an anchor block
or a prompt. A later run goes on from the last such chunk before which all keys are the same.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..graph.task import ForwardTask, Kind, Role, Slot, Space, TaskGraph
from ..kv.pages import PagePlan, kv_slots, plan_pages
from ..model.attention import resolve_attention
from ..model.roles import Backbone
from ..specs import LATENT_CHANNELS, RolloutSpec
from ..store import SlotStore
from .forward import FastOptions
from .lanes import LaneTensor
from .ops import RunInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """What a run took from earlier ones."""

    chunks: int = 0
    """Chunks, from the start, that were not rendered again."""
    forwards: int = 0
    """Forwards that were not run again, the planner's included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A rollout of which a part is there already."""

    graph: TaskGraph
    """What is left to run."""
    pages: PagePlan
    """Of the whole rollout: a part must find its pages, and so the order of its keys, as the whole would."""
    latents: Mapping[Slot, Tensor] = field(default_factory=dict)
    """Clean latents of chunks and anchor blocks that need no forward, on the CPU; only to be read."""
    kv: Mapping[Slot, Tensor] = field(default_factory=dict)
    """Pages [2, blocks, B, tokens, H, D] on the CPU that tasks of ``graph`` read and none of them writes."""
    states: Mapping[Slot, LaneTensor] = field(default_factory=dict)
    """What an earlier part of the same rollout left on its lanes: a KV policy's states and the decoder's."""
    keep: frozenset[Slot] = frozenset()
    """Slots to copy to the host when they are written."""
    keys: Mapping[Slot, str] = field(default_factory=dict)
    snapshots: tuple[tuple[Slot, ...], ...] = ()
    """The parts of ``keep`` that are stored together, with what of each was there already."""
    reused: Reused = Reused()


def whole(graph: TaskGraph, spec: RolloutSpec) -> Resume:
    """Run everything and keep nothing."""
    return Resume(graph=graph, pages=plan_pages(spec, graph))


def resume(
    graph: TaskGraph,
    *,
    inputs: RunInputs,
    backbone: Backbone,
    devices: tuple[str, ...],
    page_bytes: int,
    budget: int,
    fast: FastOptions = FastOptions(),  # noqa: B008 (frozen)
    kv_form: str = "auto",
) -> Resume:
    """Say what of ``graph`` is left to run, given what ``backbone.store`` holds.

    ``page_bytes`` is the KV of one latent frame, ``kv_form`` how banks hold it. As many snapshots are kept as
    ``budget`` bytes hold, spread evenly.
    """
    pages = plan_pages(inputs.spec, graph)
    keys = slot_keys(
        graph, pages=pages, inputs=inputs, base=base_key(backbone, inputs, devices=devices, fast=fast, kv_form=kv_form)
    )
    store, spec = backbone.store, inputs.spec
    chunks = places(graph, spec)
    first = next((c for c in (spec.num_chunks, *reversed(chunks)) if _is_there(graph, spec, c, keys, store)), 0)
    found = [slot for slot in _clean(graph, Space.ANCHOR_LATENT, spec) if keys[slot] in store]
    found += [slot for slot in _clean(graph, Space.LATENT, spec) if slot.index < first]
    kv = snapshot_slots(graph, first)
    rest = _rest(graph, first=first, have=frozenset(found))
    snapshots = [slots for chunk in chunks if chunk >= first and (slots := snapshot_slots(graph, chunk))]
    keep = _affordable(
        snapshots, num_bytes=lambda slots: _num_bytes(slots, spec, page_bytes), budget=budget - _latent_bytes(inputs)
    )
    latents = dict(zip(found, store.take(keys[slot] for slot in found), strict=True))
    pages_there = dict(zip(kv, store.take(keys[slot] for slot in kv), strict=True))
    new = tuple({slot for slots in keep for slot in slots if slot in rest.writers})
    store.shrink(max(0, budget - _num_bytes(new, spec, page_bytes)))  # before the run, which fills that room
    return Resume(
        graph=rest,
        pages=pages,
        latents=latents,
        kv=pages_there,
        keep=frozenset(new),
        keys=keys,
        snapshots=tuple(keep),
        reused=Reused(chunks=first, forwards=graph.counts()["total"] - rest.counts()["total"]),
    )


def remember(
    run: Resume, *, store: SlotStore, latents: Mapping[Slot, Tensor], kv: Mapping[Slot, Tensor], budget: int
) -> None:
    """Put the clean latents and the kept KV of a finished run into ``store``; the latest snapshot lasts longest."""
    pages = {**run.kv, **kv}
    for slots in run.snapshots:
        values = {run.keys[slot]: pages[slot] for slot in slots}
        store.put(values, budget_bytes=budget)
    made = {**run.latents, **latents}.items()
    store.put({run.keys[slot]: value for slot, value in made if slot in run.keys}, budget_bytes=budget)


def places(graph: TaskGraph, spec: RolloutSpec) -> tuple[int, ...]:
    """Return the chunks, but for the first, that are the first to read some anchor block or some prompt span."""
    found: set[int] = set()
    blocks = {anchor: index for index, block in enumerate(spec.anchor_blocks()) for anchor in block}
    seen: set[int] = set()
    for task in sorted((t for t in graph.tasks if t.role is Role.RENDERER), key=lambda task: task.index):
        read = {blocks[slot.index] for slot in task.reads if slot.space is Space.ANCHOR_KV}
        if read - seen:
            found.add(task.index)
        seen |= read
    found.update(-(-span.start // spec.chunk_frames) for span in spec.prompts)
    return tuple(sorted(chunk for chunk in found if 0 < chunk < spec.num_chunks))


def snapshot_slots(graph: TaskGraph, chunk: int) -> tuple[Slot, ...]:
    """Return the KV of chunks before ``chunk`` that it and later ones read."""
    later = (task for task in graph.tasks if task.role is Role.RENDERER and task.index >= chunk)
    read = (slot for task in later for slot in task.reads if slot.space is Space.KV and slot.index < chunk)
    return tuple(sorted(set(read)))


def base_key(
    backbone: Backbone, inputs: RunInputs, *, devices: tuple[str, ...], fast: FastOptions, kv_form: str = "auto"
) -> str:
    """Hash what every slot of a rollout depends on. Kernels may split their sums by device and number of threads."""
    kernels = []
    for name in sorted(set(devices)):
        device = torch.device(name)
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        kernels.append(
            (hardware, resolve_attention(backbone.attention, device, dtype=backbone.dtype).name, fast.compiles(device))
        )
    merged = backbone.models[Role.PLANNER] is not backbone.models[Role.RENDERER]
    shape = inputs.spec.shape
    return _hash(
        backbone.fingerprint,
        backbone.config,
        backbone.dtype,
        merged,
        kv_form,
        kernels,
        torch.get_num_threads(),
        (shape.width, shape.height, inputs.batch),
    )


def slot_keys(graph: TaskGraph, *, pages: PagePlan, inputs: RunInputs, base: str) -> dict[Slot, str]:
    """Return the key of every slot that forwards read or write."""
    texts = [content_key(text) for text in inputs.texts]
    keys = {slot: content_key(inputs.given[slot]) if slot in inputs.given else "noise" for slot in graph.inputs}
    for task in graph.tasks:
        if task.is_forward:
            facts = _facts(task, pages=pages, inputs=inputs)
            text = texts[inputs.spec.prompt_at(inputs.frames_of(task)[0])]
            key = _hash(base, facts, text, [keys[slot] for slot in task.reads])
            keys.update({slot: _hash(key, slot) for slot in task.writes})
    return keys


def content_key(tensor: Tensor) -> str:
    """Hash a tensor's values, as float32, and its shape."""
    data = tensor.detach().to("cpu", torch.float32).contiguous()
    return _hash(tuple(data.shape), hashlib.sha256(data.numpy().data).hexdigest())


def _facts(task: ForwardTask, *, pages: PagePlan, inputs: RunInputs) -> tuple[object, ...]:
    """List what decides a forward's bytes besides what it reads, its prompt and what all forwards share."""
    view, sigmas = pages.views[task.id], inputs.spec.stages.sigmas
    places = [(page.start, page.frames) for page in (view.own, *(page for _, page in view.reads))]
    levels = sigmas[task.stage : task.stage + 2] if task.kind is Kind.DENOISE else sigmas[task.stage : task.stage + 1]
    seed = inputs.spec.seed if task.kind is Kind.DENOISE else None  # a commit draws no noise
    pins = {place: content_key(pin) for place, pin in inputs.pins_of(task).items()} if seed is not None else {}
    return (task.kind, task.role, task.stage, inputs.frames_of(task), levels, seed, places, pins)


def _clean(graph: TaskGraph, space: Space, spec: RolloutSpec) -> tuple[Slot, ...]:
    return tuple(slot for slot in graph.writers if slot.space is space and slot.level == spec.stages.num_stages)


def _is_there(graph: TaskGraph, spec: RolloutSpec, chunk: int, keys: Mapping[Slot, str], store: SlotStore) -> bool:
    """Whether ``store`` holds all that a run from ``chunk`` on needs from before it."""
    latents = (slot for slot in _clean(graph, Space.LATENT, spec) if slot.index < chunk)
    return all(keys[slot] in store for slot in (*latents, *snapshot_slots(graph, chunk)))


def _rest(graph: TaskGraph, *, first: int, have: frozenset[Slot]) -> TaskGraph:
    """Return the tasks left when rendering starts at chunk ``first`` and the clean latents ``have`` are there."""
    if not first and not have:
        return graph
    needed: set[Slot] = set()
    kept: list[ForwardTask] = []
    for task in reversed(graph.tasks):
        if task.role is Role.RENDERER:
            runs = task.index >= first
        else:
            runs = task.role is None or any(slot in needed and slot not in have for slot in task.writes)
        if runs:
            needed.update(task.reads)
            kept.append(task)
    written = {slot for task in kept for slot in task.writes}
    return TaskGraph(tuple(reversed(kept)), frozenset(needed - written))


def _affordable(
    snapshots: Sequence[tuple[Slot, ...]], *, num_bytes: Callable[[tuple[Slot, ...]], int], budget: int
) -> list[tuple[Slot, ...]]:
    """Return the last snapshot and every n-th before it, for the smallest n with which they fit into ``budget``."""
    for step in range(1, len(snapshots) + 1):
        chosen = list(snapshots[::-1][::step][::-1])
        if sum(map(num_bytes, chosen)) <= budget:
            return chosen
    return []


def _latent_bytes(inputs: RunInputs) -> int:
    """Return the memory of all clean latents of a rollout, in float32."""
    shape = inputs.spec.shape
    frames = shape.latent_frames + len(inputs.spec.anchor_positions())
    return inputs.batch * LATENT_CHANNELS * frames * shape.latent_height * shape.latent_width * 4


def _num_bytes(slots: tuple[Slot, ...], spec: RolloutSpec, page_bytes: int) -> int:
    return sum(len(spec.chunk(slot.index)) for slot in slots) * page_bytes


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def kept_kv(task: ForwardTask, keep: frozenset[Slot]) -> tuple[Slot, ...]:
    """Return the slots that ``task`` writes and a snapshot wants."""
    return tuple(slot for slot in kv_slots(task.writes) if slot in keep)
