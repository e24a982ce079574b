"""Drawn scenes are faithful to their own captions, and to no others."""

from dataclasses import replace

import numpy as np
import pytest

from flashforward_core.metrics import SceneReport, evaluate
from flashforward_core.scenes import COLOURS, HILLS, SKIES, Mover, SceneWords, parse_caption, sample_scene
from flashforward_core.train.synthetic import render_scene

pytestmark = pytest.mark.cpu

FRAMES = 97  # six seconds: half a period of the slowest sprite


def drawn(seed: int, frames: int = FRAMES) -> np.ndarray:
    video, _ = render_scene(sample_scene(seed), frames)
    return ((video.permute(1, 2, 3, 0) + 1) * 127.5).round().byte().numpy()


def words_of(seed: int) -> SceneWords:
    words = parse_caption(sample_scene(seed).caption)
    assert words is not None
    return words


def report(frames: np.ndarray, words: SceneWords) -> SceneReport:
    found = evaluate([frames], scene=words).scene
    assert found is not None
    return found


def first_with(motion: str) -> int:
    return next(s for s in range(1000) if [m.motion for m in words_of(s).movers] == [motion])


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_drawn_scene_is_faithful(seed: int) -> None:
    found = report(drawn(seed, 161), words_of(seed))  # ten seconds: what crosses has come into the picture
    assert found.sky == found.hills == found.motion == 1
    assert found.colour > 0.95
    assert found.palette_error < 12  # the sun's glow is in the sky's strips
    assert abs(found.palette_drift) < 2


def test_each_wrong_word_costs_its_own_part() -> None:
    seed = first_with("drifts right")
    frames, words = drawn(seed), words_of(seed)
    (mover,) = words.movers
    wrong_sky = report(frames, replace(words, sky=next(s for s in SKIES if s != words.sky)))
    assert wrong_sky.sky == 0
    wrong_hills = report(frames, replace(words, hills=next(h for h in HILLS if h != words.hills)))
    assert wrong_hills.hills == 0 and wrong_hills.sky == 1
    colour = next(c for c in COLOURS if c not in (mover.colour, "white"))
    wrong_colour = report(frames, replace(words, movers=(replace(mover, colour=colour),)))
    assert wrong_colour.colour < 0.2 and wrong_colour.motion == 0 and wrong_colour.sky == 1
    missing = Mover(colour=colour, kind="ball", motion="circles")
    assert report(frames, replace(words, movers=(mover, missing))).colour < 0.7


@pytest.mark.parametrize("motion", ["drifts right", "crosses left"])
def test_a_reversed_video_moves_the_wrong_way(motion: str) -> None:
    seed = first_with(motion)
    frames, words = drawn(seed), words_of(seed)
    assert report(frames, words).motion == 1
    assert report(frames[::-1], words).motion == 0


@pytest.mark.parametrize("motion", ["bounces", "circles", "drifts left"])
def test_a_still_video_does_not_move_as_it_should(motion: str) -> None:
    seed = first_with(motion)
    still = drawn(seed)[40:41].repeat(FRAMES, axis=0)
    assert report(still, words_of(seed)).motion == 0


def test_fading_to_grey_is_palette_drift() -> None:
    frames = drawn(2).astype(np.float32)
    share = np.linspace(0, 0.5, FRAMES)[:, None, None, None]
    faded = ((1 - share) * frames + share * 128).astype(np.uint8)
    assert report(faded, words_of(2)).palette_drift > 10


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="use 192x128"):
        evaluate([np.zeros((9, 64, 64, 3), np.uint8)], scene=words_of(1))
