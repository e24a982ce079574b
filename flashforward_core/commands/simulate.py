"""``simulate``: predict a rollout from its specs alone, with the standard library."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..engine.cost import CostKey, CostModel, fitted_devices, load_cost, slot_frames
from ..engine.events import Timeline
from ..engine.memory import backbone_sizes, predict_memory
from ..engine.pairing import pairable
from ..engine.placement import DECODES, LAYOUTS, ORDERS, Placement, lanes_for, place
from ..engine.simulate import simulate
from ..graph.anchors import RULES
from ..graph.halves import in_halves
from ..graph.schedules import SCHEDULES, build_graph, spec_for
from ..graph.task import Slot, TaskGraph
from ..model.config import EMBEDDED, MODELS, WanConfig
from ..specs import MAX_DEVICES, AnchorPlan, RolloutSpec, VideoShape
from .policy_options import add_policy_arguments, history_of, policy_of
from .simulate_queue import forecast
from .simulate_queue import rows as queue_rows

RESOLUTIONS = {"480p": (832, 480), "720p": (1280, 720), "128x192": (192, 128)}
"""Name -> (width, height); the last is the embedded model's, named height first as in the benchmarks."""
PRECISIONS = ("fp32", "bf16", "fp8")
SIZES_SHOWN = "480p, 720p, 192x128 (the embedded model's) or another WIDTHxHEIGHT"
NO_COSTS = "no fitted costs; measure them with `bench latency --fit`"
GIB = 2**30
BF16 = 2  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--latent-frames", type=int, default=81, metavar="N", help="length in latent frames (81)")
    length.add_argument("--seconds", type=float, metavar="S", help="length in seconds at --fps instead")
    parser.add_argument("--fps", type=float, default=16.0, help="video frames per second (16)")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of lanes (1)")
    parser.add_argument("--schedule", default="flashforward", help=f"one of: {', '.join(SCHEDULES)} (flashforward)")
    parser.add_argument("--layout", default="interleaved", help=f"one of: auto, {', '.join(LAYOUTS)} (interleaved)")
    parser.add_argument("--order", default="latency", help=f"one of: {', '.join(ORDERS)} (latency)")
    parser.add_argument("--decode", default="auto", help=f"as render's, one of: {', '.join(DECODES)} (auto)")
    parser.add_argument(
        "--batch-diagonal", action="store_true", help="as render's: forwards that are ready on one device, two by two"
    )
    parser.add_argument("--model", default="1.3B", help=f"one of: {', '.join(MODELS)} (1.3B)")
    parser.add_argument("--resolution", help=f"{SIZES_SHOWN} in pixels")
    parser.add_argument("--chunk-frames", type=int, default=3, metavar="N", help="latent frames of a chunk (3)")
    add_policy_arguments(parser)
    parser.add_argument(
        "--anchor-stride", type=int, default=10, metavar="N", help="latent frames from anchor to anchor (10)"
    )
    parser.add_argument("--anchor-rule", default="nearest", help=f"one of: {', '.join(RULES)} (nearest)")
    parser.add_argument(
        "--precision", default="bf16", help=f"precision of the fitted costs to use: {', '.join(PRECISIONS)} (bf16)"
    )
    parser.add_argument("--device-name", help="device of the fitted costs to use, if several have been measured")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="fitted costs (costs.json in the cache folder)")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="also: N such videos, where each next one's planner fills the gaps"
    )
    parser.add_argument(
        "--in-flight", type=int, metavar="N", help="videos under way at a time (as many as devices, at least 2)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or Perfetto")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def size_of(resolution: str) -> tuple[int, int]:
    """Return (width, height) in pixels of a named size or of ``WIDTHxHEIGHT``."""
    if resolution in RESOLUTIONS:
        return RESOLUTIONS[resolution]
    width, _, height = resolution.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise ValueError(f"resolution={resolution!r} is no size; use {SIZES_SHOWN}")
    return int(width), int(height)


def _config(args: argparse.Namespace) -> WanConfig:
    if args.model not in MODELS:
        raise ValueError(f"model={args.model!r} is unknown; use one of: {', '.join(MODELS)}")
    return MODELS[args.model]


def _resolution(args: argparse.Namespace, config: WanConfig) -> str:
    """Return the name, in fitted costs, of the asked or usual resolution; the embedded model has only one."""
    if config is not EMBEDDED:
        return str(args.resolution or "480p")
    if args.resolution and size_of(args.resolution) != RESOLUTIONS["128x192"]:
        raise ValueError(f"resolution={args.resolution!r} does not fit model='embedded'; use 192x128, its only size")
    return "128x192"


def _spec(args: argparse.Namespace, resolution: str) -> RolloutSpec:
    width, height = size_of(resolution)
    if args.seconds is None:
        shape = VideoShape(width=width, height=height, latent_frames=args.latent_frames, fps=args.fps)
    else:
        shape = VideoShape.from_seconds(args.seconds, width=width, height=height, fps=args.fps)
    plan = AnchorPlan(stride=args.anchor_stride, rule=args.anchor_rule)
    spec = RolloutSpec(
        shape=shape,
        schedule=args.schedule,
        chunk_frames=args.chunk_frames,
        anchors=plan,
        history=history_of(args),
        kv_policy=policy_of(args),
    )
    return spec_for(spec)


def costs_path(args: argparse.Namespace) -> Path:
    """Return the file of fitted costs that a call means."""
    return Path(args.costs or args.cache_folder / "costs.json")


def _costs_elsewhere(args: argparse.Namespace, resolution: str) -> str:
    """Say which other work of this model, and of the device if one is named, has fitted costs; empty if none has."""
    found: list[str] = []
    sizes = dict.fromkeys((resolution, "x".join(map(str, size_of(resolution))), *RESOLUTIONS))
    for size, precision in product(sizes, PRECISIONS):
        devices = fitted_devices(costs_path(args), model=args.model, resolution=size, precision=precision)
        if args.device_name in devices or (devices and args.device_name is None):
            changed = [] if size == resolution else [f"--resolution {size}"]
            changed += [] if precision == args.precision else [f"--precision {precision}"]
            found.append(" ".join(changed))
    if not found:
        return ""
    return f"costs exist only with {' or '.join(found)}; add that, or measure with `bench latency --fit`"


def _check_trace(path: Path) -> None:
    """Raise ``ValueError`` for a path that no trace can be written to."""
    if path.is_dir():
        raise ValueError(f"trace={str(path)!r} is a folder; name a file, such as {str(path / 'trace.json')!r}")
    if not path.parent.is_dir():
        raise ValueError(f"trace={str(path)!r} is in a folder that does not exist; make {str(path.parent)!r} first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"trace={str(path)!r} is in a folder that you may not write to; use another folder")


def _cost(args: argparse.Namespace, resolution: str) -> CostModel | None:
    """Return the fitted costs for this work, or None; several devices' fits raise ``ValueError``."""
    if args.precision not in PRECISIONS:
        raise ValueError(f"precision={args.precision!r} is unknown; use one of: {', '.join(PRECISIONS)}")
    if args.costs and not args.costs.is_file():
        raise ValueError(
            f"costs={str(args.costs)!r} is no file; measure with `bench latency --fit`, or leave --costs out"
        )
    path, device = costs_path(args), args.device_name
    devices = fitted_devices(path, model=args.model, resolution=resolution, precision=args.precision)
    if device is not None and device not in devices:
        known = ", ".join(devices) or "none"
        other = _costs_elsewhere(args, resolution)
        raise ValueError(
            f"device_name={device!r} has no fitted costs for this work (these have: {known}); {other or 'leave it out'}"
        )
    if device is None:
        if len(devices) > 1:
            raise ValueError(f"device_name is not given, but {path} has several: {', '.join(devices)}; choose one")
        if not devices:
            return None
        device = devices[0]
    key = CostKey(device=device, model=args.model, resolution=resolution, precision=args.precision)
    return load_cost(path, key=key)


def predict(
    spec: RolloutSpec,
    *,
    config: WanConfig,
    devices: int,
    layout: str,
    order: str,
    cost: CostModel | None,
    decode: str = "auto",
    batch_diagonal: bool = False,
) -> tuple[TaskGraph, Placement, Timeline]:
    """Build, place and simulate one rollout; KV is counted in bf16."""
    graph = in_halves(build_graph(spec)) if decode == "split" else build_graph(spec)
    frame_bytes = config.kv_bytes_per_frame(spec.shape.tokens_per_frame)

    def slot_bytes(slot: Slot) -> int:
        return slot_frames(slot, spec) * frame_bytes

    lanes, alike = lanes_for([""] * devices), pairable(spec) if batch_diagonal else None
    placement = place(graph, lanes=lanes, layout=layout, order=order, decode=decode, pairable=alike)
    if cost is None:
        return graph, placement, simulate(graph, placement=placement, slot_bytes=slot_bytes)
    seconds = cost.of(spec)
    timeline = simulate(graph, placement=placement, seconds=seconds, slot_bytes=slot_bytes, pair_ratio=cost.pair_ratio)
    return graph, placement, timeline


def _check(args: argparse.Namespace) -> None:
    if args.devices < 1:
        raise ValueError(f"devices={args.devices} is below 1; use devices=1")
    if args.devices > MAX_DEVICES:
        raise ValueError(f"devices={args.devices} is above {MAX_DEVICES}; use devices={MAX_DEVICES} or fewer")
    if args.trace:
        _check_trace(args.trace)


def run(args: argparse.Namespace) -> int:
    """Print the prediction."""
    config = _config(args)
    resolution = _resolution(args, config)
    _check(args)
    spec = _spec(args, resolution)
    for told in spec.advice:
        print(told, file=sys.stderr)
    cost = _cost(args, resolution)
    elsewhere = "" if cost is not None else _costs_elsewhere(args, resolution)
    if elsewhere and args.json:
        print(f"predicted_s is unknown: {elsewhere}", file=sys.stderr)
    graph, placement, timeline = predict(
        spec,
        config=config,
        devices=args.devices,
        layout=args.layout,
        order=args.order,
        cost=cost,
        decode=args.decode,
        batch_diagonal=args.batch_diagonal,
    )
    assert timeline.rounds is not None
    names = [f"cuda:{n}" for n in range(args.devices)]
    memory = predict_memory(
        graph,
        spec=spec,
        placement=replace(placement, lanes=lanes_for(names)),
        sizes=backbone_sizes(config, element_bytes=BF16),
    )
    report = {
        "schedule": args.schedule,
        "layout": placement.layout,
        "rounds": round(timeline.rounds),
        "forwards": graph.counts(),
        "predicted_s": timeline.predicted_s,
        "peak_kv_bytes": list(timeline.peak_kv_bytes),
        "memory": [asdict(one) | {"peak_bytes": one.peak_bytes} for one in memory],
    }
    if args.prompts is not None:
        report["queue"] = forecast(
            spec, prompts=args.prompts, devices=args.devices, in_flight=args.in_flight, cost=cost
        )
    if args.trace:
        args.trace.write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")
    if args.json:
        print(json.dumps(report))
    else:
        print(table(report, model=args.model, shape=spec.shape, missing=elsewhere or NO_COSTS))
    return 0


def table(report: dict[str, Any], *, model: str, shape: VideoShape, missing: str = NO_COSTS) -> str:
    """Return the report as lines for people; ``missing`` says why there are no seconds, where there are none."""
    forwards = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in report["forwards"].items() if name != "total"
    )
    predicted = report["predicted_s"]
    seconds = f"unknown: {missing}" if predicted is None else f"{predicted:.2f}"
    peaks = "  ".join(f"{size / GIB:.3f}" for size in report["peak_kv_bytes"])
    rows = [
        ("model", model),
        ("resolution", f"{shape.width}x{shape.height}"),
        ("length", f"{shape.seconds:.2f} s ({shape.latent_frames} latent frames, {shape.fps:g} fps)"),
        ("schedule", report["schedule"]),
        ("layout", report["layout"]),
        ("rounds", str(report["rounds"])),
        ("forwards", f"{report['forwards']['total']} ({forwards})"),
        ("predicted seconds", seconds),
        ("peak KV per lane, GiB", peaks),
        ("memory per device, GiB", _memory(report["memory"])),
        *(queue_rows(report["queue"]) if "queue" in report else ()),
    ]
    return "\n".join(f"{name:<22}  {value}" for name, value in rows)


def _memory(devices: Sequence[Mapping[str, Any]]) -> str:
    """Say what each device holds at most, and what the fullest one's is made of."""
    fullest = max(devices, key=lambda one: one["peak_bytes"])
    parts = ", ".join(f"{part} {fullest[f'{part}_bytes'] / GIB:.1f}" for part in ("weights", "kv", "workspace"))
    return "  ".join(f"{one['peak_bytes'] / GIB:.1f}" for one in devices) + f"  ({parts.replace('kv', 'KV')})"
