"""Training on Wan's layout: a tiny model of the same classes goes through both phases and is loaded again."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from flashforward_core.cli import main
from flashforward_core.graph.task import Role
from flashforward_core.media import VideoWriter
from flashforward_core.model.files import read_tensors
from flashforward_core.model.loading import ASSETS, load_backbone
from flashforward_core.model.roles import role_linears
from flashforward_core.train import options
from flashforward_core.train.wan import cached_prompts, load_transformer

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


@pytest.fixture
def wan(tmp_path: Path) -> Path:
    """A folder in Wan's layout, with random weights of few numbers and the embedded model's autoencoder."""
    torch.manual_seed(0)
    folder = tmp_path / "wan"
    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, text_dim=12, freq_dim=32, ffn_dim=64, num_layers=2
    ).save_pretrained(folder / "transformer")
    config = UMT5Config(d_model=12, d_kv=4, d_ff=16, num_heads=2, num_layers=1, vocab_size=384)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    ByT5Tokenizer().save_pretrained(folder / "tokenizer")
    shutil.copytree(ASSETS / "vae", folder / "vae")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    frames = np.random.default_rng(0).integers(0, 255, (81, 32, 32, 3), dtype=np.uint8)
    with VideoWriter(folder / "a.mp4", width=32, height=32, fps=16) as writer:
        writer.write(frames)
    (folder / "a.txt").write_text("noise")
    return folder


def test_both_phases_train_and_what_they_export_is_loaded(
    wan: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options.SIZES, "1.3B", (32, 32))
    out = tmp_path / "out"
    common = ["--preset", "wan_1_3b", "--wan", str(wan), "--data", str(data), "--out", str(out), "--no-compile"]
    common += ["--clip-latents", "21", "--latents", "21", "--rank", "2", "--accumulate", "1", "--lr", "1e-3"]
    assert main(["train", "sft", *common, "--steps", "2"]) == 0
    assert main(["train", "distill", *common, "--steps", "6"]) == 0
    start = load_transformer(wan, frozen=False)
    for name in ("assets", "distilled"):
        loras = {role: out / name / f"{role}_lora.safetensors" for role in Role}
        loaded = load_backbone(out / name / "transformer", role_loras=loras).models[Role.PLANNER]
        assert loaded.config.dim == 48 and len(role_linears(loaded)) == 20  # ten linears in each of two blocks
        trained = loaded.blocks[0].ffn.net[2].weight
        assert not torch.equal(trained, start.blocks[0].ffn.net[2].weight)


def test_distilling_frozen_what_was_trained_whole_is_refused(
    wan: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only LoRAs would be exported, for weights that are nowhere."""
    monkeypatch.setitem(options.SIZES, "1.3B", (32, 32))
    words = ["--preset", "wan_1_3b", "--wan", str(wan), "--data", str(data), "--out", str(tmp_path / "out")]
    words += ["--clip-latents", "21", "--latents", "21", "--rank", "2", "--accumulate", "1", "--no-compile"]
    assert main(["train", "sft", *words, "--steps", "1"]) == 0
    assert main(["train", "distill", *words, "--steps", "1", "--frozen"]) == 2
    assert "sft.pt holds a transformer that was trained too, which frozen would lose" in capsys.readouterr().err


def test_a_frozen_transformer_stays_and_its_loras_go_on_top_of_it(
    wan: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(options.SIZES, "14B", (32, 32))
    out = tmp_path / "out"
    words = ["--preset", "wan_14b", "--wan", str(wan), "--data", str(data), "--out", str(out), "--no-compile"]
    words += ["--clip-latents", "21", "--latents", "21", "--rank", "2", "--accumulate", "1", "--steps", "2"]
    assert main(["train", "sft", *words, "--alpha", "8"]) == 0
    trained = torch.load(out / "sft.pt", weights_only=True)["model"]
    assert all(".lora_" in name or name.startswith("role_embedding") for name in trained)  # not what stays as it is
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert main(["train", "distill", *words, "--steps", "6", "--critic-rank", "2", "--lr", "0.1"]) == 0
    found = []
    for name in ("assets", "distilled"):
        assert not (out / name / "transformer").exists()
        loras = {role: out / name / f"{role}_lora.safetensors" for role in Role}
        loaded = load_backbone(wan / "transformer", role_loras=loras).models[Role.RENDERER]
        found.append(next(iter(role_linears(loaded).values())).lora_B[Role.RENDERER.value].weight)
        assert read_tensors(loras[Role.RENDERER], what="a LoRA")[1]["alpha"] == "8.0"  # distill was not told
    assert found[0].abs().max() > 0 and not torch.equal(*found)


def test_prompts_are_embedded_once_and_padded_with_zeros(wan: Path, tmp_path: Path) -> None:
    captions = ["a dog", "two dogs run"]
    prompts = cached_prompts(wan, captions, text_len=20, cache=tmp_path / "cache", device=CPU)
    found = prompts(*prompts.tokenise(captions))
    assert found.shape == (2, 20, 12)
    assert (found[0, len("a dog") + 1 :] == 0).all() and (found[1, : len("two dogs run") + 1] != 0).any(dim=1).all()
    (kept,) = (tmp_path / "cache").iterdir()
    (tmp_path / "other").touch()
    assert kept.stat().st_mode == (tmp_path / "other").stat().st_mode  # other users of a cache may read it
    shutil.rmtree(wan / "text_encoder")  # what was embedded before needs no encoder
    again = cached_prompts(wan, captions, text_len=20, cache=tmp_path / "cache", device=CPU)
    assert torch.equal(again(*again.tokenise(captions)), found)


def test_what_a_wan_preset_needs_is_named(
    wan: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["train", "sft", *words, "--out", str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    assert "preset=wan_1_3b needs wan=" in said("--preset", "wan_1_3b")
    assert "wan= goes with a preset for Wan" in said("--wan", str(wan))
    shutil.rmtree(wan / "vae")
    assert "has no folder vae" in said("--preset", "wan_1_3b", "--wan", str(wan), "--data", str(data))
