"""What a render that lost a machine had finished: kept while it runs, and written where its user finds it."""

from collections.abc import Callable

import comfy.utils
import torch
from torch import Tensor

from flashforward_core.engine.events import ChunkReady, Event
from flashforward_core.engine.rollout import stream_decode
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import SPATIAL_FACTOR, TEMPORAL_FACTOR, RolloutSpec

from .bridge import to_latent
from .events import Progress, check_cancel
from .video import new_path, write_video

VIDEO_PREFIX, LATENTS_PREFIX = "video/FlashForward_unfinished", "latents/FlashForward_unfinished"


class FinishedChunks:
    """Passes a render's events on and keeps its finished chunks."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._chunks: dict[int, Tensor] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, ChunkReady):
            self._chunks[event.index] = event.latents
        self._on_event(event)

    def leading(self) -> Tensor | None:
        """Return the latents [B, C, F, h, w] of the chunks from the first on, as far as none is missing."""
        found: list[Tensor] = []
        while len(found) in self._chunks:
            found.append(self._chunks[len(found)])
        return torch.cat(found, dim=2) if found else None

    def save(self, backbone: Backbone, spec: RolloutSpec, *, node_id: str | None) -> str:
        """Write what ``leading`` returns and say where: a video that plays, or latents where nothing here decodes."""
        latents = self.leading()
        if latents is None:
            return "nothing was saved, since the first chunk was not finished"
        if backbone.vae is None or latents.shape[0] != 1:
            return _save_latents(to_latent(latents, backbone)["samples"])
        return _save_video(backbone, latents, spec, node_id=node_id)


def _save_video(backbone: Backbone, latents_BCFHW: Tensor, spec: RolloutSpec, *, node_id: str | None) -> str:
    height, width = (side * SPATIAL_FACTOR for side in latents_BCFHW.shape[-2:])
    path, subfolder = new_path(VIDEO_PREFIX, width=width, height=height)
    chunks = stream_decode(backbone, latents_BCFHW, starts=spec.scene_frames(), check_cancel=check_cancel)
    total = TEMPORAL_FACTOR * (latents_BCFHW.shape[2] - 1) + 1
    write_video(path, chunks, fps=spec.shape.fps, total=total, metadata={}, progress=Progress(node_id=node_id))
    return f"the first {total} frames are in output/{subfolder}/{path.name}"


def _save_latents(samples_BCFHW: Tensor) -> str:
    """Write the file that Save Latent writes."""
    path, subfolder = new_path(LATENTS_PREFIX, width=0, height=0, suffix=".latent")
    tensors = {"latent_tensor": samples_BCFHW.contiguous(), "latent_format_version_0": torch.tensor([])}
    comfy.utils.save_torch_file(tensors, str(path))
    frames = samples_BCFHW.shape[2]
    return f"the first {frames} latent frames are in output/{subfolder}/{path.name}, as Load Latent reads them"
