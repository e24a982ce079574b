"""What a run tells its caller: timelines and events. Tensors are typed ``Any``, so nothing here needs torch."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneInfo:
    """Which lane a span ran on, for people."""

    name: str
    """Short and unique, such as ``lane0``."""
    device: str
    """Where it runs: ``cuda:0``, ``cpu``, or empty when nothing runs (a simulation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpan:
    """When one task ran."""

    task: str
    """The task's id."""
    lane: int
    """Index into the timeline's lanes."""
    start_s: float
    """Seconds since the run began."""
    end_s: float
    """Seconds since the run began."""


@dataclass(slots=True, kw_only=True)
class Launches:
    """How a lane's forwards were launched. On a CPU launching is the work itself."""

    eager: int = 0
    """Forwards launched piece by piece."""
    recorded: int = 0
    """Whole forwards recorded, besides those launched."""
    replayed: int = 0
    """Forwards repeated from a recording, by one launch."""
    in_parts: int = 0
    """Forwards whose blocks were repeated from recordings, by a few launches each."""
    waited_s: float = 0.0
    """Seconds that the lane's thread waited for the others' turns."""
    launching_s: float = 0.0
    """Seconds that it held its own."""

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What ran where and when, simulated or measured."""

    source: str
    """``simulated`` or ``measured``."""
    lanes: tuple[LaneInfo, ...]
    spans: tuple[TaskSpan, ...]
    """In the order of their starts. A simulation without a fitted cost model counts in rounds, not seconds."""
    rounds: float | None = None
    """Length when every forward costs 1 and decoding nothing; None for a measured timeline without placement."""
    predicted_s: float | None = None
    """Predicted length in seconds; None without a fitted cost model."""
    peak_kv_bytes: tuple[int, ...] = ()
    """Most KV alive at once, per lane; empty when unknown."""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Most memory in use on each device, by its name: predicted, or as its allocator measured; empty when unknown."""
    launches: tuple[Launches, ...] = ()
    """Per lane; empty when unknown."""

    def __post_init__(self) -> None:
        assert self.source in ("simulated", "measured"), self.source

    @property
    def length(self) -> float:
        """The end of the last span, in the unit of the spans."""
        return max((span.end_s for span in self.spans), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for ``json.dumps``."""
        return {
            "source": self.source,
            "lanes": [asdict(lane) for lane in self.lanes],
            "spans": [asdict(span) for span in self.spans],
            "rounds": self.rounds,
            "predicted_s": self.predicted_s,
            "peak_kv_bytes": list(self.peak_kv_bytes),
            "peak_bytes": dict(self.peak_bytes),
            "launches": [asdict(lane) for lane in self.launches],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Timeline":
        """Read back ``to_json``."""
        return cls(
            source=data["source"],
            lanes=tuple(LaneInfo(**lane) for lane in data["lanes"]),
            spans=tuple(TaskSpan(**span) for span in data["spans"]),
            rounds=data["rounds"],
            predicted_s=data["predicted_s"],
            peak_kv_bytes=tuple(data["peak_kv_bytes"]),
            peak_bytes=data.get("peak_bytes", {}),
            launches=tuple(Launches(**lane) for lane in data.get("launches", ())),
        )

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a trace that chrome://tracing and Perfetto open; one thread per lane, times in microseconds."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": f"{lane.name} {lane.device}"}}
            for index, lane in enumerate(self.lanes)
        ]
        spans = [
            {
                "ph": "X",
                "name": span.task,
                "cat": span.task.split("/")[0],
                "pid": 0,
                "tid": span.lane,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
            for span in self.spans
        ]
        return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished:
    """One task has ended."""

    span: TaskSpan
    done: int
    """Tasks that have ended, this one included."""
    total: int
    """Tasks in the whole graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReady:
    """A chunk's clean latents are there."""

    index: int
    """The chunk."""
    frames: range
    """Latent frames that it covers."""
    latents: Any
    """[B, C, F, h, w], normalised; only to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorBlockReady:
    """An anchor block's clean latents are there."""

    index: int
    """The anchor block."""
    latents: Any
    """[B, C, anchors, h, w], normalised; only to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesReady:
    """A chunk's video frames are there; chunks come in order."""

    index: int
    """The chunk."""
    frames: Any
    """uint8 [B, F, H, W, 3] on the CPU."""


Event = TaskFinished | ChunkReady | AnchorBlockReady | FramesReady
EventSink = Callable[[Event], None]
