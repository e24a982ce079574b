"""The engine on CUDA devices: the same path as on the CPU, with streams."""

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine.events import Event, FramesReady, TaskFinished
from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.rollout import DevicePlan, plan_anchors, render, stream_decode
from flashforward_core.model.roles import Backbone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# float32 sums in another order, and TF32 is off: errors of some 1e-6 per forward, over 10 forwards at values near 4.
CLOSE = 1e-3
PLAIN = FastOptions(compile="off")


def on(devices: str, **choices: Any) -> DevicePlan:
    return DevicePlan(devices=(devices,), fast=PLAIN, **choices)


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone(model=rig.model(torch.float32).to("cuda:0"))


@pytest.mark.parametrize("schedule", ["flashforward", "self_forcing", "hiar"])
def test_one_gpu_equals_the_cpu(rig: Any, backbone: Backbone, schedule: str) -> None:
    spec, texts = rig.spec(schedule), rig.texts()
    expected = render(rig.backbone(), spec, texts, devices=on("cpu"))
    found = render(backbone, spec, texts, devices=on("cuda:0"))
    torch.testing.assert_close(found.latents_BCFHW, expected.latents_BCFHW, rtol=0, atol=CLOSE)


def test_lanes_and_a_second_run_change_no_byte(rig: Any, backbone: Backbone) -> None:
    plans = [on(devices) for devices in ("cuda:0", "cuda:0", "cuda:0*3")]
    if torch.cuda.device_count() > 1:
        plans += [on("cuda:0,cuda:1", layout=layout) for layout in ("interleaved", "prelude", "streaming")]
    found = {render(backbone, rig.spec(), rig.texts(), devices=plan).sha256 for plan in plans}
    assert len(found) == 1


def test_given_anchors_equal_planned_ones(rig: Any, backbone: Backbone) -> None:
    devices = on("cuda:0")
    anchors = plan_anchors(backbone, rig.spec(), rig.texts(), devices=devices)
    given = render(backbone, rig.spec(), rig.texts(), anchors=anchors, devices=devices)
    assert given.sha256 == render(backbone, rig.spec(), rig.texts(), devices=devices).sha256


def test_memory_and_threads_are_given_back(rig: Any, backbone: Backbone) -> None:
    devices = on("cuda:0*2")
    render(backbone, rig.spec(), rig.texts(), devices=devices)
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one per stream
    before = torch.cuda.memory_allocated()
    threads = set(threading.enumerate())
    render(backbone, rig.spec(), rig.texts(), devices=devices)
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    assert set(threading.enumerate()) == threads


@pytest.fixture(scope="module")
def with_frames(backbone: Backbone) -> Backbone:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, z_dim=16)
    return replace(backbone, vae=vae.to("cuda:0").requires_grad_(False).eval())


def device_lists() -> list[str]:
    return ["cuda:0", "cuda:0*2"] + (["cuda:0,cuda:1"] if torch.cuda.device_count() > 1 else [])


@pytest.mark.parametrize(
    ("devices", "decode"),
    [(devices, "shared" if devices == "cuda:0" else "own") for devices in device_lists()]
    + [(f"{devices},cuda:0", "split") for devices in device_lists()[1:]],
)
def test_frames_come_in_order_and_equal_decoding_afterwards(
    rig: Any, with_frames: Backbone, devices: str, decode: str
) -> None:
    """One byte of brightness: another device or memory layout may choose another convolution."""
    frames: list[torch.Tensor] = []

    def keep(event: Event) -> None:
        if isinstance(event, FramesReady):
            frames.append(event.frames[0].clone())

    plan = on(devices, decode=decode)
    result = render(with_frames, rig.spec(), rig.texts(), devices=plan, decode=True, on_event=keep)
    after = torch.cat(list(stream_decode(with_frames, result.latents_BCFHW)))
    assert (torch.cat(frames).int() - after.int()).abs().max() <= 1


@pytest.mark.parametrize("moment", ["planner/denoise/b0/s0", "renderer/denoise/c2/s1", "decode/c1"])
@pytest.mark.parametrize("devices", device_lists())
def test_a_cancel_leaves_nothing_behind_and_the_next_run_is_right(
    rig: Any, with_frames: Backbone, devices: str, moment: str
) -> None:
    def run(**callbacks: Any) -> str:
        return render(with_frames, rig.spec(), rig.texts(), devices=on(devices), decode=True, **callbacks).sha256

    expected, seen = run(), set()
    memory, threads = allocated(), set(threading.enumerate())

    def cancel() -> None:
        if moment in seen:
            raise KeyboardInterrupt

    def note(event: Event) -> None:
        if isinstance(event, TaskFinished):
            seen.add(event.span.task)

    with pytest.raises(KeyboardInterrupt):
        run(on_event=note, check_cancel=cancel)
    assert allocated() == memory
    assert set(threading.enumerate()) == threads
    assert run() == expected


def allocated() -> int:
    """Bytes in use on all devices, without the workspaces that cuBLAS keeps for each stream."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
