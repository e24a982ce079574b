"""Our transformer computes what diffusers' does, and only its own arguments make it differ."""

import pytest
import torch
from torch import Tensor

from flashforward_core.graph.task import Role
from flashforward_core.model.checkpoints import build_transformer, infer_config, to_diffusers_naming
from flashforward_core.model.config import WanConfig
from flashforward_core.model.layers import Segment, rotate, rotate_time, rotation
from flashforward_core.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.cpu

# Heads 20 wide have 4 time pairs but 3 for rows and columns, so that axes cannot be mixed up unseen.
TINY = WanConfig(name="tiny", dim=40, ffn_dim=96, num_heads=2, num_layers=2, text_dim=20, text_len=7)

# float32 sums in another order. diffusers also takes the timestep's sinusoid from float32 angles of up to 1000
# radians, which are off by 3e-5; the time MLP averages that down.
PARITY = 1e-5

ORIGINAL_NAMES = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    "attn1.to_": "self_attn.",
    "attn2.to_": "cross_attn.",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",  # the affine norm before cross-attention
    "proj_out": "head.head",
}


def original_name(name: str) -> str:
    """The name that the public Wan2.1 code gives a parameter, written by hand as the converter's oracle."""
    if name == "scale_shift_table":
        return "head.modulation"
    for ours, theirs in ORIGINAL_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("scale_shift_table", "modulation")


@pytest.fixture(scope="module")
def diffusers_model() -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    arguments = {k: v for k, v in TINY.to_diffusers().items() if k not in ("_class_name", "text_len")}
    model = WanTransformer3DModel(**arguments)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # the defaults, ones and zeros, would hide a mix-up
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.1)
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def ours(diffusers_model: torch.nn.Module) -> CausalWanTransformer:
    return build_transformer(TINY, diffusers_model.state_dict(), source="diffusers")


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 16, 3, 8, 6, generator=generator), torch.randn(2, 7, 20, generator=generator)


def velocity(
    model: CausalWanTransformer,
    inputs: tuple[Tensor, Tensor],
    *,
    timestep: Tensor,
    role: Role = Role.RENDERER,
    first: int = 0,
) -> Tensor:
    x, text = inputs
    return model(
        x,
        timestep_BF=timestep,
        text=model.text_context(text, role),
        frames=torch.arange(first, first + x.shape[2]),
        role=role,
    )


TIMESTEP = torch.tensor([[833.3333], [625.0]]).expand(2, 3)


def test_one_chunk_equals_diffusers(
    diffusers_model: torch.nn.Module, ours: CausalWanTransformer, inputs: tuple[Tensor, Tensor]
) -> None:
    theirs = diffusers_model(inputs[0], TIMESTEP[:, 0], inputs[1]).sample
    assert theirs.std() > 0.1
    assert (velocity(ours, inputs, timestep=TIMESTEP) - theirs).abs().max() < PARITY


@pytest.mark.parametrize("prefix", ["", "model.", "model.diffusion_model.", "model._fsdp_wrapped_module."])
def test_original_naming_gives_the_same_model(
    prefix: str, diffusers_model: torch.nn.Module, ours: CausalWanTransformer, inputs: tuple[Tensor, Tensor]
) -> None:
    state = {prefix + original_name(name): tensor for name, tensor in diffusers_model.state_dict().items()}
    assert prefix + "blocks.1.self_attn.norm_k.weight" in state
    assert prefix + "head.modulation" in state
    tensors = to_diffusers_naming({"generator_ema": state}, source="test")
    assert set(tensors) == set(diffusers_model.state_dict())
    assert infer_config(tensors, num_heads=TINY.num_heads).num_layers == TINY.num_layers
    again = build_transformer(TINY, tensors, source="test")
    assert torch.equal(velocity(again, inputs, timestep=TIMESTEP), velocity(ours, inputs, timestep=TIMESTEP))


def test_parameter_names_are_diffusers_plus_the_role_embedding(diffusers_model: torch.nn.Module) -> None:
    ours = {name: p.shape for name, p in CausalWanTransformer(TINY).named_parameters()}
    assert ours.pop("role_embedding.weight") == (2, TINY.dim)
    assert ours == {name: p.shape for name, p in diffusers_model.named_parameters()}


def test_timestep_is_per_latent_frame(ours: CausalWanTransformer, inputs: tuple[Tensor, Tensor]) -> None:
    from diffusers import WanTransformer3DModel

    # diffusers takes a timestep per token: a latent frame has 4x3 of them.
    mixed = torch.tensor([[1000.0, 625.0, 0.0], [937.5, 937.5, 833.3333]])
    arguments = {k: v for k, v in TINY.to_diffusers().items() if k not in ("_class_name", "text_len")}
    theirs = WanTransformer3DModel(**arguments)
    theirs.load_state_dict({k: v for k, v in ours.state_dict().items() if k != "role_embedding.weight"})
    expected = theirs(inputs[0], mixed.repeat_interleave(12, dim=1), inputs[1]).sample
    found = velocity(ours, inputs, timestep=mixed)
    assert (found - expected).abs().max() < PARITY
    assert (found - velocity(ours, inputs, timestep=mixed.flip(1))).abs().max() > 1e-3


def test_zero_role_embedding_ignores_the_role_and_another_does_not(
    ours: CausalWanTransformer, inputs: tuple[Tensor, Tensor]
) -> None:
    planner = velocity(ours, inputs, timestep=TIMESTEP, role=Role.PLANNER)
    assert torch.equal(planner, velocity(ours, inputs, timestep=TIMESTEP, role=Role.RENDERER))
    rows = torch.randn(2, TINY.dim, generator=torch.Generator().manual_seed(2))
    taught = build_transformer(TINY, {**ours.state_dict(), "role_embedding.weight": rows}, source="test")
    renderer = velocity(taught, inputs, timestep=TIMESTEP, role=Role.RENDERER)
    assert (velocity(taught, inputs, timestep=TIMESTEP, role=Role.PLANNER) - renderer).abs().max() > 1e-2


def test_segments_of_one_sequence_equal_roles_alone_when_they_cannot_see_each_other(
    inputs: tuple[Tensor, Tensor],
) -> None:
    torch.manual_seed(3)
    model = CausalWanTransformer(TINY).double().requires_grad_(False)
    torch.nn.init.normal_(model.role_embedding.weight)
    x, text = (tensor.double() for tensor in inputs)
    mask = torch.block_diag(torch.ones(12, 12), torch.ones(24, 24)).bool()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    timestep, frames = torch.tensor([[0.0, 625.0, 625.0]]).double().expand(2, 3), torch.tensor([20, 4, 5])
    segments = (Segment(Role.PLANNER, 0, 1), Segment(Role.RENDERER, 1, 3))
    texts = [model.text_context(text, s.role) for s in segments]
    together = model(x, timestep_BF=timestep, text=texts, frames=frames, segments=segments, self_attend=attend)
    for context, s in zip(texts, segments, strict=True):
        at = slice(s.start, s.stop)
        alone = model(x[:, :, at], timestep_BF=timestep[:, at], text=context, frames=frames[at], role=s.role)
        assert (together[:, :, at] - alone).abs().max() < 1e-12  # float64, the same sums


def test_only_relative_positions_matter_and_they_do(ours: CausalWanTransformer, inputs: tuple[Tensor, Tensor]) -> None:
    base = velocity(ours, inputs, timestep=TIMESTEP)
    assert (velocity(ours, inputs, timestep=TIMESTEP, first=5000) - base).abs().max() < PARITY  # no table, no end
    x, text = inputs
    context = ours.text_context(text, Role.RENDERER)
    apart = ours(x, timestep_BF=TIMESTEP, text=context, frames=torch.tensor([0, 1, 5]), role=Role.RENDERER)
    assert (apart - base).abs().max() > 1e-4  # a last frame that is one chunk late is noticed


def test_stored_keys_move_by_rotating_their_time_pairs() -> None:
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(1, 3 * 12, 2, 20, generator=generator, dtype=torch.float64)

    def placed(first: int) -> Tensor:
        frames = torch.arange(first, first + 3)
        return rotate(keys, rotation(TINY, frames=frames, rows=4, columns=3, dtype=torch.float64))

    exact = 1e-11  # float64 angles of up to 2000 radians
    assert (rotate_time(placed(7), delta=1990, config=TINY) - placed(1997)).abs().max() < exact
    per_token = torch.full((36,), -7)
    assert (rotate_time(placed(7), delta=per_token, config=TINY) - placed(0)).abs().max() < exact
    assert (rotate_time(placed(7), delta=3, config=TINY) - placed(7)).abs().max() > 0.1


def test_gradients_are_the_same_when_blocks_are_recomputed(inputs: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(5)
    model = CausalWanTransformer(TINY).double()
    x, text = (tensor.double() for tensor in inputs)
    found = []
    for recompute in (False, True):
        model.zero_grad()
        model(
            x,
            timestep_BF=TIMESTEP,
            text=model.text_context(text, Role.PLANNER),
            frames=torch.arange(3),
            role=Role.PLANNER,
            checkpoint_blocks=recompute,
        ).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert set(found[0]) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_half_precision_weights_keep_their_islands(ours: CausalWanTransformer, inputs: tuple[Tensor, Tensor]) -> None:
    half = build_transformer(TINY, ours.state_dict(), source="test", dtype=torch.bfloat16)
    assert half.condition_embedder.time_embedder.linear_1.weight.dtype is torch.float32
    assert half.blocks[0].attn1.to_q.weight.dtype is torch.bfloat16
    full = velocity(ours, inputs, timestep=TIMESTEP)
    found = velocity(half, inputs, timestep=TIMESTEP)
    assert found.dtype is torch.bfloat16
    assert (found.float() - full).abs().max() < 0.05 * full.abs().max()  # bf16 keeps 8 bits: 0.4 % per operation
