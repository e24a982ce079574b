"""Tensors and modules as bytes."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.engine.wire import pack, pack_modules, unpack, unpack_modules
from flashforward_core.graph.task import Role
from flashforward_core.model.roles import models_by_role

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4),
        torch.randn(4, 6).T,
        torch.randn(5).bfloat16(),
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_comes_back_as_it_was(tensor: Tensor) -> None:
    back = unpack(pickle.loads(pickle.dumps(pack(tensor))))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


def test_packing_copies_nothing_that_is_contiguous() -> None:
    tensor = torch.zeros(4)
    packed = pack(tensor)
    tensor.fill_(1)
    assert unpack(packed).equal(torch.ones(4))


@pytest.mark.parametrize("merged", [False, True])
def test_modules_come_back_with_what_they_share(rig: Any, merged: bool) -> None:
    models = models_by_role(rig.model(torch.float32), merged=merged)
    packed = pickle.loads(pickle.dumps(pack_modules((models, None))))
    back, vae = unpack_modules(packed)
    assert vae is None and (back[Role.PLANNER] is back[Role.RENDERER]) is not merged
    for role in Role:
        for (name, before), (again, after) in zip(
            models[role].state_dict().items(), back[role].state_dict().items(), strict=True
        ):
            assert name == again and before.equal(after)
    embeddings = {back[role].patch_embedding.weight.data_ptr() for role in Role}
    assert len(embeddings) == 1, "weights that no LoRA touches are sent once"
    assert not any(parameter.requires_grad for parameter in back[Role.RENDERER].parameters())
