"""ComfyUI's own MODEL to a backbone: the weights as its loaders and LoRA nodes left them."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import comfy.lora
import comfy.model_patcher
import torch
from comfy_api.latest import io
from torch import Tensor

from flashforward_core.model.checkpoints import build_transformer, infer_config, standardise
from flashforward_core.model.loading import backbone_of, with_role_loras
from flashforward_core.model.presets import choose_preset
from flashforward_core.model.roles import Backbone

from .devices import default_device
from .events import show_text
from .model_files import stamp
from .roles import attention_input, compute_dtype, describe_backbone, role_inputs, role_paths
from .sockets import CATEGORY, BackboneSocket

log = logging.getLogger(__name__)
INSIDE = "diffusion_model."  # where a MODEL keeps its network
NOT_WEIGHTS = ("scale_weight", "scale_input", "weight_scale", "input_scale")
HARMLESS = ("model_sampling", "manual_cast_dtype")  # object patches that do not change the network
SOURCE = "model"


def to_backbone(model: Any, *, dtype: torch.dtype, preset: str = "auto", attention: str = "auto") -> Backbone:
    """Make a backbone on the CPU of a native MODEL with its patches (LoRAs) applied and fp8 scales multiplied in.

    ``model`` is not changed, whether it is loaded or not. Raises ``ValueError`` for anything but a Wan 2.1
    text-to-video model.
    """
    network = getattr(model.model, "diffusion_model", None)
    if network is None or not hasattr(network, "patch_embedding"):
        raise ValueError(f"model is a {type(model.model).__name__}; connect a Wan 2.1 text-to-video model")
    _warn_of_ignored(model)
    with torch.inference_mode(False), torch.no_grad():
        found = standardise(dict(patched_weights(model, dtype=dtype)), source=SOURCE)
        config = infer_config(found.tensors, num_heads=getattr(network, "num_heads", None))
        built = build_transformer(config, found.tensors, source=SOURCE, dtype=dtype, mapped=True)
    choice = choose_preset(preset)
    report = f"{found.report}, {len(model.patches)} of them patched"
    mark = _fingerprint(model, found.tensors)
    return backbone_of(built, report=report, choice=choice, fingerprint=mark, dtype=dtype, attention=attention)


def patched_weights(model: Any, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's parameters by name, as ComfyUI would sample with them.

    What no patch touches is passed on as it is, without a copy; the rest is computed in float32, as ComfyUI does, and
    rounded to ``dtype``. While a MODEL is loaded its originals are in its backup.
    """
    for name, parameter in model.model.named_parameters():
        if not name.startswith(INSIDE) or name.rpartition(".")[2] in NOT_WEIGHTS:
            continue
        weight, _, convert = comfy.model_patcher.get_key_weight(model.model, name)
        if name in model.backup:
            weight = model.backup[name].weight
        if hasattr(weight, "tensor_type"):
            raise ValueError(f"model holds GGUF tensors ({name}); choose the GGUF file in Load Backbone instead")
        if convert is None and name not in model.patches:
            yield name, _ordinary(weight)
            continue
        wide = weight.detach().to(torch.float32, copy=True)
        if convert is not None:
            wide = convert(wide, inplace=True)
        if name in model.patches:
            wide = comfy.lora.calculate_weight(model.patches[name], wide, name)
        keep = parameter.dtype if parameter.dtype.itemsize > dtype.itemsize else dtype
        yield name, wide.to(keep)


def _ordinary(weight: Tensor) -> Tensor:
    """Return a tensor that any thread may use: ComfyUI may have made the weight under inference mode."""
    weight = weight.detach()
    return weight.clone() if weight.is_inference() else weight


def _warn_of_ignored(model: Any) -> None:
    patches = model.model_options.get("transformer_options", {})
    ignored = [*(name for name in model.object_patches if name not in HARMLESS), *patches.get("patches_replace", {})]
    ignored += list(patches.get("patches", {})) + list(getattr(model, "hook_patches", {}))
    if ignored:
        log.warning("model has patches of its forward (%s), which do not apply here", ", ".join(map(str, ignored[:3])))


def _fingerprint(model: Any, tensors: dict[str, Tensor]) -> str:
    """Return a SHA-256 over every tensor's name and a few of its numbers."""
    digest = hashlib.sha256(str(model.patches_uuid).encode() if model.patches else b"")
    for name, tensor in tensors.items():
        step = max(1, tensor.numel() // 64)
        some = tensor.flatten()[::step].float().cpu().numpy().tobytes()
        digest.update(f"{name}|{tuple(tensor.shape)}|".encode() + some)
    return digest.hexdigest()


class BackboneFromModel(io.ComfyNode):
    """Take the weights of ComfyUI's own MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardBackboneFromModel",
            display_name="Backbone from MODEL",
            category=CATEGORY,
            description="Makes a backbone from a Wan 2.1 text-to-video model that ComfyUI loaded, with its LoRAs and "
            "fp8 scales applied. What other nodes changed in its sampling or attention does not carry over.",
            inputs=[
                io.Model.Input("model", tooltip="From Load Diffusion Model, with or without LoRAs."),
                *role_inputs(),
                attention_input(),
            ],
            outputs=[BackboneSocket.Output("backbone", display_name="backbone", tooltip="For the other nodes.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, planner_lora: str | None = None, renderer_lora: str | None = None) -> bool:
        role_paths(planner_lora, renderer_lora)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, *, planner_lora: str | None = None, renderer_lora: str | None = None, **inputs: Any
    ) -> str:
        """Change when a role's LoRA file does."""
        return "\n".join(stamp(path) for path in role_paths(planner_lora, renderer_lora).values())

    @classmethod
    def execute(
        cls, *, model: Any, planner_lora: str, renderer_lora: str, preset: str, attention: str
    ) -> io.NodeOutput:
        dtype = compute_dtype("auto", default_device())
        loras = role_paths(planner_lora, renderer_lora)
        chosen = "flashforward" if preset == "auto" and loras else preset
        made = with_role_loras(to_backbone(model, dtype=dtype, preset=chosen, attention=attention), loras)
        text = describe_backbone(made)
        log.info("%s", text)
        show_text(text, node_id=cls.hidden.unique_id)
        return io.NodeOutput(made, ui={"text": [text]})
