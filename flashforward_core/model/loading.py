"""Files to a Backbone: the embedded model that the package carries, with errors that name the file."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..graph.task import Role
from .adapters import apply_lora
from .checkpoints import check_shapes, checkpoint_files, load_checkpoint, load_transformer
from .config import WanConfig, whole
from .files import fingerprint, quick_fingerprint, read_json, read_tensors, require
from .formats import WEIGHTS
from .lora import is_role_lora, load_role_lora, read_role_row, set_role_row
from .presets import Choice, choose_preset
from .roles import Backbone, WeightsFrom, models_by_role, role_linears
from .transformer import CausalWanTransformer

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

    from .text import ByteT5Encoder

logger = logging.getLogger(__name__)

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
    if not (folder / "transformer").is_dir():
        raise FileNotFoundError(
            f"assets={str(folder)!r} has no folder 'transformer'; name a copy of the embedded model's"
        )
    with torch.inference_mode(False), torch.no_grad():  # a lane's thread must be able to use the weights
        model = load_transformer(folder / "transformer", dtype=dtype, device=device)
        loras = _role_files(folder)
        for role, lora in loras.items():
            load_role_lora(model, lora, role=role)
        if not loras:
            logger.warning("%s has no role LoRAs: planner and renderer are the same model", folder)
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
            source=WeightsFrom(
                loader="embedded",
                options={"assets": assets, "dtype": dtype, "merged": merged, "attention": attention},
            ),
        )


def load_backbone(
    path: Path,
    *,
    role_loras: Mapping[Role, Path] = MappingProxyType({}),
    preset: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    fp8: bool | None = False,
    merged: bool = False,
    mapped: bool = False,
    attention: str = "auto",
) -> Backbone:
    """Load a Wan 2.1 transformer from a file or diffusers folder; prompts and decoding come from elsewhere.

    ``role_loras`` are files of this project's format, or any other LoRA, then for its role alone. ``fp8`` True keeps
    weights in 8 bits, None does where the file does. ``merged`` gives each role a weight set of its own when there are
    role LoRAs: faster, for twice the memory. ``mapped`` leaves weights in the file until a device needs them. Raises
    ``FileNotFoundError`` or ``ValueError`` that names the file.
    """
    choice = choose_preset(
        preset, file_name=f"{path.parent.name}/{path.name}", has_roles=bool(role_loras)
    )  # an unknown one costs no loading
    model, report = load_checkpoint(path, dtype=dtype, device=device, fp8=fp8, mapped=mapped)
    mark = quick_fingerprint(checkpoint_files(path))
    backbone = backbone_of(model, report=report, choice=choice, fingerprint=mark, dtype=dtype, attention=attention)
    backbone = with_role_loras(backbone, role_loras)
    one = backbone.models[Role.PLANNER]
    if merged and role_linears(one) and one is backbone.models[Role.RENDERER]:
        backbone = replace(backbone, models=models_by_role(one, merged=True))
    options = {"path": path.resolve(), "role_loras": {role: lora.resolve() for role, lora in role_loras.items()}}
    options |= {"preset": preset, "dtype": dtype, "fp8": fp8, "merged": merged, "mapped": mapped}
    return replace(backbone, source=WeightsFrom(loader="file", options=options | {"attention": attention}))


def load_again(source: WeightsFrom, *, device: torch.device | str) -> Backbone:
    """Load what ``source`` says, on this machine; a missing file raises ``FileNotFoundError``, others as the loader."""
    options = source.options
    for path in (options.get("assets"), options.get("path"), *options.get("role_loras", {}).values()):
        if path is not None:
            require(path, what="weights, as on the machine that asks for them")
    if source.loader == "embedded":
        return load_embedded(**source.options, device=device)
    return load_backbone(**source.options, device=device)


def backbone_of(
    model: CausalWanTransformer,
    *,
    report: str,
    choice: Choice,
    fingerprint: str,
    dtype: torch.dtype,
    attention: str = "auto",
) -> Backbone:
    """Wrap a transformer that both roles use, without autoencoder and text encoder."""
    return Backbone(
        config=model.config,
        models=dict.fromkeys(Role, model),
        vae=None,
        text_encoder=None,
        fingerprint=fingerprint,
        dtype=dtype,
        attention=attention,
        preset=choice.name,
        preset_reason=choice.reason,
        report=report,
    )


def with_role_loras(backbone: Backbone, role_loras: Mapping[Role, Path]) -> Backbone:
    """Return a backbone with each role's LoRA on it, unmerged where weights are not in 8 bits.

    A file of another project's layout is a LoRA for that role alone. Raises ``ValueError`` that names the file.
    """
    for role, path in role_loras.items():
        row = read_role_row(path, role=role, dim=backbone.config.dim) if is_role_lora(path) else None
        backbone, lora = apply_lora(backbone, path, roles=[role], merged=False)
        if row is not None:
            set_role_row(backbone.models[role], row, role=role)
        backbone = replace(backbone, report=f"{backbone.report}\n{lora.report}, for the {role}")
    return backbone


def asset_files(folder: Path) -> list[Path]:
    """Return the files that decide what the embedded model computes."""
    parts = ("transformer", "vae", "text_encoder")
    inside = [path for part in parts for path in sorted((folder / part).iterdir()) if path.is_file()]
    return inside + list(_role_files(folder).values())


def _role_files(folder: Path) -> dict[Role, Path]:
    """Return both roles' LoRAs. Only a folder of another model than the package's may do without them."""
    files = {role: folder / f"{role}_lora.safetensors" for role in Role}
    if folder.resolve() != ASSETS and not any(path.exists() for path in files.values()):
        return {}
    return {role: require(path, what=f"the {role}'s LoRA of the embedded model") for role, path in files.items()}


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
    _check_vae(config, source=folder / "config.json")
    try:
        with init_empty_weights():
            vae = AutoencoderKLWan.from_config(config)
    except Exception as error:  # a foreign setting fails in any way
        message = f"{folder / 'config.json'} makes no autoencoder ({error}); restore the model's own config"
        raise ValueError(message) from error
    check_shapes(tensors, vae.state_dict(), source=str(path))
    vae.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return vae.requires_grad_(False).eval()


def _check_vae(config: Mapping[str, Any], *, source: Path) -> None:
    """Refuse settings that would decode to nothing, or fail far from here."""
    try:
        whole({"base_dim": 96, **config}, "base_dim")
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    mult = config.get("dim_mult", [1, 2, 4, 4])
    if not (isinstance(mult, list) and mult and all(type(m) is int and 1 <= m <= 64 for m in mult)):
        raise ValueError(f"{source}: dim_mult={mult!r:.40} is no list of whole numbers; restore the model's own config")
    for name in ("latents_mean", "latents_std"):
        if name not in config:
            continue  # diffusers knows Wan's
        found = config[name]
        fine = isinstance(found, list) and len(found) == config["z_dim"]
        odd = [v for v in found if type(v) not in (int, float) or not math.isfinite(v)] if fine else [found]
        odd += [v for v in found if v <= 0] if not odd and name == "latents_std" else []
        if odd:
            above = " above 0" if name == "latents_std" else ""
            raise ValueError(
                f"{source}: {name} has {odd[0]!r:.40}; expected {config['z_dim']} finite numbers{above}, restore the "
                "model's own config"
            )


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
