"""``bench``: measure, and keep every number as a row with what it was measured on."""

import argparse
import importlib

SUITES = {
    "latency": ("forwards, rollouts, decoding and whole jobs, in seconds", ".bench_latency"),
    "memory": ("peaks of memory beside their predictions, with and without what saves memory", ".bench_memory"),
    "quality": ("flicker, seams, drift, motion and faithfulness of each schedule's videos", ".bench_quality"),
    "ray": ("a rollout on Ray lanes beside one on lanes of this process, and what Ray adds per task", ".bench_ray"),
    "train": ("one step of each training phase: seconds and memory", ".bench_train"),
    "policies": ("KV policies against the full cache, and what they rest on", ".bench_policies"),
    "sparse": ("a chunk over a cache of any length: dense, TempCache, AnnSA, AnnCA and all three", ".bench_sparse"),
}
"""Name -> (help, module of this package with ``add_arguments(parser)`` and ``run(args) -> int``)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per suite."""
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, (help_text, module) in SUITES.items():
        suite = importlib.import_module(module, __package__)
        sub = suites.add_parser(name, help=help_text, description=f"Measure {help_text}.")
        suite.add_arguments(sub)
        sub.set_defaults(run_suite=suite.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen suite."""
    status: int = args.run_suite(args)
    return status
