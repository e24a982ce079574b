"""Keys and values in 8 bits: half of bf16's memory, a small error that is known, and the same bytes in any order."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.memory import MemoryOptions
from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.kv.packing import Form, pack, unpack
from flashforward_core.model.loading import load_embedded
from flashforward_core.specs import RolloutSpec, StageSchedule, VideoShape

pytestmark = pytest.mark.cpu
PACKED = DevicePlan(memory=MemoryOptions(kv="fp8"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_stored_number_is_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.arange(-8, 9).view(1, -1, 1, 1)  # rows of very different size
    x = (torch.randn(1, 17, 40, 64, generator=generator) * scales).to(dtype)
    error = (unpack(pack(x), dtype).float() - x.float()).abs()
    top = x.float().abs().amax(dim=-1, keepdim=True)
    # Three bits of mantissa: half a step is 1/16. Below 2^-14 of the row's top steps are even, 2^-17 of it at most.
    assert (error <= x.float().abs() / 16 + top / 2**17).all()
    assert error.sum() > 0


def test_what_is_not_finite_shows_and_zero_is_zero() -> None:
    rows = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e30, -1e30], [1e-30, 0.0]])
    back = unpack(pack(rows.view(1, 5, 1, 2)), torch.float32).view(5, 2)
    assert (back[0] == 0).all() and not back[1:3].isfinite().any()
    torch.testing.assert_close(back[3:], rows[3:], rtol=1 / 16, atol=0)
    poisoned = torch.full((1, 1, 1, 3), Form(dtype=torch.float32, packed=True).poison, dtype=torch.uint8)
    assert unpack(poisoned, torch.float32).isnan().all()


def test_a_rollout_of_the_embedded_model_stays_near_the_full_one() -> None:
    backbone = load_embedded(device="cpu", dtype=torch.float32)
    texts = [backbone.text_encoder.encode(["a red balloon drifts right over green hills at dusk"])]
    stages = StageSchedule(starts=(1.0, 0.5))
    spec = RolloutSpec(shape=VideoShape(width=192, height=128, latent_frames=4), stages=stages)
    full, packed = (render(backbone, spec, texts, devices=devices) for devices in (DevicePlan(), PACKED))
    error = (packed.latents_BCFHW - full.latents_BCFHW).norm() / full.latents_BCFHW.norm()
    # Measured with four stages: 0.02 over 21 latent frames, 0.04 over 9; the rest is for other weights of this model.
    assert 0 < error < 0.1, error
    measured = packed.timeline.peak_kv_bytes[0] / full.timeline.peak_kv_bytes[0]
    assert measured == (64 + 1) / (64 * 4)  # a byte a number, and one a head, against float32


def test_layouts_orders_and_recordings_change_no_byte(rig: Any) -> None:
    spec, texts = rig.spec(), rig.texts()
    plans = [
        PACKED,
        replace(PACKED, order="memory"),
        replace(PACKED, devices=("cpu*3",)),
        replace(PACKED, devices=("cpu*2",), layout="streaming", fast=FastOptions(graphs="on")),
    ]
    found = {render(rig.backbone(), spec, texts, devices=plan).sha256 for plan in plans}
    assert len(found) == 1
    assert found != {render(rig.backbone(), spec, texts).sha256}


def test_a_later_render_goes_on_from_its_own_kind_only(rig: Any) -> None:
    backbone, spec, texts = rig.backbone(), rig.spec(), rig.texts()
    first = render(backbone, spec, texts, devices=PACKED, reuse_bytes=1 << 30)
    other = render(backbone, spec, texts, reuse_bytes=1 << 30)
    again = render(backbone, spec, texts, devices=PACKED, reuse_bytes=1 << 30)
    assert other.reused.chunks == 0 and other.sha256 != first.sha256
    assert again.reused.chunks == spec.num_chunks and again.sha256 == first.sha256
    longer = replace(spec, shape=replace(spec.shape, latent_frames=20))
    alone = render(rig.backbone(), longer, texts, devices=PACKED)
    assert render(backbone, longer, texts, devices=PACKED, reuse_bytes=1 << 30).sha256 == alone.sha256
