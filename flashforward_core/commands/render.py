"""``render``: a prompt to an mp4 with the embedded model; frames are encoded as they are decoded."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..engine.events import Event, FramesReady, TaskFinished
from ..engine.executor import TaskFailed
from ..engine.lanes import DevicePlan
from ..engine.ops import NotFinite
from ..engine.placement import LAYOUTS, ORDERS
from ..engine.rollout import RenderResult, render
from ..graph.anchors import RULES
from ..graph.schedules import SCHEDULES, spec_for
from ..kv_policy import KV_POLICIES, policy_named
from ..media import VideoWriter, check_crf
from ..model.loading import EMBEDDED_SIZE, load_embedded
from ..model.roles import Backbone
from ..prompts import parse, spans
from ..specs import AnchorPlan, History, RolloutSpec, VideoShape

LONGEST_NAME = 230  # bytes: file systems take 255, and the partial file's name is longer than the video's
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--prompt",
        required=True,
        help='such as "a red balloon drifts right over green hills at dusk"; several as "first [5s] | second [10s#]", '
        "where # is a hard cut",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the mp4 to write")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=20.0, metavar="S", help="length in seconds (20)")
    length.add_argument("--latent-frames", type=int, metavar="N", help="length in latent frames: 4N-3 video frames")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same latents on any devices (0)")
    add_plan_arguments(parser)
    parser.add_argument(
        "--devices", default="auto", help="auto (every CUDA device, or one CPU), cpu*4, cuda:0,cuda:1, … (auto)"
    )
    parser.add_argument(
        "--ray", default="", metavar="ADDRESS", help="run on a Ray cluster: auto (this machine's) or HOST:PORT"
    )
    parser.add_argument("--layout", default="auto", help=f"one of: auto, {', '.join(LAYOUTS)} (auto)")
    parser.add_argument("--order", default="latency", help=f"one of: {', '.join(ORDERS)} (latency)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="precision of the transformer's weights (fp32)")
    parser.add_argument("--crf", type=int, default=17, help="x264's quality: 0 lossless, 17 hardly visible, 51 worst")
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="another copy of the embedded model's files")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what a rollout reads."""
    parser.add_argument("--schedule", default="flashforward", help=f"one of: {', '.join(SCHEDULES)} (flashforward)")
    parser.add_argument("--anchor-stride", type=int, default=10, metavar="N", help="latent frames between anchors (10)")
    parser.add_argument("--anchor-rule", default="nearest", help=f"one of: {', '.join(RULES)} (nearest)")
    parser.add_argument("--history", type=int, default=5, metavar="N", help="earlier chunks that a chunk reads (5)")
    parser.add_argument("--planner-history", type=int, default=6, metavar="N", help="earlier anchor blocks read (6)")
    parser.add_argument("--sink", type=int, default=0, metavar="N", help="latent frames pinned to the start (0)")
    parser.add_argument("--kv-policy", default="keep", help=f"one of: {', '.join(KV_POLICIES)} (keep)")
    parser.add_argument("--kv-budget", type=int, metavar="N", help="latent frames' worth that the policy keeps")


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
        history=History(chunks=args.history, planner_blocks=args.planner_history, sink=args.sink),
        seed=args.seed,
        kv_policy=policy_named(args.kv_policy, budget_frames=args.kv_budget),
    )
    return spec_for(spec)


class Progress:
    """One line on stderr that says how far a render is; where that is no terminal, a line per tenth of the frames."""

    def __init__(self, *, total_frames: int, quiet: bool) -> None:
        self._total_frames = total_frames
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._frames = 0
        self._tasks = "0"
        self._tenth = 0
        self._began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, FramesReady):
            self._frames += event.frames.shape[1]
        elif isinstance(event, TaskFinished):
            self._tasks = f"{event.done}/{event.total}"
        tenth = 10 * self._frames // self._total_frames
        if not self._quiet and (self._terminal or tenth > self._tenth):
            self._show()
        self._tenth = tenth

    def _show(self) -> None:
        seconds = time.perf_counter() - self._began
        text = f"{self._tasks} tasks, {self._frames}/{self._total_frames} frames, {seconds:.0f} s"
        stays = not self._terminal or self._frames == self._total_frames
        print(f"\r{text}" if self._terminal else text, end="\n" if stays else "", file=sys.stderr, flush=True)


def render_to_file(
    backbone: Backbone,
    spec: RolloutSpec,
    texts: list[torch.Tensor],
    *,
    out: Path,
    devices: DevicePlan,
    crf: int,
    progress: Progress,
) -> RenderResult:
    """Render, decode and encode at once. Whatever stops it leaves a playable ``out.partial.mp4``, if it has a frame."""
    shape = spec.shape
    writer = VideoWriter(out, width=shape.width, height=shape.height, fps=shape.fps, crf=crf)

    def on_event(event: Event) -> None:
        if isinstance(event, FramesReady):
            writer.write(event.frames[0].numpy())
        progress(event)

    try:
        with writer:
            return render(backbone, spec, texts, devices=devices, decode=True, on_event=on_event)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_left_by(writer)) from error


def run(args: argparse.Namespace) -> int:
    """Render the prompt; print the latents' SHA-256 and, last, the video's path."""
    _check_out(args.out)
    check_crf(args.crf)
    if args.layout != "auto":
        LAYOUTS[args.layout]  # an unknown one raises before anything is loaded
    prompts = parse(args.prompt)
    spec = spec_of(args, size=EMBEDDED_SIZE)
    spec = replace(spec, prompts=spans([prompt.time for prompt in prompts], spec.shape))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    devices = DevicePlan(devices=(args.devices,), layout=args.layout, order=args.order, ray_address=args.ray)
    try:
        with _one_interrupt():
            result = _render(args, spec, [prompt.text for prompt in prompts], devices)
    except TaskFailed as error:
        if isinstance(error.__cause__, NotFinite | torch.OutOfMemoryError):
            raise ValueError(str(error)) from error  # the user can choose otherwise
        raise
    print(f"latents sha256 {result.sha256}")
    print(args.out)
    return 0


def _render(args: argparse.Namespace, spec: RolloutSpec, prompts: list[str], devices: DevicePlan) -> RenderResult:
    device = "cpu" if devices.ray_address else devices.resolve()[0]  # the lanes load weights of their own
    backbone = load_embedded(args.assets, dtype=DTYPES[args.dtype], device=device)
    texts = [backbone.text_encoder.encode([prompt]) for prompt in prompts]
    progress = Progress(total_frames=spec.shape.video_frames, quiet=args.quiet)
    return render_to_file(backbone, spec, texts, out=args.out, devices=devices, crf=args.crf, progress=progress)


def _check_out(out: Path) -> None:
    if out.suffix.lower() != ".mp4":
        raise ValueError(f"out={str(out)!r} does not end in .mp4; use {str(out.with_suffix('.mp4'))!r}")
    if (size := len(os.fsencode(out.name))) > LONGEST_NAME:
        raise ValueError(f"out={str(out)!r} has a name of {size} bytes; use at most {LONGEST_NAME}")
    if not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r} is in a folder that does not exist; make {str(out.parent)!r} first")
    if out.is_dir():
        raise ValueError(f"out={str(out)!r} is a folder; name a file, such as {str(out / 'clip.mp4')!r}")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"out={str(out)!r} is in a folder that you may not write to; use another folder")


def _left_by(writer: VideoWriter) -> str:
    if not writer.frames:
        return "interrupted before the first frame"
    left = writer.partial_path if writer.partial_path.exists() else writer.path
    return f"interrupted; what was finished is in {left}"


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at the first ctrl-C or SIGTERM; ignore later ones, so that cleaning up completes."""
    stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        if stopping:
            return
        stopping = True
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping...\n")  # print may be what was interrupted, and cannot be entered twice
        raise KeyboardInterrupt

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: old for number, old in found.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in handlers:
            signal.signal(number, stop)
        yield
    finally:
        for number, old in handlers.items():
            signal.signal(number, old)
