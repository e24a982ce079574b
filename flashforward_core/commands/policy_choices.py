"""Which policies ``bench policies`` compares, and what the choices in them are."""

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..kv_policy import FutureForcingOptions, KVPolicy, TempCacheOptions, WindowOptions

FAR = (1, 2, 4, 8)  # chunks that are looked ahead, the default until the choices were measured
EVERYTHING = 10_000  # latent frames, more than any rollout has here
FIFO = "window"
"""What the other policies are compared with."""


def policies(budget: int) -> dict[str, KVPolicy]:
    """Return what is compared at a budget of latent frames."""
    return {
        FIFO: WindowOptions(budget_frames=budget, rebase=False),
        "history_only": FutureForcingOptions(
            budget_frames=budget, lookahead=FAR, future_weight=0.0, weigh_merged=False
        ),
        "unweighed": FutureForcingOptions(budget_frames=budget, lookahead=FAR, weigh_merged=False),
        "future_forcing": FutureForcingOptions(budget_frames=budget),
        "future_only": FutureForcingOptions(budget_frames=budget, future_weight=1.0),
        "temp_cache": TempCacheOptions(budget_frames=budget),
    }


def followed(budget: int) -> dict[str, KVPolicy]:
    """Return what is compared by what attention reads: all policies, and what single choices in them change."""
    future = FutureForcingOptions(budget_frames=budget)
    weights = {f"future_weight={weight:g}": replace(future, future_weight=weight) for weight in (0.0, 0.75)}
    thresholds = {
        f"threshold={value:g}": TempCacheOptions(budget_frames=EVERYTHING, threshold=value)
        for value in (0.9, 0.95, 0.98, 0.99)
    }
    return policies(budget) | weights | thresholds


def choices(budget: int) -> dict[str, KVPolicy]:
    """Return the window with and without a sink, and Future Forcing with all of its choices that matter."""
    found: dict[str, KVPolicy] = {
        FIFO: WindowOptions(budget_frames=budget, rebase=False),
        f"{FIFO} sink=0": WindowOptions(budget_frames=budget, sink_frames=0),
    }
    most = budget - 4  # recent frames that leave room for the sink and one frame of choice
    for weight, lookahead, recent, sink in product((0.5, 1.0), (FAR, (1,)), (3, most), (3, 0)):
        options = FutureForcingOptions(
            budget_frames=budget, future_weight=weight, lookahead=lookahead, recent_frames=recent, sink_frames=sink
        )
        name = f"λ={weight:g} ahead={lookahead[-1]} recent={recent} sink={sink}"
        found[name] = options
        if weight == 1 and sink == 0:
            found[f"{name} unweighed"] = replace(options, weigh_merged=False)
    return found


def latent_errors(found_BCFHW: Tensor, whole_BCFHW: Tensor, frames: slice) -> Tensor:
    """Return each video's RMS difference in some latent frames, relative to the spread of all of ``whole``; [B]."""
    difference = (found_BCFHW[:, :, frames] - whole_BCFHW[:, :, frames]).float()
    return difference.square().flatten(1).mean(dim=1).sqrt() / torch.std(whole_BCFHW.float())
