"""LoRAs on a finished backbone: a new backbone that shares everything the LoRA does not touch."""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..graph.task import Role
from .fp8 import Fp8Linear
from .layers import RoleLinear, at_least_fp32
from .lora_files import Factors, LoraFile, read_lora
from .roles import TARGETS, Backbone, role_linear, shared_copy
from .transformer import CausalWanTransformer

log = logging.getLogger(__name__)


def apply_lora(
    backbone: Backbone,
    path: Path,
    *,
    strength: float = 1.0,
    roles: Sequence[Role] = tuple(Role),
    merged: bool = True,
) -> tuple[Backbone, LoraFile]:
    """Return a backbone with a LoRA on ``roles`` at ``strength``, and what of the file matched.

    ``backbone`` is not changed; LoRAs stack by applying one after the other. ``merged`` adds updates to copies of the
    weights; otherwise they stay low-rank beside shared weights, which costs little memory and some speed. 8-bit
    weights and layers outside the blocks are merged in either case. Raises like ``read_lora``.
    """
    if not math.isfinite(strength):
        raise ValueError(f"strength={strength} is not finite; use 1.0")
    lora = read_lora(path, backbone.models[Role.RENDERER])
    if lora.unmatched:
        log.warning("%s", lora.report)
    with torch.inference_mode(False), torch.no_grad():
        models = _updated_models(backbone, lora, strength=strength, roles=roles, merged=merged)
    told = f"{backbone.fingerprint}|{lora.fingerprint}|{strength}|{sorted(roles)}|{merged}"
    made = replace(backbone, models=models, fingerprint=hashlib.sha256(told.encode()).hexdigest(), source=None)
    return made, lora


def _updated_models(
    backbone: Backbone, lora: LoraFile, *, strength: float, roles: Sequence[Role], merged: bool
) -> dict[Role, CausalWanTransformer]:
    """Update each distinct model once for all of its roles; roles part ways only where weights must be merged."""
    models = dict(backbone.models)
    for model in {id(m): m for m in models.values()}.values():
        group = [role for role in models if models[role] is model]
        hit = [role for role in group if role in roles]
        if hit:
            made = _updated(model, lora, strength=strength, roles=hit, merged=merged)
            merges = merged or bool(lora.differences) or any(_must_merge(model, name) for name in lora.factors)
            models |= dict.fromkeys(hit if merges else group, made)
    return models


def _must_merge(model: CausalWanTransformer, name: str) -> bool:
    """Whether a linear cannot carry updates beside its weight: an 8-bit one, or one outside the blocks."""
    return isinstance(model.get_submodule(name), Fp8Linear) or not any(name.endswith(f".{t}") for t in TARGETS)


def _updated(
    model: CausalWanTransformer, lora: LoraFile, *, strength: float, roles: Sequence[Role], merged: bool
) -> CausalWanTransformer:
    new = shared_copy(model)
    for name, factors in lora.factors.items():
        if merged or _must_merge(new, name):
            _merge(new, name, strength * factors.product())
        else:
            stack_update(role_linear(new, name), factors, strength=strength, roles=roles)
    for name, difference in lora.differences.items():
        module, _, leaf = name.rpartition(".")
        _add(new.get_submodule(module), leaf, strength * difference)
    return new.requires_grad_(False).eval()


def _merge(model: CausalWanTransformer, name: str, update: Tensor) -> None:
    """Put a linear with ``update`` in its weight in the place of ``name``."""
    layer = model.get_submodule(name)
    if not isinstance(layer, Fp8Linear):
        _add(layer, "weight", update)
        return
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer.updated(update.to(layer.weight.device)))


def _add(module: nn.Module, leaf: str, update: Tensor) -> None:
    """Give ``module`` a parameter of its own: the shared one plus ``update``, summed in float32 at least."""
    shared = getattr(module, leaf)
    summed = at_least_fp32(shared.detach()) + update.to(shared.device)
    setattr(module, leaf, nn.Parameter(summed.to(shared.dtype), requires_grad=False))


def stack_update(layer: RoleLinear, factors: Factors, *, strength: float, roles: Sequence[Role]) -> None:
    """Add an update to what ``roles`` have, in place: stacked LoRAs are one LoRA with their factors side by side."""
    like = layer.weight
    for role in roles:
        downs, ups = [factors.down], [at_least_fp32(factors.up) * (factors.scale * strength)]
        if role.value in layer.lora_A:
            downs.insert(0, layer.lora_A[role.value].weight.detach())
            ups.insert(0, at_least_fp32(layer.lora_B[role.value].weight.detach()) * layer.scale(role))
        rank = sum(down.shape[0] for down in downs)
        down = torch.cat([part.to(like.device, like.dtype) for part in downs])
        up = torch.cat([part.to(like.device, like.dtype) for part in ups], dim=1)
        layer.add_role(role, rank=rank, alpha=rank)
        layer.lora_A[role.value].weight = nn.Parameter(down, requires_grad=False)
        layer.lora_B[role.value].weight = nn.Parameter(up, requires_grad=False)
