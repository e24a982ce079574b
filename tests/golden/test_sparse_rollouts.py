"""Sparse attention in whole rollouts: dense everywhere it changes nothing, sparse it is the same on any lanes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.kv_policy import KeepOptions, SparseOptions, TempCacheOptions

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
