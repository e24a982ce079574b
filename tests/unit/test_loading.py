"""Files become a backbone, or an error that names the file."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashforward_core.graph.task import Role
from flashforward_core.model.checkpoints import infer_config, load_transformer, read_checkpoint, to_diffusers_naming
from flashforward_core.model.config import EMBEDDED, MODELS, WAN_1_3B, WAN_14B, WanConfig
from flashforward_core.model.loading import load_embedded
from flashforward_core.model.lora import save_role_lora
from flashforward_core.model.roles import attach_roles
from flashforward_core.model.text import ByteT5Encoder, TextConfig
from flashforward_core.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.cpu

TINY = WanConfig(name="custom", dim=48, ffn_dim=96, num_heads=2, num_layers=2, text_dim=16, text_len=8, freq_dim=32)
WEIGHTS = "diffusion_pytorch_model"


def write_transformer(folder: Path, model: CausalWanTransformer) -> None:
    """In two bf16 shards with an index, as large models come."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_diffusers()))
    state = {n: t.bfloat16().contiguous() for n, t in model.state_dict().items() if ".lora_" not in n}
    names = sorted(state)
    shards = {f"{WEIGHTS}-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for shard, held in shards.items():
        save_file({name: state[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny embedded model, complete, in the layout of the package's assets."""
    from diffusers import AutoencoderKLWan

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("assets")
    model = CausalWanTransformer(TINY)
    for factor in attach_roles(model, rank=2, alpha=4):
        torch.nn.init.normal_(factor, std=0.3)
    torch.nn.init.normal_(model.role_embedding.weight)
    write_transformer(folder / "transformer", model)
    for role in Role:
        save_role_lora(model, folder / f"{role}_lora.safetensors", role=role, base="tiny", dtype=torch.bfloat16)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1).half().save_pretrained(folder / "vae")
    text = TextConfig(d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=1, text_len=8)
    ByteT5Encoder(text).bfloat16().save(folder / "text_encoder")
    return folder


@pytest.fixture
def assets(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(written, tmp_path / "assets"))


def velocity(model: CausalWanTransformer, role: Role) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 2, 4, 4, generator=generator), torch.randn(1, 8, 16, generator=generator)
    context = model.text_context(text, role)
    timestep = torch.full((1, 2), 625.0)
    return model(x, timestep_BF=timestep, text=context, frames=torch.arange(2), role=role)


def test_assets_load_as_one_float32_backbone(written: Path) -> None:
    backbone = load_embedded(written)
    assert backbone.config == TINY
    assert {p.dtype for m in backbone.models.values() for p in m.parameters()} == {torch.float32}
    assert not any(p.requires_grad for m in backbone.models.values() for p in m.parameters())
    assert next(backbone.vae.parameters()).dtype is torch.float32
    assert backbone.text_encoder.encode(["a bird"]).shape == (1, 8, 16)
    assert backbone.size == (192, 128)


def test_merged_and_unmerged_assets_agree(written: Path) -> None:
    merged, unmerged = (load_embedded(written, merged=m) for m in (True, False))
    assert unmerged.models[Role.PLANNER] is unmerged.models[Role.RENDERER]
    for role in Role:
        difference = velocity(merged.models[role], role) - velocity(unmerged.models[role], role)
        assert difference.abs().max() < 1e-5  # float32, W + BA rounded once
    outputs = [velocity(merged.models[role], role) for role in Role]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


def test_weights_loaded_under_inference_mode_are_ordinary_tensors(written: Path) -> None:
    """Nodes run under inference mode; lanes' threads must not inherit its restrictions."""
    with torch.inference_mode():
        backbone = load_embedded(written)
    modules = (*backbone.models.values(), backbone.vae, backbone.text_encoder)
    assert not any(tensor.is_inference() for module in modules for tensor in module.parameters())


def test_role_loras_are_optional(assets: Path) -> None:
    for role in Role:
        (assets / f"{role}_lora.safetensors").unlink()
    backbone = load_embedded(assets)
    found = {name for name, _ in backbone.models[Role.PLANNER].named_parameters()}
    assert found == {name for name, _ in CausalWanTransformer(TINY).named_parameters()}


def test_fingerprint_follows_the_files(assets: Path) -> None:
    before = load_embedded(assets).fingerprint
    assert load_embedded(assets).fingerprint == before
    assert len(before) == len(hashlib.sha256().hexdigest())
    path = assets / "vae" / f"{WEIGHTS}.safetensors"
    state = load_file(path)
    name = sorted(state)[0]
    save_file({**state, name: state[name] + 1}, path)
    assert load_embedded(assets).fingerprint != before


@pytest.mark.parametrize(
    "name",
    [
        "transformer/config.json",
        f"transformer/{WEIGHTS}-00002-of-00002.safetensors",
        "vae/config.json",
        f"vae/{WEIGHTS}.safetensors",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
    ],
)
def test_a_missing_or_damaged_asset_names_itself(name: str, assets: Path) -> None:
    path = assets / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
        load_embedded(assets)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name.replace(".", r"\.") + " is missing: expected"):
        load_embedded(assets)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"assets='.*nope' has no folder 'transformer'"):
        load_embedded(tmp_path / "nope")


def test_parts_of_different_models_are_refused(assets: Path) -> None:
    config = json.loads((assets / "transformer/config.json").read_text())
    (assets / "transformer/config.json").write_text(json.dumps({**config, "ffn_dim": 100}))
    with pytest.raises(ValueError, match=r"ffn\.net\.0\.proj\.\w+ has shape \(96.*asks for \(100"):
        load_embedded(assets)
    (assets / "transformer/config.json").write_text(json.dumps({**config, "text_len": 9}))
    with pytest.raises(ValueError, match=r"makes embeddings of 8x16, the transformer takes 9x16"):
        load_embedded(assets)
    del config["ffn_dim"]
    (assets / "transformer/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json has no field 'ffn_dim'"):
        load_embedded(assets)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_single_files_load_like_folders(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = CausalWanTransformer(WanConfig(name="custom", dim=128, ffn_dim=64, num_heads=1, num_layers=1, text_dim=16))
    state = {f"model.{name}": t for name, t in model.state_dict().items() if name != "role_embedding.weight"}
    path = tmp_path / f"wan{suffix}"
    if suffix == ".pt":
        torch.save({"generator_ema": state, "step": 3}, path)
    else:
        save_file(state, path)
    loaded = load_transformer(path)
    assert loaded.config == model.config
    assert torch.equal(loaded.proj_out.weight, model.proj_out.weight)
    assert loaded.role_embedding.weight.eq(0).all()


def bare_state(channels: int = 16) -> dict[str, Tensor]:
    return {"patch_embedding.weight": torch.zeros(8, channels, 1, 2, 2)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (bare_state(36), r"x\.pt: backbone is an image-to-video \(I2V\) model; use a 16-channel Wan 2\.1"),
        (bare_state(48), r"Wan 2\.2 5B \(48 latent channels\)"),
        (bare_state(20), r"20 input channels"),
        (bare_state() | {"vace_blocks.0.x": torch.zeros(1)}, "a VACE model"),
        (bare_state() | {"img_emb.proj.0.weight": torch.zeros(1)}, "image-to-video"),
        ({"conv_in.weight": torch.zeros(1)}, r"expected patch_embedding\.weight, found conv_in\.weight"),
        ({}, "found no tensors"),
    ],
)
def test_other_models_are_refused_by_name(state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_diffusers_naming({"model": state}, source="x.pt")


def test_a_file_that_is_no_checkpoint_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "notes.pt"
    path.write_text("not a checkpoint")
    with pytest.raises(ValueError, match=r"notes\.pt is not a Wan 2\.1 transformer.*found 16 bytes"):
        read_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="expected a dict of tensors, found a list"):
        read_checkpoint(path)


@pytest.mark.parametrize("config", list(MODELS.values()), ids=list(MODELS))
def test_known_models_are_recognised_by_their_shapes(config: WanConfig) -> None:
    with torch.device("meta"):
        state = CausalWanTransformer(config).state_dict()
    assert infer_config(state) is config


def test_configs_survive_the_diffusers_form() -> None:
    for config in (EMBEDDED, WAN_1_3B, WAN_14B, TINY):
        assert WanConfig.from_diffusers(config.to_diffusers(), name=config.name) == config


def test_published_sizes() -> None:
    assert (WAN_1_3B.head_dim, WAN_14B.head_dim) == (128, 128)
    assert WAN_1_3B.rope_pairs == WAN_14B.rope_pairs == (22, 21, 21)
    gib = 2**30
    assert WAN_1_3B.kv_bytes_per_frame(1560) / gib == pytest.approx(0.268, abs=5e-4)  # the published digits
    assert WAN_14B.kv_bytes_per_frame(3600) / gib == pytest.approx(2.75, abs=5e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 is below 1"),
        ({"num_heads": 5}, "dim=256 does not give num_heads=5"),
        ({"freq_dim": 255}, "freq_dim=255 is odd; use freq_dim=256"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    sizes = {"dim": 256, "ffn_dim": 8, "num_heads": 4, "num_layers": 1} | changes
    with pytest.raises(ValueError, match=message):
        WanConfig(name="x", **sizes)
