"""Runs a long rollout part by part (``graph/parts.py``): what is planned and held does not grow with the video.

The bytes are those of the whole, but for rounding after hard cuts (``graph/parts.py``); lanes fill and drain at each
part's ends. What parts hand on is copied to the host, but for states, which stay on their lanes.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch import Tensor

from ..graph.halves import halved, in_halves
from ..graph.parts import PART_CHUNKS, Part, parts
from ..graph.task import Slot
from ..kv.pages import plan_pages
from ..model.roles import Backbone
from ..specs import PromptSpan, RolloutSpec
from .budget import fit_run
from .cost import rounds
from .events import Event, LaneInfo, Launches, TaskFinished, TaskSpan, Timeline
from .executor import run_placed
from .lanes import DevicePlan, LaneTensor
from .ops import RunInputs
from .placement import Placement, lanes_for, place
from .reuse import Resume
from .run import RunReport
from .simulate import run_lanes

LONGEST_WHOLE = 2 * PART_CHUNKS
"""Chunks up to which a rollout is planned and run as one graph."""


def runs_in_parts(spec: RolloutSpec, devices: DevicePlan) -> bool:
    """Whether a rollout is too long to be planned as a whole. On a Ray cluster, whose lanes keep their KV, none is."""
    return spec.num_chunks > LONGEST_WHOLE and not devices.ray_address


def run_in_parts(
    backbone: Backbone,
    inputs: RunInputs,
    *,
    devices: DevicePlan,
    decode: bool,
    given_anchors: bool,
    on_event: Callable[[Event], None],
    check_cancel: Callable[[], None] | None,
    size: int = PART_CHUNKS,
) -> tuple[Placement, Timeline]:
    """Run a whole rollout in parts of at least ``size`` chunks; return the last one's placement, and what ran when.

    Events are counted over all parts. Raises as ``run_placed`` does, and ``DoesNotFit`` before a part that does not
    fit.
    """
    each = partial(_parts, inputs.spec, devices, decode=decode, given_anchors=given_anchors, size=size)
    total = sum(len(part.graph) for part in each())
    chain = _Chain(backbone, inputs, devices=devices, total=total, on_event=on_event, check_cancel=check_cancel)
    for part in each():
        placement = chain.run(part)
    return placement, chain.timeline()


def _parts(spec: RolloutSpec, devices: DevicePlan, **options: Any) -> Iterator[Part]:
    """Yield a rollout's parts that have tasks, with decoding in halves where ``devices`` has it so."""
    for part in parts(spec, **options):
        if not part.graph.tasks:
            continue  # all given and read by nobody: what it carries, earlier parts hand on
        if devices.decode == "split":
            part = replace(part, graph=in_halves(part.graph), carried=halved(part.carried))
        yield part


@dataclass(slots=True)
class _Chain:
    """Parts that have run so far, and what they leave to those that follow."""

    backbone: Backbone
    inputs: RunInputs
    devices: DevicePlan = field(kw_only=True)
    total: int = field(kw_only=True)
    """Tasks of all parts."""
    on_event: Callable[[Event], None] = field(kw_only=True)
    check_cancel: Callable[[], None] | None = field(kw_only=True)
    lanes: tuple[LaneInfo, ...] = ()
    layout: str = ""
    kv: Mapping[Slot, Tensor] = field(default_factory=dict)
    states: Mapping[Slot, LaneTensor] = field(default_factory=dict)
    spans: list[TaskSpan] = field(default_factory=list)
    rounds: float = 0.0
    peaks: list[int] = field(default_factory=list)
    launches: list[Launches] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.lanes = lanes_for(self.devices.resolve())
        self.layout = self.devices.layout
        self.peaks = [0] * len(self.lanes)
        self.launches = [Launches() for _ in self.lanes]

    def run(self, part: Part) -> Placement:
        """Run one part with what is there, and keep what it hands on."""
        pages = plan_pages(self.inputs.spec, part.graph)
        placed = cache(partial(self._placed, part))
        fit = fit_run(
            self.backbone,
            part.graph,
            spec=self.inputs.spec,
            batch=self.inputs.batch,
            devices=self.devices,
            placed=placed,
            pages=pages,
            video=_as_long_as(part, self.inputs.spec),
        )
        placement = placed(self.devices.order)
        self.layout = placement.layout  # states that are handed on lie on its lanes
        later = time.perf_counter() - self.began
        report = run_placed(
            part.graph,
            inputs=self.inputs,
            backbone=self.backbone,
            placement=placement,
            on_event=partial(self._tell, later=later, done=len(self.spans)),
            check_cancel=self.check_cancel,
            resume=Resume(graph=part.graph, pages=pages, kv=self.kv, states=self.states, keep=part.carried),
            fast=self.devices.fast,
            fit=fit,
        )
        self._take(part, report, later=later)
        self.rounds += max(span.end_s for span in run_lanes(part.graph, placement=placement, cost=rounds))
        return placement

    def timeline(self) -> Timeline:
        """Return what ran where and when."""
        return Timeline(
            source="measured",
            lanes=self.lanes,
            spans=tuple(self.spans),
            rounds=self.rounds,
            peak_kv_bytes=tuple(self.peaks),
            launches=tuple(self.launches),
        )

    def _placed(self, part: Part, order: str) -> Placement:
        return place(
            part.graph,
            lanes=self.lanes,
            layout=self.layout,
            order=order,
            decode=self.devices.decode,
            pairable=self.devices.pairable(self.inputs.spec),
        )

    def _tell(self, event: Event, *, later: float, done: int) -> None:
        if isinstance(event, TaskFinished):
            event = TaskFinished(span=_moved(event.span, later), done=event.done + done, total=self.total)
        self.on_event(event)

    def _take(self, part: Part, report: RunReport, *, later: float) -> None:
        kv, states = {**self.kv, **report.kept}, {**self.states, **report.states}
        self.kv = {slot: kv[slot] for slot in part.carried if slot in kv}
        self.states = {slot: states[slot] for slot in part.carried if slot in states}
        assert len(self.kv) + len(self.states) == len(part.carried), "a part hands on less than later ones read"
        self.spans += [_moved(span, later) for span in report.spans]
        self.peaks = [max(pair) for pair in zip(self.peaks, report.peak_kv_bytes, strict=True)]
        self.launches = [before + now for before, now in zip(self.launches, report.launches, strict=True)]
        _give_back()


def _give_back() -> None:
    """Return freed host memory to the system. Pages that are handed on lie between what a part has freed, and the C
    library keeps the holes: the process would grow with every part. Does nothing where there is no ``malloc_trim``.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _moved(span: TaskSpan, later: float) -> TaskSpan:
    return replace(span, start_s=span.start_s + later, end_s=span.end_s + later)


def _as_long_as(part: Part, spec: RolloutSpec) -> RolloutSpec:
    """Return a rollout of the part's length, for predictions that count latents and anchors."""
    frames = spec.chunk(part.chunks[-1]).stop - spec.chunk(part.chunks[0]).start
    shape = replace(spec.shape, latent_frames=frames)
    return replace(spec, shape=shape, prompts=(PromptSpan(),), start_frames=0)
