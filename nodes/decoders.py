"""Small decoders of models/vae_approx, and what a node decodes with."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from flashforward_core.model.formats import FILE_SUFFIXES
from flashforward_core.model.roles import Backbone
from flashforward_core.model.tiny_vae import OTHERS, RAW, TinyVae, load_tiny_vae

from .devices import default_device
from .model_files import stamp
from .sockets import expert

FULL = "vae"
"""The choice that is no file: the VAE that is connected, or the backbone's own."""
FOLDER = "vae_approx"


def decoder_files() -> list[str]:
    """Return the names of files that may be small decoders for Wan 2.1; whether they are shows on loading."""
    names = [name.replace("\\", "/") for name in folder_paths.get_filename_list(FOLDER)]
    found = [(name, name.rpartition("/")[2].lower()) for name in names]
    return [name for name, last in found if last.endswith(FILE_SUFFIXES) and not last.startswith(OTHERS)]


def decoder_input() -> Any:
    """Declare the choice of the decoder."""
    return expert(
        io.Combo,
        "decoder",
        options=[FULL, *decoder_files()],
        default=FULL,
        optional=True,
        tooltip="vae: the connected VAE, or the backbone's own. A file of models/vae_approx (taew2_1, lighttaew2_1) "
        "instead is many times faster and of preview quality. For Wan models.",
    )


def decoder_path(name: str) -> Path:
    """Return the file of a name in the list; an unknown one raises ``ValueError`` that says where files go."""
    known = {found.replace("\\", "/"): found for found in folder_paths.get_filename_list(FOLDER)}
    found = known.get(name.replace("\\", "/"))
    path = None if found is None else folder_paths.get_full_path(FOLDER, found)
    if path is None:
        raise ValueError(
            f"decoder={name!r} is not in ComfyUI's {FOLDER} folder; put the file into models/{FOLDER}, or use {FULL}"
        )
    return Path(path)


def small_decoder(name: str) -> TinyVae:
    """Load a file of the list; ``ValueError`` names one that is no decoder for Wan 2.1.

    It stays until another is asked for: the engine moves an autoencoder to a device once.
    """
    path = decoder_path(name)
    return _loaded(path, stamp(path), default_device().type)


@lru_cache(maxsize=1)
def _loaded(path: Path, state_of_file: str, device_type: str) -> TinyVae:
    half = torch.bfloat16 if path.name.lower().startswith(RAW) else torch.float16  # as those who made them run them
    return load_tiny_vae(path, dtype=torch.float32 if device_type == "cpu" else half)


def check_decoder(name: str | None) -> None:
    """Raise ``ValueError`` for a file that is missing or wrong, before anything runs."""
    if name not in (None, FULL):
        small_decoder(str(name))


def decoder_stamp(name: str | None) -> str:
    """Return what changes when the decoder's file does."""
    return "" if name in (None, FULL) else stamp(decoder_path(str(name)))


def check_latents(backbone: Backbone | None, name: str) -> None:
    """Raise ``ValueError`` where a file cannot read what ``backbone`` makes."""
    if backbone is not None and backbone.vae is not None:
        raise ValueError(
            f"decoder={name!r} reads Wan 2.1's latents; this backbone makes its own, for its own autoencoder: use "
            f"decoder={FULL}"
        )
