"""What to render: the plan, and the anchors that the planner makes from it."""

from dataclasses import replace
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from flashforward_core.engine.rollout import Anchors, plan_anchors
from flashforward_core.graph.anchors import RULES
from flashforward_core.graph.schedules import SCHEDULES, spec_for
from flashforward_core.model.presets import PLAN_MODES, fit_spec
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import AnchorPlan, History, RolloutSpec, StageSchedule, VideoShape

from .bridge import to_latent
from .devices import default_devices
from .events import RolloutMonitor, check_cancel, show_text
from .loading import check_size
from .pictures import encode_pictures
from .previews import look_of
from .prompts import prompt_advice, with_prompts
from .residency import make_resident
from .sockets import (
    CATEGORY,
    AnchorsSocket,
    BackboneSocket,
    DevicesSocket,
    KVPolicySocket,
    PlanSocket,
    PlanValue,
    expert,
    seed_input,
)
from .summary import describe

MAX_SECONDS = 3600.0


def build_spec(
    *,
    width: int,
    height: int,
    seconds: float,
    fps: float,
    anchor_stride: int,
    schedule: str,
    anchor_rule: str,
    history: int,
    planner_history: int,
    chunk_frames: int,
    sink: int,
    shift: float,
) -> RolloutSpec:
    """Make the specification from the node's values; ``ValueError`` names the one that cannot work."""
    if seconds > MAX_SECONDS:
        raise ValueError(f"seconds={seconds:g} is above {MAX_SECONDS:g}; use seconds={MAX_SECONDS:g} or less")
    _ = RULES[anchor_rule], SCHEDULES[schedule]  # unknown names are refused before anything runs
    spec = RolloutSpec(
        shape=VideoShape.from_seconds(seconds, width=width, height=height, fps=fps),
        schedule=schedule,
        chunk_frames=chunk_frames,
        stages=StageSchedule(shift=shift),
        anchors=AnchorPlan(stride=anchor_stride, rule=anchor_rule),
        history=History(chunks=history, planner_blocks=planner_history, sink=sink),
    )
    return spec_for(spec)


class Plan(io.ComfyNode):
    """Choose size, length and schedule; says what the run will do before it runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardPlan",
            display_name="Plan",
            category=CATEGORY,
            description="Chooses size, length and schedule, and says at once how many forwards and rounds the video "
            "takes. The embedded backbone makes 192x128 only.",
            inputs=[
                BackboneSocket.Input("backbone", tooltip="The model that will render."),
                *_video_inputs(),
                *_schedule_inputs(),
                DevicesSocket.Input(
                    "devices", optional=True, tooltip="Where to run; unconnected: ComfyUI's own device."
                ),
                KVPolicySocket.Input(
                    "kv_policy", optional=True, tooltip="How the history is kept small; unconnected: history and sink."
                ),
                expert(
                    io.Combo,
                    "preset",
                    options=list(PLAN_MODES),
                    default="auto",
                    optional=True,
                    tooltip="auto: on a backbone without FlashForward's role LoRAs, schedule=flashforward gives way to "
                    "the schedule, chunk, window, sink and steps that the backbone is made for. manual: as set.",
                ),
            ],
            outputs=[
                PlanSocket.Output("plan", display_name="plan", tooltip="For Plan Anchors and Wavefront Render."),
                io.Int.Output("latent_frames", display_name="latent_frames", tooltip="The video's latent frames."),
                io.String.Output("summary", display_name="summary", tooltip="What the run will do, in words."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool | str:
        values = {name: inputs.get(name) for name in PLAN_VALUES}
        if None not in values.values():  # linked values are known, and checked, when the node runs
            build_spec(**values)  # a ValueError reaches the user once; a returned text once per input
        return True

    @classmethod
    def execute(
        cls, *, backbone: Backbone, devices: Any = None, kv_policy: Any = None, preset: str = "auto", **values: Any
    ) -> io.NodeOutput:
        asked = build_spec(**values)
        spec, said = fit_spec(asked, name=backbone.preset, reason=backbone.preset_reason, mode=preset)
        if kv_policy is not None:
            spec = replace(spec, kv_policy=kv_policy.kv_policy, sparse=kv_policy.sparse)
        check_size(backbone, width=spec.shape.width, height=spec.shape.height)
        where = devices if devices is not None else default_devices()
        plan = PlanValue(spec=spec, devices=where, node_id=cls.hidden.unique_id)
        summary = "\n".join(filter(None, (describe(plan, backbone), said)))
        show_text(summary, node_id=cls.hidden.unique_id)
        return io.NodeOutput(plan, spec.shape.latent_frames, summary, ui={"text": [summary]})


def _video_inputs() -> list[Any]:
    return [
        io.Int.Input("width", default=832, min=16, max=4096, step=16, tooltip="Pixels, a multiple of 16."),
        io.Int.Input("height", default=480, min=16, max=4096, step=16, tooltip="Pixels, a multiple of 16."),
        io.Float.Input(
            "seconds",
            default=20.0,
            min=0.1,
            max=MAX_SECONDS,
            step=0.25,
            tooltip="Length; the nearest possible one (4n+1 frames) is used and shown in the summary.",
        ),
        io.Float.Input(
            "fps", default=16.0, min=1.0, max=240.0, step=0.01, tooltip="Frames per second. Wan is made for 16."
        ),
    ]


def _schedule_inputs() -> list[Any]:
    return [
        io.Int.Input(
            "anchor_stride", default=10, min=1, max=1000, tooltip="Latent frames between anchors (4 video frames each)."
        ),
        expert(
            io.Combo,
            "schedule",
            options=list(SCHEDULES),
            default="flashforward",
            tooltip="How the rollout runs. flashforward: in-flight history and anchors, the fastest. The others are "
            "for models that are made for them, and for comparison.",
        ),
        expert(
            io.Combo,
            "anchor_rule",
            options=list(RULES),
            default="nearest",
            tooltip="Which three anchors a chunk reads.",
        ),
        expert(io.Int, "history", default=5, min=0, max=100, tooltip="Previous chunks that a chunk reads."),
        expert(
            io.Int,
            "planner_history",
            default=6,
            min=0,
            max=100,
            tooltip="Previous anchor blocks that an anchor block reads.",
        ),
        expert(io.Int, "chunk_frames", default=3, min=1, max=30, tooltip="Latent frames that are denoised together."),
        expert(
            io.Int,
            "sink",
            default=0,
            min=0,
            max=300,
            tooltip="Latent frames at the start that every chunk goes on reading; they count within the history.",
        ),
        expert(
            io.Float, "shift", default=5.0, min=0.1, max=100.0, step=0.1, tooltip="Time shift of the noise; Wan uses 5."
        ),
    ]


PLAN_VALUES = tuple(entry.id for entry in (*_video_inputs(), *_schedule_inputs()))


class PlanAnchors(io.ComfyNode):
    """Run the planner: the clean frames that hold a long video together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardPlanAnchors",
            display_name="Plan Anchors",
            category=CATEGORY,
            description="Makes the anchors, a few clean frames over the whole length that every chunk of the video "
            "then reads. It takes a fraction of the render's time, and is not run again when only the render changes.",
            inputs=[
                BackboneSocket.Input("backbone", tooltip="The model, with its planner role."),
                PlanSocket.Input("plan", tooltip="Size, length and anchor stride."),
                io.Conditioning.Input("positive", tooltip="The prompt."),
                seed_input("The anchors' noise. Frames that two strides share keep their noise."),
                AnchorsSocket.Input(
                    "keep",
                    optional=True,
                    tooltip="Anchors of this plan from Set Anchor: the locked ones stay, the others are planned again "
                    "around them.",
                ),
                io.Image.Input(
                    "start_image",
                    optional=True,
                    tooltip="A picture with which the video begins, or 4n+1 pictures of one to go on from.",
                ),
                io.Vae.Input(
                    "vae", optional=True, tooltip="Encodes start_image; the embedded backbone brings its own."
                ),
            ],
            outputs=[
                AnchorsSocket.Output("anchors", display_name="anchors", tooltip="For Wavefront Render."),
                io.Latent.Output(
                    "samples", display_name="samples", tooltip="The anchors as latent frames, to look at."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        *,
        backbone: Backbone,
        plan: PlanValue,
        positive: list[list[Any]],
        seed: int,
        keep: Anchors | None = None,
        start_image: Tensor | None = None,
        vae: Any = None,
    ) -> io.NodeOutput:
        spec, texts = with_prompts(replace(plan.spec, seed=seed), positive, backbone)
        told = prompt_advice(spec, node_id=cls.hidden.unique_id)
        start = None
        if start_image is not None:
            start = encode_pictures(start_image, name="start_image", shape=spec.shape, backbone=backbone, vae=vae)
        monitor = RolloutMonitor(
            node_id=cls.hidden.unique_id, look=look_of(backbone), plan=replace(plan, spec=spec), planner_only=True
        )
        make_resident(backbone, plan)
        anchors = plan_anchors(
            backbone,
            spec,
            texts,
            keep=keep,
            start=start,
            devices=plan.devices,
            on_event=monitor,
            check_cancel=check_cancel,
        )
        monitor.finish()
        return io.NodeOutput(anchors, to_latent(anchors.latents_BCAHW, backbone), ui={"text": told} if told else None)
