"""``bench quality``: render held-out captions with several schedules, the same seeds for all, and compare them.

Captions are batched: one rollout renders several, each with its own seed. Every variant's videos are measured from
their decoded frames, before any coding.
"""

import argparse
import datetime
import json
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.events import AnchorBlockReady, Event
from ..engine.lanes import DevicePlan
from ..engine.rollout import render
from ..metrics.numbers import METRICS, numbers
from ..model.loading import EMBEDDED_SIZE, load_embedded
from ..model.roles import Backbone
from ..model.vae import StreamingDecoder
from ..scenes import HELD_OUT, sample_scene
from ..specs import RolloutSpec, VideoShape
from .bench_rows import Row, commit, machine
from .quality_report import quality_rows, save_sheet, write_report

log = logging.getLogger(__name__)

TRAINED = 4096  # scenes below this one may have been trained on: their captions are left out
Z_95 = 1.96  # standard errors on each side of a mean that hold it 95 times in 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to make the videos."""

    schedule: str
    paste: bool = False
    """Whether the planned anchors replace what was rendered at their places, which the method never does."""


VARIANTS: Mapping[str, Variant] = {
    "flashforward": Variant(schedule="flashforward"),
    "no_anchors": Variant(schedule="flashforward_no_anchors"),
    "clean_history": Variant(schedule="clean_history_anchors"),
    "self_forcing": Variant(schedule="self_forcing"),
    "hiar": Variant(schedule="hiar"),
    "pasted_anchors": Variant(schedule="flashforward", paste=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--captions", type=int, default=32, metavar="N", help="held-out captions (32)")
    parser.add_argument("--latents", default="81,141,261", help="lengths in latent frames (81,141,261)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"some of: {', '.join(VARIANTS)} (all)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="captions rendered at once (8)")
    parser.add_argument("--seed", type=int, default=0, help="the first caption's seed; the next ones count up (0)")
    parser.add_argument("--device", default="auto", help="auto (the first CUDA device, or the CPU), cpu, cuda:0 (auto)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="processes that measure videos (one per core)"
    )
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="another copy of the embedded model's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="write a sheet of frames per length")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write tables and plots, such as docs/quality.md")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="report these rows; render nothing")


def run(args: argparse.Namespace) -> int:
    """Render and measure, or read rows; then write what was asked for."""
    rows = quality_rows(args.source) if args.source is not None else bench(args)
    if args.report is not None:
        write_report(rows, args.report, frames=args.frames)
    for row in rows if args.report is None and args.json is None else ():
        config = row["config"]
        print(
            f"{config['variant']:>16} {config['latents']:>4} {row['metric']:<16} {row['value']:.4f} ±{row['ci95']:.4f}"
        )
    return 0


def bench(args: argparse.Namespace) -> list[Row]:
    """Return the rows of every variant and length."""
    lengths = _lengths(args.latents)
    variants = _chosen(args.variants)
    for name, least in (("captions", 2), ("batch", 1), ("workers", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}={getattr(args, name)} is below {least}; use {name}={least} or more")
    devices = DevicePlan(devices=(args.device,))
    device = devices.resolve()[0]
    backbone = load_embedded(args.assets, device=device)
    captions = held_out_captions(args.captions)
    rows: list[Row] = []
    with _workers(args.workers) as pool:
        for latents in lengths:
            bench = Bench(
                backbone=backbone, device=device, latents=latents, seed=args.seed, batch=args.batch, pool=pool
            )
            found = bench.measure(captions, variants)
            rows += [row for name in variants for row in _rows(name, found.values[name], bench=bench)]
            if args.json is not None:  # after each length, so that a stopped run keeps the ones before
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            if args.frames is not None:
                args.frames.mkdir(parents=True, exist_ok=True)
                save_sheet(found.frames, args.frames / f"frames_{latents}.jpg")
    return rows


def held_out_captions(count: int) -> list[str]:
    """Return ``count`` different captions that no training scene has."""
    trained = {sample_scene(seed).caption for seed in range(TRAINED)}
    found: dict[str, None] = {}
    seed = HELD_OUT
    while len(found) < count:
        caption = sample_scene(seed).caption
        if caption not in trained:
            found[caption] = None
        seed += 1
    return list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one length gave."""

    values: dict[str, dict[str, list[float]]]
    """Variant -> metric -> one value per caption, in order."""
    frames: dict[str, np.ndarray]
    """Variant -> eight frames of the first caption's video, from first to last [8, H, W, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Renders and measures videos of one length."""

    backbone: Backbone
    device: str
    latents: int
    seed: int
    batch: int
    pool: Executor
    """Measures videos while the next ones are rendered."""

    def measure(self, captions: Sequence[str], variants: Sequence[str]) -> Found:
        """Measure every caption under every variant; caption i has the seed ``seed + i`` in each of them."""
        values: dict[str, dict[str, list[float]]] = {name: {metric: [] for metric in METRICS} for name in variants}
        frames: dict[str, np.ndarray] = {}
        for start in range(0, len(captions), self.batch):
            batch = captions[start : start + self.batch]
            pending: list[tuple[str, Future[dict[str, float]]]] = []
            for name, latents in self._render(batch, variants, first=start):
                videos = self._decode(latents)
                if start == 0:
                    frames[name] = videos[0, np.linspace(0, videos.shape[1] - 1, 8).astype(int)]
                pending += [(name, self.pool.submit(numbers, *pair)) for pair in zip(videos, batch, strict=True)]
            for name, future in pending:
                for metric, value in future.result().items():
                    values[name][metric].append(value)
        return Found(values=values, frames=frames)

    def _render(self, captions: Sequence[str], variants: Sequence[str], *, first: int) -> Iterator[tuple[str, Tensor]]:
        """Yield each variant's latents [B, C, F, h, w]; variants of one schedule share its rollout."""
        text = self.backbone.text_encoder.encode(list(captions))
        made: dict[str, tuple[Tensor, dict[int, Tensor]]] = {}
        for name in variants:
            schedule = VARIANTS[name].schedule
            if schedule not in made:
                made = {schedule: self._rollout(text, schedule, seed=self.seed + first)}
            latents, anchors = made[schedule]
            yield name, paste(latents, anchors) if VARIANTS[name].paste else latents

    def _rollout(self, text: Tensor, schedule: str, *, seed: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the latents and the anchors by their latent frame."""
        width, height = EMBEDDED_SIZE
        shape = VideoShape(width=width, height=height, latent_frames=self.latents)
        spec = RolloutSpec(shape=shape, schedule=schedule, seed=seed)
        anchors: dict[int, Tensor] = {}
        positions, blocks = spec.anchor_positions(), spec.anchor_blocks()

        def keep(event: Event) -> None:
            if isinstance(event, AnchorBlockReady):
                for place, anchor in enumerate(blocks[event.index]):
                    anchors[positions[anchor]] = event.latents[:, :, place].to("cpu", torch.float32)

        began = time.perf_counter()
        result = render(self.backbone, spec, [text], devices=DevicePlan(devices=(self.device,)), on_event=keep)
        log.info("%s, %d latents, %d captions: %.1f s", schedule, self.latents, len(text), time.perf_counter() - began)
        return result.latents_BCFHW, anchors

    def _decode(self, latents: Tensor) -> np.ndarray:
        """Return uint8 frames [B, F, H, W, 3]."""
        decoder, state, parts = StreamingDecoder(self.backbone.vae), None, []
        for part in torch.split(latents, 8, dim=2):
            frames, state = decoder.decode(part, state)
            parts.append(frames.numpy())
        return np.concatenate(parts, axis=1)


def paste(latents: Tensor, anchors: Mapping[int, Tensor]) -> Tensor:
    """Return ``latents`` [B, C, F, h, w] with the anchors [B, C, h, w] in their places."""
    pasted = latents.clone()
    for frame, anchor in anchors.items():
        pasted[:, :, frame] = anchor
    return pasted


def _workers(count: int) -> Executor:
    """Return processes, since measuring is Python and numpy; new ones, since a fork of a CUDA process is broken."""
    if count == 1:
        return ThreadPoolExecutor(max_workers=1)
    return ProcessPoolExecutor(max_workers=count, mp_context=multiprocessing.get_context("spawn"))


def mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval (normal approximation; sample deviation)."""
    return float(np.mean(values)), Z_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _rows(variant: str, values: Mapping[str, Sequence[float]], *, bench: Bench) -> list[Row]:
    rows = []
    for metric, found in values.items():
        if len(found) < 2:
            continue
        mean, ci95 = mean_and_ci95(found)
        rows.append(
            {
                "metric": metric,
                "value": mean,
                "unit": METRICS[metric],
                "ci95": ci95,
                "values": [round(value, 6) for value in found],
                "config": _config(variant, bench, captions=len(found)),
                "machine": machine(bench.device),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit(),
            }
        )
    return rows


def _config(variant: str, bench: Bench, *, captions: int) -> dict[str, Any]:
    return {
        "model": "embedded",
        "fingerprint": bench.backbone.fingerprint[:16],
        "resolution": "128x192",
        "latents": bench.latents,
        "devices": 1,
        "schedule": VARIANTS[variant].schedule,
        "variant": variant,
        "captions": captions,
        "seed": bench.seed,
        "layout": "single",
        "attention": bench.backbone.attention,
        "precision": str(bench.backbone.dtype).removeprefix("torch."),
    }


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 4 for part in parts):
        raise ValueError(f"latents={text!r} is no list of lengths of 4 or more; use latents=81,141,261")
    return [int(part) for part in parts]


def _chosen(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variants={','.join(unknown)} are unknown; use some of: {', '.join(VARIANTS)}")
    return sorted(set(names), key=lambda name: (VARIANTS[name].schedule, list(VARIANTS).index(name)))
