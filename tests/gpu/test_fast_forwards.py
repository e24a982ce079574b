"""Fast paths on CUDA: each equals the plain one, or is as close as its rounding allows, and gives its memory back."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.commands.bench_models import bench_texts, random_transformer
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.graphs import captures_work
from flashforward_core.engine.lanes import ThreadLane
from flashforward_core.engine.replicas import backbone_on, drop_replicas
from flashforward_core.engine.rollout import DevicePlan, RenderResult, render
from flashforward_core.engine.transfer import HostMark, carries, pair_works
from flashforward_core.graph.task import Role
from flashforward_core.model.attention import ATTENTION, AUTO_ORDER, sdpa
from flashforward_core.model.config import WanConfig
from flashforward_core.model.fp8 import quantise
from flashforward_core.model.fp8_matmul import Fp8MatmulLinear, scaled_matmul, use_fp8_matmul
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import AnchorPlan, RolloutSpec, VideoShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = WanConfig(name="small", dim=256, ffn_dim=512, num_heads=2, num_layers=3, text_dim=32, text_len=16)
"""Heads of 128, as Wan has them."""
PLAIN = FastOptions(compile="off", graphs="off")


def small_backbone(dtype: torch.dtype) -> Backbone:
    model = random_transformer(SMALL, device=torch.device("cuda:0"), dtype=dtype)
    return Backbone(
        config=SMALL, models=dict.fromkeys(Role, model), vae=None, text_encoder=None, fingerprint="small", dtype=dtype
    )


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_backbone(torch.bfloat16)


@pytest.fixture(scope="module")
def texts(backbone: Backbone) -> list[Tensor]:
    return bench_texts(backbone)


def spec() -> RolloutSpec:
    """11 chunks, so that the last six read a full history and are recorded; one block of three anchors, so that few
    shapes are compiled.
    """
    return RolloutSpec(shape=VideoShape(width=128, height=64, latent_frames=33), anchors=AnchorPlan(stride=11))


def run(backbone: Backbone, texts: list[Tensor], *, devices: str = "cuda:0", fast: FastOptions = PLAIN) -> RenderResult:
    return render(backbone, spec(), texts, devices=DevicePlan(devices=(devices,), fast=fast))


RECORDS = pytest.param("on", marks=pytest.mark.skipif(not captures_work(), reason="this allocator records nothing"))


def device_lists() -> list[str]:
    lists = ["cuda:0", "cuda:0*2", "cuda:0*5"]
    return lists + (["cuda:0,cuda:1", "cuda:0*2,cuda:1*2"] if torch.cuda.device_count() > 1 else [])


@pytest.mark.parametrize("devices", device_lists())
@pytest.mark.parametrize("graphs", ["off", RECORDS])
def test_lanes_and_recordings_change_no_byte(
    backbone: Backbone, texts: list[Tensor], devices: str, graphs: str
) -> None:
    """The same kernels on the same numbers, whoever launches them; recorded writes go through an index."""
    expected = run(backbone, texts)
    fast = FastOptions(compile="off", graphs=graphs)
    for _ in range(2):  # a second run finds memory that the first one used
        found = run(backbone, texts, devices=devices, fast=fast)
        assert found.sha256 == expected.sha256
        assert (sum(lane.in_parts for lane in found.timeline.launches) > 0) == (graphs == "on")
        if graphs == "on" and devices == "cuda:0":  # with others a lane may find one of them recording
            (lane,) = found.timeline.launches
            assert lane.replayed == 5 * lane.recorded > 0


def test_compiled_blocks_are_as_close_as_bf16_allows_and_lanes_agree(backbone: Backbone, texts: list[Tensor]) -> None:
    """Fused kernels round less often than eager ones. After 33 latents of feedback the two drift apart, so the first
    chunk is compared, which has seen 5 forwards: bf16 keeps 8 bits, values are near 1.
    """
    plain, fast = run(backbone, texts), FastOptions(compile="on", graphs="off")
    compiled = run(backbone, texts, fast=fast)
    first = (slice(None), slice(None), slice(0, 3))
    error = (compiled.latents_BCFHW[first] - plain.latents_BCFHW[first]).norm() / plain.latents_BCFHW[first].norm()
    assert error < 0.05
    for devices in device_lists():
        both = FastOptions(compile="on", graphs="on" if captures_work() else "auto")
        assert run(backbone, texts, devices=devices, fast=both).sha256 == compiled.sha256


@pytest.mark.parametrize("compile", ["off", "on"])
def test_two_forwards_as_one_batch_are_as_close_as_bf16_allows(
    backbone: Backbone, texts: list[Tensor], compile: str
) -> None:
    """Products of twice as many rows may add up in another order; the first chunk is compared, as above."""
    plain = run(backbone, texts)
    first = (slice(None), slice(None), slice(0, 3))
    for devices in ("cuda:0", "cuda:0*2"):
        fast = FastOptions(compile=compile, graphs="auto", batch_diagonal=True)
        found = run(backbone, texts, devices=devices, fast=fast)
        assert sum(lane.eager for lane in found.timeline.launches) < 11 * 4  # of 49 forwards, many in pairs
        error = (found.latents_BCFHW[first] - plain.latents_BCFHW[first]).norm() / plain.latents_BCFHW[first].norm()
        assert error < 0.05


@pytest.mark.parametrize("name", AUTO_ORDER)
def test_each_kernel_is_close_to_float32(name: str) -> None:
    device = torch.device("cuda:0")
    entry = ATTENTION[name]
    if (reason := entry.obstacle(device)) is not None:
        pytest.skip(reason)
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(1, 96, 2, 128, device=device, generator=generator)
    k, v = torch.randn(2, 1, 672, 2, 128, device=device, generator=generator)
    bank = torch.stack((k, v)).bfloat16()  # as lanes hold them: slices of one buffer
    found = entry.attend(q.bfloat16(), bank[0][:, 32:], bank[1][:, 32:]).float()
    exact = sdpa(q.bfloat16().float(), bank[0][:, 32:].float(), bank[1][:, 32:].float())
    assert (found - exact).norm() / exact.norm() < 1e-2  # 3e-3 measured for FlashAttention-3 at the real sizes


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper")
def test_the_8_bit_product_equals_its_reference() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256, device="cuda"), torch.randn(128, 256, device="cuda")
    bias = torch.randn(128, device="cuda").bfloat16()
    parts = (*quantise(x), *quantise(weight))
    found = scaled_matmul(*parts, bias=bias, dtype=torch.bfloat16)
    expected = scaled_matmul(*(part.cpu() for part in parts), bias=bias.cpu(), dtype=torch.float32)
    # the kernel adds up in fewer bits than float32 (fast accumulation) and rounds the result to bf16's 8
    assert (found.float().cpu() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper")
def test_8_bit_linears_run_compiled_and_recorded(texts: list[Tensor]) -> None:
    rounded = small_backbone(torch.bfloat16)
    use_fp8_matmul(rounded.models[Role.RENDERER])
    assert any(isinstance(part, Fp8MatmulLinear) for part in rounded.models[Role.PLANNER].modules())
    compiled = run(rounded, texts, fast=FastOptions(compile="on", graphs="off"))
    recorded = run(rounded, texts, devices="cuda:0*2", fast=FastOptions(compile="on"))
    assert compiled.sha256 == recorded.sha256


def test_a_lane_does_not_wait_for_its_device() -> None:
    """The host is done with a task while the device still works on it; marks tell when it ended."""
    lane, told = ThreadLane("lane0", "cuda:0"), threading.Event()
    found: dict[str, Any] = {}

    def work() -> None:
        start = lane.ops.mark()
        torch.cuda._sleep(200_000_000)  # some 0.1 s of cycles
        end = lane.ops.mark()
        found["running"] = not end.event.query()
        lane.defer(end, lambda: (found.update(seconds=end.time_s - start.time_s), told.set()))

    lane.submit(work)
    assert told.wait(10)
    lane.close()
    assert found["running"] and found["seconds"] > 0.02


def test_fetched_values_are_there_after_the_mark_and_puts_come_back() -> None:
    lane, done, found = ThreadLane("lane0", "cuda:0"), threading.Event(), {}

    def work() -> None:
        there = lane.ops.put(torch.arange(1000))
        torch.cuda._sleep(50_000_000)
        found["back"] = lane.ops.fetch(there * 2)
        lane.defer(lane.ops.mark(), done.set)
        lane.ops.wait_for(HostMark(0.0))

    lane.submit(work)
    assert done.wait(10)
    lane.close()
    assert torch.equal(found["back"], torch.arange(1000) * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pages_cross_devices_directly_and_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert pair_works(first, second) and carries(lambda t, d: t.to(d, copy=True), source=second, target=first)
    bank = torch.randn(2, 3, 1, 64, 2, 8, device=first)
    for works in (True, False):
        monkeypatch.setattr("flashforward_core.engine.transfer.pair_works", lambda *pair, works=works: works)
        lane, done, found = ThreadLane("lane1", "cuda:1"), threading.Event(), {}

        def work() -> None:
            page = torch.zeros(2, 3, 1, 80, 2, 8, device=second)
            lane.ops.copy(page[:, :, :, 8:24], bank[:, :, :, 16:32])  # noqa: B023 (runs before the next turn)
            found["page"] = lane.ops.fetch(page)  # noqa: B023
            lane.defer(lane.ops.mark(), done.set)  # noqa: B023

        lane.submit(work)
        assert done.wait(20)
        lane.close()
        assert torch.equal(found["page"][:, :, :, 8:24], bank[:, :, :, 16:32].cpu())
        assert not found["page"][:, :, :, 24:].any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_weights_move_once_and_go_when_dropped(backbone: Backbone) -> None:
    second = torch.device("cuda:1")
    first = backbone_on(backbone, second)
    assert backbone_on(backbone, second).models[Role.RENDERER] is first.models[Role.RENDERER]
    assert first.models[Role.PLANNER] is first.models[Role.RENDERER]  # shared here, shared there
    del first
    before = torch.cuda.memory_allocated(second)
    drop_replicas(backbone)
    gc.collect()
    assert torch.cuda.memory_allocated(second) < before


def allocated() -> int:
    """Bytes in use, without the workspaces that cuBLAS keeps for each stream."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("graphs", ["off", RECORDS])
def test_cancelling_or_failing_gives_memory_and_threads_back(
    backbone: Backbone, texts: list[Tensor], graphs: str
) -> None:
    fast = FastOptions(compile="off", graphs=graphs)
    expected = run(backbone, texts, devices="cuda:0*2", fast=fast).sha256
    memory, threads = allocated(), set(threading.enumerate())
    events: list[Any] = []

    def cancel() -> None:
        if len(events) > 20:
            raise KeyboardInterrupt

    plan = DevicePlan(devices=("cuda:0*2",), fast=fast)
    with pytest.raises(KeyboardInterrupt):
        render(backbone, spec(), texts, devices=plan, on_event=lambda e: events.append(type(e)), check_cancel=cancel)
    assert allocated() == memory
    left = set(threading.enumerate()) - threads
    assert {thread.name for thread in left} <= {"subproc_worker_timer"}  # which torch's compiler keeps
    assert run(backbone, texts, devices="cuda:0*2", fast=fast).sha256 == expected
