"""Tiny random files under the names that the workflows for Wan models ask for."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashforward_core.model.config import WanConfig
from flashforward_core.model.naming import BLOCK_NAMES, OUTER_NAMES
from flashforward_core.model.tiny_vae import TinyVae
from flashforward_core.model.transformer import CausalWanTransformer

CONFIG = WanConfig(name="custom", dim=128, ffn_dim=64, num_heads=1, num_layers=2)
PACKS = Path(__file__).with_name("packs")
SELF_FORCING = "self_forcing_dmd.pt"
KREA = "krea-realtime-video-14b.safetensors"
NATIVE = "wan2.1_t2v_1.3B_self_forcing.safetensors"
LORA = "my_style_lora.safetensors"
TEXT_ENCODER = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
VAE = "wan_2.1_vae.safetensors"
SMALL_DECODER, RAW_DECODER, OTHER_DECODER = "taew2_1.safetensors", "lighttaew2_1.safetensors", "tiny_other.safetensors"


def original_weights(*, seed: int = 0) -> dict[str, Tensor]:
    """A random transformer under the original names."""
    torch.manual_seed(seed)
    table = OUTER_NAMES | {f"blocks.{i}.{a}": f"blocks.{i}.{b}" for i in range(2) for a, b in BLOCK_NAMES.items()}
    renamed = {}
    for name, tensor in CausalWanTransformer(CONFIG).state_dict().items():
        module, _, leaf = name.rpartition(".")
        if leaf == "scale_shift_table":
            renamed[f"{module or 'head'}.modulation"] = tensor
        elif module != "role_embedding":
            renamed[f"{table[module]}.{leaf}"] = tensor
    return renamed


def vae_weights() -> dict[str, Tensor]:
    """A random Wan VAE, eight channels wide, under the original names that ComfyUI loads."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(1)
    return original_vae(AutoencoderKLWan(base_dim=8).state_dict())


def original_vae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo diffusers' converter: the name that it turns into each of the model's names, found by asking it."""
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    names = {next(iter(convert_wan_vae_to_diffusers({name: torch.zeros(1)}))): name for name in _original_vae_names()}
    return {names[name]: tensor for name, tensor in state.items()}


def _original_vae_names() -> list[str]:
    """Every name that may occur; those that do not are never asked for."""
    parts = []
    for side, groups in (("encoder", ("downsamples",)), ("decoder", ("upsamples",))):
        prefixes = [f"{side}.{group}.{i}" for group in groups for i in range(16)] + [
            f"{side}.middle.{i}" for i in (0, 2)
        ]
        for prefix in prefixes:
            parts += [f"{prefix}.residual.{i}.{leaf}" for i in (0, 2, 3, 6) for leaf in ("gamma", "weight", "bias")]
            parts += [
                f"{prefix}.{part}.{leaf}"
                for part in ("shortcut", "resample.1", "time_conv")
                for leaf in ("weight", "bias")
            ]
        parts += [
            f"{side}.{part}.{leaf}"
            for part in ("conv1", "head.2", "middle.1.to_qkv", "middle.1.proj")
            for leaf in ("weight", "bias")
        ]
        parts += [f"{side}.head.0.gamma", f"{side}.middle.1.norm.gamma"]
    return parts + [f"{conv}.{leaf}" for conv in ("conv1", "conv2") for leaf in ("weight", "bias")]


def style_lora() -> dict[str, Tensor]:
    torch.manual_seed(2)
    key = "lora_unet_blocks_1_cross_attn_o"
    return {f"{key}.lora_down.weight": torch.randn(4, 128), f"{key}.lora_up.weight": torch.randn(128, 4)}


def small_decoder() -> dict[str, Tensor]:
    """A random small decoder whose pictures are not one colour."""
    torch.manual_seed(3)
    made = TinyVae()
    for layer in made.modules():
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
    return {**made.state_dict(), "encoder.0.weight": torch.zeros(64, 3, 3, 3)}


def write_models(folder: Path) -> Path:
    """Write every file and return the ``--extra-model-paths-config`` that leads ComfyUI to them."""
    names = ("diffusion_models", "vae", "vae_approx", "text_encoders", "loras")
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    models = folder / "diffusion_models"
    fsdp = {f"model._fsdp_wrapped_module.{name}": tensor for name, tensor in original_weights().items()}
    torch.save({"generator_ema": fsdp, "generator": {}, "step": 600}, models / SELF_FORCING)
    half = {name: tensor.bfloat16().contiguous() for name, tensor in original_weights(seed=1).items()}
    save_file(half, models / KREA)
    save_file({name: t.contiguous() for name, t in original_weights(seed=2).items()}, models / NATIVE)
    save_file({name: t.contiguous() for name, t in vae_weights().items()}, folder / "vae" / VAE)
    (folder / "text_encoders" / TEXT_ENCODER).write_bytes(b"no model")
    save_file(style_lora(), folder / "loras" / LORA)
    decoder = small_decoder()
    for name in (SMALL_DECODER, RAW_DECODER):
        save_file(decoder, folder / "vae_approx" / name)
    save_file({"decoder.1.weight": torch.zeros(8, 4, 3, 3)}, folder / "vae_approx" / OTHER_DECODER)
    lines = [f"  {name}: {name}" for name in names]
    config = folder / "paths.yaml"
    config.write_text("\n".join(["tests:", f"  base_path: {folder}", *lines, f"  custom_nodes: {PACKS}"]) + "\n")
    return config
