"""Write a trained model in the layout that ``model/loading.py`` reads."""

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from flashforward_core.graph.task import Role
from flashforward_core.model.lora import save_role_lora
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer

SHARD = "10MB"  # no asset may be larger than 15 MiB
LORAS = {role: f"{role}_lora.safetensors" for role in Role}
WEIGHTS = ("transformer", *LORAS.values())
"""What an export may lack that the one before it had; what is in neither is the user's."""


def export_model(
    model: CausalWanTransformer, text: ByteT5Encoder, *, vae: Path, folder: Path, roles: Sequence[Role]
) -> None:
    """Write transformer, role LoRAs and text encoder in bfloat16, and a copy of the ``vae`` folder, to ``folder``."""
    with replaced_whole(folder) as new:
        save_transformer(model, new / "transformer", shard=SHARD)
        save_loras(model, new, roles=roles, base="embedded")
        copy.deepcopy(text).cpu().bfloat16().save(new / "text_encoder")  # a copy: training may go on
        shutil.copytree(vae, new / "vae")


@contextmanager
def replaced_whole(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write an export to, and put it in the place of ``folder`` once it is whole.

    At any moment ``folder`` is the old export or the new one; between two renames it is missing, and both stand beside
    it, under hidden names. What a user put into ``folder`` stays, but not into the folders within.
    """
    folder = folder.resolve()  # a link to a folder is to stay one
    new, old = (folder.with_name(f".{folder.name}.{age}") for age in ("new", "old"))
    if old.exists() and not folder.exists():
        old.rename(folder)  # the last run was stopped between its renames
    _clear(old, folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    _set_ordinary_modes(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _clear(old, folder)


def _clear(old: Path, folder: Path) -> None:
    """Remove the export ``old``, if there is one; what else it holds goes to ``folder``."""
    for path in old.glob("*"):
        if path.name not in WEIGHTS and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(old, ignore_errors=True)


def _set_ordinary_modes(folder: Path) -> None:
    """Give files the permissions that any new file gets: safetensors lets nobody but the owner read its own."""
    probe = folder / "probe"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def save_transformer(model: CausalWanTransformer, folder: Path, *, shard: str) -> None:
    """Write the transformer without its LoRAs to a new ``folder``, in bfloat16 in diffusers' layout."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_diffusers(), indent=2) + "\n")
    state = {
        name: tensor.detach().cpu().bfloat16() for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    save_torch_state_dict(
        state, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors", max_shard_size=shard
    )


def save_loras(model: CausalWanTransformer, folder: Path, *, roles: Sequence[Role], base: str) -> None:
    """Write each role's LoRA to ``folder``, in bfloat16; ``base`` says which weights they belong to."""
    for role in roles:
        save_role_lora(model, folder / LORAS[role], role=role, base=base, dtype=torch.bfloat16)
