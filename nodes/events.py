"""Progress bars, previews, what the page's timeline hears, and ComfyUI's cancel button.

The core calls back on the execution thread, so nothing here runs on a lane's. Events for the page are JSON, for the
client that queued the run: ``flashforward.span`` (tasks that ended, in batches), ``flashforward.preview`` (small
pictures by latent frame) and ``flashforward.done``.
"""

import base64
import io
import time
import uuid
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from PIL import Image
from server import PromptServer
from torch import Tensor
from torch.nn import functional

from flashforward_core.engine.events import AnchorBlockReady, ChunkReady, Event, TaskFinished, TaskSpan, Timeline
from flashforward_core.engine.rollout import Reused

from .devices import resolved
from .previews import Look
from .sockets import PlanValue

PREVIEW_SIDE = 512  # pixels, at most
THUMBNAIL_SIDE = 96  # pixels, at most
PAGE_INTERVAL_S = 0.1  # at most ten messages a second
BLOCKS_SHOWN = 3  # of anchors, on the node
PREVIEW_INTERVAL_S = 0.25  # pictures cost the execution thread time


def check_cancel() -> None:
    """Raise ComfyUI's own exception when the user has cancelled; on the execution thread only."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def to_image(frame_HWC: Tensor, *, scale: int = 1) -> Image.Image:
    """Turn a uint8 frame into an image, enlarged by a whole factor."""
    image = Image.fromarray(frame_HWC.cpu().numpy())
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.BILINEAR)


def data_url(image: Image.Image) -> str:
    """Encode a small JPEG that a page can show."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    small.save(file, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def show_text(text: str, *, node_id: str | None) -> None:
    """Show a text on a node in the editor."""
    if node_id is not None:
        PromptServer.instance.send_progress_text(text, node_id)


class Progress:
    """One node's progress bar with the latest picture on the node."""

    def __init__(self, *, node_id: str | None) -> None:
        self._bar = comfy.utils.ProgressBar(1, node_id=node_id)

    def show(self, done: int, total: int, *, preview: Tensor | None = None, scale: int = 1) -> None:
        """Move the bar; ``preview`` is a uint8 frame [H, W, 3]."""
        picture = None if preview is None else ("JPEG", to_image(preview, scale=scale), PREVIEW_SIDE)
        self._bar.update_absolute(done, total, picture)


class Gate:
    """Lets through one thing per interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last = float("-inf")

    def opens(self) -> bool:
        """Whether the interval has passed since it last did; asking and passing are one."""
        now = time.monotonic()
        if now - self._last < self._interval_s:
            return False
        self._last = now
        return True


class PageFeed:
    """Sends one run's events to the page, in batches."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._header = header
        self._gate = Gate(PAGE_INTERVAL_S)
        self._spans: list[dict[str, Any]] = []
        self._pictures: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}

    def add_span(self, span: TaskSpan, *, done: int, total: int) -> None:
        self._spans.append({"task": span.task, "lane": span.lane, "start_s": span.start_s, "end_s": span.end_s})
        self._counts = {"done": done, "total": total}

    def add_picture(self, kind: str, *, frame: int, image: Image.Image) -> None:
        """Keep a picture of an ``anchor`` or a ``chunk``, by its absolute latent frame."""
        self._pictures.append({"kind": kind, "frame": frame, "image": data_url(image)})

    def flush(self, *, now: bool = False) -> None:
        """Send what has come together, if it is time to."""
        if not (self._spans or self._pictures) or not (self._gate.opens() or now):
            return
        if self._spans:
            _send("flashforward.span", {**self._header, **self._counts, "spans": self._spans})
        if self._pictures:
            _send("flashforward.preview", {**self._header, "pictures": self._pictures})
        self._spans, self._pictures = [], []

    def done(self, *, timeline: Timeline | None, sha256: str | None, reused: Reused) -> None:
        """Say that the run has ended well."""
        self.flush(now=True)
        told = None if timeline is None else timeline.to_json()
        saved = {"chunks": reused.chunks, "forwards": reused.forwards}
        _send("flashforward.done", {**self._header, "timeline": told, "sha256": sha256, "reused": saved})


def _is_watched() -> bool:
    """Whether a page follows this run: pictures cost time. A page tells the server what it can show; scripts do not."""
    server = PromptServer.instance
    return bool(server.sockets_metadata.get(server.client_id, {}).get("feature_flags"))


def _send(name: str, data: dict[str, Any]) -> None:
    PromptServer.instance.send_sync(name, data, PromptServer.instance.client_id)


def _stacked(strips_HWC: Sequence[Tensor]) -> Tensor:
    """Put strips of pictures one below the other; shorter ones are filled up with black."""
    width = max(strip.shape[1] for strip in strips_HWC)
    return torch.cat([functional.pad(strip, (0, 0, 0, width - strip.shape[1])) for strip in strips_HWC])


class RolloutMonitor:
    """Shows a rollout's events on its node and on its plan's timeline: call it with each, on the execution thread.

    ``planner_only`` is for Plan Anchors, which runs on one lane. ``given_anchors`` tells that the planner only commits.
    ``shows_video`` is for nodes that end with a video, in whose place the editor would keep a picture for good.
    """

    def __init__(
        self,
        *,
        node_id: str | None,
        look: Look,
        plan: PlanValue,
        planner_only: bool = False,
        given_anchors: bool = False,
        shows_video: bool = False,
    ) -> None:
        self._progress = Progress(node_id=node_id)
        self._shows_video = shows_video
        self._look = look if _is_watched() else None
        self._scale = look.scale
        self._node_id = node_id
        self._positions = plan.spec.anchor_positions()
        self._blocks = plan.spec.anchor_blocks()
        devices = resolved(plan.devices)[: 1 if planner_only else None]
        self._of = {"anchor block": len(self._blocks), "chunk": 0 if planner_only else plan.spec.num_chunks}
        if given_anchors:
            self._of["anchor block"] = 0
        self._where = _where(devices)
        self._ready = dict.fromkeys(self._of, 0)
        self._done, self._total = 0, 1
        self._picture: Tensor | None = None
        self._anchors: list[Tensor] = []  # a strip of pictures per block
        self._pictures, self._texts = Gate(PREVIEW_INTERVAL_S), Gate(PAGE_INTERVAL_S)
        lanes = [{"name": f"lane{index}", "device": device} for index, device in enumerate(devices)]
        header = {"node": node_id, "plan": plan.node_id, "run": uuid.uuid4().hex, "lanes": lanes}
        self._feed = PageFeed({**header, "planner_only": planner_only, "given_anchors": given_anchors})

    def __call__(self, event: Event) -> None:
        if isinstance(event, TaskFinished):
            self._done, self._total = event.done, event.total
            self._feed.add_span(event.span, done=event.done, total=event.total)
        elif isinstance(event, ChunkReady):
            self._show_latents("chunk", frames=event.frames, latents_BCFHW=event.latents, only=len(event.frames) // 2)
            self._ready["chunk"] += 1
        elif isinstance(event, AnchorBlockReady):
            if self._of["anchor block"]:  # anchors that are given are known already
                frames = [self._positions[anchor] for anchor in self._blocks[event.index]]
                self._show_latents("anchor", frames=frames, latents_BCFHW=event.latents)
            self._ready["anchor block"] += 1
        self._show()

    def finish(
        self,
        *,
        timeline: Timeline | None = None,
        sha256: str | None = None,
        reused: Reused = Reused(),  # noqa: B008 (frozen)
    ) -> None:
        """Show the last picture and tell the page that the run has ended well."""
        self._show(now=True)
        self._feed.done(timeline=timeline, sha256=sha256, reused=reused)

    def _show_latents(self, kind: str, *, frames: Sequence[int], latents_BCFHW: Any, only: int | None = None) -> None:
        """Show latent frames at absolute positions, or ``only`` one of them: a look may need the others to follow."""
        if self._look is None:
            return
        pictures = self._look.frames(latents_BCFHW[:1], positions=frames)[0]
        shown = range(len(frames)) if only is None else [only]
        for n in shown:
            self._feed.add_picture(kind, frame=frames[n], image=to_image(pictures[n]))
        if kind == "anchor":
            self._anchors = [*self._anchors, torch.cat(tuple(pictures), dim=1)][-BLOCKS_SHOWN:]
            self._picture = _stacked(self._anchors)
        else:
            self._picture = pictures[shown[-1]]

    def _show(self, *, now: bool = False) -> None:
        picture = None
        if self._picture is not None and not self._shows_video and (self._pictures.opens() or now):
            picture, self._picture = self._picture, None
        self._progress.show(self._done, self._total, preview=picture, scale=self._scale)
        if self._texts.opens() or now:
            show_text(self.text(), node_id=self._node_id)
        self._feed.flush(now=now)

    def text(self) -> str:
        """Say how far the run is: ``anchor block 2/3 · chunk 14/27 · 2 GPUs``."""
        parts = [f"{what} {self._ready[what]}/{total}" for what, total in self._of.items() if total]
        return " · ".join([*parts, self._where])


def _where(devices: tuple[str, ...]) -> str:
    kind = "GPU" if all(device.startswith("cuda") for device in devices) else "lane"
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"
