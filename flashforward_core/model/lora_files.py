"""LoRA files of every known layout: their updates by diffusers' module name, with what matched and what did not.

Layouts: kohya (``lora_unet_blocks_0_self_attn_q.lora_down``), PEFT (``base_model.model.….lora_A[.default]``), diffusers
(``transformer.…attn1.to_q.lora_A``), ComfyUI (``diffusion_model.…``), bare names, with FSDP and compile infixes; with
or without alpha; plain differences of weights, biases and modulations (``diff``, ``diff_b``, ``diff_m``).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import WanConfig
from .files import fingerprint
from .formats import read_state
from .naming import INFIXES, WRAPPERS, bare_name, innermost, module_table
from .transformer import CausalWanTransformer

LORA_WRAPPERS = ("generator_lora", "lora_state_dict", "lora", *WRAPPERS)
PREFIXES = ("base_model.model.", "lora_unet_", "lora_transformer_", "lycoris_", "unet.")
FACTOR = re.compile(r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?P<rest>\..*)?$")
DOWN = ("lora_A", "lora_down", "lora.down")
DIFFERENCES = {"diff": "weight", "diff_b": "bias", "diff_m": "scale_shift_table"}
OTHER_KINDS = ("dora_scale", "lora_magnitude_vector", "hada_w1", "lokr_w1", "oft_blocks", "oft_diag")
EXAMPLES = 3
ROLE_ROW = "role_embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One linear's update: scale·up·down."""

    down: Tensor
    up: Tensor
    scale: float

    def product(self) -> Tensor:
        """Return the update of the weight [out, in], in float32 at least."""
        wide = torch.promote_types(self.down.dtype, torch.float32)
        return self.scale * (self.up.to(wide) @ self.down.to(wide))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A file's updates, matched to a model."""

    source: str
    factors: Mapping[str, Factors]
    """By module name."""
    differences: Mapping[str, Tensor]
    """By parameter name."""
    unmatched: tuple[str, ...]
    """Keys of modules that the model does not have."""
    fingerprint: str

    @property
    def report(self) -> str:
        """Say what matched, with examples of what did not."""
        matched = f"{self.source}: {len(self.factors)} layers and {len(self.differences)} plain differences matched"
        if not self.unmatched:
            return matched + ", every key of the file"
        some = ", ".join(self.unmatched[:EXAMPLES])
        return f"{matched}; {len(self.unmatched)} keys did not, such as {some}"


@dataclass(slots=True)
class _Module:
    """What a file says of one module, as it is collected."""

    key: str
    down: Tensor | None = None
    up: Tensor | None = None
    alpha: float | None = None
    differences: dict[str, Tensor] = field(default_factory=dict)


def read_lora(path: Path, model: CausalWanTransformer) -> LoraFile:
    """Read a LoRA file for ``model``.

    Raises ``FileNotFoundError`` for a missing file and ``ValueError`` for a damaged one, one of another kind (DoRA,
    LoKr, …), one that matches nothing, or one for another width: each in one line.
    """
    state, metadata = read_state(path, what="a LoRA", dtype=torch.float32)
    tensors, _ = innermost(state, LORA_WRAPPERS)
    tensors.pop(ROLE_ROW, None)  # of this project's role LoRAs; no layer's update
    options = _options(path, metadata)
    modules, unmatched = _collect(tensors, module_table(model.config.num_layers), source=str(path))
    if not modules:
        some = ", ".join(sorted(tensors)[:EXAMPLES]) or "no tensors"
        raise ValueError(
            f"{path} matches no layer of the {model.config.name} backbone: none of its {len(tensors)} keys is known, "
            f"such as {some}; is it a LoRA for Wan 2.1?"
        )
    factors: dict[str, Factors] = {}
    differences: dict[str, Tensor] = {}
    for name, found in modules.items():
        differences |= _checked_differences(name, found, model, source=str(path))
        if found.down is not None or found.up is not None:
            factors[name] = _factors(name, found, model, options=options, source=str(path))
    return LoraFile(
        source=path.name,
        factors=factors,
        differences=differences,
        unmatched=tuple(unmatched),
        fingerprint=fingerprint([path]),
    )


def _options(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return PEFT's options where a file has them: in its metadata, or in ``adapter_config.json`` beside it."""
    beside = path.with_name("adapter_config.json")
    try:
        raw = metadata.get("lora_adapter_metadata") or (beside.read_text(encoding="utf-8") if beside.exists() else "{}")
        found = json.loads(raw)
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} has options that cannot be read ({error}); export the LoRA again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has options that are no JSON object but {raw[:20]!r}; export the LoRA again")
    options = {name.removeprefix("transformer."): value for name, value in found.items()}
    told = str(metadata.get("use_rslora", "")).lower()
    alpha = metadata.get("lora_alpha", metadata.get("alpha"))
    return options | ({"use_rslora": told == "true"} if told else {}) | ({"lora_alpha": alpha} if alpha else {})


def _collect(
    tensors: Mapping[str, Tensor], table: Mapping[str, str], *, source: str
) -> tuple[dict[str, _Module], list[str]]:
    """Sort a file's tensors by the model's modules; the rest's keys come second."""
    modules: dict[str, _Module] = {}
    unmatched = []
    for key, tensor in tensors.items():
        kind = next((kind for kind in OTHER_KINDS if kind in key), None)
        if kind is not None:
            raise ValueError(f"{source} is no plain LoRA: it has {key}; use one without {kind} (DoRA, LoHa, LoKr, OFT)")
        module, part = _split(key)
        name = _module_name(module, table, part=part)
        if name is None:
            unmatched.append(key)
        else:
            sound = _sound(tensor, key, source=source)
            _store(modules.setdefault(name, _Module(key=module)), part, sound, source=source)
    return modules, unmatched


def _sound(tensor: Tensor, key: str, *, source: str) -> Tensor:
    """Return a tensor that can be computed with, or say what is wrong with it."""
    if tensor.is_nested or not tensor.is_floating_point():
        raise ValueError(f"{source}: {key} holds no floating-point numbers; export the LoRA again")
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch does not promote 8-bit floats
    if not torch.isfinite(wide).all():
        raise ValueError(f"{source}: {key} holds numbers that are not finite; export the LoRA again")
    return wide


def _split(key: str) -> tuple[str, str]:
    """Part a key into module and what the tensor is: down, up, alpha or the name of a parameter."""
    if match := FACTOR.fullmatch(key):
        if (match["rest"] or "").endswith(".bias"):
            return match["module"], "bias"
        return match["module"], "down" if match["part"] in DOWN else "up"
    module, _, leaf = key.rpartition(".")
    return module, DIFFERENCES.get(leaf, "alpha" if leaf == "alpha" else "")


def _module_name(module: str, table: Mapping[str, str], *, part: str) -> str | None:
    for infix in INFIXES:
        module = module.replace(infix, "")
    while prefix := next((p for p in PREFIXES if module.startswith(p)), None):
        module = module[len(prefix) :].lstrip("_")
    module = bare_name(module)[0]
    if not part:
        return None
    if part == "scale_shift_table":  # of a block or, as ``head``, of the output
        return "" if module == "head" else module if f"{module}.norm2".replace(".", "_") in table else None
    return table.get(module.replace(".", "_"))


def _store(module: _Module, part: str, tensor: Tensor, *, source: str) -> None:
    if (part in ("down", "up", "alpha") and getattr(module, part) is not None) or part in module.differences:
        raise ValueError(f"{source} has {part} of {module.key} twice, under two names; export the LoRA again")
    if part in ("down", "up"):
        if tensor.ndim < 2 or not tensor.numel():
            raise ValueError(f"{source}: {part} of {module.key} has shape {tuple(tensor.shape)}; export the LoRA again")
        setattr(module, part, tensor.flatten(1))  # some trainers keep 1x1 convolutions
    elif part == "alpha":
        if tensor.numel() != 1:
            raise ValueError(f"{source}: alpha of {module.key} holds {tensor.numel()} numbers; export the LoRA again")
        module.alpha = float(tensor)
    else:
        module.differences[part] = tensor


def _alpha(name: str, found: _Module, *, options: Mapping[str, Any], source: str) -> float | None:
    """Return the alpha that the file names for a module: its own, its pattern's or the file's."""
    pattern = options.get("alpha_pattern") or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{source} has alpha_pattern={pattern!r}, which is no JSON object; export the LoRA again")
    told = next((a for a in (found.alpha, pattern.get(name), options.get("lora_alpha")) if a is not None), None)
    try:
        alpha = None if told is None else float(told)
    except (TypeError, ValueError):
        alpha = math.nan
    if alpha is not None and not math.isfinite(alpha):
        raise ValueError(f"{source} has alpha {told!r} for {found.key}, which is no number; export the LoRA again")
    return alpha


def _factors(
    name: str, found: _Module, model: CausalWanTransformer, *, options: Mapping[str, Any], source: str
) -> Factors:
    layer = model.get_submodule(name)
    if found.down is None or found.up is None:
        missing = "down (lora_A)" if found.down is None else "up (lora_B)"
        raise ValueError(f"{source}: {found.key} lacks its {missing} factor; export the LoRA again")
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{source} updates {found.key}, which is no linear layer; use a LoRA of linear layers")
    down, up = found.down, found.up
    _check_width(model.config, found, got=(down.shape[1], up.shape[0]), layer=layer, source=source)
    if down.shape[0] != up.shape[1]:
        raise ValueError(
            f"{source}: {found.key} has factors of rank {down.shape[0]} and {up.shape[1]}; export it again"
        )
    rank = down.shape[0]
    alpha = _alpha(name, found, options=options, source=source)
    scale = (rank if alpha is None else alpha) / (math.sqrt(rank) if options.get("use_rslora") else rank)
    return Factors(down=down, up=up, scale=scale)


def _check_width(config: WanConfig, found: _Module, *, got: tuple[int, int], layer: nn.Linear, source: str) -> None:
    want = (layer.in_features, layer.out_features)
    if got != want:
        raise ValueError(
            f"{source} is for another model: {found.key} takes {got[0]} to {got[1]}, the {config.name} backbone's "
            f"{want[0]} to {want[1]}; use a LoRA made for a backbone of width {config.dim}"
        )


def _checked_differences(name: str, found: _Module, model: CausalWanTransformer, *, source: str) -> dict[str, Tensor]:
    """Return a module's plain differences by parameter name, in the parameter's shape."""
    checked = {}
    for leaf, tensor in found.differences.items():
        parameter = getattr(model.get_submodule(name), leaf, None)
        full = f"{name}.{leaf}" if name else leaf
        if parameter is None or parameter.numel() != tensor.numel():
            want = "no such parameter" if parameter is None else tuple(parameter.shape)
            raise ValueError(
                f"{source} is for another model: the difference of {found.key} has shape {tuple(tensor.shape)}, the "
                f"{model.config.name} backbone has {want}; use a LoRA made for a backbone of width {model.config.dim}"
            )
        checked[full] = tensor.reshape(parameter.shape)
    return checked
