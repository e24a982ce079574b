"""Weights in host memory: blocks come in time, never over one that runs, and change no byte."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine import replicas
from flashforward_core.engine.budget import Fit, sizes_of
from flashforward_core.engine.events import Event
from flashforward_core.engine.executor import run_placed
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.memory import GIB, SLOTS, MemoryOptions, predict_memory
from flashforward_core.engine.offload import BlockStream, HostBlock, HostCopies, streamed
from flashforward_core.engine.ops import RunInputs
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.replicas import backbone_on, drop_replicas, weights_on
from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import Role
from flashforward_core.model.fp8 import hold_fp8, quantise
from flashforward_core.model.roles import Backbone, attach_roles
from flashforward_core.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
LAYERS = 7


def deep(rig: Any, *, merged: bool) -> Backbone:
    """Return the usual small backbone with more blocks; LoRA factors differ per role."""
    torch.manual_seed(0)
    config = replace(rig.backbone().config, num_layers=LAYERS)
    model = CausalWanTransformer(config)
    for factor in attach_roles(model, rank=3, alpha=3):
        torch.nn.init.normal_(factor, std=0.2)
    return replace(rig.backbone(model=model.requires_grad_(False), merged=merged), config=config)


def video(rig: Any, backbone: Backbone, *, resident: int | None, lanes: int = 1, fast: FastOptions) -> Tensor:
    """Run a rollout with so many blocks on the device; None: all."""
    spec = rig.spec(latent_frames=5)
    graph = build_graph(spec, decode=False)
    events: list[Event] = []
    run_placed(
        graph,
        inputs=RunInputs(spec=spec, texts=rig.texts()),
        backbone=backbone,
        placement=place(graph, lanes=lanes_for(["cpu"] * lanes)),
        on_event=events.append,
        poison=True,
        fast=fast,
        fit=Fit(resident={} if resident is None else {"cpu": resident}),
    )
    found: Tensor = rig.video(events)
    return found


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("resident", [0, 5])
def test_offloading_changes_no_byte(rig: Any, merged: bool, resident: int) -> None:
    backbone = deep(rig, merged=merged)
    expected = video(rig, backbone, resident=None, fast=FastOptions())
    for lanes in (1, 3):  # lanes share what stays and have slots of their own
        assert torch.equal(video(rig, backbone, resident=resident, lanes=lanes, fast=FastOptions()), expected)


def test_recordings_are_off_while_weights_stream(rig: Any) -> None:
    """A recording would read the slots as they were when it was made."""
    backbone = deep(rig, merged=False)
    expected = video(rig, backbone, resident=None, fast=FastOptions())
    assert torch.equal(video(rig, backbone, resident=0, fast=FastOptions(graphs="on")), expected)


def test_weights_in_8_bits_stream_with_their_scales() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, bias=False))
    plain = [block[0].weight.detach(), block[1].weight.detach()]
    bias = block[0].bias
    hold_fp8(block)
    for layer, weight in zip(block, plain, strict=True):
        stored, layer.weight_scale = quantise(weight)
        layer.weight = torch.nn.Parameter(stored, requires_grad=False)
    block[0].bias = bias
    host = HostBlock(block, pinned=False)
    memory = torch.zeros(host.num_bytes, dtype=torch.uint8)
    copied = host.on(memory)
    HostCopies().copy(0, memory, host.pieces)
    x = torch.randn(4, 5)
    assert torch.equal(copied(x), block(x))


@dataclass
class Traced(HostCopies):
    """Notes what is asked of the copies."""

    trace: list[tuple[str, int]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def copy(self, slot: int, memory: Tensor, pieces: Sequence[Tensor]) -> None:
        self.trace.append(("copy", slot))
        self.sizes[memory.data_ptr()] = memory.nbytes
        super().copy(slot, memory, pieces)

    def arrive(self, slot: int) -> None:
        self.trace.append(("arrive", slot))

    def leave(self, slot: int) -> None:
        self.trace.append(("leave", slot))


def chain_of(count: int) -> list[HostBlock]:
    return [HostBlock(torch.nn.Linear(1, 1), pinned=False) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_blocks_come_ahead_and_never_over_one_that_runs(count: int) -> None:
    copies = Traced()
    stream = BlockStream(CPU, name="lane0", copies=copies)
    chains = [chain_of(count), chain_of(count)]
    for chain in (chains[0], chains[0], chains[1], chains[0]):  # roles take turns
        for number, host in enumerate(chain):
            before = len(copies.trace)
            with stream.block(chain, number) as block:
                assert torch.equal(block.weight.view(-1), host.pieces[0][:4].view(torch.float32))
            within = copies.trace[before:]
            at = within.index(("arrive", number % stream.num_slots))
            assert ("copy", number % stream.num_slots) not in within[at:]
            assert number == 0 or at == 0, "the block before it should have asked for it"
    assert stream.num_slots == len(copies.sizes) == min(SLOTS, count)


def test_a_forward_copies_each_streaming_block_once(rig: Any) -> None:
    backbone = deep(rig, merged=False)
    local = backbone_on(backbone, CPU, resident=1)
    copies = Traced()
    stream = BlockStream(CPU, name="lane0", copies=copies)
    model = streamed(local.models, stream)[Role.RENDERER]
    model.text_context(rig.texts()[0], Role.RENDERER)
    copied = [slot for what, slot in copies.trace if what == "copy"]
    ahead = SLOTS - 1  # for what runs next
    assert LAYERS - 1 <= len(copied) <= LAYERS - 1 + ahead
    host_bytes = max(block.num_bytes for block in local.models[Role.RENDERER].blocks if isinstance(block, HostBlock))
    assert sum(copies.sizes.values()) == SLOTS * host_bytes
    stream.free()
    drop_replicas(backbone)


def test_a_budget_decides_how_many_blocks_stay(rig: Any) -> None:
    backbone, spec = deep(rig, merged=True), rig.spec(latent_frames=8)
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"]))
    offload = MemoryOptions(offload="on")
    expected = render(backbone, spec, rig.texts(), devices=DevicePlan()).sha256
    for room, stay in ((2, 2), (0, 0), (2, 0)):  # blocks leave when they must; they come back after `/free` only
        (found,) = predict_memory(
            graph, spec=spec, placement=placement, sizes=sizes_of(backbone), options=offload, resident=room
        )
        memory = replace(offload, budget_gib=found.peak_bytes / GIB)
        assert render(backbone, spec, rig.texts(), devices=DevicePlan(memory=memory)).sha256 == expected
        blocks = replicas._replicas[backbone.models[Role.RENDERER]][CPU].models[Role.PLANNER].blocks
        assert [isinstance(block, HostBlock) for block in blocks] == [n >= stay for n in range(LAYERS)]


def test_host_memory_goes_when_it_is_dropped(rig: Any) -> None:
    backbone = deep(rig, merged=False)
    local = backbone_on(backbone, CPU, resident=0)
    host = weakref.ref(local.models[Role.RENDERER].blocks[0])
    del local
    assert host() is not None
    drop_replicas(backbone)
    gc.collect()
    assert host() is None
    assert weights_on(backbone, torch.device("meta")) == 0
