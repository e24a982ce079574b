"""Training the autoencoder's decoder alone."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from flashforward_core.scenes import HEIGHT, WIDTH
from flashforward_core.train.vae_train import (
    ClipPool,
    Crops,
    VaeLoss,
    VaeStage,
    VaeStep,
    by_place_and_age,
    freeze_encoder,
    new_vae,
    shimmer,
    train_vae,
)

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def clip_error(frames: int, **psnr: float) -> Tensor:
    """An error of 30 dB everywhere but in the frames named ``f13=31.0``."""
    error = torch.ones(1, 3, frames, 2, 2)
    for frame in range(frames):
        error[:, :, frame] *= 2 * 10 ** (-psnr.get(f"f{frame}", 30.0) / 20)
    return error


def test_frames_are_compared_by_place_and_age_once_settled() -> None:
    later_first_places = {f"f{frame}": 28.0 for frame in range(33, 129, 4)}
    psnr = by_place_and_age(clip_error(129, f12=20.0, f13=31.0, f20=33.0, **later_first_places))
    expected = torch.full((8, 4), 30.0)
    expected[0, 0], expected[1, 3] = 31.0, 33.0
    expected[4, 0] = 28.0  # latents 9 to 11 begin with frames 33, 37 and 41
    expected[5:, 0] = 28.0
    torch.testing.assert_close(psnr, expected)


def test_a_clip_too_short_to_settle_is_refused() -> None:
    with pytest.raises(ValueError, match="frames=13 has no settled latent to compare; use 17 or more"):
        by_place_and_age(clip_error(13))


def test_better_frames_give_way_to_worse_ones() -> None:
    step = VaeStep(new_vae(), as_conv2d=False, autocast=False)
    error = clip_error(33, f13=31.0, f18=29.0).requires_grad_()
    step._unevenness(error).backward()
    pull = (error.grad * error).sum((0, 1, 3, 4))  # of the loss on the size of each frame's error
    assert pull[13] < 0 < pull[18]
    assert pull[18] == pull.max()
    assert pull[13] == pull.min()


def test_errors_in_boxes_count_as_often_as_asked() -> None:
    """Sprites count five times, boxes eight times on top of that, the first frame eight times; 1 on average."""
    marks = torch.tensor([0, 1, 2], dtype=torch.uint8).view(1, 1, 1, 1, 3).expand(1, 1, 2, 1, 3)
    first, second = VaeLoss(box=8.0).pixels(marks)[0, 0, :, 0]
    torch.testing.assert_close(second / second[0], torch.tensor([1.0, 8.0, 40.0]))
    torch.testing.assert_close(first / second, torch.full((3,), 8.0))
    assert torch.cat((first, second)).mean().item() == pytest.approx(1.0)
    assert VaeLoss().pixels(marks)[0, 0, 1, 0, 1] == VaeLoss().pixels(marks)[0, 0, 1, 0, 0]


def test_a_pool_marks_sprites_within_their_boxes() -> None:
    pool = ClipPool(range(2), 2, device=CPU)
    _, marks = pool.sample(4, 1, torch.Generator().manual_seed(0))
    counts = [(marks == mark).sum().item() for mark in range(3)]
    assert counts[0] > counts[2] > counts[1] > 0 and marks.shape == (4, 1, 1, 128, 192)


def coded_pool(boxes: dict[int, tuple[int, int, int, int]], *, frames: int) -> ClipPool:
    """A pool whose pixels say where they are: clip and frame, row, column; its clips have at most one box each.

    ``boxes`` are (first row, last row, first column, last column) by clip, on every frame; half the clips have none.
    """
    pool = ClipPool([], frames, device=CPU)
    pool.video = torch.empty(2 * len(boxes), 3, frames, HEIGHT, WIDTH, dtype=torch.uint8)
    pool.video[:, 0] = (torch.arange(2 * len(boxes)).view(-1, 1) * frames + torch.arange(frames)).view(-1, frames, 1, 1)
    pool.video[:, 1] = torch.arange(HEIGHT).view(-1, 1)
    pool.video[:, 2] = torch.arange(WIDTH)
    pool.marks = torch.zeros(2 * len(boxes), 1, frames, HEIGHT, WIDTH, dtype=torch.uint8)
    for clip, (top, bottom, left, right) in boxes.items():
        pool.marks[clip, :, :, top : bottom + 1, left : right + 1] = 1
    return pool


def corner(crop: Tensor, *, frames: int) -> tuple[int, int, int, int]:
    """Read clip, first frame, first row and first column off a crop of a coded pool."""
    code, row, column = (((crop[:, 0, 0, 0] + 1) * 127.5).round()).int().tolist()
    return code // frames, code % frames, row, column


def test_crops_are_slices_of_their_clips_on_the_latents_grid() -> None:
    boxes = {0: (3, 9, 100, 120), 1: (60, 70, 0, 8), 2: (100, 127, 180, 191)}
    pool = coded_pool(boxes, frames=12)
    videos, marks = pool.crops(64, 9, 32, torch.Generator().manual_seed(0))
    assert videos.shape == (64, 3, 9, 32, 32) and marks.shape == (64, 1, 9, 32, 32)
    seen = set()
    for video, mark in zip(videos, marks, strict=True):
        clip, start, top, left = corner(video, frames=12)
        assert top % 8 == left % 8 == 0 and top + 32 <= HEIGHT and left + 32 <= WIDTH
        place = (slice(start, start + 9), slice(top, top + 32), slice(left, left + 32))
        assert torch.equal(video, pool.video[clip, :, *place].float() / 127.5 - 1)
        assert torch.equal(mark, pool.marks[clip, :, *place])
        seen.add((clip, start))
    assert {clip for clip, _ in seen} == set(range(6)) and {start for _, start in seen} == set(range(4))


def test_a_crop_s_middle_is_on_a_sprite_as_nearly_as_grid_and_edges_allow() -> None:
    boxes = {0: (3, 9, 100, 120), 1: (60, 70, 0, 8), 2: (100, 127, 180, 191)}
    pool = coded_pool(boxes, frames=9)
    videos, marks = pool.crops(96, 9, 32, torch.Generator().manual_seed(1))
    anywhere = set()
    for video, mark in zip(videos, marks, strict=True):
        clip, _, top, left = corner(video, frames=9)
        if clip not in boxes:
            anywhere.add((top, left))
            continue
        assert mark.any()
        first_row, last_row, first_column, last_column = boxes[clip]
        for first, low, high, of in ((top, first_row, last_row, HEIGHT), (left, first_column, last_column, WIDTH)):
            nearest, farthest = (min(max(0, middle - 16), of - 32) for middle in (low, high))
            assert nearest - 4 <= first <= farthest + 4  # the grid is 8 pixels wide
    assert len(anywhere) > 30  # where no sprite is, crops lie anywhere


def test_a_sprite_is_found_where_it_is_later() -> None:
    pool = coded_pool({0: (0, 0, 0, 0)}, frames=9)
    pool.marks[:] = 0
    pool.marks[:, :, 8, 64, 96] = 1
    videos, _ = pool.crops(8, 9, 64, torch.Generator().manual_seed(0))
    assert {corner(video, frames=9)[2:] for video in videos} == {(32, 64)}


def test_with_weights_of_one_a_crop_s_loss_is_the_plain_loss() -> None:
    torch.manual_seed(0)
    vae = new_vae()
    vae.decoder.conv_out.requires_grad_(False).weight.mul_(0.1)  # so that diffusers clamps nothing
    pool = ClipPool(range(1), 5, device=CPU)
    video, marks = pool.crops(2, 5, 32, torch.Generator().manual_seed(0))
    assert (marks > 0).any() and (marks == 0).any()
    noise = torch.randn(2, 16, 2, 4, 4)
    step = VaeStep(vae, as_conv2d=False, autocast=False)
    plain = step(video, marks, noise, VaeLoss(sprite=0.0, first_frame=1.0, mse=3.0, gradient=0.0, kl=0.0))["loss"]
    posterior = vae.encode(video).latent_dist
    out = vae.decode(posterior.mean + posterior.std * noise).sample
    expected = (out - video).abs().mean() + 3 * ((out - video) ** 2).mean()
    assert out.abs().max() < 1
    assert plain.item() == pytest.approx(expected.item(), rel=1e-5)
    assert step(video, marks, noise, VaeLoss(box=8.0))["loss"] != step(video, marks, noise, VaeLoss())["loss"]


def test_two_steps_of_three_are_crops_and_only_whole_clips_are_evened() -> None:
    pool = ClipPool(range(1), 17, device=CPU)
    crops = Crops(size=16, frames=5, batch=3, loss=VaeLoss(box=8.0))
    stage = VaeStage(frames=17, batch=1, steps=6, lr=1e-3, max_s=60.0, loss=VaeLoss(even=1.0), crops=crops)
    shapes, losses = [], []
    for step in range(6):
        video, marks, noise, loss = stage.draw(pool, torch.Generator().manual_seed(step), step)
        assert video.shape[2:] == marks.shape[2:]
        shapes.append((tuple(video.shape), tuple(noise.shape)))
        losses.append(loss)
    whole, crop = ((1, 3, 17, 128, 192), (1, 16, 5, 16, 24)), ((3, 3, 5, 16, 16), (3, 16, 2, 2, 2))
    assert shapes == [whole, crop, crop] * 2
    assert losses == [VaeLoss(even=1.0), crops.loss, crops.loss] * 2


def test_a_frozen_encoder_keeps_its_latents_and_the_decoder_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = new_vae()
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    freeze_encoder(vae)
    crops = Crops(size=16, frames=5, batch=1, loss=VaeLoss())
    stage = VaeStage(frames=17, batch=1, steps=2, lr=1e-3, max_s=600.0, loss=VaeLoss(even=1.0), crops=crops)
    pool = ClipPool(range(1), 17, device=CPU)
    options = {"out": tmp_path, "pool": pool, "accelerator": Accelerator(cpu=True), "seed": 0, "as_conv2d": False}
    after = train_vae(vae, [stage], origin={"init": "noise"}, **options).state_dict()
    changed = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"decoder", "post_quant_conv"}
    with pytest.raises(ValueError, match="holds a run with init=noise, this one has init=weights"):
        train_vae(vae, [stage], origin={"init": "weights"}, **options)


def test_shimmer_is_how_errors_change_outside_the_boxes() -> None:
    error = torch.full((1, 3, 5, 4, 6), 0.5)
    marks = torch.zeros(1, 1, 5, 4, 6, dtype=torch.uint8)
    assert shimmer(error, marks) == 0  # wrong, but still
    marks[..., :2, :] = 1
    error[:, :, 1::2, :2] += 100.0  # in the boxes
    assert shimmer(error, marks) == 0
    error[:, :, 1::2, 2:] -= 0.25
    assert shimmer(error, marks) == 0.25
    marks[:, :, 2] = 2  # a sprite over all of one frame: two of four changes do not count
    assert shimmer(error, marks) == 0.25
    assert shimmer(error, torch.ones_like(marks)) == 0
