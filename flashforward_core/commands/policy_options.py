"""What ``render`` and ``simulate`` have in common: options for the history, the KV policy and its settings."""

import argparse

from ..kv_policy import KV_POLICIES, OPTIONS, KVPolicy, default_of, has_option, policy_named
from ..specs import History


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``history_of`` and ``policy_of``."""
    own = History()
    parser.add_argument(
        "--history",
        type=int,
        metavar="N",
        help=f"earlier chunks that a chunk reads, with --kv-policy keep ({own.chunks})",
    )
    parser.add_argument(
        "--planner-history",
        type=int,
        default=own.planner_blocks,
        metavar="N",
        help=f"earlier anchor blocks that an anchor block reads ({own.planner_blocks})",
    )
    parser.add_argument(
        "--sink",
        type=int,
        metavar="N",
        help=f"latent frames at the start that stay, with --kv-policy keep ({own.sink})",
    )
    parser.add_argument("--kv-policy", default="keep", help=f"one of: {', '.join(KV_POLICIES)} (keep)")
    for name, kind, metavar, what in (
        ("budget_frames", int, "N", "latent frames' worth that the policy keeps, its sink included"),
        ("sink_frames", int, "N", "latent frames at the start that the policy keeps for ever"),
        ("future_weight", float, "W", "1 goes by expected attention only, 0 by attention so far"),
        ("threshold", float, "X", "how alike tokens must be to be stored once; above 1 none are"),
    ):
        policies = [policy for policy in KV_POLICIES if has_option(policy, name)]
        parser.add_argument(
            f"--{OPTIONS[name].replace('_', '-')}",
            type=kind,
            metavar=metavar,
            help=f"for {', '.join(policies)}: {what} ({default_of(policies[0], name)})",
        )


def policy_of(args: argparse.Namespace) -> KVPolicy:
    """Return the policy that the options ask for; ``ValueError`` for one that it has no use for or cannot work with."""
    return policy_named(args.kv_policy, **{name: getattr(args, option) for name, option in OPTIONS.items()})


def history_of(args: argparse.Namespace) -> History:
    """Return how far back forwards read; ``ValueError`` for options that the chosen policy would ignore."""
    own = History(planner_blocks=args.planner_history)
    chunks, sink = args.history, args.sink
    if args.kv_policy != "keep":
        instead = "use --kv-sink" if has_option(args.kv_policy, "sink_frames") else "leave it out"
        for name, value, remedy in (("history", chunks, "use --kv-budget"), ("sink", sink, instead)):
            if value is not None:
                raise ValueError(
                    f"{name}={value} has no use with kv_policy={args.kv_policy!r}, which keeps frames of its own; "
                    f"{remedy}, or --kv-policy keep"
                )
    return History(
        chunks=own.chunks if chunks is None else chunks,
        planner_blocks=own.planner_blocks,
        sink=own.sink if sink is None else sink,
    )
