"""Prompts over time: from text to CONDITIONING, and from CONDITIONING to a rollout's prompt spans.

Every entry of a CONDITIONING is a prompt. Ours carry their time under ``TIME_KEY``, which other nodes pass on; native
ones get theirs from Conditioning Set Timestep Range, whose shares then count over the length of the video.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from flashforward_core.model.roles import Backbone
from flashforward_core.prompts import Moment, PromptTime, TimedPrompt, parse, spans
from flashforward_core.scenes import advice
from flashforward_core.specs import RolloutSpec, VideoShape

from .bridge import prompt_text
from .events import show_text
from .sockets import CATEGORY, BackboneSocket

log = logging.getLogger(__name__)
TIME_KEY = "flashforward_time"
Conditioning = list[list[Any]]
Encode = Callable[[str], Conditioning]


def encode_with_backbone(backbone: Backbone, text: str) -> Conditioning:
    """Encode one prompt with the backbone's own text encoder."""
    if backbone.text_encoder is None:
        raise ValueError("backbone has no text encoder of its own; use CLIP Text Encode with Wan's text encoder")
    if told := advice(text):
        log.warning("%s", told)
    return [[backbone.text_encoder.encode([text]), {}]]


def encode_with_clip(clip: Any, text: str) -> Conditioning:
    """Encode one prompt as ComfyUI's CLIP Text Encode does."""
    found: Conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(text))
    return found


def encode_schedule(prompts: Sequence[TimedPrompt], *, encode: Encode) -> Conditioning:
    """Encode prompts, each with its time; a single prompt without an end holds for ever and carries none."""
    if len(prompts) == 1 and prompts[0].time.end is None:
        return encode(prompts[0].text)
    return [
        [embedding, {**more, TIME_KEY: prompt.time}] for prompt in prompts for embedding, more in encode(prompt.text)
    ]


def with_prompts(spec: RolloutSpec, positive: Conditioning, backbone: Backbone) -> tuple[RolloutSpec, list[Tensor]]:
    """Return ``spec`` with the prompts' spans, and their embeddings in the order of the spans.

    Raises ``ValueError`` for prompts without times beside others, for times that do not fit the video and for
    embeddings of another text encoder.
    """
    timed = [(_time(entry[1], alone=len(positive) == 1), entry[0]) for entry in positive]
    timed.sort(key=partial(_starts, shape=spec.shape))
    prompts = spans([time for time, _ in timed], spec.shape)
    return replace(spec, prompts=prompts), [prompt_text(embedding, backbone) for _, embedding in timed]


def prompt_advice(spec: RolloutSpec, *, node_id: str | None) -> list[str]:
    """Say on the node and in the log when a change of prompt hardly reaches the anchors that will be planned."""
    if not spec.soft_prompts:
        return []
    log.warning("%s", spec.soft_prompts)
    show_text(spec.soft_prompts, node_id=node_id)
    return [spec.soft_prompts]


def _starts(timed: tuple[PromptTime, Any], *, shape: VideoShape) -> float:
    return timed[0].start.video_frame(shape)


def _time(more: dict[str, Any], *, alone: bool) -> PromptTime:
    if TIME_KEY in more:
        found: PromptTime = more[TIME_KEY]
        return found
    if "start_percent" in more or "end_percent" in more:
        start, end = more.get("start_percent", 0.0), more.get("end_percent", 1.0)
        return PromptTime(start=Moment(share=start), end=Moment(share=end))
    if not alone:
        raise ValueError(
            "positive combines prompts that have no times; use Prompt Schedule, or give each its share of the video "
            "with Conditioning Set Timestep Range"
        )
    return PromptTime(start=Moment())


class PromptSchedule(io.ComfyNode):
    """Encode prompts that follow each other in time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardPromptSchedule",
            display_name="Prompt Schedule",
            category=CATEGORY,
            description="Encodes prompts that follow each other: a calm lake at dawn [5s] | the same lake at night "
            "[10s#]. A prompt takes effect with the first chunk that begins after its start.",
            inputs=[
                io.Clip.Input("clip", optional=True, tooltip="Wan's text encoder from Load CLIP."),
                BackboneSocket.Input(
                    "backbone", optional=True, tooltip="The embedded backbone, which brings its own text encoder."
                ),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="a red balloon drifts right over green hills at noon [5s] | "
                    "a red balloon drifts right over green hills at night",
                    tooltip="Prompts with | between them. [5s] is how long one holds, [80f] counts video frames, "
                    "[5s-15s] says from when to when, [10s#] starts with a hard cut. The last one holds to the end.",
                ),
                io.Float.Input(
                    "fps",
                    default=16.0,
                    min=1.0,
                    max=240.0,
                    step=0.01,
                    tooltip="The frame rate at which times in frames count; times in seconds do not need it.",
                ),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="For Plan Anchors and the render.")
            ],
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool:
        if isinstance(inputs.get("text"), str):  # a linked text is known, and read, when the node runs
            parse(inputs["text"])
        return True

    @classmethod
    def execute(cls, *, text: str, fps: float, clip: Any = None, backbone: Backbone | None = None) -> io.NodeOutput:
        if (clip is None) == (backbone is None):
            told = "both unconnected" if clip is None else "both connected"
            raise ValueError(f"clip and backbone are {told}; connect the one whose text encoder to use")
        prompts = [replace(prompt, time=at_fps(prompt.time, fps)) for prompt in parse(text)]
        encode = partial(encode_with_clip, clip) if clip is not None else partial(encode_with_backbone, backbone)
        return io.NodeOutput(encode_schedule(prompts, encode=encode))


def at_fps(time: PromptTime, fps: float) -> PromptTime:
    """Count a prompt's times in frames at ``fps``."""
    return replace(time, start=time.start.at_fps(fps), end=None if time.end is None else time.end.at_fps(fps))
