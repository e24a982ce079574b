"""Prefix reuse on CUDA devices: pages go to the host and back, and the bytes are a full render's."""

from typing import Any

import pytest
import torch

from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.rollout import DevicePlan, plan_anchors, render

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("lanes", [1, 3])
def test_after_a_change_of_an_anchor_the_bytes_are_a_full_renders(rig: Any, lanes: int) -> None:
    backbone = rig.backbone(model=rig.model(torch.float32).to("cuda:0"))
    devices, texts, spec = (
        DevicePlan(devices=(f"cuda:0*{lanes}",), fast=FastOptions(compile="off")),
        rig.texts(),
        rig.spec(latent_frames=40),
    )
    anchors = plan_anchors(backbone, spec, texts, devices=devices)
    render(backbone, spec, texts, anchors=anchors, devices=devices, reuse_bytes=2**30)
    last = len(anchors.positions) - 1
    changed = anchors.with_latent(last, anchors.latents_BCAHW[:, :, last] + 0.1)
    again = render(backbone, spec, texts, anchors=changed, devices=devices, reuse_bytes=2**30)
    full = render(backbone, spec, texts, anchors=changed, devices=devices)
    assert again.reused.chunks > 0
    assert again.sha256 == full.sha256
