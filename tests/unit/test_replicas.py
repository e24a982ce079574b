"""Weights on further devices: moved once, shared as the originals are, and let go with them."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine import replicas
from flashforward_core.engine.replicas import backbone_on, copy_modules, device_of, drop_replicas
from flashforward_core.graph.task import Role

pytestmark = pytest.mark.cpu

ELSEWHERE = torch.device("meta")  # another device that every machine has


def test_weights_stay_where_they_are_when_that_is_the_place(rig: Any) -> None:
    backbone = rig.backbone()
    assert backbone_on(backbone, torch.device("cpu")) is backbone


@pytest.mark.parametrize("merged", [True, False])
def test_weights_move_once_per_device(rig: Any, merged: bool) -> None:
    backbone = rig.backbone(merged=merged)
    first, second = (backbone_on(backbone, ELSEWHERE) for _ in range(2))
    assert device_of(first) == ELSEWHERE and device_of(backbone).type == "cpu"
    assert all(first.models[role] is second.models[role] for role in Role)
    assert (first.models[Role.PLANNER] is first.models[Role.RENDERER]) == (not merged)


def test_a_backbone_with_another_planner_does_not_get_the_old_one(rig: Any) -> None:
    backbone, other = rig.backbone(merged=True), rig.backbone(merged=True)
    before = backbone_on(backbone, ELSEWHERE)
    mixed = replace(backbone, models={**backbone.models, Role.PLANNER: other.models[Role.PLANNER]})
    assert backbone_on(mixed, ELSEWHERE).models[Role.PLANNER] is not before.models[Role.PLANNER]


def test_copies_share_the_memory_that_the_originals_share(rig: Any) -> None:
    """Merged weight sets share what no LoRA touches; a copy of each would take the memory twice."""
    models = rig.backbone(merged=True).models
    copied, vae = copy_modules((dict(models), None), device=torch.device("cpu"))
    assert vae is None
    for name, parameter in copied[Role.PLANNER].named_parameters():
        own, shared = models[Role.PLANNER].get_parameter(name), models[Role.RENDERER].get_parameter(name)
        beside = copied[Role.RENDERER].get_parameter(name)
        assert torch.equal(parameter, own) and parameter.data_ptr() != own.data_ptr()
        assert (parameter.data_ptr() == beside.data_ptr()) == (own.data_ptr() == shared.data_ptr()), name


@pytest.mark.parametrize("merged", [True, False])
def test_copies_go_when_dropped_or_when_the_original_goes(rig: Any, merged: bool) -> None:
    backbone = rig.backbone(merged=merged)
    copied = weakref.ref(backbone_on(backbone, ELSEWHERE).models[Role.RENDERER])
    drop_replicas(backbone)
    gc.collect()
    assert copied() is None
    copied = weakref.ref(backbone_on(backbone, ELSEWHERE).models[Role.RENDERER])
    before = len(replicas._replicas)
    del backbone
    gc.collect()
    assert copied() is None and len(replicas._replicas) == before - 1
