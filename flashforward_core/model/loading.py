"""Files to a Backbone: the embedded model that the package carries, with errors that name the file."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..graph.task import Role
from .checkpoints import WEIGHTS, check_shapes, load_transformer
from .config import WanConfig
from .files import fingerprint, read_json, read_tensors
from .lora import load_role_lora
from .roles import Backbone, models_by_role

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

    from .text import ByteT5Encoder

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EMBEDDED_SIZE = (192, 128)  # width, height: the only one that the embedded model was trained on


def load_embedded(
    assets: Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    merged: bool = True,
    attention: str = "auto",
) -> Backbone:
    """Load the embedded backbone from ``assets`` (the package's own by default).

    ``merged`` keeps one weight set per role; otherwise the roles' LoRAs are applied as they are. ``dtype`` is the
    transformer's; autoencoder and text encoder are float32. A missing file raises ``FileNotFoundError``, a damaged or
    wrong one ``ValueError``, each naming the file, what was expected and what was found.
    """
    folder = assets or ASSETS
    with torch.inference_mode(False), torch.no_grad():  # a lane's thread must be able to use the weights
        model = load_transformer(folder / "transformer", dtype=dtype, device=device)
        for role in Role:
            lora = folder / f"{role}_lora.safetensors"
            if lora.exists():
                load_role_lora(model, lora, role=role)
        text_encoder = load_text_encoder(folder / "text_encoder", device=device)
        _check_text(folder, model.config, text_encoder)
        return Backbone(
            config=model.config,
            models=models_by_role(model.requires_grad_(False).eval(), merged=merged),
            vae=load_vae(folder / "vae", device=device),
            text_encoder=text_encoder,
            fingerprint=fingerprint(asset_files(folder)),
            dtype=dtype,
            attention=attention,
            size=EMBEDDED_SIZE,
        )


def asset_files(folder: Path) -> list[Path]:
    """Return the files that decide what the embedded model computes."""
    parts = ("transformer", "vae", "text_encoder")
    inside = [path for part in parts for path in sorted((folder / part).iterdir()) if path.is_file()]
    return inside + [path for role in Role if (path := folder / f"{role}_lora.safetensors").exists()]


def load_vae(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> "AutoencoderKLWan":
    """Load diffusers' AutoencoderKLWan from ``config.json`` and ``diffusion_pytorch_model.safetensors``."""
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKLWan

    config = read_json(folder / "config.json", what="the autoencoder's config")
    if config.get("z_dim") != 16:
        raise ValueError(f"{folder / 'config.json'} has z_dim={config.get('z_dim')}; expected a 16-channel Wan VAE")
    path = folder / f"{WEIGHTS}.safetensors"
    tensors, _ = read_tensors(path, what="the autoencoder's weights")
    with init_empty_weights():
        vae = AutoencoderKLWan.from_config(config)
    check_shapes(tensors, vae.state_dict(), source=str(path))
    vae.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return vae.requires_grad_(False).eval()


def load_text_encoder(folder: Path, *, device: torch.device | str = "cpu") -> "ByteT5Encoder":
    """Load the prompt encoder from ``config.json`` and ``model.safetensors``, in float32."""
    from .text import ByteT5Encoder

    read_json(folder / "config.json", what="the text encoder's config")
    read_tensors(folder / "model.safetensors", what="the text encoder's weights")
    return ByteT5Encoder.load(folder).to(device, torch.float32).requires_grad_(False).eval()


def _check_text(folder: Path, config: WanConfig, encoder: "ByteT5Encoder") -> None:
    found, expected = (encoder.config.text_len, encoder.config.d_model), (config.text_len, config.text_dim)
    if found != expected:
        raise ValueError(
            f"{folder / 'text_encoder'} makes embeddings of {found[0]}x{found[1]}, the transformer takes "
            f"{expected[0]}x{expected[1]}; take both from one model"
        )
