"""What ``bench policies`` measures is what it says, on a small random backbone."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.commands.bench_policies import BITS, LookOptions, half_width, likeness, policies
from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.specs import History

pytestmark = pytest.mark.cpu

CPU = DevicePlan(devices=("cpu",))


def test_looking_changes_nothing_and_notes_every_block_of_every_chunk(rig: Any) -> None:
    """5 chunks; the first has nothing to look back at and the last publishes nothing: 3 looks at 2 blocks."""
    backbone, texts = rig.backbone(), rig.texts()
    spec = rig.spec("self_forcing", history=History(chunks=5))
    look = LookOptions(budget_frames=15, sink_frames=0)
    found = render(backbone, replace(spec, kv_policy=look), texts, devices=CPU)
    assert found.sha256 == render(backbone, spec, texts, devices=CPU).sha256
    assert len(look.stationarity) == 3 * 2
    assert all(0 < value < 1 for value in look.stationarity)
    assert set(look.recalls) == {(method, bits) for method, widths in BITS.items() for bits in widths}
    eight, two = (statistics.mean(look.recalls["quantised", bits]) for bits in (8, 2))
    assert 0 < two < eight <= 1


def test_the_past_alone_weighs_nothing_of_the_future() -> None:
    compared = policies(9)
    assert {policy.budget_frames for policy in compared.values()} == {9}
    assert compared["history_only"] == replace(compared["future_forcing"], future_weight=0.0)


def test_likeness_is_the_mean_psnr_and_equal_frames_count_as_100() -> None:
    frames = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    other = frames.clone()
    other[1] = 51  # a fifth of the range: 20·log10(5) dB
    assert likeness(frames, frames) == 100
    assert likeness(frames, other) == pytest.approx((100 + 20 * math.log10(5)) / 2)


def test_the_interval_is_196_standard_errors_on_each_side() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert half_width(values) == pytest.approx(1.96 * statistics.stdev(values) / 2)
    assert half_width([3.0]) is None
