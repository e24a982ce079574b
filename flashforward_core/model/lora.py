"""Role LoRA files: one role's factors and its row of the role embedding, in the diffusers/PEFT layout."""

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..graph.task import Role
from .files import read_tensors
from .formats import SAFETENSORS
from .roles import TARGETS, role_linear, role_linears
from .transformer import CausalWanTransformer

FORMAT = "flashforward-role-lora"
PREFIX = "transformer."
ROW = "role_embedding"


def save_role_lora(
    model: CausalWanTransformer, path: Path, *, role: Role, base: str, dtype: torch.dtype | None = None
) -> None:
    """Write ``role``'s LoRA and embedding row; ``base`` says which weights they belong to.

    ``dtype`` is the file's, the weights' own by default. Raises ``ValueError`` when the role has no LoRA.
    """
    layers = {name: layer for name, layer in role_linears(model).items() if role.value in layer.lora_A}
    if not layers:
        raise ValueError(f"role={role} has no LoRA to save; attach_roles gives it one")
    state = {ROW: model.role_embedding.weight[role.row]}
    for name, layer in layers.items():
        state[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A[role.value].weight
        state[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B[role.value].weight
    first = next(iter(layers.values()))
    rank, alpha = first.lora_A[role.value].out_features, first.alphas[role.value]
    metadata = {"format": FORMAT, "role": role.value, "rank": str(rank), "alpha": str(alpha), "base": base}
    plain = {name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous() for name, tensor in state.items()}
    save_file(plain, path, metadata=metadata)


def is_role_lora(path: Path) -> bool:
    """Whether a file says that it is a role LoRA of this project; a missing or damaged one raises."""
    if path.suffix not in SAFETENSORS:
        return False
    return read_tensors(path, what="a LoRA")[1].get("format") == FORMAT


def read_role_row(path: Path, *, role: Role, dim: int) -> Tensor | None:
    """Return the embedding row [dim] of a role LoRA file, or None without one.

    A file for another role or width raises ``ValueError``.
    """
    tensors, metadata = read_tensors(path, what=f"a role LoRA for the {role}")
    _check_metadata(path, metadata, role=role)
    row = tensors.get(ROW)
    if row is not None:
        _check_width(path, ROW, found=row.shape[-1], expected=dim, metadata=metadata)
    return row


def set_role_row(model: CausalWanTransformer, row: Tensor, *, role: Role) -> None:
    """Give ``model`` an embedding of its own with another row for ``role``."""
    with torch.inference_mode(False), torch.no_grad():
        rows = model.role_embedding.weight.detach().clone()
        rows[role.row] = row.to(rows)
        model.role_embedding.weight = nn.Parameter(rows, requires_grad=False)


def load_role_lora(model: CausalWanTransformer, path: Path, *, role: Role) -> None:
    """Attach the LoRA and embedding row of ``role`` from a file, in place.

    A file of another format, role or width, or one that matches nothing, raises ``ValueError``.
    """
    tensors, metadata = read_tensors(path, what=f"a role LoRA for the {role}")
    _check_metadata(path, metadata, role=role)
    row = tensors.pop(ROW, None)
    names = _layer_names(path, tensors)
    with torch.no_grad():
        for name in names:
            _load_layer(model, path, name=name, tensors=tensors, metadata=metadata, role=role)
        if row is not None:
            _check_width(path, ROW, found=row.shape[-1], expected=model.config.dim, metadata=metadata)
            model.role_embedding.weight[role.row] = row.to(model.role_embedding.weight)


def _check_metadata(path: Path, metadata: dict[str, str], *, role: Role) -> None:
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "no format")
        raise ValueError(f"{path} is no role LoRA: expected metadata format={FORMAT!r}, found {found!r}")
    if metadata.get("role") != role.value:
        raise ValueError(f"{path} is a LoRA for role={metadata.get('role')!r}; use it there, not for the {role}")


def _layer_names(path: Path, tensors: dict[str, Tensor]) -> list[str]:
    """Return the linears that the file updates; each must have both factors and nothing else may be there."""
    suffixes = (".lora_A.weight", ".lora_B.weight")
    names = sorted({key[len(PREFIX) : -len(suffixes[0])] for key in tensors if key.endswith(suffixes)})
    expected = {f"{PREFIX}{name}{suffix}" for name in names for suffix in suffixes}
    if not names:
        raise ValueError(f"{path} matches no layer of the backbone: it has no {PREFIX}…{suffixes[0]} among its keys")
    odd = sorted(expected ^ set(tensors))
    if odd:
        raise ValueError(f"{path} has a missing or unknown tensor {odd[0]!r}; export the role LoRA again")
    return names


def _load_layer(
    model: CausalWanTransformer,
    path: Path,
    *,
    name: str,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    role: Role,
) -> None:
    down, up = (tensors[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if not match or int(match[1]) >= len(model.blocks) or match[2] not in TARGETS:
        raise ValueError(f"{path} updates {name!r}, which this backbone of {len(model.blocks)} blocks does not have")
    plain = model.get_submodule(name)
    _check_width(path, name, found=down.shape[1], expected=plain.in_features, metadata=metadata)
    _check_width(path, name, found=up.shape[0], expected=plain.out_features, metadata=metadata)
    layer = role_linear(model, name)
    layer.add_role(role, rank=down.shape[0], alpha=float(metadata["alpha"]))
    layer.lora_A[role.value].weight.copy_(down)
    layer.lora_B[role.value].weight.copy_(up)


def _check_width(path: Path, name: str, *, found: int, expected: int, metadata: dict[str, str]) -> None:
    if found != expected:
        base = metadata.get("base", "another backbone")
        raise ValueError(f"{path}: {name} is {found} wide, this backbone's is {expected}; use it with base={base!r}")
