"""Training the autoencoder's decoder alone."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from flashforward_core.train.vae_train import (
    MOST_EVEN,
    ClipPool,
    VaeLoss,
    VaeStage,
    even_weights,
    freeze_encoder,
    new_vae,
    train_vae,
)

pytestmark = pytest.mark.cpu


def test_frames_that_come_out_alike_weigh_alike() -> None:
    weights = even_weights(torch.ones(2, 3, 29, 4, 4), 8.0)
    assert torch.equal(weights, torch.ones(29))


def test_the_worse_half_of_a_latent_frame_counts_more() -> None:
    error = torch.ones(1, 3, 29, 2, 2)
    worse = [frame for frame in range(1, 29) if (frame - 1) % 4 < 2]
    error[:, :, worse] = 1.1**0.5
    weights = even_weights(error, 4.0)
    torch.testing.assert_close(weights[worse], torch.full((14,), 1.1**4))
    others = [frame for frame in range(29) if frame not in worse]
    assert torch.equal(weights[others], torch.ones(15))


def test_no_frame_takes_over() -> None:
    error = torch.ones(1, 3, 29, 2, 2)
    error[:, :, 1:5] = 100.0
    assert even_weights(error, 8.0).max() == MOST_EVEN


def test_a_frozen_encoder_keeps_its_latents_and_the_decoder_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = new_vae()
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    freeze_encoder(vae)
    stage = VaeStage(frames=5, batch=1, steps=1, lr=1e-3, max_s=600.0)
    pool = ClipPool(range(1), 5, device=torch.device("cpu"))
    after = train_vae(
        vae,
        [stage],
        out=tmp_path,
        pool=pool,
        accelerator=Accelerator(cpu=True),
        seed=0,
        as_conv2d=False,
        loss=VaeLoss(even=8.0),
    ).state_dict()
    changed = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"decoder", "post_quant_conv"}
