"""Sparse attention in whole rollouts: dense everywhere it changes nothing, sparse it is the same on any lanes."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.graph.schedules import SCHEDULES
from flashforward_core.kv.bucket_attention import BUCKET_ATTENTION, BucketAttention, attend_torch
from flashforward_core.kv.groups import KeyGroups, group_page
from flashforward_core.kv_policy import KeepOptions, SparseOptions, TempCacheOptions
from flashforward_core.specs import StageSchedule

pytestmark = pytest.mark.cpu

ONE, THREE = DevicePlan(devices=("cpu",)), DevicePlan(devices=("cpu*3",))


def _texts(rig: Any) -> list[torch.Tensor]:
    """A batch of two prompts, of 2 and 3 of the 5 rows."""
    texts = rig.texts(batch=2)
    for text in texts:
        text[0, 2:] = 0
        text[1, 3:] = 0
    return texts


@pytest.mark.parametrize("policy", [KeepOptions(), TempCacheOptions(threshold=0.5, budget_frames=6)])
@pytest.mark.parametrize("options", [SparseOptions(sparse_share=0.0), SparseOptions(dense_share=1.0)])
def test_dense_everywhere_merges_the_prompts_padding_and_changes_nothing(
    rig: Any, options: SparseOptions, policy: Any
) -> None:
    """Up to float32's last digits: the padding's rows are one row with a bias."""
    backbone, texts, spec = rig.backbone(), _texts(rig), replace(rig.spec(), kv_policy=policy)
    expected = render(backbone, spec, texts, devices=ONE).latents_BCFHW
    found = render(backbone, replace(spec, sparse=options), texts, devices=ONE).latents_BCFHW
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", [KeepOptions(), TempCacheOptions(threshold=0.5, budget_frames=6)])
def test_sparse_forwards_give_the_same_bytes_on_any_lanes(rig: Any, policy: Any) -> None:
    backbone, texts, spec = rig.backbone(), _texts(rig), replace(rig.spec(), kv_policy=policy)
    dense = render(backbone, spec, texts, devices=ONE)
    found = {}
    for name, options in (
        ("both", SparseOptions(sparse_share=1.0)),
        ("video", SparseOptions(sparse_share=1.0, prompt=False)),
        ("prompt", SparseOptions(sparse_share=1.0, video=False, planes=6)),
    ):
        sparse = replace(spec, sparse=options)
        one, three = (render(backbone, sparse, texts, devices=devices) for devices in (ONE, THREE))
        assert one.sha256 == three.sha256
        assert one.latents_BCFHW.isfinite().all()
        found[name] = one.sha256
    assert len({dense.sha256, *found.values()}) == 4


class Regrouped:
    """Attends as ``torch`` does, once it has found every page's buckets again from the keys of that very forward."""

    def __init__(self) -> None:
        self.calls = self.pages = 0

    def attend(
        self, q: Tensor, q_codes: Tensor, k: Tensor, v: Tensor, groups: Sequence[KeyGroups], bias: Tensor | None
    ) -> Tensor:
        alive = torch.ones(k.shape[:3]) > 0 if bias is None else (bias > -torch.inf).transpose(1, 2).expand(k.shape[:3])
        start = 0
        for page in groups:
            at = slice(start, start + page.num_keys)
            masks = [
                None,
                alive[:, at],
            ]  # a page of a bank, or a policy's state, whose mean is a sum over what is alive
            again = [group_page(k[:, at], options=SPARSE, alive_BNH=mask) for mask in masks]
            assert any(_equal(page, other) for other in again), "these are not the buckets of the page's keys"
            start = at.stop
        assert start == k.shape[1]
        self.calls, self.pages = self.calls + 1, self.pages + len(groups)
        return attend_torch(q, q_codes, k, v, groups, bias)


def _equal(first: KeyGroups, second: KeyGroups) -> bool:
    return all(torch.equal(getattr(first, field.name), getattr(second, field.name)) for field in fields(KeyGroups))


SPARSE = SparseOptions(sparse_share=1.0, attention="regrouped")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Regrouped:
    found = Regrouped()
    entry = BucketAttention(name="regrouped", attend=found.attend, obstacle=lambda device, dtype, tables: None)
    monkeypatch.setitem(BUCKET_ATTENTION._entries, "regrouped", entry)
    return found


@pytest.mark.parametrize("policy", [KeepOptions(), TempCacheOptions(threshold=0.5, budget_frames=6)])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_buckets_that_pages_keep_are_those_that_a_forward_would_find(
    rig: Any, schedule: str, policy: Any, check: Regrouped
) -> None:
    """On three lanes, so that pages are also copied from where they were written; some forwards read several pages."""
    spec = replace(rig.spec(schedule), kv_policy=policy, sparse=SPARSE)
    found = render(rig.backbone(), spec, _texts(rig), devices=THREE)
    assert found.latents_BCFHW.isfinite().all()
    assert check.pages > check.calls > 0


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_given_chunks_attend_sparsely_to_what_a_policy_keeps_for_dense_stages_too(
    rig: Any, schedule: str, check: Regrouped
) -> None:
    """Of four stages two are dense. Two chunks are given: every bank's second commit reads what its first left."""
    policy, sparse = TempCacheOptions(threshold=0.5, budget_frames=6), replace(SPARSE, dense_share=0.5)
    spec = rig.spec(schedule, latent_frames=9, stages=StageSchedule(), kv_policy=policy, sparse=sparse)
    start = torch.randn(1, 16, 6, 4, 4, generator=torch.Generator().manual_seed(3))
    found = render(rig.backbone(), spec, rig.texts(), devices=ONE, start=start)
    assert found.latents_BCFHW.isfinite().all()
    assert check.pages > check.calls > 0
