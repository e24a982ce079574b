"""``python -m flashforward_core train``: one command per training step of the embedded model.

Each step reads what the one before wrote under ``--out`` and can be interrupted and run again. Several GPUs:
``torchrun --nproc-per-node N -m flashforward_core train STEP …``, which multiplies the batch by N.
"""

import argparse
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType

from flashforward_core.graph.task import Role
from flashforward_core.model.files import fingerprint
from flashforward_core.model.roles import role_parameters
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.scenes import FPS
from flashforward_core.train import base as base_step
from flashforward_core.train import distill as distill_step
from flashforward_core.train import sft as sft_step
from flashforward_core.train.data import LatentPool
from flashforward_core.train.export import export_model
from flashforward_core.train.folder import ClipForm, encode_folder
from flashforward_core.train.loop import LoopConfig
from flashforward_core.train.options import PARTIAL, add_arguments, check, complete, is_exported
from flashforward_core.train.origin import origin_of, weights_of
from flashforward_core.train.progress import log_video
from flashforward_core.train.rollout import layout_for
from flashforward_core.train.samples import sample_video
from flashforward_core.train.synthetic import CLIP_FRAMES
from flashforward_core.train.vae_command import own_scenes, run_vae
from flashforward_core.train.vae_train import load_vae
from flashforward_core.train.wan import export_wan
from flashforward_core.train.weights import (
    add_roles,
    base_model,
    captions,
    lora_options,
    new_models,
    start_from,
    student,
    trained_only,
)

__all__ = ["add_arguments", "run"]

log = logging.getLogger(__name__)


def _pool(args: argparse.Namespace, text: ByteT5Encoder, accelerator: Accelerator) -> LatentPool:
    """Encode this process's scenes, or read them back: the file's name says of which weights and which scenes."""
    folder = _vae_folder(args)
    weights = fingerprint(sorted(folder.glob("*.safetensors")))[:16]
    if args.data is not None:  # always so for Wan
        return _folder_pool(args, text, accelerator, weights=weights)
    share = f"{accelerator.process_index}of{accelerator.num_processes}"
    path = args.out / "latents" / f"{weights}-{args.scenes}-{share}.safetensors"
    if path.exists():
        return LatentPool.load(path, device=accelerator.device)
    vae = load_vae(folder, accelerator.device)
    seeds = own_scenes(args.scenes, accelerator)
    pool = LatentPool.encode(vae, text, seeds, frames=CLIP_FRAMES, device=accelerator.device)
    pool.save(path)
    return pool


def _folder_pool(
    args: argparse.Namespace, text: ByteT5Encoder, accelerator: Accelerator, *, weights: str
) -> LatentPool:
    """Encode this process's share of the videos in ``args.data``, or read it back."""
    latents, captions = encode_folder(
        args.data,
        load_vae(_vae_folder(args), accelerator.device),
        form=ClipForm(width=args.size[0], height=args.size[1], frames=4 * args.clip_latents - 3, fps=FPS),
        cache=args.out / "latents",
        weights=weights,
        share=(accelerator.process_index, accelerator.num_processes),
    )
    log.info("%d clips of %s", len(captions), args.data)
    return LatentPool.of_clips(text, latents, captions, device=accelerator.device)


def _config(args: argparse.Namespace, name: str, *, init: Path | None, **more: object) -> LoopConfig:
    return LoopConfig(
        out=args.out / f"{name}_run",
        origin=origin_of(args, init=init, frozen=args.frozen, **more),
        steps=args.steps,
        lr=args.lr,
        warmup=max(1, min(100, args.steps // 10)),
        seed=args.seed,
        max_s=args.max_s,
        save_every_s=args.save_every_s,
        accumulate=args.accumulate,
        shard=args.shard,
        logs=args.logs,
    )


def _base(args: argparse.Namespace, accelerator: Accelerator) -> None:
    model, text = new_models()
    if args.init is not None:
        start_from(args.init, model, text)
    model, text = base_step.train_base(
        model,
        text,
        _pool(args, text, accelerator),
        _config(args, "base", init=args.init, vae=weights_of(_vae_folder(args))),
        accelerator=accelerator,
        layouts=[(args.clips, 21, 1), (args.clips * 2, 9, 10)],
        compiled=args.compile and not args.shard,
        checkpoint_blocks=args.checkpoint_blocks,
        rebase=args.rebase,
    )
    if accelerator.is_main_process:
        base_step.save_base(model, text, args.out / "base.pt")
        if is_exported(args.init) and not (args.out / "vae").exists():
            shutil.copytree(args.init / "vae", args.out / "vae")  # what the next steps' clips are encoded with
        log.info("wrote %s", args.out / "base.pt")


_PLANNER = (5, 81, True)
SFT_STEPS = (
    *((1, 81, False), _PLANNER, _PLANNER) * 2,
    *((1, 41, False), _PLANNER, _PLANNER),
    *((1, 81, False), _PLANNER, _PLANNER) * 2,
    *((1, 21, False), _PLANNER, _PLANNER),
)
"""Times the clips per batch, latent frames, whether the planner is packed alone; taken in turn."""


Steps = list[tuple[int, int, bool]]


def sft_steps(*, clips: int, latents: int, clip_latents: int) -> tuple[Steps, Steps]:
    """Return the steps with clips of up to ``latents``, and the same for time-rebase.

    Those leave a quarter of a clip, which has ``clip_latents``, to be cropped.
    """
    steps = [(times * clips, length * latents // 81, planner) for times, length, planner in SFT_STEPS]
    most = clip_latents - clip_latents // 4
    return steps, [(count, min(length, most), planner) for count, length, planner in steps]


def _sft(args: argparse.Namespace, accelerator: Accelerator) -> None:
    init = args.init or args.out / "base.pt"
    model, text = base_model(init, args, accelerator)
    if args.rank > 0:
        add_roles(model, args)
    _alike_roles(model, args)
    _choose_trained(model, text, args)
    steps, shorter = sft_steps(clips=args.clips, latents=args.latents, clip_latents=args.clip_latents)
    layouts_for = partial(
        sft_step.layouts_for, width=args.size[0], height=args.size[1], padded_to=args.latents, device=accelerator.device
    )
    roles = tuple(Role) if args.rank > 0 else ()

    def export(student: CausalWanTransformer, encoder: torch.nn.Module, step: int) -> None:
        _export(student, encoder, args, folder=args.out / "assets", roles=roles, step=step)

    model, text = sft_step.train_sft(
        model,
        text,
        _pool(args, text, accelerator),
        layouts_for(steps),
        _config(
            args,
            "sft",
            init=init if init.exists() else args.wan,
            **lora_options(args),
            vae=weights_of(_vae_folder(args)),
            role_embedding=args.role_embedding,
        ),
        accelerator=accelerator,
        compiled=args.compile and not args.shard,
        checkpoint_blocks=args.checkpoint_blocks,
        rebase=args.rebase,
        rebased=layouts_for(shorter) if args.rebase > 0 else (),
        snapshot=export,
    )
    if accelerator.is_main_process:
        base_step.save_base(model, text, args.out / "sft.pt", trained_only=trained_only(args))
        log.info("wrote %s", args.out / "sft.pt")


@torch.no_grad()
def _alike_roles(model: CausalWanTransformer, args: argparse.Namespace) -> None:
    """Have the roles start alike: a base has trained the renderer's embedding alone, as a part of its own."""
    rows = model.role_embedding.weight
    if is_exported(args.init) or not args.role_embedding:
        torch.nn.init.zeros_(rows)
    else:
        rows.copy_(rows[list(Role).index(Role.RENDERER)].expand_as(rows))


STUDENT_LR_SCALE = 0.5  # the critic has to follow the student, so it learns faster


def _distill(args: argparse.Namespace, accelerator: Accelerator) -> None:
    init = args.init or args.out / "sft.pt"
    model, text = student(init, args, accelerator)
    _choose_trained(model, text, args)
    teacher = args.teacher or args.out / "base.pt"
    base, base_text = base_model(teacher, args, accelerator)
    if args.critic_rank > 0:
        critic = distill_step.lora_critic(base if args.shard else base.to(accelerator.device), rank=args.critic_rank)
    else:
        critic, _ = base_model(teacher, args, accelerator)
    spec = sft_step.spec_for_latents(args.latents, width=args.size[0], height=args.size[1])
    if args.forward_kl > 0:
        pool = _pool(args, text, accelerator)
    else:  # the student makes its clips itself
        pool = LatentPool.of_captions(
            text, captions(args, (accelerator.process_index, accelerator.num_processes)), device=accelerator.device
        )

    def export(student: CausalWanTransformer, step: int) -> None:
        _export(student, text, args, folder=args.out / "distilled", roles=tuple(Role), step=step)

    distill_step.train_distill(
        model,
        text,
        critic,
        distill_step.Teacher(model=base, text=base_text),
        pool,
        layout_for(spec, device=accelerator.device),
        replace(
            _config(
                args,
                "distill",
                init=init,
                teacher=weights_of(teacher if teacher.exists() else args.wan),
                critic_rank=args.critic_rank,
                role_embedding=args.role_embedding,
            ),
            lr_scales={"model.": STUDENT_LR_SCALE},
        ),
        accelerator=accelerator,
        clips=args.clips,
        distill=distill_step.DistillConfig(
            guidance=args.guidance,
            windows=args.windows,
            forward_kl=args.forward_kl,
            anchor_weight=1.0 if args.wan is None else 0.0,  # the embedded base knows sparse clips
            checkpoint_blocks=args.checkpoint_blocks,
        ),
        compiled=args.compile and not args.shard,
        snapshot=export,
    )


def _choose_trained(model: CausalWanTransformer, text: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freeze what is not to be trained."""
    if args.frozen:
        model.requires_grad_(False)
        text.requires_grad_(False)
        for parameter in role_parameters(model):
            parameter.requires_grad_(True)
    model.role_embedding.requires_grad_(args.role_embedding)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("frozen=True with rank=0 and role_embedding=False leaves nothing to train; use rank=8")


def _export(
    model: CausalWanTransformer,
    text: torch.nn.Module,
    args: argparse.Namespace,
    *,
    folder: Path,
    roles: Sequence[Role],
    step: int,
) -> None:
    """Write what can be rendered with; with logs, a sample of it too."""
    if args.wan is not None:
        export_wan(model, folder, roles=roles, frozen=args.frozen)
    else:
        export_model(model, text, vae=_vae_folder(args), folder=folder, roles=roles)
        if args.logs:
            device = next(model.parameters()).device
            frames = sample_video(folder, captions=captions(args)[:1], device=device)
            log_video(args.out / f"{args.step}_run", "sample", frames, step, fps=FPS / 2)
    log.info("step %d: exported to %s", step, folder)


def _vae_folder(args: argparse.Namespace) -> Path:
    """Return the autoencoder of this run, or that of the exported folder that it starts from."""
    if args.wan is not None:
        found: Path = args.wan / "vae"
        return found
    own: Path = args.out / "vae"
    return own if own.exists() or not is_exported(args.init) else args.init / "vae"


STEPS: Mapping[str, Callable[[argparse.Namespace, Accelerator], None]] = {
    "vae": run_vae,
    "base": _base,
    "sft": _sft,
    "distill": _distill,
}


def run(args: argparse.Namespace) -> int:
    """Run one training step."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for talkative in ("accelerate", "filelock", "huggingface_hub"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    complete(args)
    check(args)
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch._dynamo.config.recompile_limit = 64  # the autoencoder's fused norm meets many layouts
        if args.wan is None:  # cuDNN's backward pass failed in distillation (torch 2.11, H200)
            torch.backends.cuda.enable_cudnn_sdp(False)
    unused = DistributedDataParallelKwargs(find_unused_parameters=PARTIAL[args.step])
    no_gpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())  # accelerate has to be told
    accelerator = Accelerator(cpu=no_gpu, mixed_precision="no", kwargs_handlers=[unused])  # steps cast by themselves
    if accelerator.distributed_type is DistributedType.FSDP:  # which parts there are is not accelerate's to say
        if args.step == "vae":
            raise ValueError("train vae has no parts to share out; launch it without accelerate's FSDP")
        args.shard = True
    if args.shard and accelerator.num_processes == 1:
        log.warning("shard=True changes nothing for one process; start several with torchrun or accelerate launch")
        args.shard = False
    STEPS[args.step](args, accelerator)
    accelerator.end_training()
    return 0
