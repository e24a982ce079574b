"""The engine on CUDA devices: the same path as on the CPU, with streams."""

import threading
from typing import Any

import pytest
import torch

from flashforward_core.engine.rollout import DevicePlan, plan_anchors, render
from flashforward_core.model.roles import Backbone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# float32 sums in another order, and TF32 is off: errors of some 1e-6 per forward, over 10 forwards at values near 4.
CLOSE = 1e-3


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone(model=rig.model(torch.float32).to("cuda:0"))


@pytest.mark.parametrize("schedule", ["flashforward", "self_forcing", "hiar"])
def test_one_gpu_equals_the_cpu(rig: Any, backbone: Backbone, schedule: str) -> None:
    spec, texts = rig.spec(schedule), rig.texts()
    expected = render(rig.backbone(), spec, texts, devices=DevicePlan(devices=("cpu",)))
    found = render(backbone, spec, texts, devices=DevicePlan(devices=("cuda:0",)))
    torch.testing.assert_close(found.latents_BCFHW, expected.latents_BCFHW, rtol=0, atol=CLOSE)


def test_lanes_and_a_second_run_change_no_byte(rig: Any, backbone: Backbone) -> None:
    plans = [DevicePlan(devices=devices) for devices in (("cuda:0",), ("cuda:0",), ("cuda:0*3",))]
    if torch.cuda.device_count() > 1:
        plans += [DevicePlan(devices=("cuda:0,cuda:1",), layout=layout) for layout in ("interleaved", "streaming")]
    found = {render(backbone, rig.spec(), rig.texts(), devices=plan).sha256 for plan in plans}
    assert len(found) == 1


def test_given_anchors_equal_planned_ones(rig: Any, backbone: Backbone) -> None:
    devices = DevicePlan(devices=("cuda:0",))
    anchors = plan_anchors(backbone, rig.spec(), rig.texts(), devices=devices)
    given = render(backbone, rig.spec(), rig.texts(), anchors=anchors, devices=devices)
    assert given.sha256 == render(backbone, rig.spec(), rig.texts(), devices=devices).sha256


def test_memory_and_threads_are_given_back(rig: Any, backbone: Backbone) -> None:
    devices = DevicePlan(devices=("cuda:0*2",))
    render(backbone, rig.spec(), rig.texts(), devices=devices)
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one per stream
    before = torch.cuda.memory_allocated()
    threads = set(threading.enumerate())
    render(backbone, rig.spec(), rig.texts(), devices=devices)
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == before
    assert set(threading.enumerate()) == threads
