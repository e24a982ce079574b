"""One process's share of a rollout: the slots, banks and lanes of its tasks, and what has become ready.

All lanes of one machine are one share; over several machines (``engine.ray_lanes``) every lane is a share of its own,
whose ``Resume`` says which part of the rollout it is.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..graph.task import ForwardTask, Slot, Space
from ..kv.bank import BankShape, Home, LaneBanks, Ledger
from ..kv.bucket_attention import resolve_bucket_attention
from ..kv.pages import kv_slots
from ..model.attention import resolve_attention
from ..model.roles import Backbone
from ..model.tiny_vae import decoder_for
from .budget import Fit
from .events import AnchorBlockReady, ChunkReady, Event, FramesReady, Launches, TaskFinished, TaskSpan
from .forward import FastOptions, Forwarders, kind_of
from .lanes import Lane, LaneTensor
from .offload import BlockStream, streamed
from .ops import OPS, LaneState, RunInputs
from .paired import denoise_pair
from .replicas import backbone_on
from .reuse import Resume, kept_kv
from .transfer import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a finished run tells besides its events."""

    spans: tuple[TaskSpan, ...]
    """In the order of their starts; lanes as in the placement."""
    peak_kv_bytes: tuple[int, ...]
    """Most bytes that each lane's banks had at once."""
    launches: tuple[Launches, ...] = ()
    """How each lane's forwards were launched; empty when unknown."""
    kept: Mapping[Slot, Tensor]
    """What was to be kept, on the CPU."""
    states: Mapping[Slot, LaneTensor] = field(default_factory=dict)
    """States that were to be kept, on the lanes where they are."""


@dataclass(frozen=True, slots=True)
class HostPage:
    """A page from an earlier run, which banks copy as they copy another lane's."""

    page: Tensor

    def home(self, slot: Slot) -> Tensor:
        return self.page


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A task that its device has been asked for."""

    task: ForwardTask
    lane: int
    start: Mark
    end: Mark
    checks: Sequence[Callable[[], None]]
    ready: Sequence[Event]
    share: tuple[int, int] = (0, 1)
    """Which part of the time is its own: (0, 2) is the first half, where two run as one."""


class Run:
    """One rollout under way: its slots, its banks, and what has finished."""

    def __init__(
        self,
        resume: Resume,
        inputs: RunInputs,
        backbone: Backbone,
        *,
        lanes: Sequence[Lane],
        poison: bool,
        fast: FastOptions = FastOptions(),  # noqa: B008 (frozen)
        fit: Fit = Fit(),  # noqa: B008 (frozen)
    ) -> None:
        """``fit`` says how keys and values are held, and which blocks' weights stay in host memory."""
        self.graph = graph = resume.graph
        self.inputs = inputs
        self.keep = resume.keep
        self.kept: dict[Slot, Tensor] = {}
        self.kept_states: dict[Slot, LaneTensor] = {}
        plan = resume.pages
        self.ledger = Ledger(graph.tasks, plan)
        self.values: dict[Slot, LaneTensor] = dict(resume.states)
        self.homes: dict[Slot, Home] = {slot: HostPage(page) for slot, page in resume.kv.items()}
        self.marks: dict[str, Mark] = {}
        self.lane_of: dict[str, int] = {}
        self.began = time.perf_counter()
        shape = bank_shape(backbone, inputs, packed=fit.packed)
        fast = replace(fast, graphs="off") if fit.resident else fast  # a recording would keep weights in their place
        prompts = {task: inputs.spec.prompt_at(inputs.frames_of(task)[0]) for task in graph.tasks if task.is_forward}
        uses = [kind_of(task, plan.views[task.id], prompt=prompt) for task, prompt in prompts.items()]
        self.forwarders = Forwarders(fast, uses=uses, devices=[lane.device for lane in lanes])
        devices: dict[torch.device, Backbone] = {}
        self.streams: list[BlockStream] = []
        self.states: list[LaneState] = []
        for lane in lanes:
            resident = fit.resident.get(str(lane.device))
            if lane.device not in devices:
                devices[lane.device] = backbone_on(backbone, lane.device, resident=resident)
            local = devices[lane.device]
            if resident is not None:
                self.streams.append(BlockStream(lane.device, name=lane.name))
                local = replace(local, models=streamed(local.models, self.streams[-1]))
            banks = LaneBanks(
                plan, shape=shape, ledger=self.ledger, device=lane.device, poison=poison, copy=lane.ops.copy
            )
            attention = resolve_attention(backbone.attention, lane.device, dtype=backbone.dtype)
            options = inputs.spec.sparse
            sparse = None if options is None else resolve_bucket_attention(options, lane.device, dtype=backbone.dtype)
            last = fast.decodes_channels_last(lane.device)
            decoder = None if local.vae is None else decoder_for(local.vae, channels_last=last)
            forward = self.forwarders.make(local.models, attention, device=lane.device)
            state = LaneState(
                lane=lane,
                models=local.models,
                attention=attention,
                sparse=sparse,
                banks=banks,
                decoder=decoder,
                forward=forward,
            )
            self.states.append(state)

    def launch(self, task: ForwardTask, *, lane: int) -> Launched:
        """Ask the lane's device for one task, in the lane's thread, and publish what it will write.

        Whoever reads it orders its own device behind ``marks``; nothing here waits for a CUDA device.
        """
        state = self.states[lane]
        self._await_parents(task, lane=lane)
        start = state.lane.ops.mark()
        outputs = OPS[task.kind](task, self.inputs, state, self.values, self.homes)
        checks, state.checks = state.checks, []
        return self._publish(task, outputs, checks, lane=lane, start=start)

    def launch_pair(self, tasks: Sequence[ForwardTask], *, lane: int) -> list[Launched]:
        """Ask for two forwards as one batch; neither may read what the other writes."""
        state = self.states[lane]
        for task in tasks:
            self._await_parents(task, lane=lane)
        start = state.lane.ops.mark()
        found = denoise_pair(tasks, self.inputs, state, self.values, self.homes)
        launched = [
            self._publish(task, outputs, checks, lane=lane, start=start, share=(n, len(tasks)))
            for n, (task, (outputs, checks)) in enumerate(zip(tasks, found, strict=True))
        ]
        end = launched[-1].end
        self.marks.update({task.id: end for task in tasks})
        return [replace(one, end=end) for one in launched]

    def _await_parents(self, task: ForwardTask, *, lane: int) -> None:
        for parent in self.graph.parents(task):
            if self.lane_of[parent.id] != lane:
                self.states[lane].lane.ops.wait_for(self.marks[parent.id])

    def _publish(
        self,
        task: ForwardTask,
        outputs: Mapping[Slot, Any],
        checks: Sequence[Callable[[], None]],
        *,
        lane: int,
        start: Mark,
        share: tuple[int, int] = (0, 1),
    ) -> Launched:
        """Let others know of what a task writes, and let go of what nobody needs any more."""
        state = self.states[lane]
        device = state.lane.ops
        ready = self._ready(task, outputs, lane=state.lane)
        self.kept.update({slot: device.fetch(state.banks.home(slot).clone()) for slot in kept_kv(task, self.keep)})
        self._keep(outputs, lane=state.lane)
        self.marks[task.id] = end = device.mark()
        self.lane_of[task.id] = lane
        self.values.update({slot: LaneTensor(state.lane.name, value) for slot, value in outputs.items()})
        self.homes.update(dict.fromkeys(kv_slots(task.writes), state.banks))
        for slot in self.ledger.finish(task):
            self.values.pop(slot, None)
            self.homes.pop(slot, None)
        return Launched(task=task, lane=lane, start=start, end=end, checks=checks, ready=ready, share=share)

    def _keep(self, outputs: Mapping[Slot, Any], *, lane: Lane) -> None:
        """Keep what was asked for: tensors on the CPU, states where they are."""
        for slot in self.keep.intersection(outputs):
            if isinstance(outputs[slot], Tensor):
                self.kept[slot] = lane.ops.fetch(outputs[slot])
            else:
                self.kept_states[slot] = LaneTensor(lane.name, outputs[slot])

    def complete(self, launched: Launched) -> list[Event]:
        """Return what has become ready, once the device is done; raise what its checks found."""
        launched.end.wait()  # raises what the device has met
        for check in launched.checks:
            check()
        begin_s, end_s = (mark.time_s - self.began for mark in (launched.start, launched.end))
        part, parts = launched.share
        each = (end_s - begin_s) / parts
        own_s = begin_s + part * each
        span = TaskSpan(task=launched.task.id, lane=launched.lane, start_s=own_s, end_s=own_s + each)
        return [TaskFinished(span=span, done=0, total=len(self.graph)), *launched.ready]

    def _ready(self, task: ForwardTask, outputs: Mapping[Slot, Any], *, lane: Lane) -> list[Event]:
        """Return the events of finished results, with tensors on their way to the CPU."""
        clean = self.inputs.spec.stages.num_stages
        found: list[Event] = []
        for slot, value in outputs.items():
            if slot.space is Space.LATENT and slot.level == clean:
                frames = self.inputs.spec.chunk(task.index)
                found.append(ChunkReady(index=task.index, frames=frames, latents=lane.ops.fetch(value)))
            elif slot.space is Space.ANCHOR_LATENT and slot.level == clean:
                found.append(AnchorBlockReady(index=task.index, latents=lane.ops.fetch(value)))
            elif slot.space is Space.FRAMES:
                found.append(FramesReady(index=task.index, frames=lane.ops.fetch(value)))
        return found

    def report(self, spans: Sequence[TaskSpan]) -> RunReport:
        peaks = tuple(state.banks.peak_bytes + state.peak_policy_bytes for state in self.states)
        in_order = tuple(sorted(spans, key=lambda span: span.start_s))
        launches = tuple(state.forward.launches for state in self.states)
        return RunReport(
            spans=in_order, peak_kv_bytes=peaks, launches=launches, kept=self.kept, states=self.kept_states
        )

    def free(self) -> None:
        """Drop latents, contexts and banks."""
        self.values.clear()
        self.homes.clear()
        for state in self.states:
            state.banks.free()
            state.forward.free()
            state.contexts.clear()
            state.pair_texts.clear()
            state.merged.clear()
        for stream in self.streams:
            stream.free()


def bank_shape(backbone: Backbone, inputs: RunInputs, *, packed: bool = False) -> BankShape:
    config = backbone.config
    return BankShape(
        batch=inputs.batch,
        num_blocks=config.num_layers,
        frame_tokens=inputs.spec.shape.tokens_per_frame,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=backbone.dtype,
        packed=packed,
    )
