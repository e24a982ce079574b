"""Many prompts, simulated: how long they take together and how busy the lanes are. Standard library only."""

from typing import Any

from ..engine.cost import CostModel, rounds
from ..engine.dispatch import in_flight_for, simulate_queue
from ..graph.schedules import build_graph
from ..specs import RolloutSpec

MAX_PROMPTS = 1000


def forecast(
    spec: RolloutSpec, *, prompts: int, devices: int, in_flight: int | None, cost: CostModel | None
) -> dict[str, Any]:
    """Return what ``prompts`` rollouts of ``spec`` take when they overlap, and when they do not.

    Without fitted costs lengths are in rounds, and decoding, whose cost is then unknown, is left out.
    """
    if not 1 <= prompts <= MAX_PROMPTS:
        raise ValueError(f"prompts={prompts} is outside 1 to {MAX_PROMPTS}; use prompts=10")
    in_flight = in_flight_for(devices) if in_flight is None else in_flight
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight} is below 1; use in_flight=2")
    decodes = cost is not None and cost.decode_frame_s > 0
    graphs = [build_graph(spec, decode=decodes)] * prompts
    seconds = rounds if cost is None else cost.of(spec)
    together = simulate_queue(graphs, num_lanes=devices, in_flight=in_flight, cost=seconds)
    alone = simulate_queue(graphs, num_lanes=devices, in_flight=1, cost=seconds)
    return {
        "prompts": prompts,
        "in_flight": in_flight,
        "rounds": round(together.length) if cost is None else None,
        "predicted_s": None if cost is None else together.length,
        "lane_utilisation": together.utilisation,
        "one_by_one": {
            "rounds": round(alone.length) if cost is None else None,
            "predicted_s": None if cost is None else alone.length,
            "lane_utilisation": alone.utilisation,
        },
        "decoding_counted": decodes,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the forecast as lines for people."""
    counted = "" if found["decoding_counted"] else ", decoding not counted"
    return [
        (f"{found['prompts']} prompts", f"{_line(found)}, {found['in_flight']} at a time{counted}"),
        ("one after another", _line(found["one_by_one"])),
    ]


def _line(found: dict[str, Any]) -> str:
    length = f"{found['rounds']} rounds" if found["predicted_s"] is None else f"{found['predicted_s']:.2f} s"
    return f"{length}, lanes busy {found['lane_utilisation']:.1%} of the time"
