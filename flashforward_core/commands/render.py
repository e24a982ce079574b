"""``render``: prompts to mp4s with the embedded model. What needs torch is imported when a render begins."""

import argparse
import importlib
import os
from pathlib import Path

from ..engine.memory import KV_CHOICES, OFFLOAD_CHOICES, MemoryOptions
from ..engine.placement import LAYOUTS, ORDERS
from ..graph.anchors import RULES
from ..graph.schedules import SCHEDULES, spec_for
from ..kv_policy import SPARSE_KERNELS, sparse_named
from ..names import check_name
from ..specs import AnchorPlan, RolloutSpec, VideoShape
from .policy_options import add_policy_arguments, history_of, policy_of

LONGEST_NAME = 230  # bytes: file systems take 255, and the partial file's name is longer than the video's
DTYPES = ("fp32", "bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt",
        help='such as "a red balloon drifts right over green hills at dusk"; several as "first [5s] | second [10s#]", '
        "where # is a hard cut",
    )
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="many: a .txt with a prompt per line, or a .jsonl or .csv with prompt and, if wanted, seed, out, seconds; "
        "what has been rendered is left alone, so the same command goes on where it was stopped",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="the mp4 to write; with --prompts, a folder for them"
    )
    parser.add_argument("--shard", metavar="I/N", help="with --prompts: only every N-th prompt, from the I-th on")
    parser.add_argument(
        "--in-flight",
        type=int,
        metavar="N",
        help="with --prompts: videos under way at a time; more keep more lanes busy and take memory (as many as lanes, "
        "at least 2)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=20.0, metavar="S", help="length in seconds (20)")
    length.add_argument("--latent-frames", type=int, metavar="N", help="length in latent frames: 4N-3 video frames")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the same seed gives the same latents on any devices; with --prompts, the first "
        "prompt's: each next one's is one higher (0)",
    )
    add_plan_arguments(parser)
    parser.add_argument(
        "--devices", default="auto", help="auto (every CUDA device, or one CPU), cpu*4, cuda:0,cuda:1, … (auto)"
    )
    parser.add_argument(
        "--ray", default="", metavar="ADDRESS", help="run on a Ray cluster: auto (this machine's) or HOST:PORT"
    )
    parser.add_argument("--layout", default="auto", help=f"one of: auto, {', '.join(LAYOUTS)} (auto)")
    parser.add_argument("--order", default="latency", help=f"one of: {', '.join(ORDERS)} (latency)")
    parser.add_argument(
        "--batch-diagonal",
        action="store_true",
        help="run two chunks' forwards that are ready on one device as one batch; the latents differ by roundings",
    )
    add_memory_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="precision of the transformer's weights (fp32)")
    parser.add_argument("--crf", type=int, default=17, help="x264's quality: 0 lossless, 17 hardly visible, 51 worst")
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="another copy of the embedded model's files")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memory_of``."""
    parser.add_argument(
        "--kv", default="auto", help=f"how keys and values are held, one of: {', '.join(KV_CHOICES)} (auto)"
    )
    parser.add_argument(
        "--offload",
        default="off",
        help=f"keep weights that do not fit in host memory: {', '.join(OFFLOAD_CHOICES)} (off)",
    )
    parser.add_argument(
        "--budget-gib", type=float, default=0.0, metavar="GIB", help="most memory per device (all free)"
    )


def memory_of(args: argparse.Namespace) -> MemoryOptions:
    """Return what may be done to save memory."""
    return MemoryOptions(kv=args.kv, offload=args.offload, budget_gib=args.budget_gib)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what a rollout reads."""
    parser.add_argument("--schedule", default="flashforward", help=f"one of: {', '.join(SCHEDULES)} (flashforward)")
    parser.add_argument("--anchor-stride", type=int, default=10, metavar="N", help="latent frames between anchors (10)")
    parser.add_argument("--anchor-rule", default="nearest", help=f"one of: {', '.join(RULES)} (nearest)")
    add_policy_arguments(parser)
    parser.add_argument(
        "--sparse",
        default="none",
        metavar="WHICH",
        help="let later stages see only the tokens that are like theirs: self (of the video, AnnSA), cross (of the "
        "prompt, AnnCA), both or none (none)",
    )
    parser.add_argument(
        "--sparse-attention",
        default="auto",
        metavar="NAME",
        help=f"kernel of --sparse, one of: {', '.join(SPARSE_KERNELS)}; or the first that runs (auto)",
    )


def spec_of(args: argparse.Namespace, *, size: tuple[int, int]) -> RolloutSpec:
    """Return the rollout that the options ask for, at ``size`` (width, height) in pixels."""
    width, height = size
    if args.latent_frames is not None:
        shape = VideoShape(width=width, height=height, latent_frames=args.latent_frames)
    else:
        shape = VideoShape.from_seconds(args.seconds, width=width, height=height)
    if args.anchor_rule not in RULES:
        raise ValueError(f"anchor_rule={args.anchor_rule!r} is unknown; use one of: {', '.join(RULES)}")
    spec = RolloutSpec(
        shape=shape,
        schedule=args.schedule,
        anchors=AnchorPlan(stride=args.anchor_stride, rule=args.anchor_rule),
        history=history_of(args),
        seed=args.seed,
        kv_policy=policy_of(args),
        sparse=sparse_named(args.sparse, attention=args.sparse_attention),
    )
    return spec_for(spec)


def run(args: argparse.Namespace) -> int:
    """Check what needs no torch, then render one prompt or a file of them."""
    if args.layout != "auto":
        LAYOUTS[args.layout]  # an unknown one raises before anything is loaded
    if args.prompts is None:
        check_out(args.out)
        for name in ("shard", "in_flight"):
            if getattr(args, name) is not None:
                raise ValueError(f"{name} goes with a file of prompts only; use --prompts, or leave it out")
    module = ".render_one" if args.prompts is None else ".render_many"
    status: int = importlib.import_module(module, __package__).run(args)
    return status


def check_out(out: Path, *, make: bool = False) -> None:
    """Raise ``ValueError`` for a path that no video can be written to; ``make`` its folder if it is missing."""
    if not out.name:
        raise ValueError(f"out={str(out)!r} names no file; use a name such as clip.mp4")
    check_name(out)
    if out.suffix.lower() != ".mp4":
        raise ValueError(f"out={str(out)!r} does not end in .mp4; use {str(out.with_suffix('.mp4'))!r}")
    if (size := len(os.fsencode(out.name))) > LONGEST_NAME:
        raise ValueError(f"out={str(out)!r} has a name of {size} bytes; use at most {LONGEST_NAME}")
    if make:
        out.parent.mkdir(parents=True, exist_ok=True)
    if not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r} is in a folder that does not exist; make {str(out.parent)!r} first")
    if out.is_dir():
        raise ValueError(f"out={str(out)!r} is a folder; name a file, such as {str(out / 'clip.mp4')!r}")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"out={str(out)!r} is in a folder that you may not write to; use another folder")
