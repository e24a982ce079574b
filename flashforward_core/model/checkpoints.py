"""Transformer checkpoints in the wild: every wrapper, prefix and naming, to a ``CausalWanTransformer``.

Nothing here asks a network: the key converter is diffusers', the configuration is ours.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import MODELS, MOST_LAYERS, WanConfig, refuse_other_models
from .files import read_json
from .formats import FILE_SUFFIXES, read_shards, read_state
from .fp8 import Fp8Linear, dequantise, hold_fp8, is_fp8, quantise, split_scales
from .naming import ROLE_ROWS, is_original, to_diffusers, unwrap
from .transformer import CausalWanTransformer

WHAT = "a Wan 2.1 transformer"
KEEP_FP32 = ("time_embedder", "scale_shift_table", "norm", "role_embedding")
"""Parts of a name whose weights stay in float32 when the rest is half precision, as in diffusers."""

WAN_HEAD_DIM = 128  # of every Wan 2.1 model; a state dict does not tell it
WAN_22 = re.compile(r"wan[-_. ]?2[-_. ]?2|(high|low)[-_. ]?noise", re.IGNORECASE)
SECOND_EXPERT = "transformer_2"  # in diffusers' folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A file's tensors in diffusers' naming, still as the file stores them."""

    tensors: dict[str, Tensor]
    scales: dict[str, Tensor]
    """Of scaled fp8 weights, by the weight's name."""
    report: str
    """Which keys were loaded from where, in a line or two."""


def standardise(state: Mapping[str, Any], *, source: str) -> Checkpoint:
    """Bring a checkpoint of any wrapping and naming to diffusers' names.

    ``source`` names the file in errors. Another model than a 16-channel Wan 2.1 T2V raises ``ValueError``.
    """
    try:
        found = unwrap(state)
    except ValueError as error:
        raise ValueError(f"{source} {error}") from None
    refuse(found.tensors, source=source)
    named = to_diffusers(found.tensors)
    tensors, scales = split_scales(named, source=source)
    naming = "original" if is_original(found.tensors) else "diffusers"
    kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    parts = [
        f"{len(tensors)} tensors ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})",
        f"{naming} naming",
        f"under {found.wrapper!r}" if found.wrapper else "",
        f"prefix {', '.join(repr(p) for p in found.prefixes)}" if found.prefixes else "",
        f"{len(scales)} fp8 scales applied" if scales else "",
        f"{found.left_out} tensors of other models left out" if found.left_out else "",
    ]
    return Checkpoint(tensors=tensors, scales=scales, report=f"{source}: {', '.join(filter(None, parts))}")


def to_diffusers_naming(state: Mapping[str, Any], *, source: str) -> dict[str, Tensor]:
    """Return only the tensors of ``standardise``."""
    return standardise(state, source=source).tensors


def refuse(tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise ``ValueError`` that names the model when it is none that the engine runs."""
    patch = tensors.get("patch_embedding.weight")
    if patch is None or patch.ndim != 5:
        some = ", ".join(sorted(tensors)[:3]) or "no tensors"
        raise ValueError(f"{source} is no Wan transformer: expected patch_embedding.weight, found {some}")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            kind = "without data" if tensor.is_meta else "nested" if tensor.is_nested else f"as {tensor.layout}"
            raise ValueError(f"{source}: {name} is stored {kind}; expected a dense tensor, save it with .to_dense()")
    image = any("img_emb" in n or "image_embedder" in n or "k_img" in n or "add_k_proj" in n for n in tensors)
    try:
        refuse_other_models(channels=patch.shape[1], image=image, vace=any("vace" in name for name in tensors))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    odd = next(
        (name for name, tensor in tensors.items() if not (tensor.is_floating_point() or tensor.numel() <= 1)), ""
    )
    if odd and not odd.endswith(".comfy_quant"):
        raise ValueError(
            f"{source}: {odd} is stored as {tensors[odd].dtype}, a quantisation that is not supported; use a bf16, "
            "fp16, fp8 or GGUF file"
        )


def infer_config(tensors: Mapping[str, Tensor], *, num_heads: int | None = None) -> WanConfig:
    """Read the sizes off a state dict in diffusers' naming; without ``num_heads`` heads are 128 wide, as all of Wan's.

    Raises ``ValueError`` for a width that 128 does not divide, unless a known model has it.
    """
    try:
        dim = tensors["patch_embedding.weight"].shape[0]
        ffn_dim = _matrix(tensors, "blocks.0.ffn.net.0.proj.weight").shape[0]
        text_dim = _matrix(tensors, "condition_embedder.text_embedder.linear_1.weight").shape[1]
        freq_dim = _matrix(tensors, "condition_embedder.time_embedder.linear_1.weight").shape[1]
    except KeyError as error:
        raise ValueError(
            f"the checkpoint has no tensor {error}; is the file complete, and a Wan transformer?"
        ) from None
    num_layers = _count_blocks(tensors)
    for known in MODELS.values():
        same = (known.dim, known.ffn_dim, known.num_layers) == (dim, ffn_dim, num_layers)
        if same and num_heads in (None, known.num_heads):
            return known
    if num_heads is None and dim % WAN_HEAD_DIM:
        raise ValueError(
            f"the checkpoint is {dim} wide, not a multiple of {WAN_HEAD_DIM}, so its heads are unknown; use a "
            "diffusers folder, whose config.json tells them"
        )
    return WanConfig(
        name="custom",
        dim=dim,
        ffn_dim=ffn_dim,
        num_heads=num_heads or dim // WAN_HEAD_DIM,
        num_layers=num_layers,
        text_dim=text_dim,
        freq_dim=freq_dim,
    )


def _matrix(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors[name]
    if tensor.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected a matrix, use a Wan 2.1 file")
    return tensor


def _count_blocks(tensors: Mapping[str, Tensor]) -> int:
    """Return how many blocks there are; a gap in their numbers raises ``ValueError``."""
    numbers = {match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    odd = numbers - {str(number) for number in range(min(len(numbers), MOST_LAYERS))}
    if odd:
        raise ValueError(
            f"the checkpoint has {len(numbers)} blocks, one of them blocks.{min(odd)[:20]}; expected blocks.0 up "
            f"without a gap, {MOST_LAYERS} at most; is the file complete?"
        )
    return len(numbers)


def build_transformer(
    config: WanConfig,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    scales: Mapping[str, Tensor] | None = None,
    fp8: bool = False,
    mapped: bool = False,
) -> CausalWanTransformer:
    """Return a frozen model with these tensors (diffusers' naming) as its weights.

    ``scales`` belong to scaled fp8 weights. ``fp8`` keeps the blocks' linears in 8 bits and widens them when used;
    otherwise everything becomes ``dtype``, one tensor at a time. ``mapped`` leaves tensors that need no conversion in
    the file's mapping, where they cost no memory until they are read; else the file may change or go after loading.
    Missing, unknown and misshapen tensors raise ``ValueError``; a missing role embedding is zeros, as in every
    checkpoint that knows no roles.
    """
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    expected = model.state_dict()
    state = {ROLE_ROWS: torch.zeros(expected[ROLE_ROWS].shape), **tensors}
    check_shapes(state, expected, source=source)
    if fp8:
        hold_fp8(model.blocks)
    placed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        held = isinstance(model.get_submodule(name.rpartition(".")[0]), Fp8Linear) and name.endswith(".weight")
        scale = (scales or {}).get(name)
        if held:
            placed |= _held(name, tensor, scale, device=device)
        else:
            placed[name] = dequantise(tensor, scale, dtype=_dtype_of(name, dtype)).to(device)
    if not mapped:
        placed = {name: _own(tensor, tensors.get(name)) for name, tensor in placed.items()}
    model.load_state_dict(placed, assign=True)
    return model.requires_grad_(False).eval()


def _own(tensor: Tensor, stored: Tensor | None) -> Tensor:
    """Return ``tensor`` in memory of its own, copied only if it is the stored one."""
    shared = stored is not None and tensor.device == stored.device and tensor.data_ptr() == stored.data_ptr()
    return tensor.clone() if shared else tensor


def _held(name: str, tensor: Tensor, scale: Tensor | None, *, device: torch.device | str) -> dict[str, Tensor]:
    """Return an 8-bit weight and its scale; a file's own e4m3 weights stay bit for bit."""
    rows = tensor.shape[0]
    if tensor.dtype is torch.float8_e4m3fn:
        column = torch.ones(rows, 1) if scale is None else scale.float().reshape(-1, 1).expand(rows, 1).contiguous()
        stored = tensor
    else:
        stored, column = quantise(dequantise(tensor, scale, dtype=torch.float32))
    return {name: stored.to(device), f"{name}_scale": column.to(device)}


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


def read_checkpoint(path: Path, *, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read a single-file checkpoint; ``dtype`` is that of quantised GGUF tensors."""
    _refuse_wan_22(path)
    state, _ = read_state(path, what=WHAT, dtype=dtype)
    return standardise(state, source=str(path))


def _refuse_wan_22(path: Path) -> None:
    """Raise ``ValueError`` for what names, or a folder's second expert, tell: one expert's tensors are Wan 2.1's."""
    if WAN_22.search(path.name) or path.name == SECOND_EXPERT or (path / SECOND_EXPERT).exists():
        raise ValueError(
            f"{path} is Wan 2.2 by its name or its folders, two experts or a 48-channel model; use a 16-channel "
            "Wan 2.1 text-to-video file"
        )


def transformer_folder(path: Path) -> Path:
    """Return the folder with the transformer: ``path``, or the one inside a diffusers pipeline's."""
    inside = path / "transformer"
    return inside if (inside / "config.json").exists() else path


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that decide what a checkpoint computes."""
    if not path.is_dir():
        return [path]
    folder = transformer_folder(path)
    return sorted(f for f in folder.iterdir() if f.suffix in (".json", *FILE_SUFFIXES))


def load_checkpoint(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    fp8: bool | None = False,
    mapped: bool = False,
) -> tuple[CausalWanTransformer, str]:
    """Load a transformer from a single file of either naming, or from a diffusers folder, with a report.

    ``fp8`` True keeps the blocks' weights in 8 bits, None does when the file does; see ``build_transformer``, for
    ``mapped`` too.
    """
    with torch.inference_mode(False), torch.no_grad():
        if path.is_dir():
            folder = transformer_folder(path)
            _refuse_wan_22(path)
            config = read_config(folder / "config.json")
            found = standardise(read_shards(folder, what="the transformer")[0], source=str(folder))
        else:
            found = read_checkpoint(path, dtype=dtype)
            try:
                config = infer_config(found.tensors)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        keep = any(is_fp8(t) for t in found.tensors.values()) if fp8 is None else fp8
        model = build_transformer(
            config,
            found.tensors,
            source=str(path),
            dtype=dtype,
            device=device,
            scales=found.scales,
            fp8=keep,
            mapped=mapped,
        )
    return model, found.report


def load_transformer(
    path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> CausalWanTransformer:
    """Load only the model of ``load_checkpoint``."""
    return load_checkpoint(path, dtype=dtype, device=device)[0]


def read_config(path: Path) -> WanConfig:
    """Read a diffusers ``config.json``; a missing field raises ``ValueError`` naming it and the file."""
    found = read_json(path, what="the transformer's config")
    try:
        config = WanConfig.from_diffusers(found)
    except KeyError as error:
        raise ValueError(f"{path} has no field {error}; expected a diffusers WanTransformer3DModel config") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return next((known for known in MODELS.values() if replace(config, name=known.name) == known), config)
