"""``bench quality``: render held-out captions with several schedules, the same seeds for all, and compare them.

Captions are batched: one rollout renders several, each with its own seed. Frames are measured where they are decoded,
before any coding. The scenes that the captions name are measured too, as they are drawn: what a perfect model gives.
"""

import argparse
import datetime
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.events import AnchorBlockReady, Event
from ..engine.lanes import DevicePlan
from ..engine.rollout import render
from ..metrics.batched import BatchedProbe, Measured
from ..metrics.numbers import METRICS, numbers
from ..model.loading import EMBEDDED_SIZE, load_embedded
from ..model.roles import Backbone
from ..model.vae import StreamingDecoder
from ..scenes import HELD_OUT, Scene, SceneWords, parse_caption, sample_scene
from ..specs import TEMPORAL_FACTOR, RolloutSpec, VideoShape
from ..train.synthetic import render_scene
from .bench_rows import Row, commit, machine, read_rows
from .quality_looks import SHOWN, Look, keep_looks
from .quality_report import comparison, mean_and_ci95, one_run, quality_rows, write_report

log = logging.getLogger(__name__)

TRAINED = 4096  # scenes below this one may have been trained on: their captions are left out
DECODED = 8  # latent frames at a time
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to make the videos."""

    schedule: str | None
    """None draws the scenes themselves."""
    paste: bool = False
    """Whether the planned anchors replace what was rendered at their places, which the method never does."""


VARIANTS: Mapping[str, Variant] = {
    "drawn": Variant(schedule=None),
    "flashforward": Variant(schedule="flashforward"),
    "pasted_anchors": Variant(schedule="flashforward", paste=True),
    "no_anchors": Variant(schedule="flashforward_no_anchors"),
    "self_forcing": Variant(schedule="self_forcing"),
    "clean_history": Variant(schedule="clean_history_anchors"),
    "hiar": Variant(schedule="hiar"),
}
"""In the order in which they run: those of one schedule share a rollout, so they are neighbours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--captions", type=int, default=32, metavar="N", help="held-out captions (32)")
    parser.add_argument("--latents", default="81,141,261", help="lengths in latent frames (81,141,261)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"some of: {', '.join(VARIANTS)} (all)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="captions rendered at once (32)")
    parser.add_argument("--seed", type=int, default=0, help="the first caption's seed; the next ones count up (0)")
    parser.add_argument("--device", default="auto", help="auto (the first CUDA device, or the CPU), cpu, cuda:0 (auto)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the transformer (fp32)")
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="another copy of the embedded model's files")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add rows to this file; what it has is not made again"
    )
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="keep frames and curves of each length")
    parser.add_argument(
        "--commit", default="", metavar="TEXT", help="what rows say was measured, where there is no git"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write tables and plots, such as docs/quality.md")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with another model's rows in this file")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="report these rows; render nothing")


def run(args: argparse.Namespace) -> int:
    """Render and measure, or read rows; then write what was asked for."""
    # Read first: a file that can't be compared is found before hours of rendering, and --json may add to the same file.
    before = None if args.against is None else quality_rows(args.against)
    if before is not None and args.source is None:
        _check_comparable(args, before)
    rows = quality_rows(args.source) if args.source is not None else bench(args)
    if args.report is not None:
        write_report(rows, args.report, looks=args.frames)
    if before is not None:
        sources = (str(args.against), str(args.source or args.json or "measured now"))
        print("\n".join(comparison(before, rows, sources=sources)))
        return 0
    for row in rows if args.report is None and args.json is None else ():
        config = row["config"]
        print(
            f"{config['variant']:>16} {config['latents']:>4} {row['metric']:<16} {row['value']:.4f} ±{row['ci95']:.4f}"
        )
    return 0


def _check_comparable(args: argparse.Namespace, before: Sequence[Row]) -> None:
    """Raise ``ValueError`` if what is going to be measured could not be compared with ``before``."""
    precision = str(PRECISIONS[args.precision]).removeprefix("torch.")
    asked = {"captions": args.captions, "seed": args.seed, "precision": precision}
    there = one_run(before)
    for name, value in asked.items():
        if there[name] != value:
            raise ValueError(f"against={args.against} has {name}={there[name]}, not {value}; measure both alike")


def bench(args: argparse.Namespace) -> list[Row]:
    """Return the rows of every variant and length, filing those of each schedule as soon as they are there."""
    lengths = _lengths(args.latents)
    variants = _chosen(args.variants)
    for name, least in (("captions", 2), ("batch", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}={getattr(args, name)} is below {least}; use {name}={least} or more")
    rows = [] if args.json is None else read_rows(args.json)
    device = DevicePlan(devices=(args.device,)).resolve()[0]
    backbone = load_embedded(args.assets, device=device, dtype=PRECISIONS[args.precision])
    scenes = held_out_scenes(args.captions)
    wanted = []
    for latents in lengths:
        bench = Bench(
            backbone=backbone, device=device, latents=latents, seed=args.seed, batch=args.batch, commit=args.commit
        )
        for _, group in groupby(variants, key=lambda name: VARIANTS[name].schedule):
            names = list(group)
            configs = {name: bench.config(name, captions=len(scenes)) for name in names}
            wanted += list(configs.values())
            if all(any(row["config"] == config for row in rows) for config in configs.values()):
                continue
            began = time.perf_counter()
            found = bench.measure(scenes, names)
            print(f"{', '.join(names)}: {latents} latents in {time.perf_counter() - began:.1f} s", flush=True)
            rows = [row for row in rows if row["config"] not in configs.values()]  # of a part of the group
            rows += [row for name in names for row in bench.rows(found[name], configs[name])]
            _write_rows(rows, args.json)
            if args.frames is not None:
                keep_looks({name: each.look for name, each in found.items()}, args.frames, latents=latents)
    return [row for row in rows if row["config"] in wanted]


def _write_rows(rows: Sequence[Row], path: Path | None) -> None:
    """Replace the file's rows at once, so that a stopped run leaves a whole file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def held_out_scenes(count: int) -> list[Scene]:
    """Return ``count`` scenes of different captions that no training scene has."""
    trained = {sample_scene(seed).caption for seed in range(TRAINED)}
    found: dict[str, Scene] = {}
    seed = HELD_OUT
    while len(found) < count:
        scene = sample_scene(seed)
        if scene.caption not in trained:
            found.setdefault(scene.caption, scene)
        seed += 1
    return list(found.values())


def held_out_captions(count: int) -> list[str]:
    """Return ``count`` different captions that no training scene has."""
    return [scene.caption for scene in held_out_scenes(count)]


def _words(scene: Scene) -> SceneWords:
    words = parse_caption(scene.caption)
    assert words is not None, "a scene's own caption"
    return words


@dataclass(slots=True, kw_only=True)
class Found:
    """What one variant gave at one length."""

    measured: list[Measured] = field(default_factory=list)
    """Of each caption, in order."""
    shown: np.ndarray | None = None
    """Frames of the first caption's video, from first to last [8, H, W, 3]."""

    @property
    def look(self) -> Look:
        assert self.shown is not None
        return Look.of(self.measured, shown=self.shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Renders and measures videos of one length."""

    backbone: Backbone
    device: str
    latents: int
    seed: int
    batch: int
    commit: str = ""

    def measure(self, scenes: Sequence[Scene], variants: Sequence[str]) -> dict[str, Found]:
        """Measure every scene under ``variants`` of one schedule; scene i has the seed ``seed + i`` in each of them."""
        found = {name: Found() for name in variants}
        for start in range(0, len(scenes), self.batch):
            batch = scenes[start : start + self.batch]
            schedule = VARIANTS[variants[0]].schedule
            if schedule is None:
                for name in variants:
                    self._measure_drawn(batch, found[name])
                continue
            text = self.backbone.text_encoder.encode([scene.caption for scene in batch])
            latents, anchors = self.rollout(text, schedule, seed=self.seed + start)
            for name in variants:
                self._measure_decoded(paste(latents, anchors) if VARIANTS[name].paste else latents, batch, found[name])
        return found

    def rollout(self, text: Tensor, schedule: str, *, seed: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the latents [B, C, F, h, w] and the anchors by their latent frame."""
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

    def _measure_decoded(self, latents: Tensor, scenes: Sequence[Scene], found: Found) -> None:
        began = time.perf_counter()
        probe = BatchedProbe([_words(scene) for scene in scenes], device=self.device)
        decoder, state, seen = StreamingDecoder(self.backbone.vae), None, _Shown(self._frames)
        for part in torch.split(latents, DECODED, dim=2):
            frames, state = decoder.decode_in_place(part, state)
            probe(frames)
            seen(frames[0])
        found.measured += probe.report()
        if found.shown is None:
            found.shown = seen.frames
        log.info("decoded and measured %d videos: %.1f s", len(scenes), time.perf_counter() - began)

    def _measure_drawn(self, scenes: Sequence[Scene], found: Found) -> None:
        for scene in scenes:
            video = render_scene(scene, self._frames, device=self.device)[0]
            frames = ((video + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0)
            probe = BatchedProbe([_words(scene)], device=self.device)
            for part in torch.split(frames.unsqueeze(0), TEMPORAL_FACTOR * DECODED, dim=1):
                probe(part)
            found.measured += probe.report()
            if found.shown is None:
                seen = _Shown(self._frames)
                seen(frames)
                found.shown = seen.frames

    @property
    def _frames(self) -> int:
        return TEMPORAL_FACTOR * (self.latents - 1) + 1

    def config(self, variant: str, *, captions: int) -> dict[str, Any]:
        """Return what a row of ``variant`` says of how it was made."""
        return {
            "model": "embedded",
            "fingerprint": self.backbone.fingerprint[:16],
            "resolution": "128x192",
            "latents": self.latents,
            "devices": 1,
            "schedule": VARIANTS[variant].schedule,
            "variant": variant,
            "captions": captions,
            "seed": self.seed,
            "layout": "single",
            "attention": self.backbone.attention,
            "precision": str(self.backbone.dtype).removeprefix("torch."),
        }

    def rows(self, found: Found, config: Mapping[str, Any]) -> list[Row]:
        """Return a row per metric that at least two of the videos have."""
        by_video = [numbers(measured.evaluation) for measured in found.measured]
        rows = []
        for metric, unit in METRICS.items():
            values = [each[metric] for each in by_video if metric in each]
            if len(values) < 2:
                continue
            mean, ci95 = mean_and_ci95(values)
            rows.append(
                {
                    "metric": metric,
                    "value": mean,
                    "unit": unit,
                    "ci95": ci95,
                    "values": [round(value, 6) for value in values],
                    "config": dict(config),
                    "machine": machine(self.device),
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "commit": self.commit or commit(),
                }
            )
        return rows


class _Shown:
    """Picks frames, evenly from first to last, out of a video that comes in parts."""

    def __init__(self, total: int) -> None:
        self._wanted = [round(place) for place in np.linspace(0, total - 1, SHOWN)]
        self._seen = 0
        self._kept: list[np.ndarray] = []

    def __call__(self, frames_FHWC: Tensor) -> None:
        last = self._seen + len(frames_FHWC)
        self._kept += [frames_FHWC[n - self._seen].cpu().numpy() for n in self._wanted if self._seen <= n < last]
        self._seen = last

    @property
    def frames(self) -> np.ndarray:
        return np.stack(self._kept)


def paste(latents: Tensor, anchors: Mapping[int, Tensor]) -> Tensor:
    """Return ``latents`` [B, C, F, h, w] with the anchors [B, C, h, w] in their places."""
    pasted = latents.clone()
    for frame, anchor in anchors.items():
        pasted[:, :, frame] = anchor
    return pasted


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
    return [name for name in VARIANTS if name in names]
