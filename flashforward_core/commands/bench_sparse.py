"""``bench sparse``: a chunk's time and memory over an unbounded cache: dense, TempCache, AnnSA, AnnCA and all three.

One transformer block is measured and multiplied by their number, since a dense cache of 3,000 video frames has 201 GiB
at 1.3B and 480p; up to ``--whole`` frames a whole forward is measured too, to see what that leaves out. A chunk is its
stages and a commit: the first stage is dense everywhere, later ones in the blocks that the options say. As in rollouts
a sparse forward finds the buckets of its queries and of its own keys; those of cached pages are there, and a policy's
state is grouped once, when it is compacted. Weights and tokens are random; buckets have the density that was measured
on the embedded model's caches (``bench policies``), and so has what TempCache holds, up to its budget.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.lanes import DevicePlan
from ..graph.task import Role
from ..kv.bucket_attention import BUCKET_ATTENTION, resolve_bucket_attention
from ..kv.groups import bucket_tables, group_codes, group_page
from ..kv.policies import COMPACTORS, BlockState, Compaction, OwnKV
from ..kv.sparse import attend_prompt, kept_rows
from ..kv.tokens import Grid, Tokens
from ..kv_policy import SparseOptions, TempCacheOptions
from ..model.attention import resolve_attention
from ..model.biased_attention import resolve_biased_attention
from ..model.config import MODELS, PATCH
from ..model.layers import Segment, rotation
from ..specs import SPATIAL_FACTOR, TEMPORAL_FACTOR
from .bench_kernels import wait
from .bench_models import random_transformer
from .bench_rows import RowBook, machine, read_rows

SIZES = {"128x192": (192, 128), "480p": (832, 480), "720p": (1280, 720)}
CACHED = TempCacheOptions(budget_frames=18)  # as in all recorded rows
WINDOW_FRAMES = 18  # latent frames of history in the bounded window that the others are compared with
CHUNK_FRAMES = 3
STAGES = 4
CALLS = 3
GIB = 2**30
NAMES = ("dense", "temp_cache", "ann_sa", "ann_ca", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="1.3B", help="whose shapes (1.3B)")
    parser.add_argument("--resolution", choices=SIZES, default="480p", help="of the video (480p)")
    parser.add_argument("--frames", default="250,1000,3000", help="video frames that are cached (250,1000,3000)")
    parser.add_argument("--whole", type=int, default=1000, metavar="N", help="frames up to which all blocks run (1000)")
    parser.add_argument("--densities", type=Path, metavar="FILE", help="rows of bench policies")
    parser.add_argument("--device", default="auto", help="auto (the first CUDA device, or the CPU), cpu, cuda:0 (auto)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of weights and tokens (bf16)")
    parser.add_argument(
        "--sparse-attention", default="auto", metavar="NAME", help=f"one of: auto, {', '.join(BUCKET_ATTENTION)} (auto)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument(
        "--commit", default="", metavar="TEXT", help="what rows say was measured, where there is no git"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Densities:
    """What is left of pairs, of a prompt's rows and of cached tokens."""

    ann_sa: float = 0.2
    ann_ca: float = 0.9
    temp_cache: float = 0.3
    source: str = "assumed"

    @classmethod
    def of(cls, path: Path | None) -> "Densities":
        """Read the longest cache's from rows of ``bench policies``; without a file they are assumed, and so filed."""
        if path is None:
            return cls()
        rows = [row for row in read_rows(path) if row["metric"] == "density"]
        found: dict[str, float] = {}
        for row in sorted(rows, key=lambda row: row["config"].get("frames", 0)):
            found[row["config"]["what"]] = row["value"]
        missing = {"ann_sa", "ann_ca", "temp_cache"} - set(found)
        if missing:
            raise ValueError(f"{path} has no density of {', '.join(sorted(missing))}; run bench policies first")
        return cls(**found, source="measured on embedded caches")


def run(args: argparse.Namespace) -> int:
    """Measure, print and keep rows."""
    try:
        lengths = [int(text) for text in args.frames.split(",")]
    except ValueError as error:
        raise ValueError(f"frames={args.frames!r} are no numbers; use video frames, such as 250,1000") from error
    device = torch.device(DevicePlan(devices=(args.device,)).resolve()[0])
    densities = Densities.of(args.densities)
    common = {"model": args.model, "resolution": args.resolution, "devices": 1, "precision": args.precision}
    common |= {"chunk_frames": CHUNK_FRAMES, "stages": STAGES, "densities": densities.source}
    bench = Bench(args=args, device=device, densities=densities)
    common |= {"attention": bench.attention.name, "sparse_attention": bench.kernel.name}
    book = RowBook(path=args.json, machine=machine(device), common=common)
    book.commit = args.commit or book.commit
    with torch.inference_mode():
        for history in [WINDOW_FRAMES, *(-(-(frames - 1) // TEMPORAL_FACTOR) + 1 for frames in lengths)]:
            bench.measure(history, book=book)
        for frames in lengths:
            if frames <= args.whole:
                bench.measure_whole(-(-(frames - 1) // TEMPORAL_FACTOR) + 1, book=book)
    return int(bool(bench.failed))


@dataclass(kw_only=True)
class Bench:
    """One transformer block and random caches."""

    args: argparse.Namespace
    device: torch.device
    densities: Densities
    sparse: SparseOptions = field(default_factory=SparseOptions)
    failed: list[str] = field(default_factory=list)
    """Settings that could not be measured."""

    def __post_init__(self) -> None:
        self.config = MODELS[self.args.model]
        self.dtype = torch.bfloat16 if self.args.precision == "bf16" else torch.float32
        self.attention = resolve_attention("auto", self.device, dtype=self.dtype)
        self.biased = resolve_biased_attention("auto", self.device, dtype=self.dtype).attend
        self.sparse = replace(self.sparse, attention=self.args.sparse_attention)
        self.kernel = resolve_bucket_attention(self.sparse, self.device, dtype=self.dtype)
        width, height = SIZES[self.args.resolution]
        step = SPATIAL_FACTOR * PATCH[1]
        self.grid = Grid(config=self.config, rows=height // step, columns=width // step)
        self.own = CHUNK_FRAMES * self.grid.frame_tokens

    @cached_property
    def block(self) -> Any:
        """A model of one block."""
        return random_transformer(replace(self.config, num_layers=1), device=self.device, dtype=self.dtype)

    def measure(self, history: int, *, book: RowBook) -> None:
        """File a chunk's time and memory for each setting, with ``history`` latent frames cached."""
        rest = self._seconds(self._rest())
        config = {"history": history, "video_frames": TEMPORAL_FACTOR * (history - 1) + 1, "blocks": "one, multiplied"}
        window = history == WINDOW_FRAMES
        dense_s = 0.0
        for name in NAMES:
            try:
                chunk_s, peak = self._chunk(name, history, rest=rest)
            except RuntimeError as error:  # out of memory, or a kernel that this device has not: go on with the others
                reason = str(error).strip().partition("\n")[0]
                print(f"FAILED {name}, {history} latent frames: {type(error).__name__}: {reason}", flush=True)
                self.failed.append(name)
                continue
            dense_s = chunk_s if name == "dense" else dense_s
            book.add("chunk_ms", 1000 * chunk_s, "ms", policy=name, bounded=window, **config)
            if dense_s:
                book.add("speedup", dense_s / chunk_s, "1", policy=name, bounded=window, **config)
            book.add("peak_bytes", peak, "B", policy=name, bounded=window, **config)

    def _chunk(self, name: str, history: int, *, rest: float) -> tuple[float, int]:
        """Return a chunk's seconds, and the memory of all blocks' caches with one block at work."""
        self._reset_peak()
        kept = self._kept_tokens(history) if name in ("temp_cache", "all") else history * self.grid.frame_tokens
        q, k, v = (self._tokens(count) for count in (self.own, kept + self.own, kept + self.own))
        bias = self._bias(kept) if name in ("temp_cache", "all") else None
        dense = partial(self.attention.attend, q, k, v) if bias is None else partial(self.biased, q, k, v, bias)
        dense_s = self._seconds(dense)
        sparse_s, once_s, groups_bytes = dense_s, 0.0, 0
        if name in ("ann_sa", "all"):
            pages = [kept, self.own] if name == "all" else self._page_sizes(history)
            sparse_s, groups_bytes = self._bucketed(q, k, v, bias, pages)
        if name in ("temp_cache", "all"):
            once_s = self._compaction(q, k, v, kept, grouped=name == "all")
        cross_s, sparse_cross_s = self._cross(q, sparse=name in ("ann_ca", "all"))
        places = [(stage, block) for stage in range(STAGES + 1) for block in range(self.config.num_layers)]
        layers = {"num_stages": STAGES, "num_blocks": self.config.num_layers}
        sparse = sum(self.sparse.is_sparse(stage=min(s, STAGES - 1), block=b, **layers) for s, b in places)
        blocks = (len(places) - sparse) * (dense_s + cross_s) + sparse * (sparse_s + sparse_cross_s)
        once = once_s * self.config.num_layers
        others = (self.config.num_layers - 1) * (k.nbytes + v.nbytes + self.sparse.sparse_share * groups_bytes)
        peak = self._peak() + round(others) if self._peak() else 0
        return blocks + len(places) * rest + once, peak

    def _kept_tokens(self, history: int) -> int:
        """Return what TempCache holds of a history: what does not merge, up to its budget."""
        budget = min(history, CACHED.budget_frames)
        return min(int(self.densities.temp_cache * history * self.grid.frame_tokens), budget * self.grid.frame_tokens)

    def _page_sizes(self, history: int) -> list[int]:
        """Return the tokens of every page of a history, and of the own one."""
        whole, rest = divmod(history, CHUNK_FRAMES)
        return [*[self.own] * whole, *[rest * self.grid.frame_tokens] * (rest > 0), self.own]

    def _bucketed(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, pages: list[int]) -> tuple[float, int]:
        """Return seconds of a forward's AnnSA over pages of so many tokens, and the bytes of their groups.

        Buckets of the queries and of the own page are found, and then replaced by such as have the measured density.
        """
        buckets = 2**self.sparse.planes
        share = _largest_share(self.densities.ann_sa, buckets)
        q_codes, k_codes = (self._codes(x, share, buckets).unsqueeze(0) for x in (q, k))
        groups = [group_codes(codes, num_buckets=buckets) for codes in k_codes.split(pages, dim=2)]
        own = k[:, -self.own :]
        finding = self._seconds(lambda: (bucket_tables(q, options=self.sparse), group_page(own, options=self.sparse)))
        attend = self._seconds(partial(self.kernel.attend, q, q_codes, k, v, groups, bias))
        return attend + finding, sum(page.num_bytes for page in groups)

    def _codes(self, x_BNHD: Tensor, share: float, buckets: int) -> Tensor:
        weights = torch.full((buckets,), (1 - share) / (buckets - 1), device=self.device)
        weights[0] = share
        shape = x_BNHD.shape[:3]
        edges, draw = weights.cumsum(0)[:-1].contiguous(), torch.rand(shape, device=self.device)
        return torch.bucketize(draw, edges)

    def _compaction(self, q: Tensor, k: Tensor, v: Tensor, kept: int, *, grouped: bool) -> float:
        """Return seconds of adding a chunk to a block's TempCache, and of grouping what is kept."""
        shape = (1, kept, self.config.num_heads)
        places = torch.arange(kept, device=self.device).view(1, -1, 1).expand(shape).contiguous()
        count = torch.ones(shape, device=self.device)
        state = BlockState(tokens=Tokens(k_BNHD=k[:, :kept], v_BNHD=v[:, :kept], count_BNH=count, place_BNH=places))
        first = -(-kept // self.grid.frame_tokens)
        frames = torch.arange(first, first + CHUNK_FRAMES, device=self.device)
        at = Compaction(frames=frames, next_frame=first + CHUNK_FRAMES, chunk_frames=CHUNK_FRAMES, grid=self.grid)
        own = OwnKV(q_BLHD=q, k_BLHD=k[:, kept:].contiguous(), v_BLHD=v[:, kept:].contiguous())
        compact = COMPACTORS["temp_cache"]
        if grouped:
            return self._seconds(lambda: compact(state, own, at, CACHED).grouped(self.sparse))
        return self._seconds(lambda: compact(state, own, at, CACHED))

    def _cross(self, q: Tensor, *, sparse: bool) -> tuple[float, float]:
        """Return seconds of cross-attention in a dense and in a sparse block."""
        rows = self.config.text_len
        k, v = self._tokens(rows), self._tokens(rows)
        dense = self._seconds(partial(self.attention.attend, q, k, v))
        if not sparse:
            return dense, dense
        kept_BNH = torch.rand(1, rows, self.config.num_heads, device=self.device) < self.densities.ann_ca
        bias = torch.zeros(1, 1, rows, device=self.device)
        codes = group_page(k, options=self.sparse).codes_ABNH.to(torch.int64)  # once per prompt
        finding = self._seconds(partial(kept_rows, q, codes, keep_last=True, options=self.sparse))
        call = partial(attend_prompt, q, k, v, kept_BNH=kept_BNH, bias_BHN=bias, attend=self.biased, kernel=self.kernel)
        return dense, finding + self._seconds(call)

    def _rest(self) -> Callable[[], object]:
        """Return a call of one block without its attentions."""
        frames = torch.arange(CHUNK_FRAMES, device=self.device)
        wide = torch.promote_types(self.dtype, torch.float32)
        turn = rotation(self.config, frames=frames, rows=self.grid.rows, columns=self.grid.columns, dtype=wide)
        x = torch.randn(1, self.own, self.config.dim, device=self.device, dtype=self.dtype)
        times = torch.randn(1, CHUNK_FRAMES, 6, self.config.dim, device=self.device, dtype=self.dtype)
        pair = (self._tokens(1), self._tokens(1))
        segments = (Segment(Role.RENDERER, 0, CHUNK_FRAMES),)

        def passes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q

        return lambda: self.block.blocks[0](x, times, turn, (pair,), segments, passes, passes, None)

    def measure_whole(self, history: int, *, book: RowBook) -> None:
        """File a dense chunk's time and memory with all blocks and all of their cache."""
        self._reset_peak()
        model = random_transformer(self.config, device=self.device, dtype=self.dtype)
        tokens = (history + CHUNK_FRAMES) * self.grid.frame_tokens
        cache = [(self._tokens(tokens), self._tokens(tokens)) for _ in range(self.config.num_layers)]
        view = _Cache(cache)
        rows, columns = self.grid.rows * PATCH[1], self.grid.columns * PATCH[2]
        x = torch.randn(1, self.config.channels, CHUNK_FRAMES, rows, columns, device=self.device)
        text = torch.randn(1, self.config.text_len, self.config.text_dim, device=self.device, dtype=self.dtype)
        call = partial(
            model,
            x,
            timestep_BF=torch.full((1, CHUNK_FRAMES), 500.0, device=self.device),
            text=model.text_context(text, Role.RENDERER),
            frames=torch.arange(history, history + CHUNK_FRAMES, device=self.device),
            role=Role.RENDERER,
            kv=view,
            self_attend=self.attention.attend,
            cross_attend=self.attention.attend,
        )
        seconds = (STAGES + 1) * self._seconds(call)
        config = {"history": history, "video_frames": TEMPORAL_FACTOR * (history - 1) + 1, "blocks": "all"}
        book.add("chunk_ms", 1000 * seconds, "ms", policy="dense", bounded=False, **config)
        book.add("peak_bytes", self._peak(), "B", policy="dense", bounded=False, **config)

    def _tokens(self, count: int) -> Tensor:
        size = (1, count, self.config.num_heads, self.config.head_dim)
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def _bias(self, kept: int) -> Tensor:
        """Return log m of kept tokens, 0 for a chunk's own: each stands for as many as keep the measured share."""
        bias = torch.zeros(1, self.config.num_heads, kept + self.own, device=self.device)
        bias[..., :kept] = -torch.tensor(self.densities.temp_cache).log()
        return bias

    def _seconds(self, call: Callable[[], object]) -> float:
        call()
        wait(self.device)
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait(self.device)
        return (time.perf_counter() - began) / CALLS

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


@dataclass(slots=True)
class _Cache:
    """An unbounded cache whose last places are the forward's own: keys are written in place, as in a bank."""

    pairs: list[tuple[Tensor, Tensor]]

    def extend(self, block: int, k_BNHD: Tensor, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        for stored, own in zip(self.pairs[block], (k_BNHD, v_BNHD), strict=True):
            stored[:, -own.shape[1] :] = own
        return self.pairs[block]


def _largest_share(density: float, buckets: int) -> float:
    """Return the share of one bucket, the others being alike, for which random pairs meet so often.

    a² + (1 - a)² / (n - 1) = density; even buckets give 1/n, and nothing less can be.
    """
    n = buckets
    if density <= 1 / n:
        return 1 / n
    root = ((n - 1) * (n * density - 1)) ** 0.5
    return (1 + root) / n
