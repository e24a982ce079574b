"""What a training step starts from: weights out of files, with or without roles, and captions."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flashforward_core.graph.task import Role
from flashforward_core.model.config import EMBEDDED
from flashforward_core.model.loading import load_embedded
from flashforward_core.model.roles import attach_roles, role_linears, role_parameters
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.scenes import sample_scene
from flashforward_core.train.base import load_base, read_base
from flashforward_core.train.folder import captioned_videos
from flashforward_core.train.wan import CachedPrompts, cached_prompts, load_transformer

BASE = "a base.pt that train base left, or an exported folder"
SFT = "an sft.pt that train sft left"


def new_models() -> tuple[CausalWanTransformer, ByteT5Encoder]:
    return CausalWanTransformer(EMBEDDED), ByteT5Encoder.create(text_len=EMBEDDED.text_len, text_dim=EMBEDDED.text_dim)


def start_from(assets: Path, model: CausalWanTransformer, text: ByteT5Encoder) -> None:
    """Copy an exported model's weights, without its roles' LoRAs."""
    exported = load_embedded(assets, merged=False)
    state = exported.models[Role.RENDERER].state_dict()
    model.load_state_dict({name: tensor for name, tensor in state.items() if ".lora_" not in name})
    text.load_state_dict(exported.text_encoder.state_dict())


def captions(args: argparse.Namespace, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the captions to train on; of drawn scenes, those of a process's share (number, processes)."""
    if args.data is None:
        return [sample_scene(seed).caption for seed in range(share[0], args.scenes, share[1])]
    return [video.caption for video in captioned_videos(args.data)]


def trained_only(args: argparse.Namespace) -> bool:
    """Whether an ``sft.pt`` leaves out the transformer: it is frozen and in ``args.wan``."""
    return args.frozen and args.wan is not None


def add_roles(model: CausalWanTransformer, args: argparse.Namespace) -> None:
    """Attach the roles' LoRAs to train, in place."""
    _attach(model, lora_options(args))


def lora_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what ``args`` say of new LoRAs."""
    alpha = args.rank if args.alpha is None else args.alpha
    return {"rank": args.rank, "alpha": alpha, "targets": sorted(args.targets)}


def _attach(model: CausalWanTransformer, options: Mapping[str, Any]) -> None:
    attach_roles(model, **options)
    for parameter in (*role_parameters(model), model.role_embedding.weight):
        parameter.data = parameter.data.float()  # frozen weights are bfloat16, which small steps would not change


def student(
    source: Path, args: argparse.Namespace, accelerator: Accelerator
) -> tuple[CausalWanTransformer, ByteT5Encoder]:
    """Return a model with its roles attached and its text encoder, from an ``sft.pt`` or an exported folder.

    Its LoRAs are as the source has them, whatever ``args`` says; an ``sft.pt`` from before it said so leaves rank,
    alpha and targets to ``args``. Raises ``ValueError`` for a source without LoRAs, or another file.
    """
    if args.wan is None and source.is_dir():
        exported = load_embedded(source, merged=False)
        model = exported.models[Role.RENDERER]
        _check_roles(source, there=bool(role_linears(model)))
        return model.requires_grad_(True).train(), exported.text_encoder
    saved = read_base(source, wanted=SFT)
    _check_roles(source, there=any(".lora_" in name for name in saved["model"]))
    if trained_only(args) and any(".lora_" not in n and not n.startswith("role_embedding") for n in saved["model"]):
        raise ValueError(
            f"{source} holds a transformer that was trained too, which frozen would lose; use frozen=False"
        )
    model, text = new_models() if args.wan is None else _wan_model(args.wan, args, accelerator)
    if saved.get("roles"):
        _attach(model, saved["roles"])
    else:
        add_roles(model, args)
    load_base(model, text, saved, path=source, wanted=SFT, trained_only=trained_only(args))
    return model, text


def _check_roles(source: Path, *, there: bool) -> None:
    if not there:
        raise ValueError(f"{source} has no role LoRAs, which distill trains; train sft with rank=8 or more first")


def base_model(
    source: Path, args: argparse.Namespace, accelerator: Accelerator
) -> tuple[CausalWanTransformer, ByteT5Encoder]:
    """Return a bidirectional model and its text encoder, from a ``base.pt`` or an exported folder without its roles.

    For Wan ``source`` is another folder in diffusers' layout, or what is not there, which means ``args.wan``. Raises
    ``ValueError`` for another file.
    """
    if args.wan is not None:
        if source.is_file() and source in (args.init, args.teacher):
            raise ValueError(f"{source} is a file; with wan= name a folder in diffusers' layout, or leave it out")
        return _wan_model(source if source.is_dir() else args.wan, args, accelerator)
    model, text = new_models()
    if source.is_dir():
        start_from(source, model, text)
    else:
        load_base(model, text, read_base(source, wanted=BASE), path=source, wanted=BASE)
    return model, text


def _wan_model(
    folder: Path, args: argparse.Namespace, accelerator: Accelerator
) -> tuple[CausalWanTransformer, CachedPrompts]:
    model = load_transformer(folder, frozen=args.frozen)
    with accelerator.main_process_first():  # the others read what it has embedded
        text = cached_prompts(
            args.wan,
            captions(args),
            text_len=model.config.text_len,
            cache=args.out / "latents",
            device=accelerator.device,
        )
    return model, text
