"""Predicts rollouts of every schedule and length on devices that are not there, from costs that were fitted on one.

python benchmarks/predict.py --costs benchmarks/results/2026-12-01-costs-h200.json --attention cudnn \\
    --latents 21 81 141 261 --devices 4 5 --out benchmarks/results/2026-12-01-predicted.json
Rows are as ``bench latency --predict`` files them, for every bf16 fit in the file.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.commands.bench_engine import bench_spec
from flashforward_core.commands.bench_latency import add_prediction
from flashforward_core.commands.bench_rows import RowBook
from flashforward_core.engine.cost import load_costs

SCHEDULES = ("flashforward", "hiar", "self_forcing", "last_stage")
LAYOUTS = ("interleaved", "prelude", "streaming")
"""Those of the first schedule; the others have no planner to place."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="what bench latency --fit kept")
    parser.add_argument("--attention", required=True, help="the kernel that the costs were measured with")
    parser.add_argument("--latents", type=int, nargs="+", required=True, metavar="N", help="lengths in latent frames")
    parser.add_argument("--devices", type=int, nargs="+", required=True, metavar="N", help="numbers of devices")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args(argv)
    for key, cost in load_costs(args.costs).items():
        if key.precision != "bf16":
            continue
        common = {"model": key.model, "resolution": key.resolution, "precision": key.precision}
        common |= {"compile": "auto", "graphs": "auto", "attention": args.attention}
        book = RowBook(path=args.out, machine=key.device, common=common)
        for latents, schedule, devices in product(args.latents, SCHEDULES, args.devices):
            spec = bench_spec(schedule, latents=latents, resolution=key.resolution)
            for layout in LAYOUTS if schedule == SCHEDULES[0] else LAYOUTS[:1]:
                add_prediction(book, spec, cost=cost, lanes=devices, layout=layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
