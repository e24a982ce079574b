"""One prompt to an mp4 with the embedded model; frames are encoded as they are decoded."""

import argparse
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ..engine.events import Event, FramesReady, TaskFinished
from ..engine.executor import TaskFailed
from ..engine.forward import FastOptions
from ..engine.lanes import DevicePlan
from ..engine.ops import NotFinite
from ..engine.ray_lanes import LaneLost
from ..engine.rollout import RenderResult, render
from ..kv.bucket_attention import resolve_bucket_attention
from ..media import VideoWriter, check_crf
from ..model.loading import EMBEDDED_SIZE, load_embedded
from ..model.roles import Backbone
from ..prompts import parse, spans
from ..scenes import advice
from ..specs import RolloutSpec
from .interrupts import one_interrupt
from .render import memory_of, spec_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
            return render(backbone, spec, texts, devices=devices, decode=True, hold_latents=False, on_event=on_event)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_left_by(writer)) from error
    except LaneLost as error:
        raise LaneLost(f"{error}; {_left_by(writer)}") from error


def run(args: argparse.Namespace) -> int:
    """Render ``args.prompt``; print the latents' SHA-256 and, last, the video's path."""
    check_crf(args.crf)
    prompts = parse(args.prompt)
    spec = spec_of(args, size=EMBEDDED_SIZE)
    spec = replace(spec, prompts=spans([prompt.time for prompt in prompts], spec.shape))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for told in {advice(prompt.text) for prompt in prompts} - {""}:
        logging.warning("%s", told)
    for told in spec.advice:
        logging.warning("%s", told)
    try:
        with one_interrupt():
            result = _render(args, spec, [prompt.text for prompt in prompts])
    except TaskFailed as error:
        if is_users(error):
            raise ValueError(str(error)) from error
        raise
    print(f"latents sha256 {result.sha256}")
    print(args.out)
    return 0


def is_users(error: Exception) -> bool:
    """Whether the user can choose otherwise, so that a traceback would say nothing more."""
    return isinstance(error, ValueError | OSError) or isinstance(error.__cause__, NotFinite | torch.OutOfMemoryError)


def devices_of(args: argparse.Namespace) -> DevicePlan:
    """Return the devices that the options ask for."""
    return DevicePlan(
        devices=(args.devices,),
        layout=args.layout,
        order=args.order,
        ray_address=args.ray,
        fast=FastOptions(batch_diagonal=args.batch_diagonal),
        memory=memory_of(args),
    )


def sparse_kernels(args: argparse.Namespace, spec: RolloutSpec, devices: DevicePlan) -> str:
    """Return the kernels of sparse attention, by name; ``ValueError`` for one that was asked for and cannot run.

    What ``auto`` is on a Ray cluster shows there only, and is ``auto`` here.
    """
    if spec.sparse is None:
        return "none"
    if devices.ray_address:
        return spec.sparse.attention
    places, dtype = dict.fromkeys(devices.resolve()), DTYPES[args.dtype]
    found = (resolve_bucket_attention(spec.sparse, place, dtype=dtype).name for place in places)
    return ", ".join(dict.fromkeys(found))


def load(args: argparse.Namespace, devices: DevicePlan) -> Backbone:
    """Return the embedded model on the first of ``devices``, or in host memory when lanes fetch weights themselves."""
    device = "cpu" if devices.ray_address or devices.memory.offload == "on" else devices.resolve()[0]
    return load_embedded(args.assets, dtype=DTYPES[args.dtype], device=device)


def _render(args: argparse.Namespace, spec: RolloutSpec, prompts: list[str]) -> RenderResult:
    devices = devices_of(args)
    sparse_kernels(args, spec, devices)  # one that cannot run is refused before anything is loaded
    backbone = load(args, devices)
    texts = [backbone.text_encoder.encode([prompt]) for prompt in prompts]
    progress = Progress(total_frames=spec.shape.video_frames, quiet=args.quiet)
    return render_to_file(backbone, spec, texts, out=args.out, devices=devices, crf=args.crf, progress=progress)


def _left_by(writer: VideoWriter) -> str:
    if not writer.frames:
        return "interrupted before the first frame"
    left = writer.partial_path if writer.partial_path.exists() else writer.path
    return f"interrupted; what was finished is in {left}"
