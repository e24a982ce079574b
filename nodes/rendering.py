"""Run the rollout."""

import logging
from dataclasses import replace
from typing import Any

from comfy.model_management import InterruptProcessingException
from comfy_api.latest import io
from torch import Tensor

from flashforward_core.engine.parts import runs_in_parts
from flashforward_core.engine.ray_lanes import LaneLost
from flashforward_core.engine.rollout import Anchors, render
from flashforward_core.model.roles import Backbone

from .bridge import SCENES, from_latent, to_latent
from .events import RolloutMonitor, check_cancel, show_text
from .previews import look_of
from .prompts import prompt_advice, with_prompts
from .rescue import FinishedChunks
from .residency import make_resident
from .sockets import (
    CATEGORY,
    AnchorsSocket,
    BackboneSocket,
    PlanSocket,
    PlanValue,
    TimelineSocket,
    expert,
    seed_input,
)

log = logging.getLogger(__name__)


def rollout_inputs() -> list[Any]:
    """Declare what every render needs."""
    return [
        BackboneSocket.Input("backbone", tooltip="The model, with its renderer role."),
        PlanSocket.Input("plan", tooltip="Size, length and schedule."),
        io.Conditioning.Input("positive", tooltip="The prompt."),
        seed_input("The render's noise, and the anchors' when no anchors are connected."),
    ]


def anchors_input() -> Any:
    """Declare anchors that are there already."""
    return AnchorsSocket.Input(
        "anchors", optional=True, tooltip="From Plan Anchors; unconnected: planned while rendering."
    )


def start_input() -> Any:
    """Declare latents with which the video begins."""
    return io.Latent.Input(
        "start_samples",
        optional=True,
        tooltip="Latents with which the video begins: a finished video to go on from, or a picture's. "
        "Unconnected: the start that the anchors were planned for, if any.",
    )


class Render(io.ComfyNode):
    """Render all chunks as a wavefront over the devices."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardRender",
            display_name="Wavefront Render",
            category=CATEGORY,
            description="Renders the planned video. With anchors connected it uses them as they are; without, it "
            "plans them itself while it renders. The same seed gives the same latents on any number of devices.",
            inputs=[
                *rollout_inputs(),
                anchors_input(),
                expert(
                    io.Float,
                    "reuse_gib",
                    default=8.0,
                    min=0.0,
                    max=1024.0,
                    step=0.5,
                    optional=True,
                    tooltip="Host memory, in GiB, that keeps what later renders can go on from: after a change of an "
                    "anchor or a prompt, only what depends on it runs. 0 keeps nothing.",
                ),
                start_input(),
            ],
            outputs=[
                io.Latent.Output("samples", display_name="samples", tooltip="For Decode & Save Video, or VAE Decode."),
                TimelineSocket.Output("timeline", display_name="timeline", tooltip="What ran where and when."),
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
        anchors: Anchors | None = None,
        reuse_gib: float = 8.0,
        start_samples: dict[str, Tensor] | None = None,
    ) -> io.NodeOutput:
        spec, texts = with_prompts(replace(plan.spec, seed=seed), positive, backbone)
        # with anchors, Plan Anchors has said it
        told = prompt_advice(spec, node_id=cls.hidden.unique_id) if anchors is None else []
        monitor = RolloutMonitor(
            node_id=cls.hidden.unique_id,
            look=look_of(backbone),
            plan=replace(plan, spec=spec),  # its prompts' hard cuts divide the anchors' blocks
            given_anchors=anchors is not None,
        )
        make_resident(backbone, plan)
        finished, long = FinishedChunks(monitor), runs_in_parts(spec, plan.devices)
        try:
            result = render(
                backbone,
                spec,
                texts,
                anchors=anchors,
                start=None if start_samples is None else from_latent(start_samples, backbone).cpu(),
                devices=plan.devices,
                reuse_bytes=int(reuse_gib * 2**30),
                on_event=finished if plan.devices.ray_address or long else monitor,  # nothing else can lose a lane
                check_cancel=check_cancel,
            )
        except LaneLost as error:
            saved = finished.save(backbone, spec, node_id=cls.hidden.unique_id)
            raise LaneLost(f"{error}; {saved}") from error
        except InterruptProcessingException:
            if long:  # hours of work, maybe: a cancel leaves a video that plays
                saved = finished.save(backbone, spec, node_id=cls.hidden.unique_id)
                show_text(f"cancelled; {saved}", node_id=cls.hidden.unique_id)
            raise
        reused = result.reused
        monitor.finish(timeline=result.timeline, sha256=result.sha256, reused=reused)
        text = "\n".join([f"latents sha256 {result.sha256}", *told])
        if reused.forwards:
            text += f"\nreused {reused.chunks} of {spec.num_chunks} chunks; {reused.forwards} forwards saved"
        show_text(text, node_id=cls.hidden.unique_id)
        samples: dict[str, Any] = to_latent(result.latents_BCFHW, backbone)
        if scenes := spec.scene_frames():
            samples[SCENES] = {"latent_frames": spec.shape.latent_frames, "starts": scenes}
        shown = {"text": [text], "sha256": [result.sha256], "reused_chunks": [reused.chunks]}
        return io.NodeOutput(samples, result.timeline, ui=shown)
