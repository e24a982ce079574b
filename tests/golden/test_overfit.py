"""Packed fine-tuning on one clip ends in a model whose four stages give that clip, as well as the autoencoder can."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from flashforward_core.engine.rollout import render
from flashforward_core.metrics import psnr
from flashforward_core.model.config import WanConfig
from flashforward_core.model.loading import ASSETS, load_embedded
from flashforward_core.model.roles import Backbone, attach_roles, models_by_role
from flashforward_core.model.text import ByteT5Encoder, TextConfig
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.model.vae import StreamingDecoder, encode_frames
from flashforward_core.scenes import sample_scene
from flashforward_core.specs import RolloutSpec, VideoShape
from flashforward_core.train.data import LatentPool
from flashforward_core.train.loop import LoopConfig
from flashforward_core.train.sft import layouts_for, train_sft
from flashforward_core.train.synthetic import render_scene

pytestmark = pytest.mark.cpu
STEPS, LR = 800, 3e-3
LATENTS, SIZE = 13, 32  # five chunks, two anchors
CONFIG = WanConfig(name="custom", dim=64, ffn_dim=128, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)


def test_overfitting_one_clip_reaches_the_autoencoder_s_own_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    vae = load_embedded(ASSETS).vae
    drawn = render_scene(sample_scene(3), 4 * LATENTS - 3)[0][:, :, 60 : 60 + SIZE, 60 : 60 + SIZE]
    video = ((drawn + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0)
    clean = encode_frames(vae, video.unsqueeze(0))

    text = ByteT5Encoder(TextConfig(d_model=12, d_kv=4, d_ff=8, num_heads=2, num_layers=1, text_len=5))
    model = CausalWanTransformer(CONFIG)
    attach_roles(model, rank=2, alpha=2)
    layouts = layouts_for([(4, LATENTS, False)], width=SIZE, height=SIZE, device=torch.device("cpu"))
    model, text = train_sft(
        model,
        text,
        LatentPool.of_clips(text, clean, ["one clip"], device=torch.device("cpu")),
        layouts,
        LoopConfig(out=tmp_path, steps=STEPS, lr=LR, warmup=20, ema_decay=0.98, save_every=10**6),
        accelerator=Accelerator(cpu=True),
        compiled=False,
    )
    backbone = Backbone(
        config=CONFIG,
        models=models_by_role(model.requires_grad_(False).eval(), merged=True),
        vae=vae,
        text_encoder=text,
        fingerprint="overfit",
        dtype=torch.float32,
    )
    spec = RolloutSpec(shape=VideoShape(width=SIZE, height=SIZE, latent_frames=LATENTS), seed=5)
    with torch.no_grad():
        made = render(backbone, spec, [text.encode(["one clip"])]).latents_BCFHW
    reference, ours = (StreamingDecoder(vae).decode(latents, None)[0][0].numpy() for latents in (clean, made))
    possible, reached = (float(psnr(frames, video.numpy()).mean()) for frames in (reference, ours))
    assert reached > possible - 1.0
