"""Procedural scenes: what the caption says is what is drawn."""

from dataclasses import replace

import pytest
import torch

from flashforward_core.scenes import COLOURS, HEIGHT, KINDS, MOTIONS, WIDTH, Scene, Sprite, sample_scene
from flashforward_core.train.synthetic import classify_colours, render_scene, sprite_boxes, sprite_path

pytestmark = pytest.mark.cpu


def sprite(**changes: object) -> Sprite:
    fields: dict[str, object] = {
        "kind": "ball",
        "colour": "red",
        "motion": "circles",
        "radius": 15.0,
        "centre_y": 60.0,
        "period_s": 8.0,
        "phase": 0.3,
        "phase_y": 0.2,
    }
    return Sprite(**(fields | changes))  # type: ignore[arg-type]


def scene(*sprites: Sprite, sky: str = "noon") -> Scene:
    return Scene(
        sky=sky,
        hills="green",
        sprites=sprites,
        light_x=30.0,
        light_y=20.0,
        ridge_phases=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        scroll=6.0,
        time_s=1.0,
    )


def test_a_scene_is_its_number() -> None:
    assert sample_scene(7) == sample_scene(7)
    assert sample_scene(7) != sample_scene(8)


def test_caption_names_every_choice() -> None:
    drawn = scene(sprite(), sprite(kind="boat", colour="orange", motion="drifts left"), sky="dusk")
    assert drawn.caption == "a red ball circles and an orange boat drifts left over green hills at dusk"


def test_frames_are_finite_and_in_range() -> None:
    video, masks = render_scene(sample_scene(3), 5)
    assert video.shape == (3, 5, HEIGHT, WIDTH)
    assert masks.shape[1:] == (5, HEIGHT, WIDTH)
    assert float(video.min()) >= -1 and float(video.max()) <= 1
    assert bool(torch.isfinite(video).all())


@pytest.mark.parametrize("colour", list(COLOURS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_sprites_colour_is_read_back(kind: str, colour: str) -> None:
    video, masks = render_scene(scene(sprite(kind=kind, colour=colour), sky="night"), 3)
    assert classify_colours(video, masks) == [[colour] * 3]


def test_a_hidden_sprite_has_no_colour() -> None:
    back, front = sprite(colour="blue"), sprite(colour="white", radius=17.0)
    video, masks = render_scene(scene(back, front), 2)
    assert classify_colours(video, masks) == [[None, None], ["white", "white"]]


@pytest.mark.parametrize(("motion", "sign"), [("drifts left", -1), ("drifts right", 1), ("crosses right", 1)])
def test_motion_goes_where_its_name_says(motion: str, sign: int) -> None:
    x, _ = sprite_path(sprite(motion=motion, phase=0.1), torch.linspace(0, 2, 9))
    assert bool((x.diff() * sign > 0).all())


@pytest.mark.parametrize("motion", MOTIONS)
def test_a_path_is_smooth_between_wraps(motion: str) -> None:
    x, y = sprite_path(sprite(motion=motion), torch.arange(0, 20, 1 / 16))
    jumps = int((x.diff().abs() > WIDTH / 2).sum())
    assert jumps <= 3  # a drifting sprite leaves on one side and returns on the other
    assert float(y.diff().abs().max()) < 50
    assert float(x.diff().abs()[x.diff().abs() < WIDTH / 2].max()) < 5


def test_the_scene_moves_on_with_its_time() -> None:
    longer, _ = render_scene(scene(sprite()), 20)
    later = replace(scene(sprite()), time_s=2.0)
    shifted, _ = render_scene(later, 4)
    torch.testing.assert_close(shifted, longer[:, 16:20], rtol=0, atol=1e-3)  # float32 times differ in the last bit


def test_boxes_hold_sprites_with_their_edges_and_nothing_far_from_them() -> None:
    """A red ball of radius 15 and a blue one elsewhere: two squares, one per sprite, where it is visible."""
    drawn = scene(sprite(), sprite(colour="blue", motion="drifts left", phase=0.0))
    _, masks = render_scene(drawn, 3)
    boxes = sprite_boxes(masks)
    assert bool((boxes >= (masks.amax(0) > 0.1)).all())
    for mask, frame in ((masks[0], 0), (masks[0], 2)):
        rows, columns = ((mask[frame] > 0.1).any(dim).nonzero().flatten() for dim in (1, 0))
        top, bottom, left, right = rows[0], rows[-1], columns[0], columns[-1]
        assert bool(boxes[frame, top : bottom + 1, left : right + 1].all()) and int(bottom - top) in range(29, 34)
    assert not bool(sprite_boxes(masks[:1])[2, :, int(columns[-1]) + 1 :].any())  # of the first one alone
    assert not bool(sprite_boxes(torch.zeros(1, 2, HEIGHT, WIDTH)).any())
