"""Role LoRA: merged equals unmerged, each role has its own, and its file brings it back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

from flashforward_core.graph.task import Role
from flashforward_core.model.config import WanConfig
from flashforward_core.model.layers import Segment
from flashforward_core.model.lora import load_role_lora, save_role_lora
from flashforward_core.model.roles import TARGETS, attach_roles, merge_role, models_by_role, role_parameters
from flashforward_core.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.cpu

TINY = WanConfig(name="tiny", dim=48, ffn_dim=96, num_heads=2, num_layers=2, text_dim=20, text_len=7, freq_dim=32)
EXACT = 1e-11  # float64: (W + BA)x and Wx + B(Ax) differ in rounding only


def random_model(*, width: int = 48) -> CausalWanTransformer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = width // 24
    config = WanConfig(
        name="tiny", dim=width, ffn_dim=96, num_heads=heads, num_layers=2, text_dim=20, text_len=7, freq_dim=32
    )
    return CausalWanTransformer(config).double()


@pytest.fixture
def taught() -> CausalWanTransformer:
    """A model whose roles have random LoRAs and embedding rows."""
    model = random_model()
    for factor in attach_roles(model, rank=4, alpha=8):
        torch.nn.init.normal_(factor, std=0.2)
    torch.nn.init.normal_(model.role_embedding.weight)
    return model.requires_grad_(False)


def velocity(model: CausalWanTransformer, role: Role) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, 2, 4, 6, generator=generator, dtype=torch.float64)
    text = torch.randn(1, 7, 20, generator=generator, dtype=torch.float64)
    timestep = torch.full((1, 2), 625.0, dtype=torch.float64)
    context = model.text_context(text, role)
    return model(x, timestep_BF=timestep, text=context, frames=torch.arange(2), role=role)


@pytest.mark.parametrize("role", list(Role))
def test_merged_equals_unmerged(role: Role, taught: CausalWanTransformer) -> None:
    merged = models_by_role(taught, merged=True)[role]
    assert set(merged.state_dict()) == set(random_model().state_dict())
    assert (velocity(merged, role) - velocity(taught, role)).abs().max() < EXACT


def test_roles_differ_and_the_base_differs_from_both(taught: CausalWanTransformer) -> None:
    outputs = [velocity(random_model(), Role.PLANNER), *(velocity(taught, role) for role in Role)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[one] - outputs[other]).abs().max() > 0.1


def test_new_roles_change_nothing() -> None:
    model = random_model()
    before = velocity(model, Role.PLANNER)
    names = {name for name, _ in model.named_parameters()}
    parameters = attach_roles(model, rank=2, alpha=2)
    assert names < {name for name, _ in model.named_parameters()}
    assert len(parameters) == len(TARGETS) * 2 * 2 * 2  # blocks, roles, factors
    assert torch.equal(velocity(model, Role.PLANNER), before)


def test_every_target_reaches_the_output() -> None:
    for target in TARGETS:
        model = random_model()
        for factor in attach_roles(model, rank=2, alpha=2, targets=(target,)):
            torch.nn.init.normal_(factor)
        assert (velocity(model, Role.RENDERER) - velocity(random_model(), Role.RENDERER)).abs().max() > 1e-4, target


def test_a_segment_gets_its_own_roles_update(taught: CausalWanTransformer) -> None:
    layer = taught.blocks[0].attn1.to_q
    x = torch.randn(2, 12, 48, dtype=torch.float64)  # 3 latent frames of 4 tokens
    mixed = layer(x, (Segment(Role.PLANNER, 0, 1), Segment(Role.RENDERER, 1, 3)))
    exact = {"rtol": 1e-12, "atol": 1e-12}  # float64: with several threads fewer rows may be summed in another order
    torch.testing.assert_close(mixed[:, :4], layer(x[:, :4], (Segment(Role.PLANNER, 0, 1),)), **exact)
    torch.testing.assert_close(mixed[:, 4:], layer(x[:, 4:], (Segment(Role.RENDERER, 0, 2),)), **exact)


def test_gradients_reach_the_role_that_ran_and_no_other() -> None:
    model = random_model().requires_grad_(False)
    for factor in attach_roles(model, rank=2, alpha=2):
        torch.nn.init.normal_(factor)
    velocity(model, Role.RENDERER).square().mean().backward()
    assert all(p.grad is not None for p in role_parameters(model, roles=[Role.RENDERER]))
    assert all(p.grad is None for p in role_parameters(model, roles=[Role.PLANNER]))


def test_a_merged_weight_set_refuses_the_other_role(taught: CausalWanTransformer) -> None:
    with pytest.raises(AssertionError, match="merged for the planner"):
        velocity(merge_role(taught, Role.PLANNER), Role.RENDERER)


def test_merging_copies_only_what_it_changes(taught: CausalWanTransformer) -> None:
    merged = merge_role(taught, Role.PLANNER)
    assert merged.proj_out.weight.data_ptr() == taught.proj_out.weight.data_ptr()
    assert merged.blocks[0].attn1.to_q.bias.data_ptr() == taught.blocks[0].attn1.to_q.bias.data_ptr()


def test_role_file_brings_a_role_back(taught: CausalWanTransformer, tmp_path: Path) -> None:
    again = random_model()
    for role in Role:
        path = tmp_path / f"{role}_lora.safetensors"
        save_role_lora(taught, path, role=role, base="tiny")
        load_role_lora(again, path, role=role)
    for role in Role:
        assert torch.equal(velocity(again, role), velocity(taught, role))
    with safe_open(tmp_path / "planner_lora.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.metadata() == {
            "format": "flashforward-role-lora",
            "role": "planner",
            "rank": "4",
            "alpha": "8",
            "base": "tiny",
        }
    assert {"role_embedding", "transformer.blocks.1.attn1.to_q.lora_A.weight"} <= names
    assert len(names) == 1 + 2 * len(TARGETS) * 2


def saved(model: CausalWanTransformer, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    save_role_lora(model, path, role=Role.PLANNER, base="tiny")
    with safe_open(path, framework="pt") as file:
        return load_file(path), file.metadata()


def test_wrong_role_files_are_refused_by_name(taught: CausalWanTransformer, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    tensors, metadata = saved(taught, path)
    with pytest.raises(ValueError, match=r"lora\.safetensors is a LoRA for role='planner'"):
        load_role_lora(random_model(), path, role=Role.RENDERER)
    with pytest.raises(ValueError, match=r"attn1\.to_k is 48 wide, this backbone's is 72.*base='tiny'"):
        load_role_lora(random_model(width=72), path, role=Role.PLANNER)
    strange = {name.replace("transformer.", "unet."): tensor for name, tensor in tensors.items()}
    no_factors = {"role_embedding": tensors["role_embedding"]}
    one_factor = {name: t for name, t in tensors.items() if name != "transformer.blocks.0.ffn.net.2.lora_B.weight"}
    cases = [
        (no_factors, metadata, "matches no layer"),
        (strange, metadata, "missing or unknown tensor|matches no layer"),
        (one_factor, metadata, r"blocks\.0\.ffn\.net\.2\.lora_B"),
        (tensors, {"format": "pt"}, "expected metadata format='flashforward-role-lora', found 'pt'"),
    ]
    for state, told, message in cases:
        save_file(state, path, metadata=told)
        with pytest.raises(ValueError, match=message):
            load_role_lora(random_model(), path, role=Role.PLANNER)


def test_a_truncated_role_file_names_itself(taught: CausalWanTransformer, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    saved(taught, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"lora\.safetensors.*complete safetensors file, found 500 bytes"):
        load_role_lora(random_model(), path, role=Role.PLANNER)
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors is missing: expected a role LoRA"):
        load_role_lora(random_model(), tmp_path / "gone.safetensors", role=Role.PLANNER)


def test_attach_roles_refuses_what_cannot_carry_a_lora() -> None:
    with pytest.raises(ValueError, match="rank=0 is below 1"):
        attach_roles(random_model(), rank=0, alpha=1)
    with pytest.raises(ValueError, match=r"norm2.*carry no LoRA; use some of: attn1\.to_q"):
        attach_roles(random_model(), rank=1, alpha=1, targets=("norm2",))
