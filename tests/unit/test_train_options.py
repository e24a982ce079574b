"""``train``'s options: presets fill in what a command line leaves out, and mistakes are named."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from flashforward_core.cli import main
from flashforward_core.model.config import MODELS
from flashforward_core.model.loading import ASSETS
from flashforward_core.train.command import STEPS, _vae_stages
from flashforward_core.train.options import HELP, PARTIAL, add_arguments, complete, preset_names, read_preset
from flashforward_core.train.samples import sample_video

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def completed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    complete(args)
    return args


def test_every_step_is_known_everywhere() -> None:
    assert set(STEPS) == set(HELP) == set(PARTIAL) == set(read_preset("embedded")) - {"model"}


def test_the_presets_are_those_that_the_documentation_names() -> None:
    assert preset_names() == ["embedded", "wan_14b", "wan_1_3b"]
    assert {read_preset(name)["model"] for name in preset_names()} == set(MODELS)


def test_a_preset_gives_what_the_command_line_leaves_out() -> None:
    args = completed("sft", "--preset", "wan_1_3b", "--lr", "3e-5", "--no-checkpoint-blocks")
    assert (args.model, args.steps, args.lr, args.checkpoint_blocks) == ("1.3B", 1800, 3e-5, False)
    plain = completed("sft")
    assert (plain.model, plain.steps, plain.rank, plain.accumulate, plain.frozen) == ("embedded", 4000, 8, 1, False)


def test_the_decoder_alone_has_a_stage_with_crops_as_documented() -> None:
    alone = ("vae", "--init", str(ASSETS / "vae"), "--decoder-only")
    (stage,) = _vae_stages(completed(*alone))
    assert (stage.frames, stage.batch, stage.lr, stage.loss.box) == (129, 4, pytest.approx(1e-3), 4.0)
    assert stage.crops is not None and stage.loss.even > 0 == stage.crops.loss.even
    assert (stage.crops.size, stage.crops.frames, stage.crops.batch, stage.crops.loss.box) == (64, 33, 24, 8.0)
    assert _vae_stages(completed(*alone, "--crops", "0"))[0].crops is None
    assert all(stage.crops is None for stage in _vae_stages(completed("vae")))


def test_the_paper_s_batch_is_128_clips() -> None:
    args = completed("sft", "--preset", "wan_1_3b")
    assert 32 * args.clips * args.accumulate == 128


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sft: {steps: 3}", "names no model; begin it with model: and one of embedded, 1.3B, 14B"),
        ("model: embedded\nbake: {steps: 3}", "sets 'bake', which is no step"),
        ("model: embedded\nsft: {colour: 3}", "sets 'colour' of sft, which is unknown; use steps, clips, lr"),
        ("model: embedded\nbase: {steps: 3}", "has no step sft"),
        ("model: [", "is no YAML"),
    ],
)
def test_presets_that_are_off_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        completed("sft", "--preset", str(path))
    with pytest.raises(ValueError, match="preset='nowhere' is unknown; use one of: embedded, wan_14b, wan_1_3b"):
        completed("sft", "--preset", "nowhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sft", "--rebase", "2"], "rebase=2.0 is outside 0 to 1"),
        (["sft", "--rank", "-1"], "rank=-1 is below 0"),
        (["vae", "--seed", "9" * 30], "seed=999999999999999999999999999999 is outside 0 to 1048575"),
        (["sft", "--latents", "200"], "latents=200 is outside 21 to 81"),
        (["vae", "--crops", "64"], "crops=64 is for train vae with decoder_only=True; leave it out, or add that"),
        (
            ["vae", "--init", str(ASSETS / "vae"), "--decoder-only", "--crops", "60"],
            "crops=60 is no multiple of 8 from 16 to 128; use crops=64, or 0 for none",
        ),
        (["distill", "--critic-rank", "-2"], "critic_rank=-2 is below 0; use critic_rank=64"),
        (["vae", "--shard"], "shard=True is for base, sft and distill"),
        (["vae", "--data", "."], "data=. is for base, sft and distill"),
        (["sft", "--data", "nowhere"], "data=nowhere is no folder"),
        (["base", "--lr", "0"], "lr=0.0 is not above 0; use lr=0.001"),
        (["distill", "--teacher", "nowhere"], "teacher=nowhere is missing"),
    ],
)
def test_settings_out_of_range_are_named(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert main(["train", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_sample_of_an_exported_model_is_its_own_video() -> None:
    frames = sample_video(ASSETS, captions=["a red ball bounces over green hills at dusk"], device=CPU, latents=2)
    assert frames.shape == (3, 128, 192, 3)  # every second one of five
    top, bottom = frames[-1, :8].mean(axis=(0, 1)), frames[-1, -8:].mean(axis=(0, 1))
    assert top[2] > top[1] and bottom[1] > bottom[2]  # dusk is purple above, the hills are green below
