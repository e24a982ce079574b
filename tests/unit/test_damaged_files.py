"""Whatever a weight file or its settings hold, the error is one ``ValueError`` that names the file."""

import argparse
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flashforward_core.model.checkpoints import load_checkpoint, read_config
from flashforward_core.model.config import WanConfig
from flashforward_core.model.files import read_json
from flashforward_core.model.formats import read_shards
from flashforward_core.model.loading import ASSETS, load_embedded, load_text_encoder, load_vae
from flashforward_core.model.lora_files import read_lora
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.train import command

pytestmark = pytest.mark.cpu

TINY = WanConfig(name="custom", dim=128, ffn_dim=64, num_heads=1, num_layers=2, text_dim=16, freq_dim=32)
FFN = "blocks.0.ffn.net.0.proj.weight"


def with_settings(part: str, tmp_path: Path, **changes: object) -> Path:
    folder = Path(shutil.copytree(ASSETS / part, tmp_path / part))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latents_mean", [math.nan] * 16),
        ("latents_mean", [0.0] * 15),
        ("latents_std", [1.0] * 15 + [0.0]),
        ("latents_std", None),
        ("base_dim", "x"),
        ("dim_mult", None),
        ("dim_mult", []),
        ("num_res_blocks", "x"),
    ],
)
def test_autoencoder_settings(name: str, value: object, tmp_path: Path) -> None:
    folder = with_settings("vae", tmp_path, **{name: value})
    with pytest.raises(ValueError, match=r"vae.config\.json"):
        load_vae(folder)


@pytest.mark.parametrize("missing", ["planner", "renderer"])
def test_one_role_lora_without_the_other(missing: str, tmp_path: Path) -> None:
    assets = Path(shutil.copytree(ASSETS, tmp_path / "assets"))
    (assets / f"{missing}_lora.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=rf"{missing}_lora\.safetensors is missing: expected the {missing}'s"):
        load_embedded(assets)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", "x"),
        ("num_layers", 10**11),
        ("num_layers", math.inf),
        ("attention_head_dim", None),
        ("patch_size", None),
        ("eps", "a"),
        ("text_len", True),
    ],
)
def test_transformer_settings(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY.to_diffusers(), name: value}))
    with pytest.raises(ValueError, match=rf"config\.json: .*{name}="):
        read_config(path)


@pytest.mark.parametrize(("name", "value"), [("d_model", "x"), ("text_len", None), ("num_heads", 3)])
def test_text_settings(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text_encoder.*config\.json"):
        load_text_encoder(with_settings("text_encoder", tmp_path, **{name: value}))


def test_endless_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not a config"):
        read_json(path, what="a config")


@pytest.mark.parametrize("name", [3, None, ["a"], "../a.safetensors", "/a.safetensors", "..", "a.bin"])
def test_shard_names(name: object, tmp_path: Path) -> None:
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match=re.escape(f"index.json: weight_map has {name!r}")):
        read_shards(tmp_path, what="the transformer")


def _odd_state(kind: str) -> dict[Any, Any]:
    state: dict[Any, Any] = {n: t for n, t in CausalWanTransformer(TINY).state_dict().items() if "role" not in n}
    loop: dict[str, Any] = {}
    loop["model"] = loop
    return {
        "far block": {**state, "blocks.99999999999.norm2.weight": torch.ones(1)},
        "loop": loop,
        "int keys": {1: torch.ones(1), 2: torch.ones(2)},
        "0-d": {**state, FFN: torch.tensor(1.0)},
        "1-d": {**state, "condition_embedder.text_embedder.linear_1.weight": torch.ones(3)},
        "sparse": {**state, FFN: state[FFN].to_sparse()},
        "meta": {**state, FFN: state[FFN].to("meta")},
    }[kind]


@pytest.mark.parametrize("kind", ["far block", "loop", "int keys", "0-d", "1-d", "sparse", "meta"])
def test_odd_pickles(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    torch.save(_odd_state(kind), path)
    with pytest.raises(ValueError, match=r"odd\.pt"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vae", "--scenes", "0"], "scenes=0 is below 1"),
        (["vae", "--max-s", "nan"], "max_s=nan is not above 0"),
        (["vae", "--lr", "inf"], "lr=inf is not finite"),
        (["vae", "--lr", "nan"], "lr=nan is not finite"),
        (["vae", "--init", "/nope"], "init=/nope is missing"),
        (["base"], r"config\.json is missing; run first: train vae"),
        (["sft"], r"base\.pt is missing; run first: train base"),
        (["distill"], r"sft\.pt is missing; run first: train sft"),
    ],
)
def test_training_refuses_at_once(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_step(*_: object, **__: object) -> None:
        pytest.fail("the step has begun")

    monkeypatch.setattr(command, "Accelerator", no_step)
    if words[0] != "base":
        (tmp_path / "vae").mkdir()
        (tmp_path / "vae/config.json").write_text("{}")
    if words[0] == "distill":
        (tmp_path / "base.pt").write_bytes(b"")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        command.run(parser.parse_args([*words, "--out", str(tmp_path)]))


def _safetensors(kind: str) -> bytes:
    """A file whose header lies, in the format's layout: 8 bytes of length, JSON, data."""
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    headers: dict[str, Any] = {
        "negative shape": {"a": {**entry, "shape": [-2, -2]}},
        "negative offsets": {"a": {**entry, "data_offsets": [-16, 0]}},
        "overlapping offsets": {"a": entry, "b": {**entry, "data_offsets": [8, 24]}},
        "offsets past the end": {"a": {**entry, "data_offsets": [0, 1 << 40], "shape": [1 << 19, 1 << 19]}},
        "a shape that overflows": {"a": {**entry, "shape": [1 << 62, 1 << 62]}},
        "an unknown type": {"a": {**entry, "dtype": "F1"}},
        "a list": [entry],
        "a text": {"a": "b"},
    }
    if kind in headers:
        text = json.dumps(headers[kind]).encode()
        return len(text).to_bytes(8, "little") + text + bytes(24)
    deep = b'{"a":' * 100_000
    return {
        "a huge length": b"\xff" * 8 + b"{}",
        "a length past the end": (1 << 40).to_bytes(8, "little") + b"{}",
        "deep JSON": len(deep).to_bytes(8, "little") + deep,
        "no text": (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        "nothing": b"",
    }[kind]


CRAFTED = (
    *("negative shape", "negative offsets", "overlapping offsets", "offsets past the end", "a shape that overflows"),
    *(
        "an unknown type",
        "a list",
        "a text",
        "a huge length",
        "a length past the end",
        "deep JSON",
        "no text",
        "nothing",
    ),
)


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_safetensors(kind: str, tmp_path: Path) -> None:
    """As a checkpoint, as a LoRA and as the embedded model's own weights."""
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(_safetensors(kind))
    with pytest.raises(ValueError, match=r"crafted\.safetensors"):
        load_checkpoint(path)
    with pytest.raises(ValueError, match=r"crafted\.safetensors"):
        read_lora(path, CausalWanTransformer(TINY))
    vae = tmp_path / "vae"
    vae.mkdir()
    shutil.copy(ASSETS / "vae" / "config.json", vae)
    path.rename(vae / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match=r"diffusion_pytorch_model\.safetensors"):
        load_vae(vae)
