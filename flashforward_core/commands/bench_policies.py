"""``bench policies``: what KV policies cost in likeness to the full cache, and whether what they rest on holds.

The embedded model renders held-out captions with schedule ``self_forcing``: once reading the whole history, then under
each policy and budget, from the same noise. Frames are compared before any coding, on the device that decodes them. A
run that only looks measures how steady queries are before and after rotary positions, and how often approximate
matching finds the key that brute force finds. Another feeds every policy the full cache's keys and compares what
attention reads from what it kept, and the last tries the choices within policies, by latents alone.
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
from ..engine.rollout import render
from ..flow import keyed_noise_frames, renoise, timestep
from ..graph.task import Role
from ..kv.ann import AnnOptions, recall
from ..kv.groups import group_page
from ..kv.padding import merge_padding
from ..kv.policies import COMPACTORS, NAMES, BlockState, Compaction, OwnKV
from ..kv.queries import query_statistics
from ..kv.sparse import density, kept_rows
from ..kv.temp_cache import absorb_frames, squeeze
from ..kv.tokens import Tokens, join, unrotate, whole_frames
from ..kv_policy import SparseOptions, TempCacheOptions, WindowOptions
from ..model.biased_attention import attend_biased
from ..model.loading import EMBEDDED_SIZE, load_embedded
from ..model.roles import Backbone
from ..model.vae import StreamingDecoder, VaeState
from ..specs import History, RolloutSpec, VideoShape
from .bench_quality import held_out_captions
from .bench_rows import RowBook, machine
from .likeness import Consistency, psnr, ssim
from .policy_checks import COUNTED, PARTS, check
from .policy_choices import FIFO, choices, followed, latent_errors, policies
from .policy_errors import FollowOptions

Z_95 = 1.96  # standard errors on each side of a mean that hold it 95 times in 100
QUERIES = 64  # of a chunk, that are matched by brute force too
BITS: Mapping[str, Sequence[int]] = {"quantised": (2, 4, 6, 8), "signs": (32, 64, 128, 256)}
DECODED = 3  # latent frames that are decoded at a time
LATE = 0.75  # share of a video after which its frames count as late


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions(WindowOptions):
    """Keep everything, and note what the policies rest on."""

    recalls: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    stationarity: list[float] = field(default_factory=list)
    cosines: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """(``before`` or ``after`` rotary positions, distance in latent frames) -> cosine of a token's queries, a block at
    a time."""
    first: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Per block: the latent frame that is compared with, and its queries before and after."""
    merged: dict[int, Tokens] = field(default_factory=dict)
    """What an unbounded TempCache would hold, by block."""
    densities: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """(``ann_sa`` or ``temp_cache``, latent frames seen) -> share of pairs or of tokens that is left."""


NAMES[LookOptions] = "look"


@COMPACTORS.add("look")
def _look(state: BlockState | None, own: OwnKV, at: Compaction, options: LookOptions) -> BlockState:
    fresh = whole_frames(own.k_BLHD, own.v_BLHD, frames=at.frames, grid=at.grid)
    plain = unrotate(own.q_BLHD, fresh.place_BNH, grid=at.grid)
    if state is None or state.statistics is None:
        size = at.grid.frame_tokens
        options.first.append((at.next_frame - 1, plain[:, -size:], own.q_BLHD[:, -size:]))
        return BlockState(tokens=fresh, statistics=query_statistics(plain, grid=at.grid))
    statistics = state.statistics.update(plain, grid=at.grid)
    _note_densities(state.tokens, own, at, options)
    _note_cosines(plain, own, at, options)
    options.stationarity.append(statistics.stationarity_BTH.mean().item())
    keys = unrotate(state.tokens.k_BNHD, state.tokens.place_BNH, grid=at.grid)
    sample = plain[:, :: max(1, plain.shape[1] // QUERIES)]
    for method, widths in BITS.items():
        for bits in widths:
            found = recall(sample, keys, options=AnnOptions(method=method, bits=bits))
            options.recalls.setdefault((method, bits), []).append(found)
    return BlockState(tokens=join(state.tokens, fresh), statistics=statistics)


def _note_cosines(plain_BLHD: Tensor, own: OwnKV, at: Compaction, options: LookOptions) -> None:
    """Compare a chunk's last frame with the last frame of the first chunk, token by token; blocks come in turn."""
    block = len(options.stationarity) % len(options.first)
    frame, plain, turned = options.first[block]
    size = at.grid.frame_tokens
    for when, ours, theirs in (("before", plain_BLHD, plain), ("after", own.q_BLHD, turned)):
        found = torch.nn.functional.cosine_similarity(ours[:, -size:].float(), theirs.float(), dim=-1)
        options.cosines.setdefault((when, at.next_frame - 1 - frame), []).append(found.mean().item())


def _note_densities(cached: Tokens, own: OwnKV, at: Compaction, options: LookOptions) -> None:
    """Count what AnnSA would compute and TempCache would hold, at one of ``COUNTED`` chunks."""
    block, seen = len(options.stationarity) % len(options.first), at.next_frame - len(at.frames)
    if block not in options.merged:  # the first chunk, of which ``cached`` is the whole
        options.merged[block] = cached
    temp = TempCacheOptions(budget_frames=options.budget_frames)
    merged = absorb_frames(
        options.merged[block], own.q_BLHD, own.k_BLHD, own.v_BLHD, frames=at.frames, grid=at.grid, options=temp
    )
    options.merged[block] = squeeze(merged)
    if at.next_frame // at.chunk_frames % COUNTED == 0:
        kept = (options.merged[block].count_BNH > 0).double().sum(dim=1).mean().item()
        share = kept / (at.next_frame * at.grid.frame_tokens)
        options.densities.setdefault(("temp_cache", at.next_frame), []).append(share)
        sample = own.q_BLHD[:, :: max(1, own.q_BLHD.shape[1] // QUERIES)]
        sparse = SparseOptions()
        pages = cached.k_BNHD.split(at.chunk_frames * at.grid.frame_tokens, dim=1)
        found = density(sample, [group_page(page, options=sparse) for page in pages], options=sparse)
        options.densities.setdefault(("ann_sa", seen), []).append(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--captions", type=int, default=32, metavar="N", help="held-out captions (32)")
    parser.add_argument("--latents", type=int, default=81, metavar="N", help="length in latent frames (81)")
    parser.add_argument("--budgets", default="9,12,18", help="latent frames that a policy keeps (9,12,18)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is measured ({','.join(PARTS)})")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="captions rendered at once (32)")
    parser.add_argument("--seed", type=int, default=0, help="the first caption's seed; the next ones count up (0)")
    parser.add_argument("--device", default="auto", help="auto (the first CUDA device, or the CPU), cpu, cuda:0 (auto)")
    parser.add_argument("--assets", type=Path, metavar="FOLDER", help="another copy of the embedded model's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument(
        "--commit", default="", metavar="TEXT", help="what rows say was measured, where there is no git"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and keep rows."""
    budgets, parts = _budgets(args.budgets), args.parts.split(",")
    for name, least in (("captions", 2), ("batch", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}={getattr(args, name)} is below {least}; use {name}={least} or more")
    width, height = EMBEDDED_SIZE
    shape = VideoShape(width=width, height=height, latent_frames=args.latents)
    whole = RolloutSpec(shape=shape, schedule="self_forcing", anchors=None, history=History(chunks=args.latents))
    check(parts, budgets=budgets, whole=whole)
    device = DevicePlan(devices=(args.device,)).resolve()[0]
    backbone = load_embedded(args.assets, device=device)
    common = {"model": "embedded", "resolution": "128x192", "latents": args.latents, "devices": 1}
    common |= {"schedule": "self_forcing", "fingerprint": backbone.fingerprint[:16], "seed": args.seed}
    book = RowBook(path=args.json, machine=machine(device), common=common)
    book.commit = args.commit or book.commit
    bench = Bench(backbone=backbone, device=device, captions=held_out_captions(args.captions), args=args)
    if "look" in parts:
        bench.look(replace(whole, kv_policy=LookOptions(budget_frames=args.latents + 1, sink_frames=0)), book=book)
    if "compare" in parts:
        bench.compare(whole, budgets=budgets, book=book)
    if "follow" in parts:
        bench.follow(whole, budgets=budgets, book=book)
    if "choices" in parts:
        bench.choose(whole, budgets=budgets, book=book)
    return 0


def _budgets(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"budgets={text!r} are no numbers; use latent frames, such as 9,12,18") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Renders the captions, a batch at a time; caption i has the seed ``seed + i`` under every policy."""

    backbone: Backbone
    device: str
    captions: Sequence[str]
    args: argparse.Namespace

    def look(self, spec: RolloutSpec, *, book: RowBook) -> None:
        """Render the first batch under a policy that only looks; file what it saw."""
        latents, _ = next(self._latents(spec))
        book.add("density", self._prompt_share(latents, spec), "1", what="ann_ca")
        look = spec.kv_policy
        assert isinstance(look, LookOptions)
        for (method, bits), found in look.recalls.items():
            book.add("recall", mean(found), "1", ann=method, bits=bits)
        book.add("stationarity", mean(look.stationarity), "1")
        for (what, frames), shares in look.densities.items():
            book.add("density", mean(shares), "1", what=what, frames=frames)
        for (when, frames), cosines in look.cosines.items():
            book.add("query_cosine", mean(cosines), "1", rotary=when, frames=frames)

    def _prompt_share(self, latents_BCFHW: Tensor, spec: RolloutSpec) -> float:
        """Return the share of a prompt's rows that AnnCA keeps for the second chunk, over sparse stages and blocks."""
        model, options = self.backbone.models[Role.RENDERER], SparseOptions()
        frames = list(spec.chunk(1))
        clean = latents_BCFHW[:, :, frames].to(self.device)
        noise = keyed_noise_frames(range(len(clean)), "render", frames, 0, tuple(clean.shape[i] for i in (1, 3, 4)))
        text = self.backbone.text_encoder.encode(list(self.captions[: len(clean)])).to(self.device)
        merged = merge_padding(model.text_context(text, Role.RENDERER), text)
        shares: list[float] = []

        def attend(q_BLHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
            codes = group_page(k_BNHD, options=options).codes_ABNH.to(torch.int64)
            kept = kept_rows(q_BLHD, codes, keep_last=merged.padded, options=options)
            shares.append(kept.double().mean().item())
            return attend_biased(q_BLHD, k_BNHD, v_BNHD, merged.bias_N.view(1, 1, -1))

        sparse: list[float] = []
        for stage, sigma in enumerate(spec.stages.sigmas[:-1]):
            shares.clear()
            x = renoise(clean, noise.to(clean), sigma=sigma)
            times = torch.full((len(clean), len(frames)), timestep(sigma), device=self.device)
            with torch.inference_mode():
                model(
                    x,
                    timestep_BF=times,
                    text=merged.text,
                    frames=torch.tensor(frames, device=self.device),
                    role=Role.RENDERER,
                    cross_attend=attend,
                )
            place = {"stage": stage, "num_stages": spec.stages.num_stages, "num_blocks": len(shares)}
            sparse += [share for n, share in enumerate(shares) if options.is_sparse(block=n, **place)]
        return mean(sparse)

    def follow(self, spec: RolloutSpec, *, budgets: Sequence[int], book: RowBook) -> None:
        """File what each policy's cache does to attention in the first batch, while the rollout reads the whole."""
        for budget in budgets:
            look = FollowOptions(budget_frames=budget, sink_frames=0, policies=followed(budget))
            next(self._latents(replace(spec, kv_policy=look)))
            for name, errors in look.errors.items():
                config = {"policy": name, "budget": budget}
                book.add("attention_error", mean(errors), "1", **config)
                book.add("kept", mean(look.kept[name]), "1", **config)
            if budget == budgets[0]:
                for age, shares in look.shares.items():
                    book.add("attention_share", mean(shares), "1", age=age)

    def choose(self, whole: RolloutSpec, *, budgets: Sequence[int], book: RowBook) -> None:
        """File how far each choice's latents are from those of ``whole``.

        In the first chunk that reads a thinned cache, where nothing but the cache differs yet, and in the last quarter.
        """
        truth = [latents for latents, _ in self._latents(whole)]
        for budget in budgets:
            first = budget // whole.chunk_frames + 1
            late = slice(int(LATE * whole.shape.latent_frames), None)
            parts = {"first_error": whole.chunk(first), "late_error": late}
            for name, policy in choices(budget).items():
                made = [latents for latents, _ in self._latents(replace(whole, kv_policy=policy))]
                for metric, part in parts.items():
                    frames = part if isinstance(part, slice) else slice(part.start, part.stop)
                    pairs = zip(made, truth, strict=True)
                    values = torch.cat([latent_errors(ours, theirs, frames) for ours, theirs in pairs]).tolist()
                    config = {"choice": name, "budget": budget, "captions": len(values)}
                    book.add(metric, mean(values), "1", ci95=half_width(values), values=values, **config)

    def compare(self, whole: RolloutSpec, *, budgets: Sequence[int], book: RowBook) -> None:
        """File every policy's likeness to ``whole``, what it gains over first in, first out, and its time per chunk."""
        frames: list[Tensor] = []
        full = Scores()
        seconds = 0.0
        for latents, took in self._latents(whole):
            frames.append(torch.cat(list(self._decoded(latents)), dim=1))
            full.add(frames[-1], frames[-1])
            seconds += took
        self._file("full", 0, full, seconds=seconds, whole=whole, book=book)
        for budget in budgets:
            fifo: Scores | None = None
            for name, policy in policies(budget).items():
                scores, seconds = self._scores(replace(whole, kv_policy=policy), frames)
                self._file(name, budget, scores, seconds=seconds, whole=whole, book=book, fifo=fifo)
                fifo = scores if name == FIFO else fifo

    def _scores(self, spec: RolloutSpec, expected: Sequence[Tensor]) -> tuple["Scores", float]:
        scores, seconds = Scores(), 0.0
        for reference, (latents, took) in zip(expected, self._latents(spec), strict=True):
            scores.add_parts(self._decoded(latents), reference)
            seconds += took
        return scores, seconds

    def _file(
        self,
        name: str,
        budget: int,
        scores: "Scores",
        *,
        seconds: float,
        whole: RolloutSpec,
        book: RowBook,
        fifo: "Scores | None" = None,
    ) -> None:
        config = {"policy": name, "budget": budget, "captions": len(self.captions)}
        for metric, unit in UNITS.items():
            values = scores.values[metric]
            if name != "full" or metric == "consistency":
                book.add(metric, mean(values), unit, ci95=half_width(values), **config)
            if fifo is not None:
                gains = [ours - theirs for ours, theirs in zip(values, fifo.values[metric], strict=True)]
                book.add(f"{metric}_gain", mean(gains), unit, ci95=half_width(gains), over=FIFO, **config)
        batches = math.ceil(len(self.captions) / self.args.batch)
        book.add("chunk_ms", 1000 * seconds / batches / whole.num_chunks, "ms", batch=self.args.batch, **config)

    def _latents(self, spec: RolloutSpec) -> Iterator[tuple[Tensor, float]]:
        """Yield the latents [B, C, F, h, w] of each batch of captions, and the seconds that they took."""
        for start in range(0, len(self.captions), self.args.batch):
            text = self.backbone.text_encoder.encode(list(self.captions[start : start + self.args.batch]))
            began = time.perf_counter()
            seeded = replace(spec, seed=self.args.seed + start)
            made = render(self.backbone, seeded, [text], devices=DevicePlan(devices=(self.device,)))
            yield made.latents_BCFHW, time.perf_counter() - began

    def _decoded(self, latents_BCFHW: Tensor) -> Iterator[Tensor]:
        """Yield uint8 frames [B, F, H, W, 3] of a whole batch on its device, a few at a time."""
        decoder = StreamingDecoder(self.backbone.vae)
        state: VaeState | None = None
        with torch.inference_mode():
            for part in latents_BCFHW.split(DECODED, dim=2):
                frames, state = decoder.decode_in_place(part.to(self.device), state)
                yield frames


UNITS = {"psnr": "dB", "psnr_late": "dB", "ssim": "1", "consistency": "1"}


@dataclass(slots=True)
class Scores:
    """One number per video and metric."""

    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in UNITS})

    def add(self, frames: Tensor, reference: Tensor) -> None:
        """Measure a batch of whole videos."""
        self.add_parts(frames.split(4 * DECODED, dim=1), reference)

    def add_parts(self, parts: Sequence[Tensor] | Iterator[Tensor], reference: Tensor) -> None:
        """Measure a batch of videos that come in parts, against whole ones, all uint8 [B, F, H, W, 3]."""
        noise, structure, consistency = [], [], Consistency()
        start = 0
        for part in parts:
            truth = reference[:, start : start + part.shape[1]]
            noise.append(psnr(part, truth))
            structure.append(ssim(part, truth))
            consistency.add(part)
            start += part.shape[1]
        assert start == reference.shape[1], f"{start} frames are compared with {reference.shape[1]}"
        decibels = torch.cat(noise, dim=1)
        self.values["psnr"] += decibels.mean(dim=1).tolist()
        self.values["psnr_late"] += decibels[:, int(LATE * start) :].mean(dim=1).tolist()
        self.values["ssim"] += torch.cat(structure, dim=1).mean(dim=1).tolist()
        self.values["consistency"] += consistency.per_video().tolist()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % confidence interval; None for a single value."""
    if len(values) < 2:
        return None
    centre = mean(values)
    variance = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return Z_95 * math.sqrt(variance / len(values))
