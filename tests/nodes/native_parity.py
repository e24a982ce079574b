"""Run inside ComfyUI's folder: compare the pack's model and decoder with ComfyUI's own on the same random weights.

Prints one JSON object of largest differences; ``test_native.py`` starts it and says what they may be.
"""

import gc
import importlib
import importlib.util
import json
import sys
import weakref
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, str(Path.cwd()))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

for name in ("utils.install_util", "server", "nodes"):  # what ComfyUI has imported when it comes to the packs
    importlib.import_module(name)

import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

spec = importlib.util.spec_from_file_location("pack", ROOT / "__init__.py")
assert spec is not None and spec.loader is not None
pack = importlib.util.module_from_spec(spec)
sys.modules["pack"] = pack
spec.loader.exec_module(pack)

from pack.nodes.bridge import from_latent, to_latent  # noqa: E402
from pack.nodes.native import to_backbone  # noqa: E402
from pack.nodes.native_vae import streaming_decoder  # noqa: E402
from pack.nodes.residency import hold  # noqa: E402

from flashforward_core.engine.replicas import backbone_on  # noqa: E402
from flashforward_core.graph.task import Role  # noqa: E402
from flashforward_core.model.config import WanConfig  # noqa: E402
from flashforward_core.model.fp8 import FP8  # noqa: E402
from flashforward_core.model.naming import BLOCK_NAMES, OUTER_NAMES  # noqa: E402
from flashforward_core.model.tiny_vae import TinyVae  # noqa: E402
from flashforward_core.model.transformer import CausalWanTransformer  # noqa: E402
from flashforward_core.model.vae import StreamingDecoder, denormalise, encode_frames  # noqa: E402

TINY = WanConfig(name="custom", dim=256, ffn_dim=96, num_heads=2, num_layers=2)


def original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that ComfyUI's files have."""
    table = OUTER_NAMES | {
        f"blocks.{i}.{ours}": f"blocks.{i}.{theirs}"
        for i in range(TINY.num_layers)
        for ours, theirs in BLOCK_NAMES.items()
    }
    renamed = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        is_table = leaf == "scale_shift_table"
        renamed[f"{module or 'head'}.modulation" if is_table else f"{table[module]}.{leaf}"] = tensor.clone()
    return renamed


def random_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = CausalWanTransformer(TINY).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("weight" in name), std=0.1)
    return original({n: t for n, t in model.state_dict().items() if n != "role_embedding.weight"})


def scaled_fp8(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As ComfyUI's scaled fp8 files are."""
    out: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2).to(FP8)}
    for name, tensor in state.items():
        if name.endswith(".weight") and tensor.ndim == 2:
            scale = tensor.abs().max() / torch.finfo(FP8).max if name.startswith("blocks.") else torch.ones(())
            out |= {name: (tensor / scale).to(FP8), name.replace(".weight", ".scale_weight"): scale}
        else:
            out[name] = tensor
    return out


def lora() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = {}
    for module in ("blocks.0.self_attn.q", "blocks.1.ffn.0", "head.head"):
        sizes = {"blocks.0.self_attn.q": (256, 256), "blocks.1.ffn.0": (256, 96), "head.head": (256, 64)}[module]
        state |= {
            f"diffusion_model.{module}.lora_down.weight": torch.randn(4, sizes[0]) * 0.1,
            f"diffusion_model.{module}.lora_up.weight": torch.randn(sizes[1], 4) * 0.1,
            f"diffusion_model.{module}.alpha": torch.tensor(6.0),
        }
    return state


def velocities(model: Any) -> tuple[Tensor, Tensor]:
    """Ours and theirs of one clip under full attention; ours is made before the MODEL is loaded."""
    generator = torch.Generator().manual_seed(2)
    x, text = torch.randn(1, 16, 3, 8, 6, generator=generator), torch.randn(1, 512, 4096, generator=generator)
    with torch.inference_mode():  # as ComfyUI runs its nodes
        backbone = to_backbone(model, dtype=torch.float32)
    ours = backbone.models[Role.RENDERER]
    timestep = torch.full((1, 3), 833.3333)
    context = ours.text_context(text, Role.RENDERER)
    found = ours(x, timestep_BF=timestep, text=context, frames=torch.arange(3), role=Role.RENDERER)
    with torch.inference_mode():
        comfy.model_management.load_models_gpu([model], force_full_load=True)
        theirs = model.model.diffusion_model(x, timestep[:, 0], text)
        again = to_backbone(model, dtype=torch.float32)  # now that it is loaded
    same = all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), again.models[Role.RENDERER].parameters(), strict=True)
    )
    assert same, "a loaded MODEL gives other weights than before it was loaded"
    return found, theirs.clone()


def model_differences() -> dict[str, float]:
    out: dict[str, float] = {}
    plain = comfy.sd.load_diffusion_model_state_dict(random_weights())
    found, theirs = velocities(plain)
    out["velocity_scale"] = theirs.std().item()
    out["plain"] = (found - theirs).abs().max().item()
    patched, _ = comfy.sd.load_lora_for_models(plain, None, lora(), 0.8, 0)
    with_lora, theirs_lora = velocities(patched)
    out["lora"] = (with_lora - theirs_lora).abs().max().item()
    out["lora_effect"] = (theirs_lora - theirs).abs().max().item()
    after, _ = velocities(plain)
    out["original_after_lora"] = (after - found).abs().max().item()
    scaled = comfy.sd.load_diffusion_model_state_dict(scaled_fp8(random_weights()))
    found8, theirs8 = velocities(scaled)
    out["fp8"] = (found8 - theirs8).abs().max().item()
    out["fp8_effect"] = (theirs8 - theirs).abs().max().item()
    return out


def vae_differences() -> dict[str, float]:
    import comfy.ldm.wan.vae
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    torch.manual_seed(3)
    made = comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True]).requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    native = comfy.sd.VAE(sd=dict(state))
    ours = AutoencoderKLWan(base_dim=8).requires_grad_(False).eval()
    ours.load_state_dict(convert_wan_vae_to_diffusers(dict(state)))
    normalised = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(4))
    backbone = BARE
    latent = to_latent(normalised, backbone)
    with torch.inference_mode():
        theirs = native.decode(latent["samples"]).reshape(-1, 32, 48, 3)
        frames = torch.rand(5, 32, 48, 3, generator=torch.Generator().manual_seed(5))
        encoded = native.encode(frames)
    decoded, _ = StreamingDecoder(ours).decode_float(normalised, None)
    streaming = streaming_decoder(native, latent["samples"])
    assert streaming is not None
    begun, kept = streaming.decode_float(normalised[:, :, :1], None)
    rest, _ = streaming.decode_float(normalised[:, :, 1:], kept)
    native.first_stage_model.decoder.head[2] = torch.nn.Conv3d(8, 12, 3, padding=1)  # a relative of Wan 2.1's
    torch.manual_seed(6)
    small = comfy.sd.VAE(sd=TinyVae().state_dict())
    with torch.inference_mode():
        whole = small.decode(latent["samples"]).reshape(-1, 32, 48, 3)
    small_stream = streaming_decoder(small, latent["samples"])
    assert small_stream is not None
    small_frames, _ = small_stream.decode_float(normalised, None)
    return {
        "small_streamed": (small_frames[0] - whole.clamp(0, 1)).abs().max().item(),
        "small_spread": whole.std().item(),
        "streamed": (torch.cat([begun, rest], dim=1)[0] - theirs).abs().max().item(),
        "relative_streams": streaming_decoder(native, latent["samples"]) is not None,
        "decode": (decoded[0] - theirs).abs().max().item(),
        "decode_spread": theirs.std().item(),
        "encode": (encode_frames(ours, frames[None]) - from_latent({"samples": encoded}, backbone)).abs().max().item(),
        "latent_space": (latent["samples"] - denormalise(ours, normalised)).abs().max().item(),
        "round_trip": (from_latent(latent, backbone) - normalised).abs().max().item(),
    }


BARE: Any = None


def residency() -> dict[str, bool]:
    """Whether ComfyUI's unloading drops copies of our weights. A CPU under another name stands for a GPU."""
    device = torch.device("cpu", 0)
    backbone = to_backbone(comfy.sd.load_diffusion_model_state_dict(random_weights()), dtype=torch.float32)
    hold(backbone, [device])
    copied = backbone_on(backbone, device).models[Role.RENDERER]
    held = backbone_on(backbone, device).models[Role.RENDERER] is copied
    counted = sum(m.model_loaded_memory() for m in comfy.model_management.current_loaded_models if m.device == device)
    copy = weakref.ref(copied)
    del copied
    comfy.model_management.free_memory(1e30, device)
    gc.collect()
    dropped = copy() is None
    hold(backbone, [device])
    again = backbone_on(backbone, device).models[Role.RENDERER] is not backbone.models[Role.RENDERER]
    original = weakref.ref(backbone.models[Role.RENDERER])
    del backbone
    gc.collect()
    return {
        "held": held,
        "counted": counted == 4 * sum(tensor.numel() for tensor in random_weights().values()) + 4 * 2 * TINY.dim,
        "dropped": dropped,
        "again": again,
        "forgotten": original() is None,
    }


def refusal() -> str:
    """What a MODEL that is no text-to-video Wan says."""
    state = random_weights()
    state["patch_embedding.weight"] = torch.zeros(256, 36, 1, 2, 2)
    try:
        to_backbone(comfy.sd.load_diffusion_model_state_dict(state), dtype=torch.float32)
    except ValueError as error:
        return str(error)
    return "not refused"


torch.set_num_threads(1)
BARE = to_backbone(comfy.sd.load_diffusion_model_state_dict(random_weights()), dtype=torch.float32)
print(
    json.dumps({**model_differences(), **vae_differences(), **residency(), "refusal": refusal(), "report": BARE.report})
)
