"""Progress bars, previews and ComfyUI's cancel button."""

from typing import Any

import comfy.model_management
import comfy.utils
from PIL import Image
from server import PromptServer
from torch import Tensor

from flashforward_core.engine.events import AnchorBlockReady, ChunkReady, Event, TaskFinished
from flashforward_core.model.vae import Preview

PREVIEW_SIDE = 512  # pixels, at most


def check_cancel() -> None:
    """Raise ComfyUI's own exception when the user has cancelled; on the execution thread only."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def to_image(frame_HWC: Tensor, *, scale: int = 1) -> Image.Image:
    """Turn a uint8 frame into an image, enlarged by a whole factor."""
    image = Image.fromarray(frame_HWC.cpu().numpy())
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.BILINEAR)


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


class RolloutMonitor:
    """Shows a rollout's events on its node: call it with each of them, on the execution thread."""

    def __init__(self, *, node_id: str | None, preview: Preview, scale: int) -> None:
        self._progress = Progress(node_id=node_id)
        self._preview = preview
        self._scale = scale
        self._done, self._total = 0, 1

    def __call__(self, event: Event) -> None:
        picture = None
        if isinstance(event, TaskFinished):
            self._done, self._total = event.done, event.total
        elif isinstance(event, ChunkReady | AnchorBlockReady):
            picture = self._picture(event.latents)
        self._progress.show(self._done, self._total, preview=picture, scale=self._scale)

    def _picture(self, latents_BCFHW: Any) -> Tensor:
        return self._preview.frames(latents_BCFHW[:1, :, -1:])[0, -1]
