"""``train``'s options: presets fill in what a command line leaves out, and mistakes are named."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from flashforward_core.cli import main
from flashforward_core.model.config import MODELS
from flashforward_core.model.loading import ASSETS
from flashforward_core.train.command import STEPS
from flashforward_core.train.options import (
    HELP,
    PARTIAL,
    SETTABLE,
    add_arguments,
    complete,
    preset_names,
    read_preset,
)
from flashforward_core.train.samples import sample_video
from flashforward_core.train.vae_command import vae_stages

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def parser_of_train() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def completed(*words: str) -> argparse.Namespace:
    args = parser_of_train().parse_args(words)
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
    (stage,) = vae_stages(completed(*alone))
    assert (stage.frames, stage.batch, stage.lr, stage.loss.box) == (129, 4, pytest.approx(1e-3), 4.0)
    assert stage.crops is not None and stage.loss.even > 0 == stage.crops.loss.even
    assert (stage.crops.size, stage.crops.frames, stage.crops.batch, stage.crops.loss.box) == (64, 33, 24, 8.0)
    assert vae_stages(completed(*alone, "--crops", "0"))[0].crops is None
    assert all(stage.crops is None for stage in vae_stages(completed("vae")))


def test_the_paper_s_batch_is_128_clips() -> None:
    args = completed("sft", "--preset", "wan_1_3b")
    assert 32 * args.clips * args.accumulate == 128


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sft: {steps: 3}", "names no model; begin it with model: and one of embedded, 1.3B, 14B"),
        ("model: embedded\nbake: {steps: 3}", "sets 'bake', which is no step"),
        ("model: embedded\nsft: {colour: 3}", "sets 'colour' of sft, which is unknown; use steps, clips, lr"),
        (
            "model: embedded\nbase: {steps: 3}",
            "has no section sft; add sft: {} .* or values such as sft: {steps: 4000}",
        ),
        ("model: embedded\nsft:", "mine.yaml sets sft to None; give it options, such as sft: {steps: 1000}"),
        ("model: embedded\nsft: {1: 2, colour: 3}", "sets 1 of sft, which is unknown"),
        ("model: [embedded]", "names no model"),
        ("model: [", "is no YAML"),
        ("model: embedded # \xe9", "is no YAML"),
    ],
)
def test_presets_that_are_off_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=said):
        completed("sft", "--preset", str(path))
    with pytest.raises(ValueError, match="preset='nowhere' is unknown; use one of: embedded, wan_14b, wan_1_3b"):
        completed("sft", "--preset", "nowhere")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("steps: six", "steps='six' of sft, which is no whole number; write one, such as 8"),
        ("steps: 1.5", "steps=1.5 of sft, which is no whole number"),
        ("rank: true", "rank=True of sft, which is no whole number"),
        ("clips: [8]", "clips=[8] of sft, which is no whole number"),
        ("clips: .inf", "clips=inf of sft, which is no whole number"),
        ("lr: ", "lr=None of sft, which is no finite number; write one, such as 0.5 or 5e-4"),
        ("guidance: .nan", "guidance=nan of sft, which is no finite number"),
        ("save_every_s: .inf", "save_every_s=inf of sft, which is no finite number"),
        (
            'frozen: "false"',
            "frozen='false' of sft, which is neither true nor false; write one of them, without quotes",
        ),
        ("shard: 1", "shard=1 of sft, which is neither true nor false"),
    ],
)
def test_a_preset_s_values_have_their_options_types(tmp_path: Path, values: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"model: embedded\nsft: {{{values}}}")
    with pytest.raises(ValueError, match=re.escape(f"{path} sets {said}")):
        read_preset(str(path))


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: embedded\nsft: {lr: 5e-4, steps: 2e3, rebase: 1, frozen: no}")
    args = completed("sft", "--preset", str(path))
    assert (args.lr, args.steps, args.rebase, args.frozen) == (5e-4, 2000, 1.0, False)
    assert [type(value) for value in (args.lr, args.steps, args.rebase)] == [float, int, float]


def test_what_a_preset_leaves_out_is_as_in_the_model_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: 14B\nsft: {lr: 3.0e-5, shard: false}\ndistill: {}\nbase: {steps: 3}")
    args, own = completed("sft", "--preset", str(path)), completed("sft", "--preset", "wan_14b")
    changed = {name for name in SETTABLE if getattr(args, name) != getattr(own, name)}
    assert changed == {"lr", "shard"} and (args.lr, args.shard) == (3e-5, False)
    assert completed("distill", "--preset", str(path)).critic_rank == 128
    for preset in (str(path), "wan_1_3b"):
        with pytest.raises(ValueError, match="train base does not train; start with train sft"):
            completed("base", "--preset", preset)


def test_wan_presets_save_by_the_clock_and_the_command_line_goes_first() -> None:
    for preset in ("wan_1_3b", "wan_14b"):
        for step in ("sft", "distill"):
            assert completed(step, "--preset", preset).save_every_s == 1800
    assert completed("sft", "--preset", "wan_14b", "--save-every-s", "60").save_every_s == 60
    assert completed("sft").save_every_s == math.inf


def test_the_help_groups_the_options_and_names_what_presets_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    for title in ("data and weights:", "run:", "fine-tuning:", "distillation:", "autoencoder:"):
        assert f"\n{title}\n" in said
    of_presets = said[said.index("  --preset PRESET") : said.index("  --out OUT")]
    assert all(f"--{name.replace('_', '-')}" in of_presets for name in SETTABLE)


def test_the_commands_say_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--help"], "measure speed, memory, quality, training steps and policies, and keep the results as JSON"),
        (["--help"], "train the embedded model or Wan 2.1, one step at a time"),
        (["train", "--help"], "Train the embedded model or Wan 2.1, one step at a time."),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert said in " ".join(capsys.readouterr().out.split())


def test_launchers_pass_every_documented_option_on() -> None:
    """Before Python 3.12 argparse looks for its own options even behind the module's name."""
    options = {action.option_strings[0] for action in parser_of_train()._actions if action.option_strings} - {"-h"}
    assert "--tensorboard" in options
    for launcher in (get_args_parser(), launch_command_parser()):
        for option in sorted(options):
            given = launcher.parse_args(["-m", "flashforward_core", "train", "sft", option])
            assert given.training_script_args == ["train", "sft", option]


def test_logs_is_another_name_of_tensorboard() -> None:
    assert completed("sft", "--logs").logs and completed("sft", "--tensorboard").logs and not completed("sft").logs


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
        (["sft", "--preset", "PRESET"], "steps=0 is not above 0; use steps=4000"),
        (["distill", "--guidance", "nan"], "guidance=nan is no finite number from 0; use guidance=3"),
        (["distill", "--guidance", "inf"], "guidance=inf is no finite number from 0"),
        (["distill", "--guidance", "-1"], "guidance=-1.0 is no finite number from 0"),
        (["distill", "--forward-kl", "nan"], "forward_kl=nan is no finite number from 0; use forward_kl=0"),
        (["distill", "--forward-kl", "-0.1"], "forward_kl=-0.1 is no finite number from 0"),
        (["distill", "--windows", "0"], "windows=0 is below 1; use windows=1"),
        (["sft", "--accumulate", "0"], "accumulate=0 is below 1; use accumulate=1"),
        (["sft", "--alpha", "0"], "alpha=0.0 is no finite number above 0; use alpha=8, or leave it out: the rank"),
        (["sft", "--alpha", "nan"], "alpha=nan is no finite number above 0"),
        (["sft", "--alpha", "inf"], "alpha=inf is no finite number above 0"),
        (["sft", "--save-every-s", "nan"], "save_every_s=nan is not above 0; use save_every_s=1800, or leave it out"),
        (["sft", "--save-every-s", "0"], "save_every_s=0.0 is not above 0"),
        (["vae", "--held-out", "0"], "held_out=0 is below 1; use held_out=512"),
        (["distill", "--teacher", "nowhere"], "teacher=nowhere is missing"),
    ],
)
def test_settings_out_of_range_are_named(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("model: embedded\nsft: {steps: 0}")
    words = [str(preset) if word == "PRESET" else word for word in words]
    assert main(["train", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("step", "made"), [("sft", "assets"), ("distill", "distilled")])
def test_a_run_does_not_start_from_what_it_writes(
    step: str, made: str, tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    """Its first save would change what it says that it was made from."""
    (tmp_path / made).symlink_to(ASSETS)
    assert main(["train", step, "--out", str(tmp_path), "--init", str(tmp_path / made)]) == 2
    assert "is what this run writes; name another out=" in capsys.readouterr().err


def test_a_sample_of_an_exported_model_is_its_own_video() -> None:
    frames = sample_video(ASSETS, captions=["a red ball bounces over green hills at dusk"], device=CPU, latents=2)
    assert frames.shape == (3, 128, 192, 3)  # every second one of five
    top, bottom = frames[-1, :8].mean(axis=(0, 1)), frames[-1, -8:].mean(axis=(0, 1))
    assert top[2] > top[1] and bottom[1] > bottom[2]  # dusk is purple above, the hills are green below
