"""Write a trained model in the layout that ``model/loading.py`` reads."""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from flashforward_core.graph.task import Role
from flashforward_core.model.lora import save_role_lora
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer

SHARD = "10MB"  # no asset may be larger than 15 MiB


def export_model(
    model: CausalWanTransformer, text: ByteT5Encoder, *, vae: Path, folder: Path, roles: Sequence[Role]
) -> None:
    """Write transformer, role LoRAs and text encoder in bfloat16, and a copy of the ``vae`` folder, to ``folder``."""
    save_transformer(model, folder / "transformer", shard=SHARD)
    for role in roles:
        save_role_lora(model, folder / f"{role}_lora.safetensors", role=role, base="embedded", dtype=torch.bfloat16)
    copy.deepcopy(text).cpu().bfloat16().save(folder / "text_encoder")  # a copy: training may go on
    shutil.copytree(vae, folder / "vae", dirs_exist_ok=True)


def save_transformer(model: CausalWanTransformer, folder: Path, *, shard: str) -> None:
    """Write the transformer without its LoRAs to ``folder``, in bfloat16 in diffusers' layout."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_diffusers(), indent=2) + "\n")
    state = {
        name: tensor.detach().cpu().bfloat16() for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    save_torch_state_dict(
        state, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors", max_shard_size=shard
    )
