"""LoRAs as trainers write them: each layout gives the same update, merged or not, and misfits are named."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashforward_core.graph.task import Role
from flashforward_core.model.adapters import apply_lora
from flashforward_core.model.checkpoints import build_transformer
from flashforward_core.model.config import WanConfig
from flashforward_core.model.fp8 import Fp8Linear
from flashforward_core.model.loading import backbone_of, with_role_loras
from flashforward_core.model.lora import save_role_lora
from flashforward_core.model.lora_files import read_lora
from flashforward_core.model.naming import BLOCK_NAMES
from flashforward_core.model.presets import choose_preset
from flashforward_core.model.roles import TARGETS, Backbone, attach_roles, role_linears
from flashforward_core.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.cpu

TINY = WanConfig(name="tiny", dim=48, ffn_dim=96, num_heads=2, num_layers=2, text_dim=20, text_len=7, freq_dim=32)
RANK, ALPHA = 4, 6.0
EXACT = 1e-11  # float64: (W + BA)x and Wx + B(Ax) differ in rounding only
Tensors = dict[str, Tensor]


def backbone_with(model: CausalWanTransformer) -> Backbone:
    choice = choose_preset("auto")
    made = backbone_of(model, report="", choice=choice, fingerprint="tiny", dtype=torch.float64)
    return replace(made, dtype=next(model.parameters()).dtype)


def random_model(config: WanConfig = TINY) -> CausalWanTransformer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return CausalWanTransformer(config).double().requires_grad_(False)


@pytest.fixture
def backbone() -> Backbone:
    return backbone_with(random_model())


@pytest.fixture(scope="module")
def factors() -> dict[str, tuple[Tensor, Tensor]]:
    """Down and up of every linear of every block, by diffusers' name."""
    torch.manual_seed(1)
    model = random_model()
    made = {}
    for name in (f"blocks.{i}.{target}" for i in range(TINY.num_layers) for target in TARGETS):
        layer = model.get_submodule(name)
        down, up = torch.randn(RANK, layer.in_features), torch.randn(layer.out_features, RANK)
        made[name] = (down.double() * 0.2, up.double() * 0.2)
    return made


def original(name: str) -> str:
    block, target = name.split(".", 2)[1:]
    return f"blocks.{block}.{BLOCK_NAMES[target]}"


LAYOUTS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "kohya": (lambda n: "lora_unet_" + original(n).replace(".", "_"), "lora_down.weight", "lora_up.weight"),
    "kohya, two underscores": (
        lambda n: "lora_unet__" + original(n).replace(".", "_"),
        "lora_down.weight",
        "lora_up.weight",
    ),
    "PEFT": (lambda n: "base_model.model." + original(n), "lora_A.weight", "lora_B.weight"),
    "PEFT with adapter name": (lambda n: "base_model.model." + n, "lora_A.default.weight", "lora_B.default.weight"),
    "PEFT around FSDP": (
        lambda n: "base_model.model.model." + original(n).replace("blocks.1.", "blocks.1._checkpoint_wrapped_module."),
        "lora_A.weight",
        "lora_B.weight",
    ),
    "diffusers": (lambda n: "transformer." + n, "lora_A.weight", "lora_B.weight"),
    "old diffusers": (lambda n: "transformer." + n, "lora.down.weight", "lora.up.weight"),
    "ComfyUI": (lambda n: "diffusion_model." + original(n), "lora_down.weight", "lora_up.weight"),
    "ComfyUI, PEFT's factors": (lambda n: "diffusion_model." + original(n), "lora_A.weight", "lora_B.weight"),
    "bare": (original, "lora_A.weight", "lora_B.weight"),
    "bare, no leaf": (lambda n: n, "lora_A", "lora_B"),
}


def written(factors: dict[str, tuple[Tensor, Tensor]], layout: str, *, alpha: float | None) -> Tensors:
    key, down, up = LAYOUTS[layout]
    state: Tensors = {}
    for name, pair in factors.items():
        state |= {f"{key(name)}.{down}": pair[0], f"{key(name)}.{up}": pair[1]}
        if alpha is not None:
            state[f"{key(name)}.alpha"] = torch.tensor(alpha)
    return state


def save(path: Path, state: Tensors, **metadata: str) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata=metadata)
    return path


def velocity(backbone: Backbone, role: Role) -> Tensor:
    model = backbone.models[role]
    dtype = model.proj_out.weight.dtype
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, 2, 4, 6, generator=generator, dtype=torch.float64).to(dtype)
    text = torch.randn(1, 7, 20, generator=generator, dtype=torch.float64).to(dtype)
    timestep = torch.full((1, 2), 625.0, dtype=dtype)
    context = model.text_context(text, role)
    return model(x, timestep_BF=timestep, text=context, frames=torch.arange(2), role=role)


def by_hand(factors: dict[str, tuple[Tensor, Tensor]], scale: float) -> Backbone:
    """The oracle: W + scale·up·down, written down once more."""
    model = random_model()
    for name, (down, up) in factors.items():
        model.get_submodule(name).weight += scale * up @ down
    return backbone_with(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", [None, ALPHA])
def test_every_layout_gives_the_same_update(
    layout: str, alpha: float | None, backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    path = save(tmp_path / "style.safetensors", written(factors, layout, alpha=alpha))
    expected = by_hand(factors, 0.7 * (1.0 if alpha is None else ALPHA / RANK))
    before = velocity(backbone, Role.PLANNER)
    for merged in (True, False):
        made, lora = apply_lora(backbone, path, strength=0.7, merged=merged)
        assert (len(lora.factors), lora.unmatched) == (len(factors), ())
        for role in Role:
            assert (velocity(made, role) - velocity(expected, role)).abs().max() < EXACT
        assert bool(role_linears(made.models[Role.PLANNER])) is not merged
    assert torch.equal(velocity(backbone, Role.PLANNER), before)  # the backbone that came in is as it was
    assert (velocity(expected, Role.PLANNER) - before).abs().max() > 0.1


def test_diffusers_converter_reads_the_same(
    factors: dict[str, tuple[Tensor, Tensor]], backbone: Backbone, tmp_path: Path
) -> None:
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers

    state = written(factors, "ComfyUI", alpha=ALPHA)
    lora = read_lora(save(tmp_path / "l.safetensors", state), backbone.models[Role.PLANNER])
    theirs = _convert_non_diffusers_wan_lora_to_diffusers(dict(state))
    for name, ours in lora.factors.items():
        product = theirs[f"transformer.{name}.lora_B.weight"] @ theirs[f"transformer.{name}.lora_A.weight"]
        assert (ours.product() - product).abs().max() < EXACT


@pytest.mark.parametrize("where", ["metadata", "adapter_config.json", "flag"])
def test_rank_stabilised_loras_are_scaled_by_the_root_of_the_rank(
    where: str, backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    options = {"use_rslora": True, "lora_alpha": ALPHA, "r": RANK}
    state = written(factors, "PEFT", alpha=ALPHA if where == "flag" else None)
    metadata = {}
    if where == "metadata":
        metadata["lora_adapter_metadata"] = json.dumps({f"transformer.{k}": v for k, v in options.items()})
    elif where == "adapter_config.json":
        (tmp_path / where).write_text(json.dumps(options))
    else:
        metadata["use_rslora"] = "True"
    made, _ = apply_lora(backbone, save(tmp_path / "rs.safetensors", state, **metadata))
    expected = by_hand(factors, ALPHA / math.sqrt(RANK))
    assert (velocity(made, Role.RENDERER) - velocity(expected, Role.RENDERER)).abs().max() < EXACT


@pytest.mark.parametrize("merged", [True, False])
def test_loras_stack_with_their_strengths_and_roles(
    merged: bool, backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    one = save(tmp_path / "one.safetensors", written(factors, "kohya", alpha=ALPHA))
    few = {name: pair for name, pair in factors.items() if "attn1" in name}
    two = save(tmp_path / "two.safetensors", written(few, "diffusers", alpha=None))
    made, _ = apply_lora(backbone, one, strength=0.5, merged=merged)
    made, _ = apply_lora(made, two, strength=-2.0, roles=[Role.PLANNER], merged=merged)
    renderer = by_hand(factors, 0.5 * ALPHA / RANK)
    planner = by_hand(factors, 0.5 * ALPHA / RANK)
    for name, (down, up) in few.items():
        planner.models[Role.PLANNER].get_submodule(name).weight -= 2 * up @ down
    assert (velocity(made, Role.PLANNER) - velocity(planner, Role.PLANNER)).abs().max() < EXACT
    assert (velocity(made, Role.RENDERER) - velocity(renderer, Role.RENDERER)).abs().max() < EXACT
    assert len({made.fingerprint, backbone.fingerprint, apply_lora(backbone, one, strength=0.5)[0].fingerprint}) == 3


def test_a_style_on_top_of_role_loras_leaves_their_strength(
    factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    taught = random_model()
    for factor in attach_roles(taught, rank=2, alpha=6):
        torch.nn.init.normal_(factor, std=0.2)
    path = save(tmp_path / "style.safetensors", written(factors, "bare", alpha=None))
    styled = [apply_lora(backbone_with(taught), path, merged=merged)[0] for merged in (True, False)]
    for role in Role:
        assert (velocity(styled[0], role) - velocity(styled[1], role)).abs().max() < EXACT
    assert (velocity(styled[0], Role.PLANNER) - velocity(styled[0], Role.RENDERER)).abs().max() > 1e-3


def test_unmerged_loras_share_the_weights_and_one_model(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    path = save(tmp_path / "l.safetensors", written(factors, "bare", alpha=None))
    made, _ = apply_lora(backbone, path, roles=[Role.PLANNER], merged=False)
    assert made.models[Role.PLANNER] is made.models[Role.RENDERER]  # a second copy on other devices is not needed
    before = {p.data_ptr() for p in backbone.models[Role.PLANNER].parameters()}
    new = [
        p for n, p in made.models[Role.PLANNER].named_parameters() if p.data_ptr() not in before and ".lora_" not in n
    ]
    assert not new
    assert torch.equal(velocity(made, Role.RENDERER), velocity(backbone, Role.RENDERER))


def test_plain_differences_are_added(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    torch.manual_seed(2)
    state = written(factors, "ComfyUI", alpha=None)
    wanted = {
        "blocks.1.self_attn.q.diff_b": "blocks.1.attn1.to_q.bias",
        "blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
        "blocks.1.cross_attn.norm_k.diff": "blocks.1.attn2.norm_k.weight",
        "blocks.1.diff_m": "blocks.1.scale_shift_table",
        "head.diff_m": "scale_shift_table",
        "patch_embedding.diff": "patch_embedding.weight",
        "time_embedding.0.diff_b": "condition_embedder.time_embedder.linear_1.bias",
    }
    expected = by_hand(factors, 0.5)
    for key, name in wanted.items():
        parameter = expected.models[Role.PLANNER].get_parameter(name)
        difference = torch.randn_like(parameter)
        state[f"diffusion_model.{key}"] = difference
        parameter += 0.5 * difference
    for merged in (True, False):
        made, lora = apply_lora(backbone, save(tmp_path / "d.safetensors", state), strength=0.5, merged=merged)
        assert (set(lora.differences), lora.unmatched) == (set(wanted.values()), ())
        assert (velocity(made, Role.PLANNER) - velocity(expected, Role.PLANNER)).abs().max() < EXACT


def test_layers_outside_the_blocks_are_updated_too(backbone: Backbone, tmp_path: Path) -> None:
    torch.manual_seed(3)
    state, expected = {}, by_hand({}, 1.0)
    for theirs, ours in {
        "head.head": "proj_out",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    }.items():
        layer = expected.models[Role.PLANNER].get_submodule(ours)
        down, up = torch.randn(2, layer.in_features).double(), torch.randn(layer.out_features, 2).double()
        state |= {f"diffusion_model.{theirs}.lora_A.weight": down, f"diffusion_model.{theirs}.lora_B.weight": up}
        layer.weight += up @ down
    path = save(tmp_path / "outer.safetensors", state)
    for merged in (True, False):
        made, _ = apply_lora(backbone, path, roles=[Role.PLANNER], merged=merged)
        assert (velocity(made, Role.PLANNER) - velocity(expected, Role.PLANNER)).abs().max() < EXACT
        assert torch.equal(velocity(made, Role.RENDERER), velocity(backbone, Role.RENDERER))


def test_updates_of_8_bit_weights_are_rounded_to_8_bits_again(
    factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    state = random_model().float().state_dict()
    held = backbone_with(build_transformer(TINY, state, source="x", fp8=True))
    path = save(tmp_path / "l.safetensors", written(factors, "kohya", alpha=None))
    made, _ = apply_lora(held, path, roles=[Role.RENDERER], merged=False)
    layer = made.models[Role.RENDERER].blocks[1].ffn.net[2]
    assert isinstance(layer, Fp8Linear)
    down, up = factors["blocks.1.ffn.net.2"]
    exact = held.models[Role.RENDERER].blocks[1].ffn.net[2].widened(torch.float32) + (up @ down).float()
    error = (layer.widened(torch.float32) - exact).abs()
    assert (
        error <= exact.abs() / 16 + exact.abs().amax(dim=1, keepdim=True) / 2**15
    ).all()  # half a unit of 3 + 1 bits
    assert torch.equal(velocity(made, Role.PLANNER), velocity(held, Role.PLANNER))


@pytest.mark.parametrize("fp8", [False, True])
def test_role_loras_go_on_any_backbone(fp8: bool, tmp_path: Path) -> None:
    taught = random_model().float()
    for factor in attach_roles(taught, rank=3, alpha=6):
        torch.nn.init.normal_(factor, std=0.2)
    torch.nn.init.normal_(taught.role_embedding.weight)
    paths = {role: tmp_path / f"{role}.safetensors" for role in Role}
    for role, path in paths.items():
        save_role_lora(taught, path, role=role, base="tiny")
    state = {n: t for n, t in random_model().float().state_dict().items() if n != "role_embedding.weight"}
    bare = backbone_with(build_transformer(TINY, state, source="x", fp8=fp8))
    made = with_role_loras(bare, paths)
    for role in Role:
        difference = (velocity(made, role) - velocity(backbone_with(taught), role)).abs().max()
        scale = velocity(backbone_with(taught), role).abs().max()
        assert difference < (0.15 * scale if fp8 else 1e-5)  # 8 bits: 3 % a weight, over two blocks; else float32
        assert paths[role].name in made.report
    assert bare.models[Role.PLANNER].role_embedding.weight.eq(0).all()
    with pytest.raises(ValueError, match="is a LoRA for role='planner'"):
        with_role_loras(bare, {Role.RENDERER: paths[Role.PLANNER]})


def test_a_lora_of_another_layout_can_be_a_roles(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    path = save(tmp_path / "longlive_lora.safetensors", written(factors, "PEFT", alpha=None))
    made = with_role_loras(backbone, {Role.RENDERER: path})
    assert (velocity(made, Role.RENDERER) - velocity(by_hand(factors, 1.0), Role.RENDERER)).abs().max() < EXACT
    assert torch.equal(velocity(made, Role.PLANNER), velocity(backbone, Role.PLANNER))


def test_a_trainers_pickle_is_unwrapped(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    state = written(factors, "PEFT", alpha=None)
    torch.save({"generator_lora": state, "step": 10}, tmp_path / "lora.pt")
    assert len(read_lora(tmp_path / "lora.pt", backbone.models[Role.PLANNER]).factors) == len(factors)


def test_a_partial_match_says_how_much_and_gives_examples(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = written(factors, "ComfyUI", alpha=None)
    strange = [f"diffusion_model.blocks.{i}.cross_attn.k_img.lora_down.weight" for i in range(4)]
    _, lora = apply_lora(backbone, save(tmp_path / "i2v.safetensors", state | {key: torch.zeros(1) for key in strange}))
    assert set(lora.unmatched) == set(strange)
    said = caplog.text
    assert f"{len(factors)} layers and 0 plain differences matched; 4 keys did not, such as" in said
    assert sum(key in said for key in strange) == 3


def misfits(factors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensors, str]]:
    name, (down, up) = next(iter(factors.items()))
    key = f"diffusion_model.{original(name)}"
    other = {name: (torch.zeros(RANK, 80), torch.zeros(80, RANK))}
    return {
        "no match": ({"unet.down.lora_A.weight": down}, r"matches no layer of the tiny backbone: none of its 1 keys"),
        "role row only": ({"role_embedding": torch.zeros(48)}, "matches no layer.*no tensors"),
        "wrong width": (
            written(other, "kohya", alpha=None),
            r"is for another model: lora_unet_blocks_0_self_attn_q takes 80 to 80, the tiny backbone's 48 to 48",
        ),
        "wrong difference": ({f"{key}.diff_b": torch.zeros(80)}, r"another model: the difference of .* \(80,\)"),
        "one factor": ({f"{key}.lora_A.weight": down}, r"lacks its up \(lora_B\) factor"),
        "ranks differ": ({f"{key}.lora_A.weight": down[:2], f"{key}.lora_B.weight": up}, "factors of rank 2 and 4"),
        "DoRA": ({f"{key}.lora_A.weight": down, f"{key}.dora_scale": up}, "is no plain LoRA.*without dora_scale"),
        "LoKr": ({f"{key}.lokr_w1": down}, "is no plain LoRA.*without lokr_w1"),
        "twice": (
            {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up, f"transformer.{name}.lora_A.weight": 2 * down},
            "has down of .* twice, under two names",
        ),
        "rank 0": (
            {f"{key}.lora_A.weight": down[:0], f"{key}.lora_B.weight": up[:, :0]},
            r"down of .* shape \(0, 48\)",
        ),
        "no matrix": ({f"{key}.lora_A.weight": down[0], f"{key}.lora_B.weight": up}, r"down of .* has shape \(48,\)"),
        "not finite": ({f"{key}.lora_A.weight": down * torch.nan}, "lora_A.weight holds numbers that are not finite"),
        "whole numbers": ({f"{key}.lora_A.weight": down.long()}, "holds no floating-point numbers"),
        "two alphas": ({f"{key}.alpha": torch.ones(2)}, "alpha of .* holds 2 numbers"),
        "no alpha": ({f"{key}.alpha": torch.ones(0)}, "alpha of .* holds 0 numbers"),
    }


CASES = (
    *("no match", "role row only", "wrong width", "wrong difference", "one factor", "ranks differ", "DoRA", "LoKr"),
    *("twice", "rank 0", "no matrix", "not finite", "whole numbers", "two alphas", "no alpha"),
)


@pytest.mark.parametrize("case", CASES)
def test_a_lora_that_does_not_fit_is_refused_in_one_line(
    case: str, backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    state, message = misfits(factors)[case]
    path = save(tmp_path / "odd.safetensors", state)
    with pytest.raises(ValueError, match=message) as refusal:
        apply_lora(backbone, path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("[1]", "no JSON object but '.1.'"),
        ("null", "no JSON object but 'null'"),
        ("[" * 100_000, "options that cannot be read"),
        ("not JSON", "options that cannot be read"),
        ('{"alpha_pattern": [1]}', r"alpha_pattern=\[1\], which is no JSON object"),
        ('{"lora_alpha": {}}', "has alpha {} for .*, which is no number"),
        ('{"lora_alpha": "abc"}', "has alpha 'abc' for"),
        ('{"lora_alpha": NaN}', "has alpha nan for"),
    ],
    ids=["list", "null", "nested", "text", "pattern", "object", "word", "nan"],
)
@pytest.mark.parametrize("where", ["metadata", "beside"])
def test_options_that_make_no_sense_are_refused_by_name(
    options: str,
    message: str,
    where: str,
    backbone: Backbone,
    factors: dict[str, tuple[Tensor, Tensor]],
    tmp_path: Path,
) -> None:
    state = written(factors, "PEFT", alpha=None)
    told = {"lora_adapter_metadata": options} if where == "metadata" else {}
    path = save(tmp_path / "lora.safetensors", state, **told)
    if where == "beside":
        (tmp_path / "adapter_config.json").write_text(options)
    with pytest.raises(ValueError, match=message) as refusal:
        apply_lora(backbone, path)
    assert str(path) in str(refusal.value)


def test_alpha_0_switches_an_update_off(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    path = save(tmp_path / "lora.safetensors", written(factors, "kohya", alpha=0.0))
    changed, _ = apply_lora(backbone, path)
    assert torch.equal(velocity(changed, Role.PLANNER), velocity(backbone, Role.PLANNER))


def test_8_bit_factors_are_widened(
    backbone: Backbone, factors: dict[str, tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    half = {name: (d.to(torch.float8_e4m3fn), u.to(torch.float8_e4m3fn)) for name, (d, u) in factors.items()}
    path = save(tmp_path / "lora.safetensors", written(half, "bare", alpha=None))
    wide = {name: (d.double(), u.double()) for name, (d, u) in half.items()}
    changed, _ = apply_lora(backbone, path)
    expected = velocity(by_hand(wide, 1.0), Role.PLANNER)
    torch.testing.assert_close(velocity(changed, Role.PLANNER), expected, rtol=1e-5, atol=1e-5)  # products in float32


def test_a_pickle_that_holds_itself_ends(backbone: Backbone, tmp_path: Path) -> None:
    state: dict[str, object] = {}
    state["lora"] = state
    torch.save(state, tmp_path / "self.pt")
    with pytest.raises(ValueError, match="matches no layer"):
        apply_lora(backbone, tmp_path / "self.pt")


def test_missing_and_truncated_loras_name_themselves(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors is missing: expected a LoRA"):
        apply_lora(backbone, tmp_path / "gone.safetensors")
    (tmp_path / "half.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(ValueError, match=r"half\.safetensors is not a LoRA: expected a complete safetensors"):
        apply_lora(backbone, tmp_path / "half.safetensors")
