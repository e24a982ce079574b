"""The façade: specs and weights in; anchors, latents, frames and a timeline out."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from ..graph.halves import in_halves
from ..graph.schedules import build_graph
from ..graph.task import Slot, Space, TaskGraph
from ..model.roles import Backbone
from ..model.tiny_vae import TinyVae, decoder_for
from ..specs import RolloutSpec
from .anchors import Anchors, check_anchors, plan_anchors, reseed
from .budget import fit_run
from .cost import rounds
from .events import AnchorBlockReady, ChunkReady, Event, FramesReady, LaneInfo, TaskFinished, Timeline
from .executor import runner
from .inputs import checked_inputs, empty_latents
from .lanes import DevicePlan
from .latent_file import HeldLatents, LatentFile, LatentSink
from .ops import RunInputs
from .parts import run_in_parts, runs_in_parts
from .placement import Placement, lanes_for, place
from .reuse import Resume, Reused, remember, resume, whole
from .run import RunReport, bank_shape
from .simulate import run_lanes

__all__ = [
    "Anchors",
    "DevicePlan",
    "RenderResult",
    "Reused",
    "plan_anchors",
    "render",
    "reseed",
    "stream_decode",
]

log = logging.getLogger(__name__)

Callback = Callable[[Event], None]
CheckCancel = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderResult:
    """A finished render."""

    latents_BCFHW: Tensor
    """Normalised, float32 on the CPU; without frames if they were not to be held."""
    timeline: Timeline
    """Measured; what was reused is not on it."""
    sha256: str
    """Of the latents' bytes: the same for any number of devices, layout and order, and whatever was reused."""
    reused: Reused = Reused()  # noqa: RUF009 (frozen)
    """What came from earlier renders."""


def render(
    backbone: Backbone,
    spec: RolloutSpec,
    texts: Sequence[Tensor],
    *,
    anchors: Anchors | None = None,
    start: Tensor | None = None,
    devices: DevicePlan = DevicePlan(),  # noqa: B008 (frozen)
    decode: bool = False,
    reuse_bytes: int = 0,
    hold_latents: bool = True,
    on_event: Callback | None = None,
    check_cancel: CheckCancel | None = None,
) -> RenderResult:
    """Run the whole rollout over ``devices``; without ``anchors`` it plans them on the way.

    ``texts`` are prompt embeddings [B, text_len, text_dim], indexed by ``PromptSpan.prompt``; row b of the batch has
    the seed ``spec.seed + b``. ``start`` holds the video's first latent frames, normalised [B, C, F, h, w]; without it
    the anchors' own start is used. Chunks that it covers are committed clean (t=0), and what is left of it stays as it
    is while its chunk is denoised. With ``decode``, frames arrive as ``FramesReady`` events, in order. ``on_event`` and
    ``check_cancel`` run on the calling thread, the latter at least every 50 ms; what they raise stops every lane within
    one forward and propagates. ``reuse_bytes`` of host memory hold what later renders with this backbone can go on
    from (see ``engine.reuse``); reused chunks arrive as events too, first. 0 reuses nothing and drops what is held.
    A long rollout runs in parts (``engine.parts``), which reuse nothing, so that its memory does not grow; without
    ``hold_latents`` finished latents are in no memory either, but in their events.
    Raises ``ValueError`` for inputs that do not fit, ``DoesNotFit`` for too little memory, ``TaskFailed`` when a task
    fails, ``LaneLost`` when a machine of a Ray cluster does.
    """
    inputs = _inputs(backbone, spec, texts, anchors=anchors, start=start)
    if decode and backbone.vae is None:
        raise ValueError("decode=True needs a backbone with an autoencoder; load one, or decode the latents elsewhere")
    if devices.decode in ("any", "split") and devices.ray_address:
        raise ValueError(
            f"decode={devices.decode!r} does not go with ray_address, since machines keep their decoder; use 'own'"
        )
    if decode and devices.decode == "split" and isinstance(backbone.vae, TinyVae):
        raise ValueError("decode='split' is for Wan's autoencoder, and this decoder is small; use decode='own'")
    out = _sink(backbone, inputs, held=hold_latents)
    began = time.perf_counter()
    if runs_in_parts(inputs.spec, devices):
        _check_reuse(reuse_bytes)
        backbone.store.shrink(0)
        events = _Events(out, inputs.spec, on_event=on_event)
        events.replay(_given_chunks(inputs))
        placement, timeline = run_in_parts(
            backbone,
            inputs,
            devices=devices,
            decode=decode,
            given_anchors=anchors is not None,
            on_event=events,
            check_cancel=check_cancel,
        )
        reused = Reused()
    else:
        graph = build_graph(inputs.spec, decode=decode, given_anchors=anchors is not None)
        graph = in_halves(graph) if devices.decode == "split" else graph
        placement, timeline, reused = _run_whole(
            backbone,
            inputs,
            graph=graph,
            devices=devices,
            out=out,
            reuse_bytes=reuse_bytes,
            on_event=on_event,
            check_cancel=check_cancel,
        )
    digest = out.sha256()
    _log_rollout(inputs.spec, placement, seconds=time.perf_counter() - began, sha256=digest, reused=reused)
    held = out.out_BCFHW if isinstance(out, HeldLatents) else empty_latents(backbone, inputs, frames=0)
    return RenderResult(latents_BCFHW=held, timeline=timeline, sha256=digest, reused=reused)


def _run_whole(
    backbone: Backbone,
    inputs: RunInputs,
    *,
    graph: TaskGraph,
    devices: DevicePlan,
    out: LatentSink,
    reuse_bytes: int,
    on_event: Callback | None,
    check_cancel: CheckCancel | None,
) -> tuple[Placement, Timeline, Reused]:
    """Run a rollout that is planned as one graph, or what earlier renders leave of it to run."""
    lanes = lanes_for(devices.resolve())
    alike = devices.pairable(inputs.spec)
    run = _resume(graph, inputs, backbone, devices=devices, lanes=lanes, reuse_bytes=reuse_bytes)

    @cache
    def placed(order: str) -> Placement:
        return place(run.graph, lanes=lanes, layout=devices.layout, order=order, decode=devices.decode, pairable=alike)

    placement = placed(devices.order)
    fit = fit_run(
        backbone, run.graph, spec=inputs.spec, batch=inputs.batch, devices=devices, placed=placed, pages=run.pages
    )
    skipped = len(graph) - len(run.graph)
    events = _Events(out, inputs.spec, on_event=on_event, skipped=skipped, keeps=bool(run.keys))
    events.replay(_given_chunks(inputs))
    events.replay(run.latents)
    report = runner(devices.ray_address)(
        run.graph,
        inputs=replace(inputs, given={**inputs.given, **run.latents}),
        backbone=backbone,
        placement=placement,
        on_event=events,
        check_cancel=check_cancel,
        resume=run,
        fast=devices.fast,
        fit=fit,
    )
    if run.keys:
        remember(run, store=backbone.store, latents=events.latents, kv=report.kept, budget=reuse_bytes)
    return placement, _measured(run.graph, placement=placement, report=report), run.reused


def _sink(backbone: Backbone, inputs: RunInputs, *, held: bool) -> LatentSink:
    out = empty_latents(backbone, inputs, frames=inputs.spec.shape.latent_frames if held else 0)
    if held:
        return HeldLatents(out)
    batch, channels, _, height, width = out.shape
    return LatentFile((batch, channels, inputs.spec.shape.latent_frames, height, width))


def _given_chunks(inputs: RunInputs) -> dict[Slot, Tensor]:
    return {slot: value for slot, value in inputs.given.items() if slot.space is Space.LATENT}


def stream_decode(
    backbone: Backbone, latents_BCFHW: Tensor, *, starts: Sequence[int] = (), check_cancel: CheckCancel | None = None
) -> Iterator[Tensor]:
    """Yield video frames, uint8 [F, H, W, 3] on the CPU, one latent frame's at a time.

    ``latents_BCFHW`` is normalised with B = 1, and its scenes after the first begin at ``starts``. More videos raise
    ``ValueError``, so does a backbone without an autoencoder.
    """
    if backbone.vae is None:
        raise ValueError("the backbone has no autoencoder; load one, or decode the latents elsewhere")
    if latents_BCFHW.shape[0] != 1:
        raise ValueError(f"latents hold {latents_BCFHW.shape[0]} videos; decode one at a time")
    frames = decoder_for(backbone.vae).stream(latents_BCFHW, starts=starts)
    return _unless_cancelled(frames, count=latents_BCFHW.shape[2], check_cancel=check_cancel)


def _unless_cancelled(frames: Iterator[Tensor], *, count: int, check_cancel: CheckCancel | None) -> Iterator[Tensor]:
    for _ in range(count):
        if check_cancel is not None:
            check_cancel()
        yield next(frames)[0]


def latents_sha256(latents: Tensor) -> str:
    """Return the SHA-256 of the latents' bytes, as contiguous float32."""
    return HeldLatents(latents).sha256()


def _inputs(
    backbone: Backbone,
    spec: RolloutSpec,
    texts: Sequence[Tensor],
    *,
    anchors: Anchors | None,
    start: Tensor | None,
) -> RunInputs:
    if anchors is None:
        return checked_inputs(backbone, spec, texts, start=start)
    inputs = checked_inputs(backbone, spec, texts, start=anchors.start if start is None else start)
    check_anchors(inputs, anchors)
    return replace(inputs, given={**inputs.given, **replace(anchors, spec=inputs.spec).slots()})


def _resume(
    graph: TaskGraph,
    inputs: RunInputs,
    backbone: Backbone,
    *,
    devices: DevicePlan,
    lanes: Sequence[LaneInfo],
    reuse_bytes: int,
) -> Resume:
    _check_reuse(reuse_bytes)
    backbone.store.shrink(reuse_bytes)
    # what a KV policy keeps is in no snapshot, keys of slots tell neither of sparse attention nor of which forwards ran
    # as one, and another machine's KV stays there
    keyed = not (inputs.spec.compacts or inputs.spec.sparse or devices.fast.batch_diagonal)
    if not reuse_bytes or not keyed or devices.ray_address:
        return whole(graph, inputs.spec)
    kv = devices.memory.kv
    page_bytes = bank_shape(backbone, inputs, packed=kv == "fp8").bank_bytes(frames=1)
    return resume(
        graph,
        inputs=inputs,
        backbone=backbone,
        devices=tuple(lane.device for lane in lanes),
        fast=devices.fast,
        kv_form=kv,
        page_bytes=page_bytes,
        budget=reuse_bytes,
    )


def _check_reuse(reuse_bytes: int) -> None:
    if reuse_bytes < 0:
        raise ValueError(f"reuse_bytes={reuse_bytes} is below 0; use 0 to reuse nothing")


class _Events:
    """Takes a rollout's events: fills in the result, counts reused work as done, and passes them on."""

    def __init__(
        self,
        out: LatentSink,
        spec: RolloutSpec,
        *,
        on_event: Callback | None,
        skipped: int = 0,
        keeps: bool = False,
    ) -> None:
        """``keeps`` says that later renders may want ``latents``: what has been made, by slot."""
        self.latents: dict[Slot, Tensor] = {}
        self._keeps = keeps
        self._out = out
        self._spec = spec
        self._on_event = on_event
        self._skipped = skipped
        self._early: dict[int, FramesReady] = {}
        self._next_frames = 0

    def replay(self, there: Mapping[Slot, Tensor]) -> None:
        """Tell what is there already, as if it had just been made."""
        for slot, latents in there.items():
            if slot.space is Space.LATENT:
                self(ChunkReady(index=slot.index, frames=self._spec.chunk(slot.index), latents=latents))
            else:
                self(AnchorBlockReady(index=slot.index, latents=latents))

    def __call__(self, event: Event) -> None:
        if isinstance(event, ChunkReady):
            self._out.write(event.frames, event.latents)
            self._keep(Space.LATENT, event)
        elif isinstance(event, AnchorBlockReady):
            self._keep(Space.ANCHOR_LATENT, event)
        elif isinstance(event, TaskFinished):
            event = replace(event, done=event.done + self._skipped, total=event.total + self._skipped)
        if isinstance(event, FramesReady):
            self._in_order(event)
        elif self._on_event is not None:
            self._on_event(event)

    def _in_order(self, event: FramesReady) -> None:
        """Pass frames on in the order of the chunks: lanes that take turns do not deliver in it."""
        self._early[event.index] = event
        while self._next_frames in self._early:
            found = self._early.pop(self._next_frames)
            self._next_frames += 1
            if self._on_event is not None:
                self._on_event(found)

    def _keep(self, space: Space, event: ChunkReady | AnchorBlockReady) -> None:
        if self._keeps:
            self.latents[Slot(space=space, index=event.index, level=self._spec.stages.num_stages)] = event.latents


def _measured(graph: TaskGraph, *, placement: Placement, report: RunReport) -> Timeline:
    in_rounds = run_lanes(graph, placement=placement, cost=rounds)
    return Timeline(
        source="measured",
        lanes=placement.lanes,
        spans=report.spans,
        rounds=max((span.end_s for span in in_rounds), default=0.0),
        peak_kv_bytes=report.peak_kv_bytes,
        launches=report.launches,
    )


def _log_rollout(spec: RolloutSpec, placement: Placement, *, seconds: float, sha256: str, reused: Reused) -> None:
    log.info(
        "rollout: %dx%d, %d latent frames, %s, %s on %s: %.2f s, reused %d of %d chunks (%d forwards), "
        "latents sha256 %s",
        spec.shape.width,
        spec.shape.height,
        spec.shape.latent_frames,
        spec.schedule,
        placement.layout,
        ",".join(lane.device for lane in placement.lanes),
        seconds,
        reused.chunks,
        spec.num_chunks,
        reused.forwards,
        sha256,
    )
