"""The two roles of one backbone: a LoRA per role on the transformer's linears, applied per segment or merged."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..graph.task import Role
from ..store import SlotStore
from .config import WanConfig
from .layers import RoleLinear
from .transformer import CausalWanTransformer

TARGETS = (
    *(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
)
"""The linears of a block that can carry a role's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFrom:
    """How another machine can load the same weights from its own disk."""

    loader: str
    """``embedded`` or ``file``: which function of ``model.loading``."""
    options: Mapping[str, Any]
    """Its arguments, apart from the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """Everything that renders: one transformer per role, the autoencoder and the prompt encoder."""

    config: WanConfig
    models: Mapping[Role, CausalWanTransformer]
    """One weight set per role when merged; the same model twice when roles are applied unmerged."""
    vae: Any
    """diffusers' AutoencoderKLWan, or None when only latents are made."""
    text_encoder: Any
    """A ByteT5Encoder, or None when prompts come as embeddings."""
    fingerprint: str
    """SHA-256 over the files that the weights came from."""
    dtype: torch.dtype
    """Of the transformers' weights."""
    attention: str = "auto"
    """What the user asked for; ``resolve_attention`` says what it means on a device."""
    preset: str = "flashforward"
    """A name in ``presets.PRESETS``: the rollout that these weights were trained for."""
    preset_reason: str = "the embedded model is trained for it"
    """Why that preset."""
    report: str = ""
    """Which keys were loaded from where."""
    size: tuple[int, int] | None = None
    """The only (width, height) in pixels that the weights can make, or None for any."""
    source: WeightsFrom | None = None
    """Where the weights can be loaded again; None when they exist in memory only."""
    store: SlotStore = field(default_factory=SlotStore, init=False, repr=False, compare=False)
    """What earlier rollouts with these weights left to reuse. It goes with its handle: a changed copy starts anew."""


def attach_roles(
    model: CausalWanTransformer,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = TARGETS,
    roles: Sequence[Role] = tuple(Role),
) -> list[nn.Parameter]:
    """Give every block's ``targets`` a LoRA per role, in place, and return its parameters.

    Until it is trained or loaded it changes nothing. Raises ``ValueError`` for a rank below 1 or an unknown target.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} is below 1; use rank=1 or more")
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown or not targets:
        raise ValueError(f"targets={unknown or targets} carry no LoRA; use some of: {', '.join(TARGETS)}")
    for block in model.blocks:
        for target in targets:
            layer = role_linear(block, target)
            for role in roles:
                layer.add_role(role, rank=rank, alpha=alpha)
    return role_parameters(model, roles=roles)


def role_linear(module: nn.Module, name: str) -> RoleLinear:
    """Return the linear ``name`` below ``module`` as a RoleLinear, replacing a plain one in place."""
    layer = module.get_submodule(name)
    if isinstance(layer, RoleLinear):
        return layer
    assert isinstance(layer, nn.Linear), f"{name} is no linear"
    parent, _, leaf = name.rpartition(".")
    replacement = RoleLinear(layer)
    module.get_submodule(parent).register_module(leaf, replacement)
    return replacement


def role_linears(model: CausalWanTransformer) -> dict[str, RoleLinear]:
    """Return the linears that carry a LoRA, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, RoleLinear)}


def role_parameters(model: CausalWanTransformer, *, roles: Sequence[Role] = tuple(Role)) -> list[nn.Parameter]:
    """Return the LoRA factors of ``roles``; the role embedding is not among them."""
    layers = role_linears(model).values()
    pairs = ((layer.lora_A, layer.lora_B) for layer in layers)
    factors = (part[role.value] for pair in pairs for role in roles for part in pair if role.value in part)
    return [factor.weight for factor in factors]


def shared_copy(model: CausalWanTransformer) -> CausalWanTransformer:
    """Return modules of their own over the memory of ``model``'s tensors; their parameters are frozen, its own stay."""
    with torch.inference_mode(False):
        memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        return copy.deepcopy(model, memo | {id(buffer): buffer for buffer in model.buffers()})


def merge_role(model: CausalWanTransformer, role: Role) -> CausalWanTransformer:
    """Return a weight set that serves ``role`` alone, with its LoRA merged in.

    Whatever the LoRA does not touch is shared with ``model``, so neither may be changed afterwards.
    """
    merged = shared_copy(model)
    merged.serves = role
    with torch.inference_mode(False), torch.no_grad():
        for name, layer in role_linears(merged).items():
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            plain.weight, plain.bias = nn.Parameter(layer.merged_weight(role), requires_grad=False), layer.bias
            parent, _, leaf = name.rpartition(".")
            merged.get_submodule(parent).register_module(leaf, plain)
    return merged.requires_grad_(False).eval()


def models_by_role(model: CausalWanTransformer, *, merged: bool) -> dict[Role, CausalWanTransformer]:
    """Return the model to run for each role: two merged weight sets, or ``model`` itself for both (less memory)."""
    return {role: merge_role(model, role) if merged else model for role in Role}
