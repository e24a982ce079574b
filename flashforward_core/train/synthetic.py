"""Procedural landscapes with captions: endless, exactly known training clips.

A scene is a sky, a sun or moon, two hill layers that scroll at different speeds and one or two
sprites on closed-form paths. Shapes are signed distances in pixels, so edges are anti-aliased and
any number of frames draws on any device. ``scenes`` draws the lots. Legend: B clips, F frames, H rows, W columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flashforward_core.scenes import (
    COLOURS,
    FAR_SHADE,
    FPS,
    HEIGHT,
    HILLS,
    HORIZON_ROW,
    NEAR_SHADE,
    SKIES,
    WIDTH,
    Scene,
    Sprite,
    disc_colour,
)

CLIP_FRAMES = 321  # 81 latents, 20 seconds at 16 frames a second


def _triangle(turns: Tensor) -> Tensor:
    """Ping-pong 0 → 1 → 0 once a turn."""
    return 1 - (2 * (turns % 1) - 1).abs()


def sprite_path(sprite: Sprite, time_s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre (x, y) in pixels at each time."""
    turns = time_s / sprite.period_s + sprite.phase
    margin = sprite.radius + 6
    span = WIDTH - 2 * margin
    sway = torch.sin(2 * torch.pi * (turns * 2 + sprite.phase_y))
    if sprite.motion == "bounces":
        hop = torch.sin(torch.pi * (turns * 4 % 1))
        return margin + span * _triangle(turns / 2), sprite.centre_y + 18 - 36 * hop
    if sprite.motion == "circles":
        angle = 2 * torch.pi * turns
        centre = WIDTH / 2 + (sprite.phase_y - 0.5) * 60
        return centre + 40 * torch.cos(angle), sprite.centre_y + 18 * torch.sin(angle)
    sign = -1.0 if sprite.motion.endswith("left") else 1.0
    travelled = (sign * turns) % 1
    x = travelled * (WIDTH + 2 * margin) - margin
    if sprite.motion.startswith("drifts"):
        return x, sprite.centre_y + 5 * sway
    return x, sprite.centre_y + 22 * (1 - 2 * (turns % 1))  # it rises as it crosses


EDGE = 2.5  # pixels over which an edge fades: soft shapes are kinder to a small autoencoder than hard ones


def _cover(distance: Tensor) -> Tensor:
    """Cover the inside of a signed distance in pixels, with a soft edge."""
    return (0.5 - distance / EDGE).clamp(0, 1)


def _box(x: Tensor, y: Tensor, half_w: float | Tensor, half_h: float | Tensor) -> Tensor:
    return torch.maximum(x.abs() - half_w, y.abs() - half_h)


def _ellipse(x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    scale = torch.sqrt((x / a) ** 2 + (y / b) ** 2)
    return (scale - 1) * min(a, b)


def sprite_coverage(sprite: Sprite, x: Tensor, y: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, tuple[float, ...]]:
    """Cover pixels at offsets (x, y) from the centre: (coloured part, detail part, the detail's colour)."""
    r = sprite.radius
    if sprite.kind == "ball":
        return _cover(torch.sqrt(x**2 + y**2) - r), _cover(_box(x, y, r * 0.9, 2.0)), (0.15, 0.15, 0.18)
    if sprite.kind == "balloon":
        basket = _cover(_box(x, y - 1.25 * r, 0.32 * r, 0.22 * r))
        return _cover(_ellipse(x, y + 0.2 * r, 0.95 * r, 1.1 * r)), basket, (0.35, 0.22, 0.12)
    if sprite.kind == "boat":
        hull = torch.maximum(_ellipse(x, y - 0.1 * r, 1.35 * r, 0.8 * r), -(y - 0.1 * r))
        sail = torch.maximum(0.86 * (x.abs() - 0.6 * (y + 1.3 * r)), y + 0.05 * r)
        return _cover(hull), _cover(sail), (0.93, 0.90, 0.82)
    flap = 0.55 * torch.sin(2 * torch.pi * turns)
    wing = (y + 0.15 * r) - flap * (x.abs() - 0.3 * r)
    wings = _ellipse(x.abs() - 0.75 * r, wing, 0.8 * r, 0.3 * r)
    body = _ellipse(x, y, 0.55 * r, 0.38 * r)
    beak_side = -1.0 if sprite.motion.endswith("left") else 1.0
    beak = _box(x * beak_side - 0.62 * r, y, 0.16 * r, 0.1 * r)
    return _cover(torch.minimum(wings, body)), _cover(beak), (0.95, 0.60, 0.10)


def _blend(image: Tensor, cover: Tensor, colour: Tensor) -> Tensor:
    return image + cover.unsqueeze(0) * (colour.view(3, 1, 1, 1) - image)


def _colour(rgb: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(rgb, dtype=torch.float32, device=device)


def _ridge(scene: Scene, x: Tensor, shift: Tensor, *, near: bool) -> Tensor:
    """Height of a hill line (row number) at column x after scrolling by ``shift`` pixels."""
    phases = scene.ridge_phases[3:] if near else scene.ridge_phases[:3]
    at = (x + shift) / WIDTH * 2 * torch.pi
    waves = sum(
        amplitude * torch.sin(turns * at + 2 * torch.pi * phase)
        for amplitude, turns, phase in zip((6.0, 4.0, 2.0), (1, 2, 3), phases, strict=True)
    )
    return (104 if near else 82) + waves


def render_scene(scene: Scene, frames: int, *, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Draw ``frames`` video frames.

    Returns the video [3, F, H, W] in -1..1 and the coloured part of each sprite, visible pixels only,
    [sprites, F, H, W] in 0..1.
    """
    device = torch.device(device)
    y = torch.arange(HEIGHT, device=device, dtype=torch.float32).view(1, -1, 1)
    x = torch.arange(WIDTH, device=device, dtype=torch.float32).view(1, 1, -1)
    t = (scene.time_s + torch.arange(frames, device=device, dtype=torch.float32) / FPS).view(-1, 1, 1)
    top, horizon, light = (_colour(c, device).view(3, 1, 1, 1) for c in SKIES[scene.sky])
    image = (top + (horizon - top) * (y / HORIZON_ROW).clamp(0, 1)).expand(3, frames, HEIGHT, WIDTH)

    from_light = torch.sqrt((x - scene.light_x) ** 2 + (y - scene.light_y) ** 2)
    disc = _colour(disc_colour(scene.sky), device)
    image = _blend(image, 0.35 * torch.exp(-from_light / 22), disc)
    image = _blend(image, _cover(from_light - 11), disc)

    land = _colour(HILLS[scene.hills], device).view(3, 1, 1, 1) * light
    far = _cover(_ridge(scene, x, scene.scroll * 0.4 * t, near=False) - y)
    near = _cover(_ridge(scene, x, scene.scroll * t, near=True) - y)
    image = _blend(image, far, (FAR_SHADE * land + (1 - FAR_SHADE) * horizon).flatten())
    image = _blend(image, near, (NEAR_SHADE * land).flatten())

    masks: list[Tensor] = []
    for sprite in scene.sprites:
        cx, cy = sprite_path(sprite, t)
        body, detail, detail_rgb = sprite_coverage(sprite, x - cx, y - cy, t)
        image = _blend(image, body, _colour(COLOURS[sprite.colour], device))
        image = _blend(image, detail, _colour(detail_rgb, device))
        hidden = torch.maximum(body, detail)
        masks = [mask * (1 - hidden) for mask in masks]
        masks.append((body * (1 - detail)).expand(frames, HEIGHT, WIDTH))
    return image * 2 - 1, torch.stack(masks)


def sprite_boxes(masks_SFHW: Tensor, *, least: float = 0.1) -> Tensor:
    """Return where the boxes around the visible sprites are, [F, H, W] bool: their details and edges lie within."""
    shown = masks_SFHW > least
    rows, columns = shown.any(3, keepdim=True), shown.any(2, keepdim=True)
    return (_between(rows, dim=2) & _between(columns, dim=3)).any(0)


def _between(marks: Tensor, *, dim: int) -> Tensor:
    """Mark everything from the first to the last mark along ``dim``."""
    begun = marks.int().cummax(dim).values
    to_come = marks.flip(dim).int().cummax(dim).values.flip(dim)
    return (begun & to_come).bool()


def classify_colours(video_CFHW: Tensor, masks_SFHW: Tensor, *, min_pixels: float = 60.0) -> list[list[str | None]]:
    """Name the nearest palette colour of each sprite in each frame; None where too little of it shows.

    The mean is taken over pixels well inside the sprite, since the autoencoder's grid softens edges.
    """
    palette = torch.tensor(list(COLOURS.values()), device=video_CFHW.device)
    names = list(COLOURS)
    result: list[list[str | None]] = []
    for mask_FHW in masks_SFHW:
        inside = (mask_FHW > 0.99).float()
        area = inside.sum((1, 2))
        mean_FC = ((video_CFHW + 1) / 2 * inside).sum((2, 3)).T / area.clamp(min=1).unsqueeze(1)
        nearest = torch.cdist(mean_FC.float(), palette).argmin(1).tolist()
        result.append([names[i] if a >= min_pixels else None for i, a in zip(nearest, area.tolist(), strict=True)])
    return result
