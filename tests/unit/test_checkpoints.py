"""Checkpoints as they come from trainers, hubs and ComfyUI: whatever is around the tensors, the same model loads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashforward_core.graph.schedules import spec_for
from flashforward_core.graph.task import Role
from flashforward_core.model.checkpoints import load_checkpoint, standardise
from flashforward_core.model.config import WanConfig
from flashforward_core.model.fp8 import FP8, Fp8Linear, quantise
from flashforward_core.model.loading import load_backbone
from flashforward_core.model.lora import save_role_lora
from flashforward_core.model.naming import BLOCK_NAMES, OUTER_NAMES, WRAPPERS, module_table
from flashforward_core.model.presets import PRESETS, choose_preset, fit_spec
from flashforward_core.model.roles import attach_roles, role_linears
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import AnchorPlan, RolloutSpec, VideoShape

pytestmark = pytest.mark.cpu

TINY = WanConfig(name="custom", dim=128, ffn_dim=64, num_heads=1, num_layers=2, text_dim=16, freq_dim=32)


@pytest.fixture(scope="module")
def model() -> CausalWanTransformer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = CausalWanTransformer(TINY).requires_grad_(False)
    for name, parameter in made.named_parameters():
        if "norm" in name:  # ones and zeros would hide a mix-up
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return made


@pytest.fixture(scope="module")
def weights(model: CausalWanTransformer) -> dict[str, Tensor]:
    """Under diffusers' names, without the role embedding, as published files are."""
    return {name: t.contiguous() for name, t in model.state_dict().items() if name != "role_embedding.weight"}


def original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the original names, by a table that is checked against diffusers' converter below."""
    table = OUTER_NAMES | {
        f"blocks.{i}.{ours}": f"blocks.{i}.{theirs}"
        for i in range(TINY.num_layers)
        for ours, theirs in BLOCK_NAMES.items()
    }
    renamed = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "scale_shift_table":
            renamed[f"{module or 'head'}.modulation"] = tensor
        else:
            renamed[f"{table[module]}.{leaf}"] = tensor
    return renamed


NAMINGS = {"diffusers": dict, "original": original}
PREFIXES = (
    "",
    "model.",
    "diffusion_model.",
    "model.diffusion_model.",
    "_orig_mod.",
    "model._fsdp_wrapped_module.",
    "module.model._orig_mod.",
)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("wrapper", ["", *WRAPPERS])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_naming_wrapper_and_prefix_gives_the_same_tensors(
    naming: str, wrapper: str, prefix: str, weights: dict[str, Tensor]
) -> None:
    state: dict[str, Any] = {prefix + name: t for name, t in NAMINGS[naming](weights).items()}
    if wrapper:
        state = {"step": 3, wrapper: state, "optimizer": {"lr": 1.0}}
    found = standardise(state, source="x")
    assert set(found.tensors) == set(weights)
    assert all(found.tensors[name] is tensor for name, tensor in weights.items())  # nothing was copied
    for word in (naming, repr(wrapper) if wrapper else "", str(len(weights))):
        assert word in found.report


def test_fsdp_wraps_in_the_middle_of_names(weights: dict[str, Tensor]) -> None:
    inner = "_checkpoint_wrapped_module."
    state = {
        n.replace("blocks.0.", f"blocks.0.{inner}").replace("blocks.1.", f"blocks.1.{inner}"): t
        for n, t in original(weights).items()
    }
    found = standardise({"generator": state}, source="x")
    assert set(found.tensors) == set(weights)
    assert inner in found.report


def test_the_moving_average_is_preferred(weights: dict[str, Tensor]) -> None:
    other = {name: tensor + 1 for name, tensor in weights.items()}
    found = standardise({"critic": other, "generator": other, "generator_ema": weights}, source="x")
    assert found.tensors["proj_out.bias"] is weights["proj_out.bias"]
    assert "under 'generator_ema'" in found.report


def test_a_whole_checkpoint_gives_its_transformer_only(weights: dict[str, Tensor]) -> None:
    state = {f"model.diffusion_model.{name}": t for name, t in original(weights).items()}
    state["first_stage_model.conv1.weight"] = torch.zeros(1)
    found = standardise(state, source="x")
    assert set(found.tensors) == set(weights)
    assert "1 tensors of other models left out" in found.report


def write(path: Path, state: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    elif path.suffix == ".gguf":
        write_gguf(path, state)
    else:
        torch.save({"generator_ema": state, "step": 3}, path, _use_new_zipfile_serialization=path.suffix != ".pth")
    return path


def write_gguf(path: Path, state: dict[str, Tensor], *, quantise_linears: bool = False) -> None:
    """As the converters of ComfyUI's GGUF loaders do: five axes flattened, their shape in the metadata."""
    import gguf

    writer = gguf.GGUFWriter(path, "wan")
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if tensor.ndim == 5:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensor.shape))
            array = array.reshape(-1, array.shape[-1])
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantise_linears and name.startswith("blocks.") and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["wan.safetensors", "wan.pt", "old.pth", "wan.gguf"])
def test_every_file_format_loads_the_same(name: str, model: CausalWanTransformer, tmp_path: Path) -> None:
    state = {n: t for n, t in model.state_dict().items() if n != "role_embedding.weight"}
    loaded, report = load_checkpoint(write(tmp_path / name, original({n: t.contiguous() for n, t in state.items()})))
    assert loaded.config == TINY
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in state.items())
    assert loaded.role_embedding.weight.eq(0).all()
    assert name in report


def test_quantised_gguf_becomes_the_nearest_weights(
    model: CausalWanTransformer, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "q8.gguf"
    write_gguf(path, original(weights), quantise_linears=True)
    loaded, _ = load_checkpoint(path, dtype=torch.bfloat16)
    found, exact = loaded.blocks[1].ffn.net[2].weight, model.blocks[1].ffn.net[2].weight
    assert found.dtype is torch.bfloat16
    # Q8_0: half a step of 1/127 of each 32 values' largest, plus bf16's half unit of 1/256.
    assert (found.float() - exact).abs().max() <= exact.abs().max() * (0.5 / 127 + 1 / 512)


def test_a_diffusers_pipeline_folder_loads_its_transformer(weights: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    config = {**TINY.to_diffusers(), "num_attention_heads": 2, "attention_head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    loaded, report = load_checkpoint(tmp_path)
    assert loaded.config.num_heads == 2  # a folder tells what a single file cannot
    assert "diffusers naming" in report


def test_half_precision_files_keep_their_type_when_asked(weights: dict[str, Tensor], tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        path = write(tmp_path / f"{dtype}.safetensors", {n: t.to(dtype) for n, t in weights.items()})
        loaded, _ = load_checkpoint(path, dtype=dtype)
        linear = loaded.blocks[0].attn1.to_q.weight
        assert torch.equal(linear, weights["blocks.0.attn1.to_q.weight"].to(dtype))
        assert loaded.blocks[0].scale_shift_table.dtype is torch.float32


def velocity(model: CausalWanTransformer, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 2, 4, 4, generator=generator), torch.randn(1, 512, 16, generator=generator)
    context = model.text_context(text.to(dtype), Role.RENDERER)
    timestep = torch.full((1, 2), 625.0)
    return model(x, timestep_BF=timestep, text=context, frames=torch.arange(2), role=Role.RENDERER).float()


def fp8_file(
    weights: dict[str, Tensor], *, scale_name: str, per_row: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An fp8 file in original naming, and what its weights stand for."""
    state, meant = {}, dict(weights)
    for name, tensor in weights.items():
        if not (name.startswith("blocks.") and tensor.ndim == 2):
            state[name] = tensor
            continue
        stored, scale = quantise(tensor)
        if not per_row:
            scale = tensor.abs().max() / torch.finfo(FP8).max
            stored = (tensor / scale).to(FP8)
        state[name], meant[name] = stored, stored.float() * scale
        module = name.removesuffix(".weight")
        if scale_name:
            state[f"{module}.{scale_name}"] = scale.squeeze()
            state[f"{module}.scale_input"] = torch.ones(())
        else:
            meant[name] = stored.float()
    if scale_name:
        state["scaled_fp8"] = torch.zeros(2).to(FP8)
    renamed: dict[str, Tensor] = {}
    names = {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs in _pairs(weights).items()}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        is_table = leaf == "scale_shift_table"
        renamed[
            _pairs(weights)[name] if name in weights or is_table else f"{names.get(module, module)}.{leaf}".strip(".")
        ] = tensor
    return renamed, meant


def _pairs(weights: dict[str, Tensor]) -> dict[str, str]:
    """Diffusers' parameter name to the original one."""
    return dict(zip(weights, original(weights), strict=True))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("scale_name", ["scale_weight", "weight_scale", ""])
@pytest.mark.parametrize("held", [False, True])
def test_fp8_files_mean_what_their_scales_say(
    scale_name: str, per_row: bool, held: bool, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    state, meant = fp8_file(weights, scale_name=scale_name, per_row=per_row)
    path = write(tmp_path / "fp8.safetensors", state)
    loaded, report = load_checkpoint(path, fp8=held)
    expected, _ = load_checkpoint(write(tmp_path / "full.safetensors", meant))
    assert isinstance(loaded.blocks[0].ffn.net[2], Fp8Linear) is held
    assert (velocity(loaded) - velocity(expected)).abs().max() < 1e-5  # float32 products of the same numbers
    assert ("20 fp8 scales applied" in report) == bool(scale_name)
    if held:
        assert loaded.blocks[0].ffn.net[2].weight.dtype is FP8
        assert torch.equal(
            loaded.blocks[0].attn2.to_out[0].weight.float(), state["blocks.0.cross_attn.o.weight"].float()
        )


def test_weights_can_be_held_in_8_bits_whatever_the_file(
    model: CausalWanTransformer, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    path = write(tmp_path / "wan.safetensors", weights)
    held, _ = load_checkpoint(path, dtype=torch.bfloat16, fp8=True)
    full = velocity(model)
    found = velocity(held, torch.bfloat16)
    assert held.blocks[0].attn1.to_q.weight.element_size() == 1
    # e4m3 keeps 4 bits: 3 % per weight, averaged over 128-wide sums and added to a residual stream.
    assert 1e-4 < (found - full).abs().max() < 0.1 * full.abs().max()
    assert load_checkpoint(path, fp8=None)[0].blocks[0].attn1.to_q.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.self_attn.q.weight_scale": torch.ones(3)}, "scaled per tensor or per row"),
        ({"blocks.7.self_attn.q.scale_weight": torch.ones(1)}, "found no such weight"),
        ({"blocks.0.self_attn.q.weight": torch.zeros(128, 64, dtype=torch.uint8)}, "torch.uint8, a quantisation"),
        ({"blocks.0.extra.weight": torch.zeros(1)}, "has a tensor blocks.0.extra.weight that the model does not"),
        ({"blocks.1.self_attn.q.weight": torch.zeros(128, 4)}, r"attn1\.to_q\.weight has shape \(128, 4\)"),
    ],
)
def test_what_a_file_should_not_hold_is_named(
    change: dict[str, Tensor], message: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    path = write(tmp_path / "bad.safetensors", original(weights) | change)
    with pytest.raises(ValueError, match=message) as refusal:
        load_checkpoint(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["wan.safetensors", "wan.pt", "old.pth", "wan.gguf"])
def test_missing_truncated_and_foreign_files_end_in_one_sentence(
    name: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match=f"{name} is missing: expected a Wan 2.1 transformer"):
        load_checkpoint(path)
    whole = write(path, original(weights)).read_bytes()
    for content in (whole[: len(whole) // 3], b"GGUF", b"<html>not found</html>", b""):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{name} is not a Wan 2.1 transformer.*found {len(content)} bytes"
        ) as said:
            load_checkpoint(path)
        assert "\n" not in str(said.value)
    write(path, {"conv_in.weight": torch.zeros(4, 4)})
    with pytest.raises(
        ValueError, match=f"{name} is no Wan transformer: expected patch_embedding.weight, found conv_in"
    ):
        load_checkpoint(path)


def test_a_file_that_runs_code_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"generator": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(ValueError, match="checkpoint of plain tensors"):
        load_checkpoint(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def test_unknown_widths_and_wan_2_2_are_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    odd = CausalWanTransformer(WanConfig(name="c", dim=48, ffn_dim=8, num_heads=2, num_layers=1, text_dim=4))
    path = write(tmp_path / "odd.safetensors", dict(odd.state_dict()))
    with pytest.raises(ValueError, match=r"odd.safetensors: the checkpoint is 48 wide, not a multiple of 128"):
        load_checkpoint(path)
    for name in ("wan2.2_t2v_14B.safetensors", "Wan2_2-T2V_HIGH_noise.safetensors", "t2v_low_noise.gguf"):
        with pytest.raises(ValueError, match=r"Wan 2\.2 by its name or its folders"):
            load_checkpoint(tmp_path / name)
    for name in ("Wan2.2-T2V-A14B-Diffusers", "renamed"):
        for expert in ("transformer", "transformer_2"):
            (tmp_path / name / expert).mkdir(parents=True)
            (tmp_path / name / expert / "config.json").write_text(json.dumps(TINY.to_diffusers()))
        with pytest.raises(ValueError, match=r"Wan 2\.2 by its name or its folders"):
            load_checkpoint(tmp_path / name)


def test_one_name_for_two_tensors_is_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    twice = {"model.patch_embedding.weight": torch.zeros_like(weights["patch_embedding.weight"])}
    path = write(tmp_path / "twice.safetensors", weights | twice)
    with pytest.raises(ValueError, match=r"twice\.safetensors has patch_embedding.weight twice, under two names"):
        load_checkpoint(path)


def test_our_table_of_names_is_diffusers_converter() -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    for theirs, ours in {
        **{v: k for k, v in OUTER_NAMES.items()},
        **{f"blocks.3.{v}": f"blocks.3.{k}" for k, v in BLOCK_NAMES.items()},
    }.items():
        assert set(convert_wan_transformer_to_diffusers({f"{theirs}.weight": torch.zeros(1)})) == {f"{ours}.weight"}
    named = {name.rpartition(".")[0] for name, _ in CausalWanTransformer(TINY).named_parameters()}
    with_tables = {"", *(f"blocks.{i}" for i in range(TINY.num_layers)), "role_embedding"}
    assert set(module_table(TINY.num_layers).values()) == named - with_tables


PUBLISHED = {
    "self_forcing_dmd.pt": ("self_forcing", "self_forcing", 21, 0),
    "Wan2.1-T2V-1.3B-Self-Forcing.safetensors": ("self_forcing", "self_forcing", 21, 0),
    "causal_forcing_chunkwise.pt": ("causal_forcing", "self_forcing", 21, 0),
    "HiAR-1.3B.safetensors": ("hiar", "hiar", 21, 0),
    "longlive_base.pt": ("longlive", "self_forcing", 12, 3),
    "Reward-Forcing-T2V.pt": ("reward_forcing", "self_forcing", 9, 3),
    "krea-realtime-video-14b.safetensors": ("krea", "self_forcing", 6, 0),
    "rolling_forcing_dmd.pt": ("rolling_forcing", "self_forcing", 21, 3),
    "Reward-Forcing/rewardforcing.pt": ("reward_forcing", "self_forcing", 9, 3),
    "LongLive-1.3B\\models\\model.pt": ("longlive", "self_forcing", 12, 3),
    "krea/hiar.pt": ("hiar", "hiar", 21, 0),  # the file's own name goes first
    "wan2.1_t2v_1.3B_bf16.safetensors": ("self_forcing", "self_forcing", 21, 0),
    "flashforward_base.safetensors": ("self_forcing", "self_forcing", 21, 0),  # no roles were loaded
}


@pytest.mark.parametrize(("file_name", "expected"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_published_checkpoints_run_as_their_authors_do(file_name: str, expected: tuple[str, str, int, int]) -> None:
    choice = choose_preset("auto", file_name=file_name)
    spec = RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=81), anchors=AnchorPlan(), seed=3)
    run = choice.preset.applied(spec)
    window = (run.history.chunks + 1) * run.chunk_frames
    assert (choice.name, run.schedule, window, run.history.sink) == expected
    assert run.anchors is None
    assert (run.shape, run.seed, run.stages.shift) == (spec.shape, 3, 5.0)
    levels = 5 if choice.name == "rolling_forcing" else 4
    assert run.stages.num_stages == levels
    assert choice.reason


def test_role_loras_or_the_user_make_it_flashforward() -> None:
    assert choose_preset("auto", file_name="hiar.pt", has_roles=True).name == "flashforward"
    assert choose_preset("hiar", file_name="self_forcing.pt", has_roles=True).name == "hiar"
    spec = RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=81))
    assert PRESETS["flashforward"].applied(spec) == spec  # the defaults are the paper's
    with pytest.raises(ValueError, match="preset='fast' is unknown; use one of: flashforward, hiar"):
        choose_preset("fast")


def test_a_stock_file_makes_a_backbone_that_says_what_it_is(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = write(tmp_path / "hiar.safetensors", original(weights))
    with torch.inference_mode():
        backbone = load_backbone(path)
    assert backbone.models[Role.PLANNER] is backbone.models[Role.RENDERER]
    assert (backbone.vae, backbone.text_encoder, backbone.size) == (None, None, None)
    assert (backbone.preset, backbone.preset_reason) == ("hiar", "the file's name says hiar")
    assert not any(p.is_inference() for p in backbone.models[Role.PLANNER].parameters())  # lanes have threads
    assert load_backbone(path).fingerprint == backbone.fingerprint
    write(path, original({**weights, "proj_out.bias": weights["proj_out.bias"] + 1}))
    assert load_backbone(path).fingerprint != backbone.fingerprint


def test_a_plan_for_a_stock_backbone_never_becomes_flashforward_by_itself() -> None:
    spec = RolloutSpec(shape=VideoShape(width=832, height=480, latent_frames=81))
    for name in PRESETS:
        fitted, said = fit_spec(spec, name=name, reason="why")
        if name == "flashforward":
            assert (fitted, said) == (spec, "")
        else:
            assert fitted.schedule in ("self_forcing", "hiar")
            assert said.startswith(f"preset {name} (why): {fitted.schedule}, chunks of 3")
            assert "flashforward needs role LoRAs" in said
    chosen = spec_for(replace(spec, schedule="last_stage"))
    assert fit_spec(chosen, name="hiar", reason="") == (chosen, "")  # a schedule that was chosen stays
    kept, warned = fit_spec(spec, name="hiar", reason="", mode="manual")
    assert kept == spec
    assert warned == "warning: flashforward without trained role LoRAs runs, but its quality needs them"
    with pytest.raises(ValueError, match="preset='fast' is unknown; use one of: auto, manual"):
        fit_spec(spec, name="hiar", reason="", mode="fast")


@pytest.mark.parametrize("name", ["wan.safetensors", "wan.pt"])
def test_weights_stay_in_the_file_only_when_asked(name: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """A file that changes in place must not change a model that owns its weights; a mapped one reads the file."""
    path = write(tmp_path / name, original(weights))
    own, _ = load_checkpoint(path)
    mapped, _ = load_checkpoint(path, mapped=True)
    expected = weights["blocks.0.ffn.net.2.weight"]
    assert torch.equal(mapped.blocks[0].ffn.net[2].weight, expected)
    whole = path.read_bytes()
    with path.open("r+b") as file:  # as an overwriting download does
        file.write(bytes(len(whole)))
    assert torch.equal(own.blocks[0].ffn.net[2].weight, expected)
    assert mapped.blocks[0].ffn.net[2].weight.eq(0).all()


def test_role_loras_load_with_the_checkpoint_merged_or_not(weights: dict[str, Tensor], tmp_path: Path) -> None:
    taught = CausalWanTransformer(TINY)
    torch.manual_seed(5)
    for factor in attach_roles(taught, rank=2, alpha=4):
        torch.nn.init.normal_(factor, std=0.2)
    loras = {role: tmp_path / f"{role}.safetensors" for role in Role}
    for role, path in loras.items():
        save_role_lora(taught, path, role=role, base="custom")
    path = write(tmp_path / "hiar.safetensors", weights)
    unmerged, merged = (load_backbone(path, role_loras=loras, merged=m) for m in (False, True))
    assert unmerged.models[Role.PLANNER] is unmerged.models[Role.RENDERER]
    assert merged.models[Role.PLANNER] is not merged.models[Role.RENDERER]
    assert not role_linears(merged.models[Role.RENDERER])
    difference = velocity(merged.models[Role.RENDERER]) - velocity(unmerged.models[Role.RENDERER])
    assert difference.abs().max() < 1e-4  # float32, W + BA rounded once; values near 4
    assert (
        velocity(merged.models[Role.RENDERER]) - velocity(load_backbone(path).models[Role.RENDERER])
    ).abs().max() > 0.1
    assert (merged.preset, merged.preset_reason) == ("flashforward", "planner or renderer LoRA loaded")
