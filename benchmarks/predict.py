"""Predicts rollouts of every schedule and length on devices that are not there, from costs that were fitted on one.

python benchmarks/predict.py --costs benchmarks/results/2026-12-01-costs-h200.json --attention cudnn \\
    --latents 21 81 141 261 --jobs 81 --devices 4 5 --device-gib 139 --out benchmarks/results/2026-12-01-predicted.json
Rows of rollouts are as ``bench latency --predict`` files them, for every bf16 fit in the file; FlashForward's jobs are
predicted up to the last frame, since encoding goes on beside them, where the fit has what decoding takes.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.commands.bench_engine import bench_spec, write_traces
from flashforward_core.commands.bench_latency import add_prediction, trace_name
from flashforward_core.commands.bench_rows import RowBook
from flashforward_core.engine.cost import CostKey, CostModel, load_costs
from flashforward_core.engine.memory import GIB, backbone_sizes, predict_memory
from flashforward_core.engine.placement import LANES_APART, lanes_for, place
from flashforward_core.engine.simulate import simulate
from flashforward_core.graph.halves import in_halves
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import TaskGraph
from flashforward_core.model.config import MODELS
from flashforward_core.specs import MAX_DEVICES, RolloutSpec

SCHEDULES = ("flashforward", "hiar", "self_forcing", "last_stage")
LAYOUTS = ("interleaved", "prelude", "streaming")
"""Those of the first schedule; the others have no planner to place."""
DECODES = ("auto", "own", "any", "split")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="what bench latency --fit kept")
    parser.add_argument("--attention", required=True, help="the kernel that the costs were measured with")
    parser.add_argument("--latents", type=int, nargs="+", required=True, metavar="N", help="lengths in latent frames")
    parser.add_argument("--devices", type=int, nargs="+", required=True, metavar="N", help="numbers of devices")
    parser.add_argument("--out", type=Path, required=True, help="a new file for the rows")
    parser.add_argument("--jobs", type=int, nargs="*", default=[], metavar="N", help="lengths to predict jobs for too")
    parser.add_argument("--device-gib", type=float, required=True, metavar="N", help="memory of a device")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="write simulated timelines")
    args = parser.parse_args(argv)
    try:
        return _predict(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _predict(args: argparse.Namespace) -> int:
    least = max(LANES_APART.values()) + 1 if args.jobs else 2
    if few := [count for count in args.devices if not least <= count <= MAX_DEVICES]:
        raise ValueError(f"devices={few[0]} is outside {least} to {MAX_DEVICES}; use devices=4")
    if args.out.exists():
        raise ValueError(f"out={str(args.out)!r} is there already; delete it, or name another file")
    fits = {key: cost for key, cost in load_costs(args.costs).items() if key.precision == "bf16"}
    if not fits:
        raise ValueError(f"costs={str(args.costs)!r} has no bf16 fit; measure with `bench latency --fit` first")
    for key, cost in fits.items():
        common = {"model": key.model, "resolution": key.resolution, "precision": key.precision}
        common |= {"compile": "auto", "graphs": "auto", "attention": args.attention}
        book = RowBook(path=args.out, machine=key.device, common=common)
        for latents, schedule, devices in product(args.latents, SCHEDULES, args.devices):
            spec = bench_spec(schedule, latents=latents, resolution=key.resolution)
            for layout in LAYOUTS if schedule == SCHEDULES[0] else LAYOUTS[:1]:
                if not fits_into(args, build_graph(spec, decode=False), spec, key=key, lanes=devices, layout=layout):
                    continue
                placement, predicted = add_prediction(book, spec, cost=cost, lanes=devices, layout=layout)
                if args.traces:
                    write_traces(args.traces, trace_name(common, spec, placement), predicted=predicted)
            if schedule == SCHEDULES[0] and cost.decode_frame_s and latents in args.jobs:
                for decode in DECODES:
                    graph = build_graph(spec, decode=True)
                    graph = in_halves(graph) if decode == "split" else graph
                    if fits_into(args, graph, spec, key=key, lanes=devices, decode=decode):
                        add_job(book, graph, spec, cost=cost, lanes=devices, decode=decode)
    return 0


def fits_into(
    args: argparse.Namespace, graph: TaskGraph, spec: RolloutSpec, *, key: CostKey, lanes: int, **options: str
) -> bool:
    """Return whether every device can hold what it has to in bf16; say so if one cannot."""
    placement = place(graph, lanes=lanes_for(f"cuda:{n}" for n in range(lanes)), **options)
    sizes = backbone_sizes(MODELS[key.model], element_bytes=2)
    found = predict_memory(graph, spec=spec, placement=placement, sizes=sizes)
    needed = max(one.peak_bytes for one in found) / GIB
    if needed > args.device_gib:
        how = " ".join(f"{name}={value}" for name, value in options.items())
        run = f"{spec.shape.latent_frames} latents of {key.model} at {key.resolution}, {spec.schedule} {how} on {lanes}"
        print(f"left out: {run} would need {needed:.0f} GiB on a device")
    return needed <= args.device_gib


def add_job(book: RowBook, graph: TaskGraph, spec: RolloutSpec, *, cost: CostModel, lanes: int, decode: str) -> None:
    """File how long a job would take on so many devices."""
    placement = place(graph, lanes=lanes_for([""] * lanes), decode=decode)
    spans = simulate(graph, placement=placement, seconds=cost.of(spec)).spans
    decoding = [span for span in spans if span.task.startswith("decode/")]
    denoiser, total = max(span.end_s for span in spans if span not in decoding), max(span.end_s for span in spans)
    config = {"latents": spec.shape.latent_frames, "devices": lanes, "schedule": spec.schedule, "decode": decode}
    config |= {"encoder": "none", "decoder": "wan", "order": "latency", "source": "predicted"}
    found = {"denoiser_s": denoiser, "decoding_s": sum(span.end_s - span.start_s for span in decoding)}
    book.add("job_s", total, "s", **config, **found, ratio=total / denoiser)


if __name__ == "__main__":
    sys.exit(main())
