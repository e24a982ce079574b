"""Transformer checkpoints in the wild: every wrapper, prefix and naming, to a ``CausalWanTransformer``.

Nothing here asks a network: the key converter is diffusers', the configuration is ours.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import MODELS, WanConfig, refuse_other_models
from .files import read_json, read_tensors, require
from .transformer import CausalWanTransformer

WRAPPERS = ("generator_ema", "generator", "model", "state_dict")
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.")
INFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
ROLE_ROWS = "role_embedding.weight"
WEIGHTS = "diffusion_pytorch_model"
KEEP_FP32 = ("time_embedder", "scale_shift_table", "norm", "role_embedding")
"""Parts of a name whose weights stay in float32 when the rest is half precision, as in diffusers."""

WAN_HEAD_DIM = 128  # of every Wan 2.1 model; a state dict does not tell it


def unwrap(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint without wrapper dicts and name prefixes."""
    for wrapper in WRAPPERS:
        if isinstance(state.get(wrapper), Mapping):
            return unwrap(state[wrapper])
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {_bare(name): value for name, value in tensors.items()}


def _bare(name: str) -> str:
    for infix in INFIXES:
        name = name.replace(infix, "")
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    return name[len(prefix) :]


def to_diffusers_naming(state: Mapping[str, Any], *, source: str) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under diffusers' names, from either naming and any wrapping.

    ``source`` names the file in errors. Another model than a 16-channel Wan 2.1 T2V, or an fp8 file, raises
    ``ValueError``.
    """
    tensors = unwrap(state)
    _refuse(tensors, source=source)
    if not any(name.startswith("blocks.0.self_attn.") for name in tensors):
        return tensors
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    roles = {ROLE_ROWS: tensors.pop(ROLE_ROWS)} if ROLE_ROWS in tensors else {}
    return convert_wan_transformer_to_diffusers(tensors) | roles


def _refuse(tensors: Mapping[str, Tensor], *, source: str) -> None:
    patch = tensors.get("patch_embedding.weight")
    if patch is None or patch.ndim != 5:
        some = ", ".join(sorted(tensors)[:3]) or "no tensors"
        raise ValueError(f"{source} is no Wan transformer: expected patch_embedding.weight, found {some}")
    image = any("img_emb" in n or "image_embedder" in n or "k_img" in n or "add_k_proj" in n for n in tensors)
    try:
        refuse_other_models(channels=patch.shape[1], image=image, vace=any("vace" in name for name in tensors))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    scaled = any(name.endswith((".scale_weight", ".weight_scale")) for name in tensors)
    if scaled or any("float8" in str(t.dtype) for t in tensors.values()):
        raise ValueError(f"{source} holds fp8 weights, which are not supported; use its bf16 or fp16 version")


def infer_config(tensors: Mapping[str, Tensor]) -> WanConfig:
    """Read the sizes off a state dict in diffusers' naming; heads are 128 wide unless a known model says otherwise."""
    dim = tensors["patch_embedding.weight"].shape[0]
    blocks = {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    ffn_dim = tensors["blocks.0.ffn.net.0.proj.weight"].shape[0]
    for known in MODELS.values():
        if (known.dim, known.ffn_dim, known.num_layers) == (dim, ffn_dim, len(blocks)):
            return known
    return WanConfig(
        name="custom",
        dim=dim,
        ffn_dim=ffn_dim,
        num_heads=max(1, dim // WAN_HEAD_DIM),
        num_layers=len(blocks),
        text_dim=tensors["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        freq_dim=tensors["condition_embedder.time_embedder.linear_1.weight"].shape[1],
    )


def build_transformer(
    config: WanConfig,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CausalWanTransformer:
    """Return a frozen model with these tensors (diffusers' naming) as its weights.

    Missing, unknown and misshapen tensors raise ``ValueError``; a missing role embedding is zeros, as in every
    checkpoint that knows no roles.
    """
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    expected = model.state_dict()
    state = {ROLE_ROWS: torch.zeros(expected[ROLE_ROWS].shape), **tensors}
    check_shapes(state, expected, source=source)
    placed = {name: tensor.to(device, _dtype_of(name, dtype)) for name, tensor in state.items()}
    model.load_state_dict(placed, assign=True)
    return model.requires_grad_(False).eval()


def check_shapes(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, source: str) -> None:
    """Raise ``ValueError`` naming the first tensor that is missing, unknown or of another shape."""
    for name in expected:
        if name not in state:
            raise ValueError(f"{source} has no tensor {name}; expected {len(expected)} tensors, found {len(state)}")
    for name, tensor in state.items():
        if name not in expected:
            raise ValueError(f"{source} has a tensor {name} that the model does not; is it another model's file?")
        if tensor.shape != expected[name].shape:
            want, found = tuple(expected[name].shape), tuple(tensor.shape)
            raise ValueError(f"{source}: {name} has shape {found}, its config asks for {want}")


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    kept = any(part in name for part in KEEP_FP32)
    return torch.promote_types(dtype, torch.float32) if kept else dtype


def read_shards(folder: Path, *, what: str) -> tuple[dict[str, Tensor], tuple[Path, ...]]:
    """Read ``diffusion_pytorch_model*.safetensors`` of a diffusers folder, whole or in shards listed by an index.

    Returns the tensors and the files they came from. A missing or damaged file raises an error that names it.
    """
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if not index.exists():
        whole = folder / f"{WEIGHTS}.safetensors"
        return read_tensors(whole, what=what)[0], (whole,)
    listed = read_json(index, what=f"the index of {what}").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} has no weight_map, so it is not the index of {what}")
    shards = tuple(folder / name for name in sorted(set(listed.values())))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= read_tensors(shard, what=f"a part of {what}")[0]
    return tensors, (index, *shards)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read a single-file checkpoint (safetensors, or a pickle of tensors) in diffusers' naming."""
    what = "a Wan 2.1 transformer"
    if path.suffix == ".safetensors":
        return to_diffusers_naming(read_tensors(path, what=what)[0], source=str(path))
    try:
        state = torch.load(require(path, what=what), map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} is not {what}: expected a PyTorch checkpoint, found {size} bytes") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} is not {what}: expected a dict of tensors, found a {type(state).__name__}")
    return to_diffusers_naming(state, source=str(path))


def load_transformer(
    path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> CausalWanTransformer:
    """Load a transformer from a single file of either naming, or from a diffusers folder."""
    with torch.inference_mode(False), torch.no_grad():
        if not path.is_dir():
            tensors = read_checkpoint(path)
            return build_transformer(infer_config(tensors), tensors, source=str(path), dtype=dtype, device=device)
        config = read_config(path / "config.json")
        tensors = to_diffusers_naming(read_shards(path, what="the transformer")[0], source=str(path))
        return build_transformer(config, tensors, source=str(path), dtype=dtype, device=device)


def read_config(path: Path) -> WanConfig:
    """Read a diffusers ``config.json``; a missing field raises ``ValueError`` naming it and the file."""
    found = read_json(path, what="the transformer's config")
    try:
        config = WanConfig.from_diffusers(found)
    except KeyError as error:
        raise ValueError(f"{path} has no field {error}; expected a diffusers WanTransformer3DModel config") from error
    return next((known for known in MODELS.values() if replace(config, name=known.name) == known), config)
