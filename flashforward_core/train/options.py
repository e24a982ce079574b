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
"""What neither the command line nor the preset says."""
SETTABLE = ("steps", "clips", "lr", *DEFAULTS)
"""What a preset may set for a step."""


SIZES = {"embedded": (192, 128), "1.3B": (832, 480), "14B": (832, 480)}
"""Width and height of the clips, by model."""


CROPS = 64
"""Side of the crops around sprites, in pixels: a sprite fits in with some of what is around it."""


def preset_names() -> list[str]:
    """Return the presets that the package carries."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_preset(preset: str) -> dict[str, Any]:
    """Read a preset by name or file: ``model`` and, per step, values of options.

    Raises ``ValueError`` for an unknown name, step, option or model.
    """
    path = PRESETS / f"{preset}.yaml" if preset in preset_names() else Path(preset)
    if not path.is_file():
        raise ValueError(f"preset={preset!r} is unknown; use one of: {', '.join(preset_names())}, or a YAML file")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML ({error}); correct it") from error
    if not isinstance(found, dict) or found.get("model") not in MODELS:
        raise ValueError(f"{path} names no model; begin it with model: and one of {', '.join(MODELS)}")
    for step, values in found.items():
        if step == "model":
            continue
        if step not in HELP or not isinstance(values, dict):
            raise ValueError(f"{path} sets {step!r}, which is no step; use {', '.join(HELP)}")
        unknown = sorted(set(values) - set(SETTABLE))
        if unknown:
            raise ValueError(f"{path} sets {unknown[0]!r} of {step}, which is unknown; use {', '.join(SETTABLE)}")
    return found


def complete(args: argparse.Namespace) -> None:
    """Fill in what the command line left out, from the preset and the defaults, in place."""
    preset = read_preset(args.preset)
    args.model = preset["model"]
    args.size = SIZES[args.model]
    if args.step not in preset:
        raise ValueError(f"preset={args.preset!r} has no step {args.step}; start from published weights instead")
    values = {**DEFAULTS, **preset[args.step]}
    for name in SETTABLE:
        if getattr(args, name) is None:
            setattr(args, name, values[name])
    if args.crops is None and args.decoder_only:
        args.crops = CROPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train`` to its parser."""
    parser.add_argument("step", choices=HELP, help="; ".join(f"{name}: {words}" for name, words in HELP.items()))
    parser.add_argument(
        "--preset",
        default="embedded",
        help=f"defaults of all options: {', '.join(preset_names())}, or a file (embedded)",
    )
    parser.add_argument("--out", type=Path, default=Path(".train"), help="folder of checkpoints and results")
    parser.add_argument(
        "--init",
        type=Path,
        help="start from weights: a vae folder (last stage only), an assets folder (others), a base.pt (sft), "
        "an sft.pt (distill)",
    )
    parser.add_argument("--steps", type=int, help="optimiser steps in all; 0 with vae --init: only measure it")
    parser.add_argument("--clips", type=int, help="clips per batch and process")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="base, sft, distill: videos with captions, in place of drawn scenes"
    )
    parser.add_argument(
        "--wan",
        type=Path,
        metavar="FOLDER",
        help="for the wan presets: Wan 2.1 in diffusers' layout (weights, encoders)",
    )
    parser.add_argument("--clip-latents", type=int, default=81, help="latent frames of the clips in --data (81)")
    parser.add_argument("--scenes", type=int, default=4096, help="procedural scenes to train on")
    parser.add_argument("--held-out", type=int, default=512, help="scenes that the autoencoder is measured on")
    parser.add_argument(
        "--decoder-only",
        action="store_true",
        help="vae: keep --init's encoder; crops sharpen the sprites, whole clips even the frames out",
    )
    parser.add_argument(
        "--crops",
        type=int,
        metavar="PIXELS",
        help=f"with --decoder-only: side of the crops, a multiple of 8; 0 trains on whole clips alone ({CROPS})",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-s", type=float, default=math.inf, help="stop after this many seconds of training")
    parser.add_argument(
        "--save-every-s", type=float, default=math.inf, help="save, and export where a step does, so often"
    )
    parser.add_argument("--accumulate", type=int, help="batches per step (1)")
    parser.add_argument("--logs", action="store_true", help="write TensorBoard logs (pip install tensorboard)")
    parser.add_argument("--latents", type=int, help="sft, distill: latent frames of the longest clip (81)")
    parser.add_argument("--rank", type=int, help="sft: rank of the roles' LoRAs, 0 for none (8)")
    parser.add_argument("--alpha", type=float, help="sft: scale of the LoRAs is alpha / rank (the rank)")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="sft: linears of a block that get LoRAs (all)")
    parser.add_argument(
        "--no-role-embedding", dest="role_embedding", action="store_false", help="sft: tell roles apart by LoRAs alone"
    )
    parser.add_argument("--rebase", type=float, help="base, sft: share of steps on clips cropped anywhere (0)")
    for name, words in (
        ("checkpoint-blocks", "recompute blocks in the backward pass, for memory"),
        ("frozen", "train the roles' LoRAs and embedding alone"),
        ("shard", "base, sft, distill: each process holds a part of all weights; runs eagerly"),
    ):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=words)
    parser.add_argument("--teacher", type=Path, help="distill: a base.pt or assets folder to learn from (OUT/base.pt)")
    parser.add_argument("--critic-rank", type=int, help="distill: rank of a critic's LoRA, 0 for a whole critic (0)")
    parser.add_argument("--guidance", type=float, help="distill: weight of the teacher's guidance (3)")
    parser.add_argument(
        "--windows", type=int, help="distill: parts of each rollout that are judged, 21 latents each (1)"
    )
    parser.add_argument("--forward-kl", type=float, help="distill: weight of the loss on real clips (0)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run eagerly")


SEEDS = 1 << 20  # the loop's generators take 64 bits, 42 of them for step and process


def check(args: argparse.Namespace) -> None:
    """Refuse what a step would only find out after minutes, or not at all."""
    for name in ("steps", "clips", "lr"):
        only_measure = name == "steps" and args.steps == 0 and args.step == "vae" and args.init is not None
        if getattr(args, name) <= 0 and not only_measure:
            usual = read_preset(args.preset)[args.step][name]
            raise ValueError(f"{name}={getattr(args, name)} is not above 0; use {name}={usual}")
    if not args.lr < math.inf:
        raise ValueError(f"lr={args.lr} is not finite; use lr=1e-4")
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
    if not 0 <= args.seed < SEEDS:
        raise ValueError(f"seed={args.seed} is outside 0 to {SEEDS - 1}; use seed=0")
    if args.scenes < 1:
        raise ValueError(f"scenes={args.scenes} is below 1; use scenes=4096")
    if not args.clip_latents >= 21:
        raise ValueError(f"clip_latents={args.clip_latents} is below 21; use clip_latents=81")
    if args.step == "base" and args.data is not None and args.clip_latents < 81:
        raise ValueError(f"clip_latents={args.clip_latents} is too short for base's sparse clips; use clip_latents=81")
    longest = args.clip_latents if args.data is not None else 81
    if not 21 <= args.latents <= longest:
        raise ValueError(f"latents={args.latents} is outside 21 to {longest}, the clips' length; use latents={longest}")
    if not 0 <= args.rebase <= 1:
        raise ValueError(f"rebase={args.rebase} is outside 0 to 1; use rebase=0.5")
    if args.rank < 0:
        raise ValueError(f"rank={args.rank} is below 0; use rank=8, or 0 for no LoRAs")
    if args.critic_rank < 0:
        raise ValueError(f"critic_rank={args.critic_rank} is below 0; use critic_rank=64, or 0 for a whole critic")
    if args.shard and args.step == "vae":
        raise ValueError("shard=True is for base, sft and distill; the autoencoder is small, leave it out")
    if not args.max_s > 0:
        raise ValueError(f"max_s={args.max_s} is not above 0; leave it out for no limit")
    for name in ("init", "teacher"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            raise ValueError(f"{name}={path} is missing; name existing weights or leave it out")
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
