"""Training the autoencoder's decoder alone."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from flashforward_core.train.vae_train import (
    ClipPool,
    VaeLoss,
    VaeStage,
    VaeStep,
    by_place_and_age,
    freeze_encoder,
    new_vae,
    train_vae,
)

pytestmark = pytest.mark.cpu


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
    step = VaeStep(new_vae(), VaeLoss(even=1.0), as_conv2d=False, autocast=False)
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
    pool = ClipPool(range(2), 2, device=torch.device("cpu"))
    _, marks = pool.sample(4, 1, torch.Generator().manual_seed(0))
    counts = [(marks == mark).sum().item() for mark in range(3)]
    assert counts[0] > counts[2] > counts[1] > 0 and marks.shape == (4, 1, 1, 128, 192)


def test_a_frozen_encoder_keeps_its_latents_and_the_decoder_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = new_vae()
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    freeze_encoder(vae)
    stage = VaeStage(frames=17, batch=1, steps=1, lr=1e-3, max_s=600.0)
    pool = ClipPool(range(1), 17, device=torch.device("cpu"))
    after = train_vae(
        vae,
        [stage],
        out=tmp_path,
        pool=pool,
        accelerator=Accelerator(cpu=True),
        seed=0,
        as_conv2d=False,
        loss=VaeLoss(even=1.0),
    ).state_dict()
    changed = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"decoder", "post_quant_conv"}
