"""The options of ``train``: presets give what a command line leaves out, and mistakes are found before work starts."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flashforward_core.model.config import MODELS
from flashforward_core.model.roles import TARGETS
from flashforward_core.scenes import HEIGHT
from flashforward_core.specs import SPATIAL_FACTOR
from flashforward_core.train.folder import captioned_videos
from flashforward_core.train.wan import check_folder

Group = argparse._ArgumentGroup  # what add_argument_group returns has no public name

HELP: Mapping[str, str] = {
    "vae": "the autoencoder",
    "base": "the bidirectional base and the text encoder",
    "sft": "both roles, packed supervised fine-tuning",
    "distill": "both roles, on their own rollouts, from sft.pt",
}
PARTIAL: Mapping[str, bool] = {"vae": True, "base": False, "sft": True, "distill": True}
"""Whether some steps leave weights unused: single frames the temporal convolutions, the planner the other role."""

PRESETS = Path(__file__).parent / "presets"
DEFAULTS: Mapping[str, Any] = {
    "accumulate": 1,
    "save_every_s": math.inf,
    "rank": 8,
    "rebase": 0.0,
    "guidance": 3.0,
    "windows": 1,
    "forward_kl": 0.0,
    "latents": 81,
    "checkpoint_blocks": False,
    "frozen": False,
    "shard": False,
    "critic_rank": 0,
}
"""What neither the command line nor a preset says."""
SETTABLE: Mapping[str, type] = {
    "steps": int,
    "clips": int,
    "lr": float,
    **{name: type(value) for name, value in DEFAULTS.items()},
}
"""What a preset may set for a step, and of what type that is."""
WRITTEN: Mapping[type, str] = {
    int: "no whole number; write one, such as 8",
    float: "no finite number; write one, such as 0.5 or 5e-4",
    bool: "neither true nor false; write one of them, without quotes",
}


SIZES = {"embedded": (192, 128), "1.3B": (832, 480), "14B": (832, 480)}
"""Width and height of the clips, by model."""


CROPS = 64
"""Side of the crops around sprites, in pixels: a sprite fits in with some of what is around it."""


def preset_names() -> list[str]:
    """Return the presets that the package carries."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_preset(preset: str) -> dict[str, Any]:
    """Read a preset by name or file: ``model`` and, per step, values of options.

    Raises ``ValueError`` for an unknown name, step, option or model, and for a value of the wrong type.
    """
    path = PRESETS / f"{preset}.yaml" if preset in preset_names() else Path(preset)
    if not path.is_file():
        raise ValueError(f"preset={preset!r} is unknown; use one of: {', '.join(preset_names())}, or a YAML file")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no YAML ({' '.join(str(error).split())}); correct it") from error
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, str) or model not in MODELS:
        raise ValueError(f"{path} names no model; begin it with model: and one of {', '.join(MODELS)}")
    sections = {step: values for step, values in found.items() if step != "model"}
    return {"model": model, **{step: _section(path, step, values) for step, values in sections.items()}}


def _section(path: Path, step: object, values: object) -> dict[str, Any]:
    """Return what a preset's file sets for a step, each value in its option's type."""
    if step not in HELP:
        raise ValueError(f"{path} sets {step!r}, which is no step; use {', '.join(HELP)}")
    if not isinstance(values, dict):
        raise ValueError(f"{path} sets {step} to {values!r}; give it options, such as {step}: {{steps: 1000}}")
    section = {}
    for name, value in values.items():
        if name not in SETTABLE:
            raise ValueError(f"{path} sets {name!r} of {step}, which is unknown; use {', '.join(SETTABLE)}")
        section[name] = _typed(value, SETTABLE[name])
        if section[name] is None:
            raise ValueError(f"{path} sets {name}={value!r} of {step}, which is {WRITTEN[SETTABLE[name]]}")
    return section


def _typed(value: object, kind: type) -> Any:
    """Return a value out of YAML as ``kind``, or ``None`` if it is none.

    YAML 1.1 reads a number without a dot, such as 5e-4, as text.
    """
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return None
    return kind(number)


def built_in(model: str) -> dict[str, Any]:
    """Return the package's own preset of a model."""
    (found,) = (preset for preset in map(read_preset, preset_names()) if preset["model"] == model)
    return found


def complete(args: argparse.Namespace) -> None:
    """Fill in what the command line left out, in place: from the preset, the model's own preset, then the defaults."""
    preset = read_preset(args.preset)
    args.model = preset["model"]
    args.size = SIZES[args.model]
    recipe = built_in(args.model)
    if args.step not in recipe:
        raise ValueError(
            f"preset={args.preset!r} is for model {args.model}, which train {args.step} does not train; start with "
            "train sft, from its published weights"
        )
    if args.step not in preset:
        raise ValueError(
            f"preset={args.preset!r} has no section {args.step}; add {args.step}: {{}} for the values of the "
            f"package's own preset, or values such as {args.step}: {{steps: {recipe[args.step]['steps']}}}"
        )
    values = {**DEFAULTS, **recipe[args.step], **preset[args.step]}
    for name in SETTABLE:
        if getattr(args, name) is None:
            setattr(args, name, values[name])
    if args.crops is None and args.decoder_only:
        args.crops = CROPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train`` to its parser."""
    parser.add_argument("step", choices=HELP, help="; ".join(f"{name}: {words}" for name, words in HELP.items()))
    _add_data(parser.add_argument_group("data and weights"))
    _add_run(parser.add_argument_group("run"))
    _add_tuning(parser.add_argument_group("fine-tuning"))
    _add_distillation(parser.add_argument_group("distillation"))
    _add_autoencoder(parser.add_argument_group("autoencoder"))


def _add_data(group: Group) -> None:
    group.add_argument(
        "--preset",
        default="embedded",
        help=f"a recipe, {', '.join(preset_names())} or a YAML file (embedded): defaults of "
        + ", ".join(f"--{name.replace('_', '-')}" for name in SETTABLE),
    )
    group.add_argument("--out", type=Path, default=Path(".train"), help="folder of checkpoints and results (.train)")
    group.add_argument(
        "--init",
        type=Path,
        help="start from weights: a vae folder (last stage only), an assets folder (others), a base.pt (sft), "
        "an sft.pt (distill)",
    )
    group.add_argument(
        "--data", type=Path, metavar="FOLDER", help="base, sft, distill: videos with captions, in place of drawn scenes"
    )
    group.add_argument(
        "--wan",
        type=Path,
        metavar="FOLDER",
        help="for the wan presets: Wan 2.1 in diffusers' layout (weights, encoders)",
    )
    group.add_argument("--clip-latents", type=int, default=81, help="latent frames of the clips in --data (81)")
    group.add_argument("--scenes", type=int, default=4096, help="procedural scenes to train on (4096)")


def _add_run(group: Group) -> None:
    group.add_argument("--steps", type=int, help="optimiser steps in all; 0 with vae --init: only measure it")
    group.add_argument("--clips", type=int, help="clips per batch and process")
    group.add_argument("--accumulate", type=int, help="base, sft, distill: batches per step (1)")
    group.add_argument("--lr", type=float, help="peak learning rate")
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn at random (0)")
    group.add_argument("--max-s", type=float, default=math.inf, help="stop after this many seconds of training")
    group.add_argument(
        "--save-every-s",
        type=float,
        help="base, sft, distill: save, and export where a step does, so often (never; every 1,000 steps anyway)",
    )
    # torchrun has two options that begin with --logs, and before Python 3.12 takes ours for one of them
    group.add_argument(
        "--tensorboard",
        "--logs",
        dest="logs",
        action="store_true",
        help="base, sft, distill: write TensorBoard logs (pip install tensorboard)",
    )
    _add_switch(group, "checkpoint-blocks", "base, sft, distill: recompute blocks in the backward pass, for memory")
    _add_switch(group, "shard", "base, sft, distill: each process holds a part of all weights; runs eagerly")
    group.add_argument("--no-compile", dest="compile", action="store_false", help="run eagerly")


def _add_tuning(group: Group) -> None:
    group.add_argument("--latents", type=int, help="sft, distill: latent frames of the longest clip (81)")
    group.add_argument("--rank", type=int, help="sft: rank of the roles' LoRAs, 0 for none (8)")
    group.add_argument("--alpha", type=float, help="sft: scale of the LoRAs is alpha / rank (the rank)")
    group.add_argument(
        "--targets",
        nargs="+",
        default=TARGETS,
        help="sft: linears of a block that get LoRAs (all)",
    )
    group.add_argument(
        "--no-role-embedding",
        dest="role_embedding",
        action="store_false",
        help="sft, distill: tell roles apart by LoRAs alone",
    )
    group.add_argument("--rebase", type=float, help="base, sft: share of steps on clips cropped anywhere (0)")
    _add_switch(group, "frozen", "sft, distill: train the roles' LoRAs and embedding alone")


def _add_distillation(group: Group) -> None:
    group.add_argument(
        "--teacher",
        type=Path,
        help="a base.pt or assets folder to learn from (OUT/base.pt); for Wan a folder like --wan's (that one)",
    )
    group.add_argument("--critic-rank", type=int, help="rank of a critic's LoRA, 0 for a whole critic (0)")
    group.add_argument("--guidance", type=float, help="weight of the teacher's guidance (3; embedded: 0.5)")
    group.add_argument("--windows", type=int, help="parts of each rollout that are judged, 21 latents each (1)")
    group.add_argument("--forward-kl", type=float, help="weight of the loss on real clips (0)")


def _add_autoencoder(group: Group) -> None:
    group.add_argument("--held-out", type=int, default=512, help="scenes that the autoencoder is measured on (512)")
    group.add_argument(
        "--decoder-only",
        action="store_true",
        help="keep --init's encoder; crops sharpen the sprites, whole clips even the frames out",
    )
    group.add_argument(
        "--crops",
        type=int,
        metavar="PIXELS",
        help=f"with --decoder-only: side of the crops, a multiple of 8; 0 trains on whole clips alone ({CROPS})",
    )


def _add_switch(group: Group, name: str, words: str) -> None:
    """Add an option that a preset may turn on and the command line off again."""
    group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=words)


SEEDS = 1 << 20  # the loop's generators take 64 bits, 42 of them for step and process


def check(args: argparse.Namespace) -> None:
    """Refuse what a step would only find out after minutes, or not at all."""
    _check_numbers(args)
    if args.decoder_only and (args.step != "vae" or args.init is None):
        raise ValueError("decoder_only=True is for train vae with --init; name the autoencoder whose encoder to keep")
    if args.crops is not None and not args.decoder_only:
        raise ValueError(f"crops={args.crops} is for train vae with decoder_only=True; leave it out, or add that")
    if args.crops and (not 16 <= args.crops <= HEIGHT or args.crops % SPATIAL_FACTOR):
        sizes = f"multiple of {SPATIAL_FACTOR} from 16 to {HEIGHT}"
        raise ValueError(f"crops={args.crops} is no {sizes}; use crops={CROPS}, or 0 for none")
    if args.data is not None:
        if args.step == "vae":
            raise ValueError(
                f"data={args.data} is for base, sft and distill; the autoencoder is trained on drawn scenes"
            )
        captioned_videos(args.data)
    _check_wan(args)
    if not args.clip_latents >= 21:
        raise ValueError(f"clip_latents={args.clip_latents} is below 21; use clip_latents=81")
    if args.step == "base" and args.data is not None and args.clip_latents < 81:
        raise ValueError(f"clip_latents={args.clip_latents} is too short for base's sparse clips; use clip_latents=81")
    longest = args.clip_latents if args.data is not None else 81
    if not 21 <= args.latents <= longest:
        raise ValueError(f"latents={args.latents} is outside 21 to {longest}, the clips' length; use latents={longest}")
    if args.shard and args.step == "vae":
        raise ValueError("shard=True is for base, sft and distill; the autoencoder is small, leave it out")
    for name in ("init", "teacher"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            raise ValueError(f"{name}={path} is missing; name existing weights or leave it out")
    made = args.out / {"vae": "vae", "base": "base.pt", "sft": "assets", "distill": "distilled"}[args.step]
    if args.init is not None and args.init.resolve() == made.resolve():
        raise ValueError(f"init={args.init} is what this run writes; name another out=, or copy it first")
    vae = {} if is_exported(args.init) or args.wan is not None else {"vae/config.json": "vae"}
    teacher = {"base.pt": "base"} if args.teacher is None and args.wan is None else {}
    needed = {
        "vae": {},
        "base": vae,
        "sft": vae | ({"base.pt": "base"} if args.init is None and args.wan is None else {}),
        "distill": vae | teacher | ({"sft.pt": "sft"} if args.init is None else {}),
    }
    for name, step in needed[args.step].items():
        if not (args.out / name).is_file():
            raise ValueError(f"{args.out / name} is missing; run first: train {step} --out {args.out}")


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that no step can take."""
    for name in ("steps", "clips", "lr"):
        only_measure = name == "steps" and args.steps == 0 and args.step == "vae" and args.init is not None
        if getattr(args, name) <= 0 and not only_measure:
            usual = built_in(args.model)[args.step][name]
            raise ValueError(f"{name}={getattr(args, name)} is not above 0; use {name}={usual}")
    if not args.lr < math.inf:
        raise ValueError(f"lr={args.lr} is not finite; use lr=1e-4")
    for name, usual in (("accumulate", 1), ("scenes", 4096), ("held_out", 512), ("windows", 1)):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)} is below 1; use {name}={usual}")
    if not 0 <= args.seed < SEEDS:
        raise ValueError(f"seed={args.seed} is outside 0 to {SEEDS - 1}; use seed=0")
    if not 0 <= args.rebase <= 1:
        raise ValueError(f"rebase={args.rebase} is outside 0 to 1; use rebase=0.5")
    if args.rank < 0:
        raise ValueError(f"rank={args.rank} is below 0; use rank=8, or 0 for no LoRAs")
    if args.alpha is not None and not 0 < args.alpha < math.inf:
        raise ValueError(f"alpha={args.alpha} is no finite number above 0; use alpha=8, or leave it out: the rank")
    if args.critic_rank < 0:
        raise ValueError(f"critic_rank={args.critic_rank} is below 0; use critic_rank=64, or 0 for a whole critic")
    for name in ("guidance", "forward_kl"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"{name}={getattr(args, name)} is no finite number from 0; use {name}={DEFAULTS[name]:g}")
    for name in ("max_s", "save_every_s"):
        if not getattr(args, name) > 0:
            raise ValueError(f"{name}={getattr(args, name)} is not above 0; use {name}=1800, or leave it out")


def _check_wan(args: argparse.Namespace) -> None:
    """Refuse Wan's presets without its weights or clips, and its weights without its presets."""
    if args.model == "embedded":
        if args.wan is not None:
            raise ValueError("wan= goes with a preset for Wan; use preset=wan_1_3b")
        return
    if args.wan is None or args.data is None:
        raise ValueError(
            f"preset={args.preset} needs wan= (Wan 2.1 in diffusers' layout) and data= (videos); name both"
        )
    check_folder(args.wan)
    if args.frozen and args.rank < 1:
        raise ValueError("frozen with rank=0 leaves nothing to train; use rank=128")


def is_exported(source: Path | None) -> bool:
    return source is not None and (source / "vae").is_dir()
