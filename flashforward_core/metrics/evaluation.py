"""Everything that is measured of one video."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..scenes import SceneWords
from .drift import Drift, measure_drift
from .faithfulness import SceneProbe, SceneReport
from .seams import Seam, Spectrum, anchor_seams, chunk_seams, latent_change, seam, spectrum
from .series import VideoMetrics, VideoSeries, collect, summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where seams would be."""

    chunk_frames: int = 3
    """Latent frames per chunk."""
    anchor_stride: int = 10
    """Latent frames from anchor to anchor."""
    fps: float = 16.0

    def __post_init__(self) -> None:
        for name in ("chunk_frames", "anchor_stride"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)} has no seams to tell from the rest; use 2 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What ``evaluate`` finds."""

    video: VideoMetrics
    seam_chunk: Seam | None
    """None where the video is too short for seams."""
    seam_anchor: Seam | None
    drift: Drift
    scene: SceneReport | None
    """None without a caption of a procedural scene."""
    series: VideoSeries
    spectrum: Spectrum

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain data, without the series."""
        scene = None if self.scene is None else {**asdict(self.scene), "faithfulness": self.scene.faithfulness}
        return {
            **asdict(self.video),
            "seam_chunk": None if self.seam_chunk is None else asdict(self.seam_chunk),
            "seam_anchor": None if self.seam_anchor is None else asdict(self.seam_anchor),
            "drift": asdict(self.drift),
            "scene": scene,
        }


def evaluate(
    chunks: Iterable[np.ndarray],
    *,
    scene: SceneWords | None = None,
    layout: Layout = Layout(),
) -> Evaluation:
    """Measure a video of uint8 frames [F, H, W, 3], read once. Fewer than two frames raise ``ValueError``."""
    probe = None if scene is None else SceneProbe(words=scene)
    series = collect(chunks, on_frame=probe)
    return evaluation_of(series, scene=None if probe is None else probe.report(fps=layout.fps), layout=layout)


def evaluation_of(series: VideoSeries, *, scene: SceneReport | None, layout: Layout) -> Evaluation:
    """Compute everything from what was kept of a video."""
    change = latent_change(series)
    latents = len(change) + 1
    between_chunks = chunk_seams(latents, chunk_frames=layout.chunk_frames)
    at_anchors = anchor_seams(latents, anchors=range(0, latents, layout.anchor_stride))
    return Evaluation(
        video=summarise(series),
        seam_chunk=seam(change, seams=between_chunks, others=at_anchors, period=layout.chunk_frames),
        seam_anchor=seam(change, seams=at_anchors, others=between_chunks, period=layout.anchor_stride),
        drift=measure_drift(series, fps=layout.fps),
        scene=scene,
        series=series,
        spectrum=spectrum(change),
    )
