"""How busy the real lanes' threads are over many prompts when tasks take a fixed time and no processor.

    .venv/bin/python benchmarks/lanes_busy.py --lanes 1 2 4 6 --json rows.json

On a machine with fewer cores than lanes, computing lanes hold each other up, and their share says little about devices
of their own. Here everything is as in ``render_many`` (threads, the dispatcher, its locks and signals) but the
forwards, which sleep. Decoding a chunk sleeps ``--decode`` times as long.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashforward_core.commands.bench_rows import RowBook, machine
from flashforward_core.commands.render_many import busy
from flashforward_core.engine.dispatch import in_flight_for
from flashforward_core.engine.events import Event, TaskFinished, TaskSpan, Timeline
from flashforward_core.engine.lanes import open_lanes
from flashforward_core.engine.placement import lanes_for
from flashforward_core.engine.run import Launched
from flashforward_core.engine.shared_lanes import SharedLanes
from flashforward_core.engine.transfer import HostMark
from flashforward_core.graph.schedules import build_graph
from flashforward_core.graph.task import ForwardTask, Kind, TaskGraph
from flashforward_core.specs import RolloutSpec, VideoShape


class Sleeper:
    """A rollout whose tasks sleep, in the place of ``engine.run.Run``."""

    def __init__(self, graph: TaskGraph, *, forward_s: float, decode: float) -> None:
        self.graph, self._forward_s, self._decode = graph, forward_s, decode

    def launch(self, task: ForwardTask, *, lane: int) -> Launched:
        start = HostMark(time.perf_counter())
        time.sleep(self._forward_s * (self._decode if task.kind is Kind.DECODE else 1))
        end = HostMark(time.perf_counter())
        return Launched(task=task, lane=lane, start=start, end=end, checks=[], ready=[])

    def complete(self, launched: Launched) -> list[Event]:
        start_s, end_s = launched.start.time_s, launched.end.time_s
        span = TaskSpan(task=launched.task.id, lane=launched.lane, start_s=start_s, end_s=end_s)
        return [TaskFinished(span=span, done=0, total=len(self.graph))]


def measure(graph: TaskGraph, *, lanes: int, prompts: int, in_flight: int, forward_s: float, decode: float) -> float:
    """Return the share of all lanes' time that they work, from the first task's start to the last one's end."""
    infos, spans = lanes_for(["cpu"] * lanes), []
    left, following = {}, iter(range(prompts))
    with open_lanes([(info.name, info.device) for info in infos]) as opened:
        shared = SharedLanes(opened)
        for index, lane in enumerate(opened):
            lane.submit(partial(shared.work, index))

        def admit() -> None:
            number = next(following, None)
            if number is not None:
                left[number] = len(graph)
                shared.admit(number, Sleeper(graph, forward_s=forward_s, decode=decode))
                if number == prompts - 1:
                    shared.no_more()

        for _ in range(in_flight):
            admit()
        while left:
            number, events = shared.inbox.get()
            spans += [event.span for event in events]
            left[number] -= len(events)
            if not left[number]:
                del left[number]
                admit()
        shared.stop()
    spans.sort(key=lambda span: span.start_s)
    first = spans[0].start_s
    moved = [TaskSpan(task=s.task, lane=s.lane, start_s=s.start_s - first, end_s=s.end_s - first) for s in spans]
    return busy(Timeline(source="measured", lanes=infos, spans=tuple(moved)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--latents", type=int, default=81)
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--forward-s", type=float, default=0.05)
    parser.add_argument("--decode", type=float, default=0.0, help="of a forward's time; 0: no decoding")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    shape = VideoShape(width=192, height=128, latent_frames=args.latents)
    graph = build_graph(RolloutSpec(shape=shape), decode=bool(args.decode))
    common = {"source": "measured, tasks that sleep", "prompts": args.prompts, "latents": args.latents}
    common |= {"forward_s": args.forward_s, "decode": bool(args.decode), "decode_rounds": args.decode}
    book = RowBook(path=args.json, machine=machine("cpu"), common=common)
    for lanes in args.lanes:
        places = args.in_flight or in_flight_for(lanes)
        found = measure(
            graph, lanes=lanes, prompts=args.prompts, in_flight=places, forward_s=args.forward_s, decode=args.decode
        )
        book.add("lane_utilisation", found, "share", devices=lanes, in_flight=places)
    return 0


if __name__ == "__main__":
    sys.exit(main())
