"""Numbers about videos: flicker, motion, seams, drift, and faithfulness to a reference or to a caption."""

from .drift import Drift, measure_drift
from .evaluation import Evaluation, Layout, evaluate
from .faithfulness import SceneProbe, SceneReport
from .seams import Seam, Spectrum
from .series import VideoMetrics, VideoSeries, collect, measure, psnr

__all__ = [
    "Drift",
    "Evaluation",
    "Layout",
    "SceneProbe",
    "SceneReport",
    "Seam",
    "Spectrum",
    "VideoMetrics",
    "VideoSeries",
    "collect",
    "evaluate",
    "measure",
    "measure_drift",
    "psnr",
]
