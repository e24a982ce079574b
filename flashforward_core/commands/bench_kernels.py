"""Parts measured by themselves: the decoder's speed each way, and how far fast forwards are from float32."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine.forward import FastOptions
from ..graph.task import Role
from ..model.attention import ATTENTION, AUTO_ORDER, resolve_attention, sdpa
from ..model.compiled import compiled_parts
from ..model.fp8_matmul import Fp8MatmulLinear, use_fp8_matmul
from ..model.roles import Backbone
from ..model.tiny_vae import TinyDecoder, TinyVae
from ..model.transformer import CausalWanTransformer
from ..model.vae import Decoder, StreamingDecoder, VaeState
from ..specs import LATENT_CHANNELS, TEMPORAL_FACTOR, RolloutSpec, VideoShape
from .bench_models import bench_texts

WARM_LATENTS = 3  # the first latent frame has a shape of its own; kernels are chosen on the second and third
TIMED_LATENTS = 6
TIMED_CALLS = 10


def decode_rates(vae: Any, shape: VideoShape, *, compiles: bool) -> Iterator[tuple[str, float]]:
    """Yield (mode, video frames per second) for each way to run the decoder; the autoencoder itself stays as it is."""
    device = next(vae.parameters()).device
    if isinstance(vae, TinyVae):
        yield "tiny", decode_rate(TinyDecoder(vae), shape, device=device)
        return
    for channels_last, compiled in ((False, False), (True, False), (True, True)):
        for as_conv2d in (False, True):
            if compiled and (as_conv2d or not compiles):
                continue
            decoder = StreamingDecoder(vae, as_conv2d=as_conv2d, channels_last=channels_last, compiled=compiled)
            words = ["conv2d" if as_conv2d else "conv3d"]
            words += ["channels last"] * channels_last + ["compiled"] * compiled
            yield ", ".join(words), decode_rate(decoder, shape, device=device)


def decode_rate(decoder: Decoder, shape: VideoShape, *, device: torch.device) -> float:
    """Return video frames per second after a warm-up, on latents of noise."""
    size = (1, 16, 1, shape.latent_height, shape.latent_width)
    latents = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    state: VaeState | None = None
    with torch.inference_mode():
        for _ in range(WARM_LATENTS):
            _, state = decoder.decode_in_place(latents, state)
        wait(device)
        began = time.perf_counter()
        for _ in range(TIMED_LATENTS):
            _, state = decoder.decode_in_place(latents, state)
        wait(device)
    return TEMPORAL_FACTOR * TIMED_LATENTS / (time.perf_counter() - began)


def wait(device: torch.device) -> None:
    """Wait for a CUDA device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention_times(
    backbone: Backbone, spec: RolloutSpec, *, device: torch.device
) -> Iterator[tuple[int, float, float]]:
    """Yield (context in latent frames, seconds, seconds of the first call) of one block's self-attention.

    Keys are a slice of a longer buffer, as in a bank. Kernels that plan per shape and thread show it in the first call.
    """
    config, attend = backbone.config, resolve_attention(backbone.attention, device, dtype=backbone.dtype).attend
    tokens, chunk = spec.shape.tokens_per_frame, spec.chunk_frames
    longest = 7 * chunk
    size = (1, longest * tokens, config.num_heads, config.head_dim)
    with torch.inference_mode():
        bank = torch.randn(2, *size, device=device, dtype=backbone.dtype)
        q = bank[0, :, : chunk * tokens].clone()
        for context in range(2 * chunk, longest + 1, chunk):
            k, v = bank[0, :, : context * tokens], bank[1, :, : context * tokens]
            first_s = _seconds(partial(attend, q, k, v), device=device, calls=1)
            yield context, _seconds(partial(attend, q, k, v), device=device, calls=TIMED_CALLS) / TIMED_CALLS, first_s


def _seconds(call: Callable[[], object], *, device: torch.device, calls: int) -> float:
    wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return time.perf_counter() - began


def forward_errors(
    backbone: Backbone, spec: RolloutSpec, *, fast: FastOptions
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield (config, relative error of the velocity against float32) for every kernel that runs here.

    The reference has the same weights, widened, and plain attention; the input is one chunk of noise as long as
    ``spec``, attending to itself.
    """
    model = backbone.models[Role.RENDERER]
    if any(isinstance(layer, Fp8MatmulLinear) for layer in model.modules()):
        raise ValueError("precision='fp8' has lost the weights to compare with; use bf16, which measures fp8 beside it")
    device = next(model.parameters()).device
    names = [name for name in AUTO_ORDER if ATTENTION[name].obstacle(device) is None and _takes(name, backbone)]
    exact = velocity(_exact(backbone), spec, backbone, attend=sdpa)
    for name, compiles in itertools.product(names or ["sdpa"], (False, True)):
        if compiles and not fast.compiles(device):
            continue
        parts = compiled_parts(device, Role.RENDERER, _latent_size(spec)) if compiles else None
        found = velocity(model, spec, backbone, attend=ATTENTION[name].attend, parts=parts)
        error = ((found - exact).norm() / exact.norm()).item()
        yield {"attention": name, "compile": "on" if compiles else "off"}, error
    if backbone.dtype == torch.bfloat16:
        rounded = copy.deepcopy(model)
        use_fp8_matmul(rounded)
        found = velocity(rounded, spec, backbone, attend=sdpa)
        yield (
            {"attention": "sdpa", "precision": "fp8", "compile": "off"},
            ((found - exact).norm() / exact.norm()).item(),
        )


def _latent_size(spec: RolloutSpec) -> tuple[int, ...]:
    shape = spec.shape
    return (1, LATENT_CHANNELS, shape.latent_frames, shape.latent_height, shape.latent_width)


def _takes(name: str, backbone: Backbone) -> bool:
    return backbone.dtype in ATTENTION[name].dtypes


def _exact(backbone: Backbone) -> CausalWanTransformer:
    with torch.inference_mode(False):
        return copy.deepcopy(backbone.models[Role.RENDERER]).float()


def velocity(model: CausalWanTransformer, spec: RolloutSpec, backbone: Backbone, **options: Any) -> Tensor:
    """Return a renderer forward's velocity in float32, of noise that is the same for every model."""
    attend = options.pop("attend")
    device = next(model.parameters()).device
    shape, generator = spec.shape, torch.Generator().manual_seed(1)
    x = torch.randn(_latent_size(spec), generator=generator).to(device)
    with torch.inference_mode():
        text = model.text_context(bench_texts(backbone)[0].to(device), Role.RENDERER)
        out: Tensor = model(
            x,
            timestep_BF=torch.full((1, shape.latent_frames), 937.5, device=device),
            text=text,
            frames=torch.arange(shape.latent_frames, device=device),
            role=Role.RENDERER,
            self_attend=attend,
            cross_attend=attend,
            **options,
        )
    return out.float()
