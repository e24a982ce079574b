"""KV policies in whole rollouts: a policy that removes nothing changes nothing, one that removes keeps its budget."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.kv_policy import (
    FutureForcingOptions,
    KeepOptions,
    KVPolicy,
    TempCacheOptions,
    WindowOptions,
)
from flashforward_core.specs import History, PromptSpan, RolloutSpec

pytestmark = pytest.mark.cpu

# 14 latent frames in 5 chunks: budgets above 14 remove nothing.
NOTHING = {
    "keep": KeepOptions(),
    "window": WindowOptions(budget_frames=15, sink_frames=0),
    "future_forcing": FutureForcingOptions(budget_frames=15),
    "temp_cache": TempCacheOptions(threshold=1.1, budget_frames=15),
}
SMALL = {
    "window": WindowOptions(budget_frames=5, sink_frames=2),
    "future_forcing": FutureForcingOptions(budget_frames=7),
    "temp_cache": TempCacheOptions(threshold=0.5, budget_frames=6),
}
ONE, THREE = DevicePlan(devices=("cpu",)), DevicePlan(devices=("cpu*3",))


def _spec(rig: Any, schedule: str, policy: KVPolicy) -> RolloutSpec:
    """A history of all chunks, so that without a policy all is kept, in the order in which it came."""
    spec: RolloutSpec = rig.spec(schedule, history=History(chunks=5, planner_blocks=1))
    return replace(spec, kv_policy=policy)


@pytest.mark.parametrize("schedule", ["flashforward", "self_forcing", "hiar", "last_stage"])
def test_a_policy_that_removes_nothing_gives_the_bytes_of_none(rig: Any, schedule: str) -> None:
    """TempCache adds log 1 = 0, but through a kernel that takes a bias: equal up to float32's last digits."""
    backbone, texts = rig.backbone(), rig.texts(batch=2)
    expected = render(backbone, _spec(rig, schedule, KeepOptions()), texts, devices=ONE)
    for name, policy in NOTHING.items():
        found = render(backbone, _spec(rig, schedule, policy), texts, devices=THREE)
        if name == "temp_cache":
            torch.testing.assert_close(found.latents_BCFHW, expected.latents_BCFHW, rtol=0, atol=1e-4)
        else:
            assert found.sha256 == expected.sha256, name


@pytest.mark.parametrize("name", SMALL)
def test_lanes_and_orders_give_the_same_bytes(rig: Any, name: str) -> None:
    backbone, spec = rig.backbone(), _spec(rig, "flashforward", SMALL[name])
    plans = [ONE, THREE, DevicePlan(devices=("cpu*2",), layout="prelude"), DevicePlan(devices=("cpu",), order="memory")]
    assert len({render(backbone, spec, rig.texts(), devices=plan).sha256 for plan in plans}) == 1


@pytest.mark.parametrize("name", SMALL)
def test_a_small_budget_changes_the_video_and_bounds_the_memory(rig: Any, name: str) -> None:
    backbone, spec = rig.backbone(), _spec(rig, "self_forcing", SMALL[name])
    plain = render(backbone, replace(spec, kv_policy=KeepOptions()), rig.texts(), devices=ONE)
    found = render(backbone, spec, rig.texts(), devices=ONE)
    assert found.sha256 != plain.sha256
    peaks = []
    for latent_frames in (29, 50):  # heads that merge much take longest to fill their budget
        longer = replace(spec, shape=replace(spec.shape, latent_frames=latent_frames))
        rendered = render(backbone, longer, rig.texts(), devices=ONE)
        assert torch.isfinite(rendered.latents_BCFHW).all()
        peaks.append(rendered.timeline.peak_kv_bytes[0])
    assert peaks[1] <= peaks[0] * 1.02  # how much the fullest head holds moves a little from chunk to chunk


def test_the_window_policy_equals_the_schedule_with_that_window(rig: Any) -> None:
    """The history's ring reads its pages in another order, so sums differ in float64's last digits."""
    backbone, texts = rig.backbone(torch.float64), rig.texts(torch.float64)
    ring = replace(_spec(rig, "self_forcing", KeepOptions()), history=History(chunks=2, sink=3))
    kept = _spec(rig, "self_forcing", WindowOptions(budget_frames=6, sink_frames=3, rebase=False))
    expected = render(backbone, ring, texts, devices=ONE).latents_BCFHW
    found = render(backbone, kept, texts, devices=ONE).latents_BCFHW
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # results are handed out in float32


def test_one_mean_query_per_head_needs_less_memory(rig: Any) -> None:
    backbone = rig.backbone()
    peaks = [
        render(backbone, _spec(rig, "self_forcing", policy), rig.texts(), devices=ONE).timeline.peak_kv_bytes[0]
        for policy in (replace(SMALL["future_forcing"], per_head=True), SMALL["future_forcing"])
    ]
    assert peaks[0] < peaks[1]


def test_rows_of_a_batch_are_kept_apart(rig: Any) -> None:
    """Row 1 alone, with its own seed, is what it is in the batch, to float64's last digits."""
    backbone, texts = rig.backbone(torch.float64), rig.texts(torch.float64, batch=2)
    for policy in SMALL.values():
        spec = _spec(rig, "self_forcing", policy)
        both = render(backbone, spec, texts, devices=ONE).latents_BCFHW
        alone = replace(spec, seed=spec.seed + 1)
        second = render(backbone, alone, [text[1:] for text in texts], devices=ONE).latents_BCFHW
        torch.testing.assert_close(both[1:], second, rtol=0, atol=1e-6)  # results are handed out in float32


def test_a_hard_cut_forgets(rig: Any) -> None:
    """After the cut the frames equal those of a rollout that was cut there but looked otherwise before."""
    backbone, texts = rig.backbone(), rig.texts()
    cut = PromptSpan(start=6, prompt=1, hard_cut=True)
    spec = replace(_spec(rig, "self_forcing", SMALL["future_forcing"]), prompts=(PromptSpan(), cut))
    other = replace(spec, prompts=(PromptSpan(prompt=1), replace(cut, prompt=1)))
    first, second = (render(backbone, s, texts, devices=ONE).latents_BCFHW for s in (spec, other))
    assert not torch.equal(first[:, :, :6], second[:, :, :6])
    assert torch.equal(first[:, :, 6:], second[:, :, 6:])
