"""Run the rollout and write its video meanwhile: finished chunks are decoded on the rollout's own devices."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from comfy.model_management import InterruptProcessingException
from comfy_api.latest import InputImpl, io, ui
from torch import Tensor

from flashforward_core.engine.events import Event, FramesReady
from flashforward_core.engine.parts import runs_in_parts
from flashforward_core.engine.ray_lanes import LaneLost
from flashforward_core.engine.replicas import copy_modules, device_of
from flashforward_core.engine.rollout import Anchors, RenderResult, render
from flashforward_core.model.roles import Backbone

from .bridge import from_latent
from .decoders import FULL, check_decoder, check_latents, decoder_input, decoder_stamp, small_decoder
from .events import RolloutMonitor, check_cancel, show_text
from .native_vae import streaming_module
from .previews import look_of
from .prompts import prompt_advice, with_prompts
from .rendering import anchors_input, rollout_inputs, start_input
from .residency import make_resident
from .sockets import CATEGORY, PlanValue, TimelineSocket
from .video import metadata, new_path

if TYPE_CHECKING:
    from flashforward_core.media import VideoWriter

CPU = torch.device("cpu")
_copies: "weakref.WeakKeyDictionary[torch.nn.Module, torch.nn.Module]" = weakref.WeakKeyDictionary()
"""ComfyUI's VAEs -> our copies in host memory: for a new autoencoder the engine moves all weights again."""


def with_decoder(backbone: Backbone, *, vae: Any, decoder: str) -> Backbone:
    """Return a handle of its own with what is to decode; ``ValueError`` says what cannot, or that nothing does."""
    if decoder != FULL:
        check_latents(backbone, decoder)
        module: torch.nn.Module | None = small_decoder(decoder)
    elif vae is not None:
        if backbone.vae is not None:
            raise ValueError("vae is connected, but this backbone's latents are its own decoder's; disconnect vae")
        module = _copy_of(vae)
    elif backbone.vae is not None:
        return replace(backbone)  # what a Wavefront Render holds for later stays
    else:
        raise ValueError("this backbone has no autoencoder; connect vae (Wan 2.1's), or choose a decoder")
    assert module is not None
    device = device_of(backbone)
    if device != CPU:
        _, module = copy_modules(({}, module), device=device)
    return replace(backbone, vae=module, source=None)


def _copy_of(vae: Any) -> torch.nn.Module:
    network = getattr(vae, "first_stage_model", None)
    if network is not None and network in _copies:
        return _copies[network]
    module = streaming_module(vae, device=CPU)
    if module is None:
        raise ValueError(
            "vae is not Wan 2.1's, which alone decodes while the video is rendered; use Wavefront Render and Decode & "
            "Save Video"
        )
    _copies[network] = module
    return module


class RenderVideo(io.ComfyNode):
    """Render all chunks as a wavefront, decode and encode them on the way."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardRenderVideo",
            display_name="Wavefront Render to Video",
            category=CATEGORY,
            description="Renders the planned video like Wavefront Render and writes an mp4 (h264) with the workflow "
            "inside while it renders: chunks are decoded as they are finished, on the devices and where the Devices "
            "node says. No latents are kept, so a long video takes no more memory than a short one.",
            inputs=[
                *rollout_inputs(),
                io.String.Input(
                    "filename_prefix",
                    default="video/FlashForward",
                    tooltip="Where to write in ComfyUI's output folder. %date:yyyy-MM-dd% and the like are filled in.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="Wan 2.1's VAE from Load VAE, for Wan models. The embedded backbone has its own.",
                ),
                anchors_input(),
                start_input(),
                decoder_input(),
            ],
            outputs=[
                io.Video.Output("video", display_name="video", tooltip="The file that was written."),
                TimelineSocket.Output("timeline", display_name="timeline", tooltip="What ran where and when."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, decoder: str | None = None) -> bool:
        check_decoder(decoder)
        return True

    @classmethod
    def fingerprint_inputs(cls, decoder: str | None = None, **inputs: Any) -> str:
        return decoder_stamp(decoder)

    @classmethod
    def execute(
        cls,
        *,
        backbone: Backbone,
        plan: PlanValue,
        positive: list[list[Any]],
        seed: int,
        filename_prefix: str,
        vae: Any = None,
        anchors: Anchors | None = None,
        start_samples: dict[str, Tensor] | None = None,
        decoder: str = FULL,
    ) -> io.NodeOutput:
        decoding = with_decoder(backbone, vae=vae, decoder=decoder)
        spec, texts = with_prompts(replace(plan.spec, seed=seed), positive, backbone)
        # with anchors, Plan Anchors has said it
        told = prompt_advice(spec, node_id=cls.hidden.unique_id) if anchors is None else []
        node_id, shape = cls.hidden.unique_id, spec.shape
        path, subfolder = new_path(filename_prefix, width=shape.width, height=shape.height)
        monitor = RolloutMonitor(
            node_id=node_id,
            look=look_of(backbone),
            plan=replace(plan, spec=spec),
            given_anchors=anchors is not None,
            shows_video=True,
        )
        make_resident(decoding, plan, decodes=True)

        def run(on_event: Callable[[Event], None]) -> RenderResult:
            return render(
                decoding,
                spec,
                texts,
                anchors=anchors,
                start=None if start_samples is None else from_latent(start_samples, backbone).cpu(),
                devices=plan.devices,
                decode=True,
                hold_latents=False,
                on_event=on_event,
                check_cancel=check_cancel,
            )

        result = _written(path, run, plan=replace(plan, spec=spec), monitor=monitor, hidden=cls.hidden)
        monitor.finish(timeline=result.timeline, sha256=result.sha256)
        text = "\n".join([f"latents sha256 {result.sha256}", *told])
        show_text(text, node_id=node_id)
        shown = ui.PreviewVideo([ui.SavedResult(path.name, subfolder, io.FolderType.output)]).as_dict()
        video = InputImpl.VideoFromFile(str(path))
        return io.NodeOutput(video, result.timeline, ui={**shown, "text": [text], "sha256": [result.sha256]})


def _written(
    path: Path,
    run: Callable[[Callable[[Event], None]], RenderResult],
    *,
    plan: PlanValue,
    monitor: RolloutMonitor,
    hidden: Any,
) -> RenderResult:
    """Write the frames of a run. A lost machine, and a cancel of a long render, leave a video that plays."""
    from flashforward_core.media import VideoWriter

    shape = plan.spec.shape
    writer = VideoWriter(path, width=shape.width, height=shape.height, fps=shape.fps, metadata=metadata(hidden))

    def on_event(event: Event) -> None:
        if isinstance(event, FramesReady):
            writer.write(event.frames[0].numpy())
        monitor(event)

    keep = False
    try:
        result = run(on_event)
        writer.close()
        return result
    except LaneLost as error:
        keep = True
        raise LaneLost(f"{error}; {_left(writer)}") from error
    except InterruptProcessingException:
        if keep := runs_in_parts(plan.spec, plan.devices):  # hours of work, maybe
            show_text(f"cancelled; {_left(writer)}", node_id=hidden.unique_id)
        raise
    finally:
        writer.abort(keep=keep)


def _left(writer: "VideoWriter") -> str:
    if not writer.frames:
        return "nothing was saved, since the first chunk was not finished"
    return f"the first {writer.frames} frames are in {writer.partial_path.name}, in the video's folder"
