"""Models to measure: the embedded one, or random weights of the real sizes, made on the device."""

import logging

import torch
from torch import nn

from ..graph.task import Role
from ..model.config import EMBEDDED, MODELS, WanConfig
from ..model.fp8_matmul import use_fp8_matmul
from ..model.loading import load_embedded
from ..model.roles import Backbone
from ..model.tiny_vae import TinyVae
from ..model.transformer import CausalWanTransformer

log = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Name -> dtype of what is not in 8 bits; ``fp8`` multiplies the blocks' linears in 8 bits."""
WEIGHT_STD = 0.02


def bench_backbone(
    model: str, *, device: torch.device, precision: str, attention: str, decoder: str | None = None
) -> Backbone:
    """Return a backbone on ``device``. Speed does not depend on the weights' values, so the large ones are random.

    ``decoder`` is one of ``DECODERS`` or None; the embedded model has its own. Both roles share one weight set.
    """
    dtype = PRECISIONS[precision]
    if MODELS[model] is EMBEDDED:
        backbone = load_embedded(dtype=dtype, device=device, attention=attention)
    else:
        transformer = random_transformer(MODELS[model], device=device, dtype=dtype)
        backbone = Backbone(
            config=transformer.config,
            models=dict.fromkeys(Role, transformer),
            vae=DECODERS[decoder](device) if decoder else None,
            text_encoder=None,
            fingerprint=f"random {model}",
            dtype=dtype,
            attention=attention,
        )
    if precision == "fp8":
        for transformer in set(backbone.models.values()):
            use_fp8_matmul(transformer)
    return backbone


def random_transformer(config: WanConfig, *, device: torch.device, dtype: torch.dtype) -> CausalWanTransformer:
    """Return a transformer with small random weights, never held in another dtype or elsewhere."""
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            model = CausalWanTransformer(config).to(dtype)
        model = model.to_empty(device=device).requires_grad_(False).eval()
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
        return model


def _fill(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if parameter.ndim > 1:
        parameter.normal_(std=WEIGHT_STD, generator=generator)
    else:
        parameter.fill_(float(name.endswith("weight")))  # norms scale by 1, biases are 0


def random_vae(device: torch.device) -> nn.Module | None:
    """Return diffusers' Wan 2.1 autoencoder with random weights, in bfloat16 on CUDA; None without diffusers."""
    try:
        from diffusers import AutoencoderKLWan
    except ModuleNotFoundError as error:
        log.warning("%s is not installed, so nothing can be decoded", error.name)
        return None

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode(False), torch.device(device):
        return AutoencoderKLWan().to(dtype).requires_grad_(False).eval()


def random_tiny_vae(device: torch.device) -> nn.Module:
    """Return a tiny decoder with random weights, in half precision on CUDA, as its files are."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.inference_mode(False), torch.device(device):
        return TinyVae().to(dtype).requires_grad_(False).eval()


DECODERS = {"wan": random_vae, "tiny": random_tiny_vae}
"""Name -> maker of a random autoencoder."""


def bench_texts(backbone: Backbone, *, batch: int = 1) -> list[torch.Tensor]:
    """Return one random prompt embedding on the CPU."""
    size = (batch, backbone.config.text_len, backbone.config.text_dim)
    return [torch.randn(size, generator=torch.Generator().manual_seed(0))]
