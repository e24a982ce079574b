"""The autoencoder's training step, as ``train vae`` runs it: stages, the decoder alone, and the report."""

import argparse
import logging
import math
import shutil

import torch
from accelerate import Accelerator

from flashforward_core.scenes import HELD_OUT
from flashforward_core.train.origin import origin_of
from flashforward_core.train.synthetic import CLIP_FRAMES
from flashforward_core.train.vae_train import (
    ClipPool,
    Crops,
    VaeLoss,
    VaeStage,
    evaluate_vae,
    freeze_encoder,
    load_vae,
    measure_latents,
    new_vae,
    report,
    save_vae,
    train_vae,
)

log = logging.getLogger(__name__)

VAE_STAGES = ((0.1, 1, 256), (0.25, 17, 16), (0.3, 49, 8), (0.35, 129, 3))
"""Share of the steps, video frames per clip, clips per batch. The last clips are longer than what the causal
autoencoder remembers: without them it drifts after the longest clip it has seen."""


DECODER = VaeLoss(box=4.0, even=0.2, still=3.0)
"""Of whole clips, for the decoder alone. At 0.2, a quarter of a decibel between frames pulls ten times as hard as what
is left of the errors."""
DECODER_CROPS = VaeLoss(mse=16.0, box=8.0, first_frame=2.0, still=3.0)
"""Of crops: the largest errors count most, as in what is measured."""


def vae_stages(args: argparse.Namespace) -> list[VaeStage]:
    """Return what to train the autoencoder on; the decoder alone has one stage of its own."""
    if args.decoder_only:
        crops = Crops(size=args.crops, frames=33, batch=3 * args.clips, loss=DECODER_CROPS) if args.crops else None
        return [
            VaeStage(
                frames=VAE_STAGES[-1][1],
                batch=max(1, args.clips // 2),
                steps=args.steps,
                lr=args.lr / 3,
                max_s=args.max_s,
                loss=DECODER,
                crops=crops,
            )
        ]
    chosen = VAE_STAGES if args.init is None else VAE_STAGES[-1:]
    whole = sum(share for share, _, _ in chosen)
    return [
        VaeStage(
            frames=frames,
            batch=max(1, clips * args.clips // 8),
            steps=math.ceil(args.steps * share / whole),
            lr=args.lr if frames < 49 else args.lr / 2,
            max_s=args.max_s * share / whole,
        )
        for share, frames, clips in chosen
    ]


def run_vae(args: argparse.Namespace, accelerator: Accelerator) -> None:
    device = accelerator.device
    if args.steps == 0:
        if accelerator.is_main_process:
            shutil.copytree(args.init, args.out / "vae", dirs_exist_ok=True)
            _measure(args, device)
        return
    stages = vae_stages(args)
    vae = new_vae() if args.init is None else load_vae(args.init, device)
    if args.decoder_only:
        freeze_encoder(vae)
    pool = ClipPool(own_scenes(args.scenes, accelerator), stages[-1].frames + 16, device=device)
    vae = train_vae(
        vae,
        stages,
        out=args.out / "vae_run",
        origin=origin_of(args, init=args.init, decoder_only=args.decoder_only, crops=args.crops),
        pool=pool,
        accelerator=accelerator,
        seed=args.seed,
        as_conv2d=False,
    )
    if accelerator.is_main_process:
        vae = vae.eval().float()
        if not args.decoder_only:  # its latents are those of --init, and so are their statistics
            measure_latents(vae, range(16), frames=161, device=device)
        save_vae(vae, args.out / "vae")
        _measure(args, device)


def _measure(args: argparse.Namespace, device: torch.device) -> None:
    seeds = range(HELD_OUT, HELD_OUT + args.held_out)
    result = evaluate_vae(load_vae(args.out / "vae", device), seeds, frames=CLIP_FRAMES, device=device)
    report(result, args.out / "vae_report.json")
    log.info("autoencoder: %s", {k: v for k, v in result.items() if k != "psnr_per_frame"})


def own_scenes(count: int, accelerator: Accelerator) -> range:
    """Give each process its own share of the training scenes."""
    return range(accelerator.process_index, count, accelerator.num_processes)
