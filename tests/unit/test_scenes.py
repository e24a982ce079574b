"""The palette and the grammar are what the procedural clips are drawn and captioned by."""

import pytest
import torch

from flashforward_core.scenes import (
    HILLS,
    SKIES,
    Mover,
    SceneWords,
    advice,
    far_hill_colour,
    near_hill_colour,
    parse_caption,
    sample_scene,
    sky_colour,
)
from flashforward_core.train.synthetic import render_scene

pytestmark = pytest.mark.cpu


def test_every_drawn_scene_s_caption_is_read_back() -> None:
    for seed in range(200):
        scene = sample_scene(seed)
        words = parse_caption(scene.caption)
        movers = tuple(Mover(colour=s.colour, kind=s.kind, motion=s.motion) for s in scene.sprites)
        assert words == SceneWords(sky=scene.sky, hills=scene.hills, movers=movers)


@pytest.mark.parametrize(
    "text",
    ["", "a cat", "a red ball bounces over green hills", "a red ball bounces over green hills at noon, then a cat"],
)
def test_other_text_is_no_caption(text: str) -> None:
    assert parse_caption(text) is None
    assert "knows only captions such as" in advice(text)
    assert advice("a red balloon drifts right over green hills at dusk") == ""


def test_drawn_pixels_have_the_colours_that_the_functions_name() -> None:
    seen = set()
    for seed in range(60):
        scene = sample_scene(seed)
        if (scene.sky, scene.hills) in seen:
            continue
        seen.add((scene.sky, scene.hills))
        image = (render_scene(scene, 1)[0][:, 0] + 1) / 2
        top = image[:, 0].median(dim=1).values
        bottom = image[:, 127].median(dim=1).values
        # the sun's glow reaches the top row, by 4 % of its colour at most where the median is taken
        torch.testing.assert_close(top, torch.tensor(sky_colour(scene.sky, 0)), rtol=0, atol=0.04)
        torch.testing.assert_close(bottom, torch.tensor(near_hill_colour(scene.hills, scene.sky)), rtol=0, atol=1e-6)
    assert len(seen) > 12


def test_far_hills_are_hazier_than_near_ones() -> None:
    for hills in HILLS:
        for sky in SKIES:
            horizon = torch.tensor(SKIES[sky][1])
            far, near = (torch.tensor(f(hills, sky)) for f in (far_hill_colour, near_hill_colour))
            assert (far - horizon).norm() < (near - horizon).norm()
