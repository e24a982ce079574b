"""One number per metric for a video of a captioned scene, as benchmarks report them."""

from collections.abc import Mapping

from .evaluation import Evaluation

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


def numbers(found: Evaluation) -> dict[str, float]:
    """Return one value per metric of a procedural scene's evaluation; a video too short for seams has none of those."""
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
