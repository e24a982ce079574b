"""``bench policies``: what KV policies cost in likeness to the full cache, and whether what they rest on holds.

The embedded model renders held-out captions with schedule ``self_forcing``: once reading the whole history, then under
each policy and budget, from the same noise. Frames are compared before any coding. A run that only looks measures how
steady queries are before rotary positions, and how often approximate matching finds the key that brute force finds.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ..engine.lanes import DevicePlan
from ..engine.rollout import render, stream_decode
from ..kv.ann import AnnOptions, recall
from ..kv.policies import COMPACTORS, NAMES, BlockState, Compaction, OwnKV
from ..kv.queries import query_statistics
from ..kv.tokens import join, unrotate, whole_frames
from ..kv_policy import FutureForcingOptions, KVPolicy, TempCacheOptions, WindowOptions
from ..metrics import psnr
from ..model.loading import EMBEDDED_SIZE, load_embedded
from ..model.roles import Backbone
from ..specs import History, RolloutSpec, VideoShape
from .bench_quality import held_out_captions
from .bench_rows import RowBook, machine

Z_95 = 1.96  # standard errors on each side of a mean that hold it 95 times in 100
QUERIES = 64  # of a chunk, that are matched by brute force too
BITS: Mapping[str, Sequence[int]] = {"quantised": (2, 4, 6, 8), "signs": (32, 64, 128, 256)}


def policies(budget: int) -> dict[str, KVPolicy]:
    """Return what is compared at a budget of latent frames."""
    return {
        "window": WindowOptions(budget_frames=budget),
        "history_only": FutureForcingOptions(budget_frames=budget, future_weight=0.0),
        "future_forcing": FutureForcingOptions(budget_frames=budget),
        "temp_cache": TempCacheOptions(budget_frames=budget),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions(WindowOptions):
    """Keep everything, and note what the policies rest on."""

    recalls: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    stationarity: list[float] = field(default_factory=list)


NAMES[LookOptions] = "look"


@COMPACTORS.add("look")
def _look(state: BlockState | None, own: OwnKV, at: Compaction, options: LookOptions) -> BlockState:
    fresh = whole_frames(own.k_BLHD, own.v_BLHD, frames=at.frames, grid=at.grid)
    plain = unrotate(own.q_BLHD, fresh.place_BNH, grid=at.grid)
    if state is None or state.statistics is None:
        return BlockState(tokens=fresh, statistics=query_statistics(plain, grid=at.grid))
    statistics = state.statistics.update(plain, grid=at.grid)
    options.stationarity.append(statistics.stationarity_BTH.mean().item())
    keys = unrotate(state.tokens.k_BNHD, state.tokens.place_BNH, grid=at.grid)
    sample = plain[:, :: max(1, plain.shape[1] // QUERIES)]
    for method, widths in BITS.items():
        for bits in widths:
            found = recall(sample, keys, options=AnnOptions(method=method, bits=bits))
            options.recalls.setdefault((method, bits), []).append(found)
    return BlockState(tokens=join(state.tokens, fresh), statistics=statistics)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--captions", type=int, default=32, metavar="N", help="held-out captions (32)")
    parser.add_argument("--latents", type=int, default=81, metavar="N", help="length in latent frames (81)")
    parser.add_argument("--budgets", default="9,12,18", help="latent frames that a policy keeps (9,12,18)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="captions rendered at once (8)")
    parser.add_argument("--seed", type=int, default=0, help="the first caption's seed; the next ones count up (0)")
    parser.add_argument("--device", default="auto", help="auto (the first CUDA device, or the CPU), cpu, cuda:0 (auto)")
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="another copy of the embedded model's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")


def run(args: argparse.Namespace) -> int:
    """Measure, print and keep rows."""
    device = DevicePlan(devices=(args.device,)).resolve()[0]
    backbone = load_embedded(args.assets, device=device)
    width, height = EMBEDDED_SIZE
    shape = VideoShape(width=width, height=height, latent_frames=args.latents)
    whole = RolloutSpec(shape=shape, schedule="self_forcing", anchors=None, history=History(chunks=args.latents))
    common = {"model": "embedded", "resolution": "128x192", "latents": args.latents, "devices": 1}
    book = RowBook(path=args.json, machine=machine(device), common={**common, "schedule": "self_forcing"})
    bench = Bench(backbone=backbone, device=device, captions=held_out_captions(args.captions), args=args)
    look = LookOptions(budget_frames=args.latents + 1, sink_frames=0)
    bench.look(replace(whole, kv_policy=look))
    for (method, bits), found in look.recalls.items():
        book.add("recall", sum(found) / len(found), "1", ann=method, bits=bits)
    book.add("stationarity", sum(look.stationarity) / len(look.stationarity), "1")
    bench.compare(whole, budgets=[int(text) for text in args.budgets.split(",")], book=book)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Renders the captions, a batch at a time; caption i has the seed ``seed + i`` under every policy."""

    backbone: Backbone
    device: str
    captions: Sequence[str]
    args: argparse.Namespace

    def look(self, spec: RolloutSpec) -> None:
        """Render the first batch under a policy that only looks."""
        next(self._latents(spec))

    def compare(self, whole: RolloutSpec, *, budgets: Sequence[int], book: RowBook) -> None:
        """File every policy's likeness to ``whole``, and its time per chunk."""
        expected = [self._frames(latents) for latents, _ in self._latents(whole)]
        for budget in budgets:
            for name, policy in policies(budget).items():
                values: list[float] = []
                seconds = 0.0
                for truth, (latents, took) in zip(
                    expected, self._latents(replace(whole, kv_policy=policy)), strict=True
                ):
                    values += [likeness(a, b) for a, b in zip(self._frames(latents), truth, strict=True)]
                    seconds += took
                config = {"policy": name, "budget": budget, "captions": len(values)}
                book.add("psnr", mean(values), "dB", ci95=half_width(values), **config)
                book.add("chunk_ms", 1000 * seconds / len(expected) / whole.num_chunks, "ms", **config)

    def _latents(self, spec: RolloutSpec) -> Iterator[tuple[Tensor, float]]:
        """Yield the latents [B, C, F, h, w] of each batch of captions, and the seconds that they took."""
        for start in range(0, len(self.captions), self.args.batch):
            text = self.backbone.text_encoder.encode(list(self.captions[start : start + self.args.batch]))
            began = time.perf_counter()
            seeded = replace(spec, seed=self.args.seed + start)
            made = render(self.backbone, seeded, [text], devices=DevicePlan(devices=(self.device,)))
            yield made.latents_BCFHW, time.perf_counter() - began

    def _frames(self, latents_BCFHW: Tensor) -> list[Tensor]:
        """Decode each video of a batch to uint8 [F, H, W, 3]."""
        return [torch.cat(list(stream_decode(self.backbone, video[None]))) for video in latents_BCFHW]


def likeness(frames: Tensor, reference: Tensor) -> float:
    """Return the mean PSNR of a video's frames in dB; equal frames count as 100."""
    return float(psnr(frames.numpy(), reference.numpy()).clip(max=100.0).mean())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % confidence interval; None for a single value."""
    if len(values) < 2:
        return None
    centre = mean(values)
    variance = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return Z_95 * math.sqrt(variance / len(values))
