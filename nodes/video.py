"""Latents to a video file."""

import contextlib
import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_management
import folder_paths
from comfy.cli_args import args
from comfy_api.latest import InputImpl, io, ui
from torch import Tensor

from flashforward_core.model.roles import Backbone
from flashforward_core.model.tiny_vae import decoder_for
from flashforward_core.model.vae import Decoder, StreamingDecoder, normalise, to_uint8
from flashforward_core.specs import SPATIAL_FACTOR, TEMPORAL_FACTOR

from .bridge import from_latent, scene_starts, video_samples
from .decoders import FULL, check_decoder, check_latents, decoder_input, decoder_stamp, small_decoder
from .devices import default_device
from .events import Progress, check_cancel
from .native_vae import streaming_decoder
from .sockets import CATEGORY, BackboneSocket

log = logging.getLogger(__name__)
NOTHING_DECODES = "vae and backbone are both unconnected; connect one of them to decode with, or choose a decoder"
LATENTS_AT_ONCE = 3  # decoded and encoded together: memory stays flat in the video's length


def _stream_embedded(samples: dict[str, Tensor], backbone: Backbone) -> Iterator[Tensor]:
    """Yield uint8 frames [F, H, W, 3], a few latent frames at a time."""
    return _stream(StreamingDecoder(backbone.vae), from_latent(samples, backbone), starts=scene_starts(samples))


def _stream_small(samples: dict[str, Tensor], name: str) -> Iterator[Tensor]:
    """Like ``_stream_embedded``, with a file of models/vae_approx on ComfyUI's device."""
    latents, device, vae = video_samples(samples), default_device(), copy.deepcopy(small_decoder(name))
    pixels = latents.shape[-2] * latents.shape[-1] * SPATIAL_FACTOR**2
    comfy.model_management.free_memory(pixels * vae.numbers_per_pixel * vae.dtype.itemsize, device)
    return _stream(decoder_for(vae.to(device)), _normalised(latents), starts=scene_starts(samples))


def _normalised(latents_BCFHW: Tensor) -> Tensor:
    found: Tensor = comfy.latent_formats.Wan21().process_in(latents_BCFHW.float())
    return found


def _stream(decoder: Decoder, latents_BCFHW: Tensor, *, starts: list[int]) -> Iterator[Tensor]:
    for frames in decoder.stream(latents_BCFHW, starts=starts, at_once=LATENTS_AT_ONCE):
        yield frames[0]


def _decode_native(samples: dict[str, Tensor], vae: Any) -> Iterator[Tensor]:
    """Yield uint8 frames [F, H, W, 3], as a stream if the VAE can.

    If even a part is too much for the device, ComfyUI's way is left, which falls back on tiles.
    """
    latents = video_samples(samples)
    decoder, begun = streaming_decoder(vae, latents), False
    if decoder is not None:
        try:
            wan = isinstance(decoder, StreamingDecoder)
            own = normalise(decoder.vae, latents) if wan else _normalised(latents)
            for frames in _stream(decoder, own, starts=scene_starts(samples)):
                begun = True
                yield frames
            return
        except comfy.model_management.OOM_EXCEPTION:
            if begun:
                raise
            log.warning("a part of the video is too large to decode at once; ComfyUI decodes it whole, in tiles")
            decoder = None  # its weights make room
    yield from _decode_whole(latents, vae)


def _decode_whole(latents_BCFHW: Tensor, vae: Any) -> Iterator[Tensor]:
    """Yield uint8 frames [F, H, W, 3]; ComfyUI's VAE decodes the clip as a whole."""
    images = vae.decode(latents_BCFHW)
    images = images.reshape(-1, *images.shape[-3:])
    for part in images.split(LATENTS_AT_ONCE * TEMPORAL_FACTOR):
        yield to_uint8(part[..., :3].clamp(0, 1))


def metadata(hidden: Any) -> dict[str, str]:
    """Collect what lets ComfyUI reopen the workflow from the file."""
    if args.disable_metadata:
        return {}
    found = dict(hidden.extra_pnginfo or {})
    if hidden.prompt is not None:
        found["prompt"] = hidden.prompt
    return {name: json.dumps(value) for name, value in found.items()}


class DecodeVideo(io.ComfyNode):
    """Decode latents chunk by chunk into an mp4."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardDecodeVideo",
            display_name="Decode & Save Video",
            category=CATEGORY,
            description="Decodes latents and writes an mp4 (h264) with the workflow inside, a few frames at a time: "
            "a long video takes no more memory than a short one. Connect a backbone (the embedded model's own "
            "decoder) or a VAE, or choose a small decoder.",
            inputs=[
                io.Latent.Input("samples", tooltip="Video latents, such as Wavefront Render's."),
                io.Float.Input(
                    "fps", default=16.0, min=1.0, max=240.0, step=0.01, tooltip="Frames per second. Wan is made for 16."
                ),
                io.String.Input(
                    "filename_prefix",
                    default="video/FlashForward",
                    tooltip="Where to write in ComfyUI's output folder. %date:yyyy-MM-dd% and the like are filled in.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="A VAE from Load VAE; it is used when both are connected. Wan 2.1's decodes a few frames "
                    "at a time, others the whole clip at once, in ComfyUI's way.",
                ),
                BackboneSocket.Input(
                    "backbone",
                    optional=True,
                    tooltip="The backbone whose own decoder to use (the embedded one has one).",
                ),
                decoder_input(),
            ],
            outputs=[io.Video.Output("video", display_name="video", tooltip="The file that was written.")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool | str:
        fps = inputs.get("fps")
        if fps is not None and not 1 <= fps <= 240:
            return f"fps={fps} is outside 1 to 240; Wan models are made for fps=16"
        if inputs.get("decoder", FULL) == FULL and "vae" not in inputs and "backbone" not in inputs:
            return NOTHING_DECODES
        check_decoder(inputs.get("decoder"))
        return True

    @classmethod
    def fingerprint_inputs(cls, decoder: str | None = None, **inputs: Any) -> str:
        return decoder_stamp(decoder)

    @classmethod
    def execute(
        cls,
        *,
        samples: dict[str, Tensor],
        fps: float,
        filename_prefix: str,
        vae: Any = None,
        backbone: Backbone | None = None,
        decoder: str = FULL,
    ) -> io.NodeOutput:
        latents = video_samples(samples)
        if decoder != FULL:
            check_latents(backbone, decoder)
            vae, chunks = None, _stream_small(samples, decoder)
        elif vae is not None:
            chunks = _decode_native(samples, vae)
        elif backbone is not None:
            chunks = _stream_embedded(samples, backbone)
        else:
            raise ValueError(NOTHING_DECODES)
        if (channels := getattr(vae, "latent_channels", latents.shape[1])) != latents.shape[1]:
            raise ValueError(f"vae has {channels} latent channels, samples {latents.shape[1]}; use Wan 2.1's VAE")
        height, width = (side * SPATIAL_FACTOR for side in latents.shape[-2:])
        path, subfolder = new_path(filename_prefix, width=width, height=height)
        progress = Progress(node_id=cls.hidden.unique_id)
        total = TEMPORAL_FACTOR * (latents.shape[2] - 1) + 1
        write_video(path, chunks, fps=fps, total=total, metadata=metadata(cls.hidden), progress=progress)
        shown = ui.SavedResult(path.name, subfolder, io.FolderType.output)
        return io.NodeOutput(InputImpl.VideoFromFile(str(path)), ui=ui.PreviewVideo([shown]))


def new_path(prefix: str, *, width: int, height: int, suffix: str = ".mp4") -> tuple[Path, str]:
    """Return the next free path for a prefix and its folder below the output folder; neither leads out of that."""
    output = folder_paths.get_output_directory()
    try:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, output, width, height)
        path = Path(folder) / f"{name}_{counter:05}_{suffix}"
        with contextlib.suppress(FileNotFoundError):
            # A name that is too long fails here, not after the first chunk.
            path.with_suffix(f".partial{suffix}").stat()
        inside = path.resolve().is_relative_to(Path(output).resolve())
    except Exception as error:  # ComfyUI raises a plain Exception for what leads out
        raise ValueError(f"filename_prefix={prefix[:80]!r} cannot be used ({error}); use video/FlashForward") from error
    if not inside:
        raise ValueError(f"filename_prefix={prefix[:80]!r} leads out of the output folder; use video/FlashForward")
    return path, subfolder


def write_video(
    path: Path, chunks: Iterator[Tensor], *, fps: float, total: int, metadata: dict[str, str], progress: Progress
) -> None:
    """Encode chunks as they come. When anything stops it, ComfyUI's cancel too, the unfinished file is removed."""
    from flashforward_core.media import VideoWriter

    writer, done = None, 0
    try:
        for frames in chunks:
            if writer is None:
                height, width = frames.shape[1:3]
                writer = VideoWriter(path, width=width, height=height, fps=fps, metadata=metadata)
            writer.write(frames.numpy())
            done += len(frames)
            progress.show(done, total)  # no picture: the editor would show it in the video's place, for good
            check_cancel()
        assert writer is not None, "no latent frame to decode"
        writer.close()
    except BaseException:
        if writer is not None:
            writer.abort(keep=False)
        raise
    log.info("wrote %d frames to %s", done, path.name)
