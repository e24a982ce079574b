"""The façade: specs and weights in; anchors, latents, frames and a timeline out."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..graph.schedules import build_graph, planner_graph, spec_for
from ..graph.task import Slot, Space, TaskGraph
from ..model.roles import Backbone
from ..model.vae import StreamingDecoder, VaeState
from ..specs import RolloutSpec
from .cost import rounds
from .events import AnchorBlockReady, ChunkReady, Event, Timeline
from .executor import RunReport, run_placed
from .lanes import DevicePlan
from .ops import RunInputs
from .placement import Placement, lanes_for, place
from .simulate import run_lanes

__all__ = ["Anchors", "DevicePlan", "RenderResult", "plan_anchors", "render", "stream_decode"]

log = logging.getLogger(__name__)

Callback = Callable[[Event], None]
CheckCancel = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Planned latent frames that a render reads and never copies."""

    latents_BCAHW: Tensor
    """Normalised, float32 on the CPU; A counts anchors. Only to be read."""
    positions: tuple[int, ...]
    """Absolute latent index of each anchor, rising."""
    spec: RolloutSpec
    """What they were planned for, seed included."""
    locked: tuple[bool, ...]
    """Whether each anchor is to stay as it is when others are planned again."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderResult:
    """A finished render."""

    latents_BCFHW: Tensor
    """Normalised, float32 on the CPU."""
    timeline: Timeline
    """Measured."""
    sha256: str
    """Of the latents' bytes: the same for any number of devices, layout and order."""


def plan_anchors(
    backbone: Backbone,
    spec: RolloutSpec,
    texts: Sequence[Tensor],
    *,
    devices: DevicePlan = DevicePlan(),  # noqa: B008 (frozen)
    on_event: Callback | None = None,
    check_cancel: CheckCancel | None = None,
) -> Anchors:
    """Run the planner alone, on the first device: its forwards follow one another.

    ``texts`` and the callbacks are as for ``render``. Raises ``ValueError`` for a schedule without anchors.
    """
    inputs = _inputs(backbone, spec, texts)
    graph = planner_graph(inputs.spec)
    placement = place(graph, lanes=lanes_for(devices.resolve()[:1]), layout="single", order=devices.order)
    positions = inputs.spec.anchor_positions()
    out = _empty_latents(backbone, inputs, frames=len(positions))
    blocks = inputs.spec.anchor_blocks()

    def keep(event: Event) -> None:
        if isinstance(event, AnchorBlockReady):
            out[:, :, blocks[event.index][0] : blocks[event.index][-1] + 1] = event.latents
        if on_event is not None:
            on_event(event)

    _run(graph, inputs=inputs, backbone=backbone, placement=placement, on_event=keep, check_cancel=check_cancel)
    return Anchors(latents_BCAHW=out, positions=positions, spec=inputs.spec, locked=(False,) * len(positions))


def render(
    backbone: Backbone,
    spec: RolloutSpec,
    texts: Sequence[Tensor],
    *,
    anchors: Anchors | None = None,
    devices: DevicePlan = DevicePlan(),  # noqa: B008 (frozen)
    decode: bool = False,
    on_event: Callback | None = None,
    check_cancel: CheckCancel | None = None,
) -> RenderResult:
    """Run the whole rollout over ``devices``; without ``anchors`` it plans them on the way.

    ``texts`` are prompt embeddings [B, text_len, text_dim], indexed by ``PromptSpan.prompt``; row b of the batch has
    the seed ``spec.seed + b``. With ``decode``, frames arrive as ``FramesReady`` events, in order. ``on_event`` and
    ``check_cancel`` run on the calling thread, the latter at least every 50 ms; what they raise stops every lane within
    one forward and propagates. Raises ``ValueError`` for inputs that do not fit, ``TaskFailed`` when a task fails.
    """
    inputs = _inputs(backbone, spec, texts, anchors=anchors)
    if decode and backbone.vae is None:
        raise ValueError("decode=True needs a backbone with an autoencoder; load one, or decode the latents elsewhere")
    graph = build_graph(inputs.spec, decode=decode, given_anchors=anchors is not None)
    lanes = lanes_for(devices.resolve())
    placement = place(graph, lanes=lanes, layout=devices.layout, order=devices.order)
    out = _empty_latents(backbone, inputs, frames=inputs.spec.shape.latent_frames)

    def keep(event: Event) -> None:
        if isinstance(event, ChunkReady):
            out[:, :, event.frames.start : event.frames.stop] = event.latents
        if on_event is not None:
            on_event(event)

    began = time.perf_counter()
    report = _run(
        graph, inputs=inputs, backbone=backbone, placement=placement, on_event=keep, check_cancel=check_cancel
    )
    digest = latents_sha256(out)
    _log_rollout(inputs.spec, placement, seconds=time.perf_counter() - began, sha256=digest)
    timeline = _measured(graph, placement=placement, report=report)
    return RenderResult(latents_BCFHW=out, timeline=timeline, sha256=digest)


def stream_decode(
    backbone: Backbone, latents_BCFHW: Tensor, *, check_cancel: CheckCancel | None = None
) -> Iterator[Tensor]:
    """Yield video frames, uint8 [F, H, W, 3] on the CPU, one latent frame's at a time.

    ``latents_BCFHW`` is normalised with B = 1; more raises ``ValueError``, so does a backbone without an autoencoder.
    """
    if backbone.vae is None:
        raise ValueError("the backbone has no autoencoder; load one, or decode the latents elsewhere")
    if latents_BCFHW.shape[0] != 1:
        raise ValueError(f"latents hold {latents_BCFHW.shape[0]} videos; decode one at a time")
    return _decoded(StreamingDecoder(backbone.vae), latents_BCFHW, check_cancel=check_cancel)


def _decoded(decoder: StreamingDecoder, latents: Tensor, *, check_cancel: CheckCancel | None) -> Iterator[Tensor]:
    state: VaeState | None = None
    for index in range(latents.shape[2]):
        if check_cancel is not None:
            check_cancel()
        frames, state = decoder.decode(latents[:, :, index : index + 1], state)
        yield frames[0]


def latents_sha256(latents: Tensor) -> str:
    """Return the SHA-256 of the latents' bytes, as contiguous float32."""
    data = latents.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _run(
    graph: TaskGraph,
    *,
    inputs: RunInputs,
    backbone: Backbone,
    placement: Placement,
    on_event: Callback,
    check_cancel: CheckCancel | None,
) -> RunReport:
    return run_placed(
        graph, inputs=inputs, backbone=backbone, placement=placement, on_event=on_event, check_cancel=check_cancel
    )


def _inputs(
    backbone: Backbone, spec: RolloutSpec, texts: Sequence[Tensor], *, anchors: Anchors | None = None
) -> RunInputs:
    """Check that everything fits together; raise ``ValueError`` that says what does not."""
    spec = spec_for(spec)
    _check_texts(backbone, spec, texts)
    shape = spec.shape
    if backbone.size is not None and backbone.size != (shape.width, shape.height):
        width, height = backbone.size
        raise ValueError(
            f"size={shape.width}x{shape.height} does not fit the backbone, which makes {width}x{height} only; "
            f"use width={width}, height={height}"
        )
    inputs = RunInputs(spec=spec, texts=texts)
    if anchors is None:
        return inputs
    _check_anchors(inputs, anchors)
    return replace(inputs, given=replace(anchors, spec=spec).slots())


def _check_texts(backbone: Backbone, spec: RolloutSpec, texts: Sequence[Tensor]) -> None:
    needed = max(span.prompt for span in spec.prompts)
    if needed >= len(texts):
        raise ValueError(f"prompts use prompt {needed}, but texts hold {len(texts)}; give one embedding per prompt")
    rows = (backbone.config.text_len, backbone.config.text_dim)
    for index, text in enumerate(texts):
        if text.ndim != 3 or tuple(text.shape[1:]) != rows or text.shape[0] != texts[0].shape[0]:
            raise ValueError(
                f"texts[{index}] has shape {tuple(text.shape)}; the backbone takes "
                f"({texts[0].shape[0]}, {rows[0]}, {rows[1]}): encode the prompt with this backbone's text encoder"
            )


def _check_anchors(inputs: RunInputs, anchors: Anchors) -> None:
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


def _empty_latents(backbone: Backbone, inputs: RunInputs, *, frames: int) -> Tensor:
    shape = inputs.spec.shape
    size = (inputs.batch, backbone.config.channels, frames, shape.latent_height, shape.latent_width)
    with torch.inference_mode(False):  # callers may write into the result
        return torch.empty(size, dtype=torch.float32)


def _measured(graph: TaskGraph, *, placement: Placement, report: RunReport) -> Timeline:
    in_rounds = run_lanes(graph, placement=placement, cost=rounds)
    return Timeline(
        source="measured",
        lanes=placement.lanes,
        spans=report.spans,
        rounds=max(span.end_s for span in in_rounds),
        peak_kv_bytes=report.peak_kv_bytes,
    )


def _log_rollout(spec: RolloutSpec, placement: Placement, *, seconds: float, sha256: str) -> None:
    log.info(
        "rollout: %dx%d, %d latent frames, %s, %s on %s: %.2f s, latents sha256 %s",
        spec.shape.width,
        spec.shape.height,
        spec.shape.latent_frames,
        spec.schedule,
        placement.layout,
        ",".join(lane.device for lane in placement.lanes),
        seconds,
        sha256,
    )
