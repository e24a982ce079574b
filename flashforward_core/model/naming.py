"""What files call a Wan transformer's tensors: wrapper dicts, prefixes, the two namings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

WRAPPERS = ("generator_ema", "generator", "model_ema", "model", "state_dict", "module")
"""Keys under which trainers keep the weights, the better ones first."""
WHOLE = "model.diffusion_model."
"""Prefix in a checkpoint that holds text encoder and autoencoder too, which are left out then."""
PREFIXES = (WHOLE, "diffusion_model.", "model.", "module.", "generator.", "transformer.")
INFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
DEEPEST = 8  # wrappers in wrappers; a file may hold itself
ROLE_ROWS = "role_embedding.weight"

BLOCK_NAMES = {
    **{f"attn1.{ours}": f"self_attn.{theirs}" for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"))},
    **{f"attn2.{ours}": f"cross_attn.{theirs}" for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"))},
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    "attn1.norm_q": "self_attn.norm_q",
    "attn1.norm_k": "self_attn.norm_k",
    "attn2.norm_q": "cross_attn.norm_q",
    "attn2.norm_k": "cross_attn.norm_k",
    "norm2": "norm3",  # the affine norm before cross-attention
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
"""Modules of a block: diffusers' name to the original one."""
OUTER_NAMES = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """A file's tensors under bare names, and what was around them."""

    tensors: dict[str, Tensor]
    wrapper: str
    """Path of wrapper keys, such as ``generator_ema``; empty without any."""
    prefixes: tuple[str, ...]
    """What was taken off the front or out of the middle of names, sorted."""
    left_out: int
    """Tensors of other models in the same file."""


def innermost(state: Mapping[str, Any], wrappers: tuple[str, ...]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors inside trainers' dicts, and the keys that lead there; a file may hold itself."""
    path: list[str] = []
    while len(path) < DEEPEST and (found := next((w for w in wrappers if isinstance(state.get(w), Mapping)), None)):
        state = state[found]
        path.append(found)
    kept = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}
    return kept, path


def unwrap(state: Mapping[str, Any], *, wrappers: tuple[str, ...] = WRAPPERS) -> Unwrapped:
    """Take the tensors out of trainers' dicts and strip the prefixes of their names.

    Raises ``ValueError`` for two tensors of one bare name: which of them is meant, no name tells.
    """
    tensors, path = innermost(state, wrappers)
    whole = {name: value for name, value in tensors.items() if name.startswith(WHOLE)}
    kept, seen = {}, set()
    for name, value in (whole or tensors).items():
        bare, stripped = bare_name(name)
        if bare in kept:
            raise ValueError(f"has {bare} twice, under two names; save the model again with one of them")
        kept[bare] = value
        seen |= set(stripped)
    left_out = len(tensors) - len(kept)
    return Unwrapped(tensors=kept, wrapper="/".join(path), prefixes=tuple(sorted(seen)), left_out=left_out)


def bare_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a tensor's name without prefixes and wrappers' infixes, and those that were taken away."""
    stripped = [infix for infix in INFIXES if infix in name]
    for infix in stripped:
        name = name.replace(infix, "")
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name[len(prefix) :]
        stripped.append(prefix)
    return name, tuple(stripped)


def is_original(tensors: Mapping[str, Any]) -> bool:
    """Whether names are the original (and ComfyUI's) ones rather than diffusers'."""
    return any(name.startswith("blocks.0.self_attn.") for name in tensors)


def to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of either naming under diffusers' names; its own converter does it."""
    named = dict(tensors)
    if not is_original(named):
        return named
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    ours = {ROLE_ROWS: named.pop(ROLE_ROWS)} if ROLE_ROWS in named else {}
    return dict(convert_wan_transformer_to_diffusers(named)) | ours


def module_table(num_layers: int) -> dict[str, str]:
    """Return every spelling of a module's name, dots as underscores (kohya's way), to diffusers' name."""
    pairs = dict(OUTER_NAMES)
    for block in range(num_layers):
        pairs |= {f"blocks.{block}.{ours}": f"blocks.{block}.{theirs}" for ours, theirs in BLOCK_NAMES.items()}
    # norm2 and norm3 are swapped between the namings; only the original norm3 and diffusers' norm2 have parameters.
    table = {theirs.replace(".", "_"): ours for ours, theirs in pairs.items()}
    return table | {ours.replace(".", "_"): ours for ours in pairs}
