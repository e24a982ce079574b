"""How far a training run is: a progress bar on a terminal, log lines elsewhere, and TensorBoard's logs if wanted."""

import io
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

log = logging.getLogger(__name__)


class Progress:
    """Shows one run; a context manager that closes what it opened."""

    def __init__(self, steps: int, *, folder: Path | None, shown: bool) -> None:
        """``folder`` gets TensorBoard logs; with ``shown`` False nothing is shown or written."""
        self._steps = steps
        self._shown = shown
        self._writer = writer(folder) if shown and folder is not None else None
        self._bar = tqdm(total=steps, unit="step") if shown and sys.stderr.isatty() else None

    def resume(self, step: int) -> None:
        """Go on from ``step``."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def note(self, step: int, seconds: float, losses: Mapping[str, Tensor]) -> None:
        """Show the losses at ``step``; waits for the device."""
        if not self._shown:
            return
        values = {name: value.item() for name, value in losses.items()}
        words = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        if self._bar is None:
            log.info("step %d/%d %.0fs %s", step, self._steps, seconds, words)
        else:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(words)
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"loss/{name}", value, step)
            self._writer.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (self._bar, self._writer):
            if part is not None:
                part.close()


def writer(folder: Path) -> Any:
    """Return TensorBoard's writer. Raises ``ValueError`` that says what to install."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("logs need tensorboard; install it with: pip install tensorboard") from error
    return SummaryWriter(str(folder))


def log_video(folder: Path, tag: str, frames_FHWC: np.ndarray, step: int, *, fps: float) -> None:
    """Add a video (uint8 frames) to the TensorBoard logs in ``folder``, as a moving GIF among the images."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width = frames_FHWC.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif(frames_FHWC, fps=fps))
    with writer(folder) as target:
        target._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def gif(frames_FHWC: np.ndarray, *, fps: float) -> bytes:
    """Return the frames as an endless GIF."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames_FHWC]
    target = io.BytesIO()
    pictures[0].save(target, "GIF", save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0)
    return target.getvalue()
