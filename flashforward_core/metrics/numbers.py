"""One number per metric for a video of a captioned scene, as benchmarks report them."""

from collections.abc import Mapping

import numpy as np

from ..scenes import parse_caption
from .evaluation import Layout, evaluate

METRICS: Mapping[str, str] = {
    "flicker": "1",
    "motion": "1",
    "seam_chunk": "1",
    "seam_anchor": "1",
    "drift": "levels",
    "drift_sharpness": "octaves",
    "palette_error": "levels",
    "palette_drift": "levels",
    "faithfulness": "1",
}
"""Names and units of what is measured of each video."""


def numbers(video_FHWC: np.ndarray, caption: str) -> dict[str, float]:
    """Return one value per metric; a video that is too short for seams has none of those.

    Raises ``ValueError`` for a caption of no procedural scene.
    """
    scene = parse_caption(caption)
    if scene is None:
        raise ValueError("caption describes no procedural scene, so faithfulness has no measure; use one that does")
    found = evaluate([video_FHWC], scene=scene, layout=Layout())
    assert found.scene is not None
    seams = {"seam_chunk": found.seam_chunk, "seam_anchor": found.seam_anchor}
    return {
        "flicker": found.video.flicker,
        "motion": found.video.motion,
        **{name: seam.excess for name, seam in seams.items() if seam is not None},
        "drift": found.drift.colour,
        "drift_sharpness": found.drift.sharpness,
        "palette_error": found.scene.palette_error,
        "palette_drift": found.scene.palette_drift,
        "faithfulness": found.scene.faithfulness,
    }
