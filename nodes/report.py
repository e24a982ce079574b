"""What a run did and what its video is like, as a picture and as JSON."""

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from comfy_api.latest import InputImpl, io, ui
from PIL import Image
from torch import Tensor

from flashforward_core.engine.events import Timeline
from flashforward_core.specs import RolloutSpec

from .drawing import Curve, curves_plot, lanes_plot, stack
from .events import check_cancel
from .sockets import CATEGORY, PlanSocket, PlanValue, TimelineSocket

FRAMES_AT_ONCE = 16  # a long video is measured in the memory of a short one
DECIMALS = 4  # of curves in the JSON


class Report(io.ComfyNode):
    """Draw a run's timeline and its video's flicker, seams and drift."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardReport",
            display_name="Report",
            category=CATEGORY,
            description="Draws what a run did (which task ran where and when) and what its video is like: flicker, "
            "seams between chunks and at anchors, drift of the colours. Connect what there is.",
            inputs=[
                TimelineSocket.Input("timeline", optional=True, tooltip="From Wavefront Render."),
                io.Video.Input("video", optional=True, tooltip="The finished video, from Decode & Save Video."),
                PlanSocket.Input(
                    "plan",
                    optional=True,
                    tooltip="Says where chunks meet and anchors lie, so that seams can be measured.",
                ),
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="The plots."),
                io.String.Output("json", display_name="json", tooltip="The numbers."),
            ],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool | str:
        if "timeline" not in inputs and "video" not in inputs:
            return "timeline and video are both unconnected; connect at least one of them to report on"
        return True

    @classmethod
    def execute(
        cls, *, timeline: Timeline | None = None, video: Any = None, plan: PlanValue | None = None
    ) -> io.NodeOutput:
        if timeline is None and video is None:
            raise ValueError("timeline and video are both unconnected; connect at least one of them to report on")
        plots: list[Image.Image] = []
        told: dict[str, Any] = {}
        if timeline is not None:
            told["timeline"] = timeline_numbers(timeline)
            plots.append(lanes_plot(timeline, title=_timeline_title(told["timeline"])))
        if video is not None:
            told["video"], drawn = _video_report(video, spec=None if plan is None else plan.spec)
            plots += drawn
        image = _to_tensor(stack(plots))
        return io.NodeOutput(image, json.dumps(told, indent=1), ui=ui.PreviewImage(image, cls=cls))


def _to_tensor(image: Image.Image) -> Tensor:
    """Return ComfyUI's IMAGE: [1, H, W, 3] in 0..1."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)[None]


def timeline_numbers(timeline: Timeline) -> dict[str, Any]:
    """Return length, mean forwards and how busy each lane was, with the timeline itself."""
    length = timeline.length
    seconds: dict[str, list[float]] = {}
    busy = [0.0] * len(timeline.lanes)
    for span in timeline.spans:
        busy[span.lane] += span.end_s - span.start_s
        kind = "/".join(span.task.split("/")[:2]) if "/denoise/" in span.task or "/commit/" in span.task else "other"
        seconds.setdefault(kind, []).append(span.end_s - span.start_s)
    return {
        "length_s": length,
        "tasks": len(timeline.spans),
        "mean_s": {kind: sum(values) / len(values) for kind, values in sorted(seconds.items())},
        "busy": [share / length if length else 0.0 for share in busy],
        **timeline.to_json(),
    }


def _timeline_title(numbers: dict[str, Any]) -> str:
    busy = ", ".join(f"{share:.0%}" for share in numbers["busy"])
    return f"{numbers['source']}: {numbers['tasks']} tasks in {numbers['length_s']:.2f} s, busy {busy}"


def _video_report(video: Any, *, spec: RolloutSpec | None) -> tuple[dict[str, Any], list[Image.Image]]:
    """Measure a VIDEO; return the numbers and the plots. Seams need the plan, which says where they would be."""
    from flashforward_core.metrics import Layout, evaluate

    frames, fps = _frames_of(video)
    layout = Layout(fps=fps)
    if spec is not None and spec.chunk_frames > 1:
        stride = spec.anchors.stride if spec.anchors is not None and spec.anchors.stride > 1 else layout.anchor_stride
        layout = Layout(fps=fps, chunk_frames=spec.chunk_frames, anchor_stride=stride)
    found = evaluate(frames, layout=layout)
    numbers = found.to_json()
    del numbers["scene"]
    if spec is None or spec.chunk_frames < 2:
        del numbers["seam_chunk"]
    if spec is None or spec.anchors is None or spec.anchors.stride < 2:
        del numbers["seam_anchor"]
    change, drift = found.series.change, _drift(found.series.colour, fps=fps)
    numbers["curves"] = {"change": change.round(DECIMALS).tolist(), "drift": drift.round(DECIMALS).tolist()}
    return numbers, _video_plots(numbers, change=change, drift=drift, fps=fps, spec=spec)


def _video_plots(
    numbers: dict[str, Any], *, change: np.ndarray, drift: np.ndarray, fps: float, spec: RolloutSpec | None
) -> list[Image.Image]:
    length_s = (len(drift) - 1) / fps
    seams = [] if spec is None else _chunk_starts(spec, frames=len(drift), fps=fps)
    flicker = f"flicker {numbers['flicker']:.4f}, motion {numbers['motion']:.3f}: change from frame to frame, of 255"
    colour = f"drift {numbers['drift']['colour']:.2f}: distance of the mean colour from the first two seconds, of 255"
    return [
        curves_plot(
            [Curve(name="change", colour="#2c5796", values=change.tolist())],
            title=flicker,
            length_s=length_s,
            marks_s=seams,
            marks="chunks meet",
        ),
        curves_plot([Curve(name="drift", colour="#b3261e", values=drift.tolist())], title=colour, length_s=length_s),
    ]


def _chunk_starts(spec: RolloutSpec, *, frames: int, fps: float) -> list[float]:
    """Return the seconds at which chunks but the first begin: latent frame n begins at video frame 4n - 3."""
    firsts = [4 * spec.chunk(chunk).start - 3 for chunk in range(1, spec.num_chunks)]
    return [first / fps for first in firsts if first < frames]


def _drift(colour: np.ndarray, *, fps: float) -> np.ndarray:
    """Return each frame's distance from the mean colour of the beginning, in levels [F]."""
    from flashforward_core.metrics.drift import ends

    first, _ = ends(len(colour), fps=fps)
    return np.asarray(np.linalg.norm(colour - colour[first].mean(axis=0), axis=1))


def _frames_of(video: Any) -> tuple[Iterator[np.ndarray], float]:
    """Return a VIDEO's uint8 frames [F, H, W, 3], a few at a time, and its frame rate. Files are read as a stream."""
    source = video.get_stream_source() if isinstance(video, InputImpl.VideoFromFile) else None
    if isinstance(source, str):
        from flashforward_core.media import probe, read_frames

        return _cancellable(read_frames(source, chunk=FRAMES_AT_ONCE)), float(probe(source).fps)
    parts = video.get_components()
    frames = (part[..., :3].mul(255).round().byte().numpy() for part in parts.images.cpu().split(FRAMES_AT_ONCE))
    return _cancellable(frames), float(Fraction(parts.frame_rate))


def _cancellable(chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    for chunk in chunks:
        check_cancel()
        yield chunk
