"""What a plan will do: predicted by the core's simulation, for the page and in words."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from flashforward_core.cli import cache_folder
from flashforward_core.commands.bench_rows import machine
from flashforward_core.commands.simulate import RESOLUTIONS
from flashforward_core.engine.budget import Question, fit, sizes_of, total_bytes
from flashforward_core.engine.cost import CostKey, CostModel, load_cost, slot_frames
from flashforward_core.engine.events import Timeline
from flashforward_core.engine.memory import GIB, BackboneSizes, DeviceMemory, backbone_sizes, size
from flashforward_core.engine.pairing import Pairable, pairable
from flashforward_core.engine.placement import Placement, lanes_for, place
from flashforward_core.engine.rollout import DevicePlan
from flashforward_core.engine.simulate import simulate
from flashforward_core.graph.passes import to_json
from flashforward_core.graph.schedules import build_graph, planner_graph
from flashforward_core.graph.task import Slot, TaskGraph
from flashforward_core.model.config import WanConfig
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import RolloutSpec

from .devices import resolved
from .sockets import PlanValue

log = logging.getLogger(__name__)

MAX_CHUNKS = 120
"""Longer videos are simulated this far and carried on at the same pace: the wavefront is steady long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One run: the render, or the planner on its own."""

    graph: TaskGraph
    placement: Placement
    timeline: Timeline
    memory: tuple[DeviceMemory, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"graph": to_json(self.graph), "timeline": self.timeline.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan, simulated without decoding, which is a node of its own."""

    spec: RolloutSpec
    """The whole video."""
    shown: RolloutSpec
    """As much of it as was simulated."""
    model: str
    """Whose KV was counted."""
    devices: tuple[str, ...]
    planner: Part | None
    """Plan Anchors' run; None when the render plans its anchors itself."""
    render: Part
    counts: dict[str, int]
    """Forwards by role and kind, of the planner's run too, and their ``total``."""
    rounds: float
    predicted_s: float | None

    @property
    def is_exact(self) -> bool:
        """Whether all of the video was simulated."""
        return self.shown.num_chunks == self.spec.num_chunks


def first_chunks(spec: RolloutSpec, count: int) -> RolloutSpec:
    """Cut a rollout after ``count`` chunks; prompts that start later go too."""
    if spec.num_chunks <= count:
        return spec
    frames = count * spec.chunk_frames
    prompts = tuple(span for span in spec.prompts if span.start < frames)
    return replace(spec, shape=replace(spec.shape, latent_frames=frames), prompts=prompts)


def fitted_cost(spec: RolloutSpec, *, model: str, devices: tuple[str, ...]) -> CostModel | None:
    """Return the costs that ``bench latency --fit`` has measured for this work on these devices, or None.

    Devices have to be alike. Several lanes on one CPU share its cores, so a forward's time there says nothing of them.
    """
    names = {machine(device) for device in devices}
    if len(names) != 1 or (len(devices) > 1 and devices[0] == "cpu"):
        return None
    size = (spec.shape.width, spec.shape.height)
    resolution = next((name for name, known in RESOLUTIONS.items() if known == size), f"{size[0]}x{size[1]}")
    precision = "bf16" if devices[0].startswith("cuda") else "fp32"  # what Load Backbone's auto takes
    key = CostKey(device=names.pop(), model=model, resolution=resolution, precision=precision)
    try:
        return load_cost(cache_folder() / "costs.json", key=key)
    except ValueError as error:  # a prediction without seconds is better than no plan
        log.warning("%s", error)
        return None


def predict_plan(
    spec: RolloutSpec,
    *,
    devices: DevicePlan,
    config: WanConfig,
    given_anchors: bool = False,
    sizes: BackboneSizes | None = None,
) -> Prediction:
    """Simulate a rollout on its devices. ``given_anchors``: Plan Anchors runs first, on its own.

    ``sizes`` are the backbone's; without them its weights are counted from ``config``.
    """
    most = spec.start_chunks + MAX_CHUNKS  # what is given is no steady pace to carry on from
    shown, lanes = first_chunks(spec, most), resolved(devices)
    cost = fitted_cost(spec, model=config.name, devices=lanes)
    planner, render = _parts(shown, devices=devices, lanes=lanes, config=config, cost=cost, given=given_anchors)
    counts, length, seconds = _totals(planner, render)
    if shown is not spec:
        half = first_chunks(spec, most - MAX_CHUNKS // 2)
        before = _totals(*_parts(half, devices=devices, lanes=lanes, config=config, cost=cost, given=given_anchors))
        more = (spec.num_chunks - most) / (most - half.num_chunks)
        counts = {name: round(count + (count - before[0][name]) * more) for name, count in counts.items()}
        length = round(length + (length - before[1]) * more)
        seconds = None if seconds is None or before[2] is None else seconds + (seconds - before[2]) * more
    sizes = sizes or backbone_sizes(config, element_bytes=2 if lanes[0].startswith("cuda") else 4)
    planner, render = (
        _with_memory(part, shown, video=spec, devices=devices, sizes=sizes) for part in (planner, render)
    )
    assert render is not None
    return Prediction(
        spec=spec,
        shown=shown,
        model=config.name,
        devices=lanes,
        planner=planner,
        render=render,
        counts=counts,
        rounds=length,
        predicted_s=seconds,
    )


def _parts(
    spec: RolloutSpec,
    *,
    devices: DevicePlan,
    lanes: tuple[str, ...],
    config: WanConfig,
    cost: CostModel | None,
    given: bool,
) -> tuple[Part | None, Part]:
    """Simulate what Plan Anchors runs, if it does, and what the render runs."""
    given = given and spec.anchors is not None
    graph = build_graph(spec, decode=False, given_anchors=given)
    alike = devices.pairable(spec)
    layout, order = devices.layout, devices.order
    render = _part(graph, spec, lanes=lanes, layout=layout, order=order, config=config, cost=cost, alike=alike)
    if not given:
        return None, render
    alone = planner_graph(spec)
    planner = _part(alone, spec, lanes=lanes[:1], layout="single", order=devices.order, config=config, cost=cost)
    return planner, render


def _part(
    graph: TaskGraph,
    spec: RolloutSpec,
    *,
    lanes: tuple[str, ...],
    layout: str,
    order: str,
    config: WanConfig,
    cost: CostModel | None,
    alike: Pairable | None = None,
) -> Part:
    frame_bytes = config.kv_bytes_per_frame(spec.shape.tokens_per_frame)

    def slot_bytes(slot: Slot) -> int:
        return slot_frames(slot, spec) * frame_bytes

    seconds = None if cost is None else cost.of(spec)
    named = lanes_for(lanes)
    placement = place(graph, lanes=named, layout=layout, order=order, pairable=alike)
    ratio = 1.0 if cost is None else cost.pair_ratio
    timeline = simulate(graph, placement=placement, seconds=seconds, slot_bytes=slot_bytes, pair_ratio=ratio)
    return Part(graph=graph, placement=placement, timeline=timeline)


def _question(part: Part, spec: RolloutSpec, *, video: RolloutSpec, sizes: BackboneSizes) -> Question:
    """Ask for the memory of a part; in another order it is placed as it would be with that order."""
    placed = part.placement

    def place_in(order: str) -> Placement:
        alike = pairable(spec) if placed.pairs else None
        return place(part.graph, lanes=placed.lanes, layout=placed.layout, order=order, pairable=alike)

    return Question(graph=part.graph, spec=spec, sizes=sizes, placed=place_in, video=video)


def _limits(part: Part, devices: DevicePlan) -> dict[str, int]:
    """Return all that each device has, or the budget; the devices of a cluster are not known here."""
    budget = int(devices.memory.budget_gib * GIB)
    names = {lane.device for lane in part.placement.lanes}
    if devices.ray_address:
        return dict.fromkeys(names, budget or 1 << 62)
    return {name: min(budget or 1 << 62, total_bytes(name)) for name in names}


def _with_memory(
    part: Part | None, spec: RolloutSpec, *, video: RolloutSpec, devices: DevicePlan, sizes: BackboneSizes
) -> Part | None:
    if part is None:
        return None
    question = _question(part, spec, video=video, sizes=sizes)
    memory, _ = question.predict(part.placement, devices.memory, limits=_limits(part, devices))
    peaks = {found.device: found.peak_bytes for found in memory}
    return replace(part, memory=memory, timeline=replace(part.timeline, peak_bytes=peaks))


def _totals(planner: Part | None, render: Part) -> tuple[dict[str, int], float, float | None]:
    """Return forwards, rounds and seconds of the parts together: they run one after the other."""
    parts = [part for part in (planner, render) if part is not None]
    counts = [part.graph.counts() for part in parts]
    length = sum(part.timeline.rounds or 0 for part in parts)
    seconds = [part.timeline.predicted_s for part in parts if part.timeline.predicted_s is not None]
    together = {name: sum(count[name] for count in counts) for name in counts[0]}
    return together, length, sum(seconds) if len(seconds) == len(parts) else None


def to_page(found: Prediction, *, start_known: bool = True) -> dict[str, Any]:
    """Return everything that the timeline draws, as plain data; ``start_known``: whether what is given is counted."""
    shown = found.shown
    return {
        **found.render.to_json(),
        "planner": None if found.planner is None else found.planner.to_json(),
        "summary": in_words(found),
        "video": {
            "latent_frames": shown.shape.latent_frames,
            "num_chunks": found.spec.num_chunks,
            "seconds": found.spec.shape.seconds,
            "fps": found.spec.shape.fps,
            "chunks": [[shown.chunk(c).start, shown.chunk(c).stop] for c in range(shown.num_chunks)],
            "anchors": list(shown.anchor_positions()),
            "anchor_blocks": [list(block) for block in shown.anchor_blocks()],
            "num_stages": shown.stages.num_stages,
            "start_seconds": _start_seconds(found.spec) if start_known else None,
        },
        "totals": {
            "forwards": found.counts,
            "rounds": found.rounds,
            "predicted_s": found.predicted_s,
            "schedule": found.spec.schedule,
            "layout": found.render.placement.layout,
            "model": found.model,
            "exact": found.is_exact,
        },
    }


def _start_seconds(spec: RolloutSpec) -> float:
    """How much of the video is given."""
    return replace(spec.shape, latent_frames=spec.start_frames).seconds if spec.start_frames else 0.0


def in_words(found: Prediction) -> str:
    """Say length, forwards, rounds, seconds and memory, one fact a line."""
    spec, shape, counts = found.spec, found.spec.shape, found.counts
    planner = counts["planner_denoise"] + counts["planner_commit"]
    about = "" if found.is_exact else "about "
    predicted = "unknown (not measured)" if found.predicted_s is None else f"{about}{found.predicted_s:.1f} s"
    anchors = f", anchors: {len(spec.anchor_positions())}" if spec.anchors is not None else ""
    forwards = f"{counts['total']} forwards ({planner} planner, {counts['total'] - planner} renderer)"
    lines = [
        f"{shape.width}x{shape.height}, {shape.seconds:.2f} s: {shape.video_frames} frames at {shape.fps:g} fps",
        f"{shape.latent_frames} latent frames in {spec.num_chunks} chunks{anchors}",
        f"{spec.schedule}: {about}{forwards}",
        f"{', '.join(found.devices)}: layout {found.render.placement.layout}, {about}{found.rounds:g} rounds",
        f"predicted time: {predicted}",
    ]
    if largest := max(found.render.memory, key=lambda memory: memory.peak_bytes, default=None):
        lines.append(f"memory: {size(largest.peak_bytes)} on {largest.device} ({largest.parts()})")
    return "\n".join([*lines, *spec.advice])


def describe(plan: PlanValue, backbone: Backbone) -> str:
    """Say what a plan will do, with Plan Anchors and without, which Plan cannot know; nothing runs.

    Raises ``DoesNotFit`` for what is too much for its devices even with nothing else on them.
    """
    sizes = sizes_of(backbone)
    found = predict_plan(plan.spec, devices=plan.devices, config=backbone.config, sizes=sizes)
    question = _question(found.render, found.shown, video=found.spec, sizes=sizes)
    fit(
        question,
        order=plan.devices.order,
        options=plan.devices.memory,
        available=_limits(found.render, plan.devices),
    )
    apart = predict_plan(plan.spec, devices=plan.devices, config=backbone.config, sizes=sizes, given_anchors=True)
    told = in_words(found)
    return told if apart.planner is None else f"{told}\n{_apart_in_words(apart)}"


def _apart_in_words(found: Prediction) -> str:
    """Say what changes when Plan Anchors runs first: the render waits for it, and encodes the anchors once more."""
    assert found.planner is not None
    about = "" if found.is_exact else "about "
    return f"with Plan Anchors connected: {about}{found.rounds:g} rounds, {found.counts['total']} forwards"
