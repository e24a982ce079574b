"""Anchors one can hold: plan them, look at them, replace, lock or reseed one, plan the others again around it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from ..graph.schedules import planner_graph
from ..graph.task import Role, Slot, Space, TaskGraph
from ..model.roles import Backbone
from ..specs import TEMPORAL_FACTOR, RolloutSpec
from .budget import fit_run
from .events import AnchorBlockReady, Event
from .executor import runner
from .inputs import checked_inputs, empty_latents
from .lanes import DevicePlan
from .ops import RunInputs
from .placement import Placement, lanes_for, place

Callback = Callable[[Event], None]
CheckCancel = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What planned some anchors, and can plan a part of them again."""

    backbone: Backbone
    texts: Sequence[Tensor]
    devices: DevicePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Planned latent frames that a render reads and never copies. A change gives new anchors."""

    latents_BCAHW: Tensor
    """Normalised, float32 on the CPU; A counts anchors. Only to be read."""
    positions: tuple[int, ...]
    """Absolute latent index of each anchor, rising."""
    spec: RolloutSpec
    """What they were planned for, seed included."""
    locked: tuple[bool, ...]
    """Whether each anchor is to stay as it is when others are planned again."""
    planner: Planner | None = field(default=None, repr=False, compare=False)
    """What planned them; None when they came from elsewhere."""
    start: Tensor | None = field(default=None, repr=False, compare=False)
    """The video's first latent frames, normalised [B, C, F, h, w], which they were planned to follow."""

    def __post_init__(self) -> None:
        count = self.latents_BCAHW.shape[2]
        assert count == len(self.positions) == len(self.locked), "one latent, position and lock per anchor"

    @property
    def seed(self) -> int:
        return self.spec.seed

    def slots(self) -> dict[Slot, Tensor]:
        """Return the graph inputs that these latents are, one per anchor block."""
        level, blocks = self.spec.stages.num_stages, self.spec.anchor_blocks()
        return {
            Slot(space=Space.ANCHOR_LATENT, index=index, level=level): self.latents_BCAHW[
                :, :, block[0] : block[-1] + 1
            ]
            for index, block in enumerate(blocks)
        }

    def seconds(self, index: int) -> float:
        """Return the time of an anchor in the video: that of the last of its four frames."""
        return TEMPORAL_FACTOR * self.positions[index] / self.spec.shape.fps

    def nearest(self, seconds: float) -> int:
        """Return the index of the anchor nearest to a time, the earlier of two; ``ValueError`` outside the video."""
        length = self.spec.shape.seconds
        if not 0 <= seconds <= length:
            raise ValueError(f"seconds={seconds:g} is outside the video, 0 to {length:g} s; use a time within it")
        return min(range(len(self.positions)), key=lambda index: abs(self.seconds(index) - seconds))

    def with_latent(self, index: int, latent_BCHW: Tensor) -> "Anchors":
        """Return anchors with another latent frame at ``index``; one of another size raises ``ValueError``."""
        before = self.latents_BCAHW[:, :, index]
        if latent_BCHW.shape != before.shape:
            raise ValueError(
                f"latent has shape {tuple(latent_BCHW.shape)}, but the anchors have {tuple(before.shape)} "
                "(batch, channels, height, width); use a picture of the plan's size"
            )
        with torch.inference_mode(False):
            latents = self.latents_BCAHW.clone()
            latents[:, :, index] = latent_BCHW.detach().to("cpu", torch.float32)
        return replace(self, latents_BCAHW=latents)

    def with_lock(self, index: int, locked: bool) -> "Anchors":
        """Return anchors with one locked or unlocked."""
        return replace(self, locked=tuple(locked if n == index else old for n, old in enumerate(self.locked)))


def plan_anchors(
    backbone: Backbone,
    spec: RolloutSpec,
    texts: Sequence[Tensor],
    *,
    keep: Anchors | None = None,
    start: Tensor | None = None,
    devices: DevicePlan = DevicePlan(),  # noqa: B008 (frozen)
    on_event: Callback | None = None,
    check_cancel: CheckCancel | None = None,
) -> Anchors:
    """Run the planner alone, on the first device: its forwards follow one another.

    ``texts`` and the callbacks are as for ``render``. The locked anchors of ``keep`` stay as they are, and the others
    are planned around them; so are those that ``start`` covers, the video's first latent frames. Raises ``ValueError``
    for a schedule without anchors and for ``keep`` or ``start`` of another plan.
    """
    if start is None and keep is not None:
        start = keep.start
    inputs = checked_inputs(backbone, spec, texts, start=start)
    planner = Planner(backbone=backbone, texts=texts, devices=devices)
    if keep is not None and inputs.spec.anchors is not None:
        check_anchors(inputs, keep)
        inputs = replace(inputs, pinned=_pins(keep, [n for n, locked in enumerate(keep.locked) if locked]))
    latents = _plan(planner, inputs, graph=planner_graph(inputs.spec), on_event=on_event, check_cancel=check_cancel)
    positions = inputs.spec.anchor_positions()
    locked = (False,) * len(positions) if keep is None else keep.locked
    return Anchors(
        latents_BCAHW=latents, positions=positions, spec=inputs.spec, locked=locked, planner=planner, start=start
    )


def reseed(
    anchors: Anchors,
    index: int,
    *,
    seed: int,
    on_event: Callback | None = None,
    check_cancel: CheckCancel | None = None,
) -> Anchors:
    """Plan one anchor again from another seed's noise; every other anchor keeps its latents.

    Its block is denoised with the block's other anchors held where they are, after the anchors before it. Raises
    ``ValueError`` for anchors that no planner here made.
    """
    if anchors.planner is None:
        raise ValueError("reseed needs the planner that made the anchors; connect anchors from Plan Anchors")
    inputs = checked_inputs(anchors.planner.backbone, anchors.spec, anchors.planner.texts, start=anchors.start)
    spec = inputs.spec
    block = next(n for n, members in enumerate(spec.anchor_blocks()) if index in members)
    others = [n for n in range(len(anchors.positions)) if n != index]
    before = {slot: latents for slot, latents in anchors.slots().items() if slot.index < block}
    inputs = replace(inputs, given=before, start=None, pinned=_pins(anchors, others), anchor_seeds={index: seed})
    graph = _one_block(planner_graph(spec), block=block, given=frozenset(before))
    latents = _plan(anchors.planner, inputs, graph=graph, on_event=on_event, check_cancel=check_cancel)
    return anchors.with_latent(index, latents[:, :, index])


def check_anchors(inputs: RunInputs, anchors: Anchors) -> None:
    """Raise ``ValueError`` where ``anchors`` do not fit a rollout."""
    spec = inputs.spec
    if spec.anchors is None:
        raise ValueError(f"schedule={spec.schedule!r} reads no anchors; use schedule='flashforward' or disconnect them")
    positions = spec.anchor_positions()
    if anchors.positions != positions:
        raise ValueError(
            f"anchors are at the latent frames {anchors.positions}, but the plan has them at {positions}; "
            "plan the anchors again"
        )
    height, width = spec.shape.latent_height, spec.shape.latent_width
    found = anchors.latents_BCAHW.shape
    if (found[0], found[3], found[4]) != (inputs.batch, height, width):
        raise ValueError(
            f"anchors are {found[0]} x {found[4]}x{found[3]} latents, but the plan needs {inputs.batch} x "
            f"{width}x{height}; plan the anchors again"
        )


def _pins(anchors: Anchors, indices: Sequence[int]) -> Mapping[int, Tensor]:
    return {index: anchors.latents_BCAHW[:, :, index] for index in indices}


def _one_block(graph: TaskGraph, *, block: int, given: frozenset[Slot]) -> TaskGraph:
    """Return what it takes to denoise one block: its own forwards, and commits of the finished blocks before it."""
    target = next(slot for slot in graph.writers if slot.space is Space.ANCHOR_LATENT and slot.index == block)
    level = max(slot.level for slot in graph.writers if slot.space is Space.ANCHOR_LATENT)
    needed = {replace(target, level=level)}
    kept = []
    for task in reversed(graph.tasks):
        if needed.difference(given).intersection(task.writes):
            needed.update(task.reads)
            kept.append(task)
    written = {slot for task in kept for slot in task.writes}
    return TaskGraph(tuple(reversed(kept)), frozenset(slot for task in kept for slot in task.reads) - written)


def _plan(
    planner: Planner,
    inputs: RunInputs,
    *,
    graph: TaskGraph,
    on_event: Callback | None,
    check_cancel: CheckCancel | None,
) -> Tensor:
    """Run planner tasks; return the anchors' latents, of which only those of the blocks that ran are filled in."""
    assert all(task.role is Role.PLANNER for task in graph.tasks)
    devices = planner.devices
    lanes = lanes_for(devices.resolve())
    if not devices.ray_address:  # there all lanes are kept, since a render that follows wants them with their weights
        lanes = lanes[:1]

    @cache
    def placed(order: str) -> Placement:
        return place(graph, lanes=lanes, layout="single", order=order)

    fit = fit_run(planner.backbone, graph, spec=inputs.spec, batch=inputs.batch, devices=devices, placed=placed)
    blocks = inputs.spec.anchor_blocks()
    out = empty_latents(planner.backbone, inputs, frames=len(inputs.spec.anchor_positions()))

    def keep(event: Event) -> None:
        if isinstance(event, AnchorBlockReady):
            out[:, :, blocks[event.index][0] : blocks[event.index][-1] + 1] = event.latents
        if on_event is not None:
            on_event(event)

    runner(devices.ray_address)(
        graph,
        inputs=inputs,
        backbone=planner.backbone,
        placement=placed(devices.order),
        on_event=keep,
        check_cancel=check_cancel,
        fast=devices.fast,
        fit=fit,
    )
    return out
