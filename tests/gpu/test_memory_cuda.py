"""Memory on CUDA: predicted peaks, weights that stream from pinned memory, KV in 8 bits, and a cap that holds."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashforward_core.commands.bench_memory import capped
from flashforward_core.commands.bench_models import bench_texts, random_transformer
from flashforward_core.engine.budget import sizes_of
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.memory import GIB, DeviceMemory, DoesNotFit, MemoryOptions, predict_memory
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.replicas import blocks_on, drop_replicas
from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import Role
from flashforward_core.model.config import WAN_14B, WanConfig
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import AnchorPlan, RolloutSpec, VideoShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda:0")
SMALL = WanConfig(name="small", dim=256, ffn_dim=512, num_heads=2, num_layers=8, text_dim=32, text_len=16)
STACK = replace(WAN_14B, num_layers=8)
"""8 of the 40 blocks of 14B: 5.3 GiB in bf16."""
PLAIN = FastOptions(compile="off", graphs="off")


def on_host(config: WanConfig) -> Backbone:
    """Return random weights in host memory, where files leave them."""
    model = random_transformer(config, device=CUDA, dtype=torch.bfloat16).to("cpu")
    return Backbone(
        config=config,
        models=dict.fromkeys(Role, model),
        vae=None,
        text_encoder=None,
        fingerprint=config.name,
        dtype=torch.bfloat16,
    )


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def small() -> Backbone:
    return on_host(SMALL)


@pytest.fixture(scope="module")
def texts(small: Backbone) -> list[Tensor]:
    return bench_texts(small)


def spec(width: int = 128, height: int = 64) -> RolloutSpec:
    """Six chunks and three anchors."""
    shape = VideoShape(width=width, height=height, latent_frames=18)
    return RolloutSpec(shape=shape, anchors=AnchorPlan(stride=6))


def predicted(backbone: Backbone, what: RolloutSpec, plan: DevicePlan, *, resident: int) -> DeviceMemory:
    graph = build_graph(what, decode=False)
    placement = place(graph, lanes=lanes_for(plan.resolve()), layout=plan.layout, order=plan.order)
    found = predict_memory(
        graph,
        spec=what,
        placement=placement,
        sizes=sizes_of(backbone),
        options=plan.memory,
        resident=resident,
    )
    return found[0]


def plan_for(devices: str = "cuda:0", *, fast: FastOptions = PLAIN, **memory: object) -> DevicePlan:
    return DevicePlan(devices=(devices,), fast=fast, memory=MemoryOptions(**memory))


@pytest.mark.parametrize("compile", ["off", "on"], ids=["plain", "compiled"])
def test_streaming_weights_change_no_byte(small: Backbone, texts: list[Tensor], compile: str) -> None:
    fast = FastOptions(compile=compile, graphs="off")
    expected = render(small, spec(), texts, devices=plan_for(fast=fast)).sha256
    for devices in ("cuda:0", "cuda:0*2"):
        plan = plan_for(devices, fast=fast, offload="on")
        budget = predicted(small, spec(), plan, resident=1).peak_bytes / GIB
        plan = replace(plan, memory=replace(plan.memory, budget_gib=budget))
        for _ in range(3):  # a copy that comes too late or too early would not be so every time
            assert render(small, spec(), texts, devices=plan).sha256 == expected
        found = blocks_on(small, CUDA)
        assert found is not None and found < SMALL.num_layers
        drop_replicas(small)


def test_everything_comes_back(small: Backbone, texts: list[Tensor]) -> None:
    plan = plan_for(offload="on", kv="fp8")
    budget = predicted(small, spec(), plan, resident=0).peak_bytes / GIB
    plan = replace(plan, memory=replace(plan.memory, budget_gib=budget))
    drop_replicas(small)
    left = []
    for _ in range(2):
        render(small, spec(), texts, devices=plan)
        drop_replicas(small)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one per stream
        left.append(torch.cuda.memory_allocated())
    assert left[0] == left[1]


def test_packed_kv_is_near_and_the_same_in_any_layout(small: Backbone, texts: list[Tensor]) -> None:
    full = render(small, spec(), texts, devices=plan_for()).latents_BCFHW
    fast = (PLAIN, FastOptions(compile="off", graphs="on"))
    plans = [plan_for(devices, fast=choice, kv="fp8") for devices in ("cuda:0", "cuda:0*2") for choice in fast]
    found = [render(small, spec(), texts, devices=plan) for plan in plans]
    assert len({result.sha256 for result in found}) == 1
    error = (found[0].latents_BCFHW - full).norm() / full.norm()
    assert 0 < error < 0.1  # stored numbers are off by a sixteenth at most, and a chunk reads many
    drop_replicas(small)


def test_a_stack_of_the_largest_blocks_runs_under_a_cap_below_its_weights() -> None:
    """5.3 GiB of weights, and KV, under 4 GiB; the prediction says how much of it is used."""
    cap_gib = 4.0
    backbone, what = on_host(STACK), spec(width=208, height=128)
    texts = bench_texts(backbone)
    plan = plan_for(offload="on", kv="fp8", budget_gib=0.95 * cap_gib)
    torch._C._cuda_clearCublasWorkspaces()  # of other tests' streams
    with capped(CUDA, gib=cap_gib):
        with pytest.raises(DoesNotFit, match="offload=on"):
            render(backbone, what, texts, devices=replace(plan, memory=replace(plan.memory, offload="off")))
        torch.cuda.reset_peak_memory_stats(CUDA)
        render(backbone, what, texts, devices=plan)
        peak = torch.cuda.max_memory_allocated(CUDA)
    stay = blocks_on(backbone, CUDA)
    assert stay is not None and stay < STACK.num_layers
    expected = predicted(backbone, what, plan, resident=stay).peak_bytes
    # 128 MiB are for the libraries' workspaces, which may take less; the last block that fits may not fill the budget.
    assert expected - (256 << 20) < peak <= expected
    drop_replicas(backbone)
