"""``bench memory``: the peak of a rollout on one device beside its prediction, for models of full size.

With a cap, nothing above it can be allocated: what then runs, fits. Weights are random; memory does not depend on them.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from ..engine.budget import fit_run
from ..engine.executor import TaskFailed
from ..engine.forward import CHOICES, FastOptions
from ..engine.lanes import DevicePlan
from ..engine.memory import GIB, KV_CHOICES, OFFLOAD_CHOICES, DoesNotFit, MemoryOptions, size
from ..engine.placement import ORDERS, Placement, lanes_for, place
from ..engine.rollout import render
from ..graph.schedules import SCHEDULES, build_graph, spec_for
from ..model.attention import resolve_attention
from ..model.config import EMBEDDED, MODELS
from ..model.roles import Backbone
from ..specs import RolloutSpec, VideoShape
from .bench_models import PRECISIONS, bench_backbone, bench_texts
from .bench_rows import RowBook, commit, machine
from .simulate import RESOLUTIONS, size_of

CAP_MARGIN = 0.05  # of a cap: what the allocator loses between its blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--models", nargs="+", default=["1.3B"], help=f"some of: {', '.join(MODELS)} (1.3B)")
    parser.add_argument("--resolutions", nargs="+", default=["480p"], help="480p, 720p or WIDTHxHEIGHT (480p)")
    parser.add_argument(
        "--schedules", nargs="+", default=list(SCHEDULES), help=f"some of: {', '.join(SCHEDULES)} (all)"
    )
    parser.add_argument(
        "--latents", type=int, nargs="+", default=[3], metavar="N", help="lengths in latent frames (3: one chunk)"
    )
    parser.add_argument("--orders", nargs="+", default=["latency"], help=f"some of: {', '.join(ORDERS)} (latency)")
    parser.add_argument("--kv", nargs="+", default=["auto"], help=f"some of: {', '.join(KV_CHOICES)} (auto)")
    parser.add_argument("--offload", default="off", help=f"one of: {', '.join(OFFLOAD_CHOICES)} (off)")
    parser.add_argument("--cap-gib", type=float, default=0.0, metavar="GIB", help="let no more be allocated (no cap)")
    parser.add_argument("--decode", action="store_true", help="decode on the way, with a random autoencoder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:0 (auto)")
    parser.add_argument("--precision", default="bf16", help=f"one of: {', '.join(PRECISIONS)} (bf16)")
    parser.add_argument("--attention", default="auto", help="a kernel of `bench latency` (auto)")
    parser.add_argument("--compile", default="off", help=f"one of: {', '.join(CHOICES)} (off: what is predicted)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    parser.add_argument("--commit", default="", help="what rows say was measured, where there is no git")


def run(args: argparse.Namespace) -> int:
    """Measure every combination; one that does not fit is reported, and the others still run."""
    for name, known in (("models", MODELS), ("orders", ORDERS), ("kv", KV_CHOICES)):
        if unknown := [value for value in getattr(args, name) if value not in known]:
            raise ValueError(f"{name}={unknown[0]!r} is unknown; use some of: {', '.join(known)}")
    if args.precision not in PRECISIONS:
        raise ValueError(f"precision={args.precision!r} is unknown; use one of: {', '.join(PRECISIONS)}")
    device = torch.device(DevicePlan(devices=(args.device,)).resolve()[0])
    if args.cap_gib and device.type != "cuda":
        raise ValueError(f"cap_gib={args.cap_gib:g} needs a CUDA device; leave it out on {device}")
    failed = 0
    for model in args.models:
        backbone = _weights(args, model, device)
        resolutions = ["128x192"] if MODELS[model] is EMBEDDED else args.resolutions
        for resolution, schedule, latents, order, kv in product(
            resolutions, args.schedules, args.latents, args.orders, args.kv
        ):
            case = Case(resolution=resolution, schedule=schedule, latents=latents, order=order, kv=kv)
            failed += not _reported(args, case, backbone, device=device, model=model)
        del backbone
        _collect()
    return int(failed > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One rollout to measure."""

    resolution: str
    schedule: str
    latents: int
    order: str
    kv: str

    def spec(self) -> RolloutSpec:
        width, height = RESOLUTIONS.get(self.resolution) or size_of(self.resolution)
        shape = VideoShape(width=width, height=height, latent_frames=self.latents)
        return spec_for(RolloutSpec(shape=shape, schedule=self.schedule))


def _weights(args: argparse.Namespace, model: str, device: torch.device) -> Backbone:
    """Return random weights: made on the device, where that is quick, then moved if blocks come from the host."""
    began = time.perf_counter()
    decoder = "wan" if args.decode else None
    made = bench_backbone(model, device=device, precision=args.precision, attention=args.attention, decoder=decoder)
    if args.offload == "on":
        for part in (*set(made.models.values()), *([] if made.vae is None else [made.vae])):
            part.to("cpu")
        _collect()
    print(f"weights of {model} made in {time.perf_counter() - began:.1f} s", flush=True)
    return made


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reported(args: argparse.Namespace, case: Case, backbone: Backbone, *, device: torch.device, model: str) -> bool:
    """Measure one case and file it; return whether it ran."""
    attention = resolve_attention(args.attention, device, dtype=backbone.dtype).name
    common = {"model": model, "resolution": case.resolution, "precision": args.precision, "attention": attention}
    common |= {"compile": args.compile, "graphs": "off", "latents": case.latents, "schedule": case.schedule}
    common |= {"order": case.order, "kv": case.kv, "offload": args.offload, "decode": args.decode}
    common |= {"cap_gib": args.cap_gib, "devices": 1}
    book = RowBook(path=args.json, machine=machine(device), common=common, commit=args.commit or commit())
    try:
        with capped(device, gib=args.cap_gib):
            _measure(args, case, backbone, device=device, book=book)
    except (DoesNotFit, TaskFailed, RuntimeError) as error:
        print(f"FAILED {model} {case}: {type(error).__name__}: {error}", flush=True)
        return False
    finally:
        _collect()
    return True


@contextmanager
def capped(device: torch.device, *, gib: float) -> Iterator[None]:
    """Let this process allocate no more than so many GiB on a CUDA device; 0 for no cap."""
    if not gib:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _measure(args: argparse.Namespace, case: Case, backbone: Backbone, *, device: torch.device, book: RowBook) -> None:
    spec = case.spec()
    budget = args.cap_gib * (1 - CAP_MARGIN)
    memory = MemoryOptions(kv=case.kv, offload=args.offload, budget_gib=budget)
    fast = FastOptions(compile=args.compile, graphs="off")
    devices = DevicePlan(devices=(str(device),), layout="single", order=case.order, fast=fast, memory=memory)
    graph = build_graph(spec, decode=args.decode)

    def placed(order: str) -> Placement:
        return place(graph, lanes=lanes_for([str(device)]), layout="single", order=order)

    fit = fit_run(backbone, graph, spec=spec, batch=1, devices=devices, placed=placed)
    (predicted,) = fit.predicted
    print(f"predicted {size(predicted.peak_bytes)}: {predicted.parts()}", flush=True)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    result = render(backbone, spec, bench_texts(backbone), devices=devices, decode=args.decode)
    seconds = time.perf_counter() - began
    kv = result.timeline.peak_kv_bytes[0]
    told = {"device": str(device), "seconds": seconds, "resident_blocks": fit.resident.get(str(device), -1)}
    told |= {"weights_bytes": predicted.weights_bytes, "kv_bytes": predicted.kv_bytes}
    book.add("peak_kv_bytes", kv, "bytes", **told)
    if cuda:
        peak = torch.cuda.max_memory_allocated(device)
        told |= {"predicted_bytes": predicted.peak_bytes, "error": abs(peak - predicted.peak_bytes) / peak}
        told |= {"reserved_bytes": torch.cuda.max_memory_reserved(device)}
        book.add("peak_bytes", peak, "bytes", **told)
