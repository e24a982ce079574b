"""ComfyUI's own VAE as a module that streams: a long video need not be decoded as a whole."""

import logging
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from flashforward_core.model.tiny_vae import decoder_for, tiny_vae_of
from flashforward_core.model.vae import Decoder
from flashforward_core.specs import LATENT_CHANNELS

log = logging.getLogger(__name__)
LAST_NORM = "decoder.head.0.gamma"  # as wide as the whole autoencoder's first level
TINY_LAYER = "decoder.22.bias"  # by which ComfyUI itself knows small video decoders


def streaming_decoder(vae: Any, samples_BCFHW: Tensor) -> Decoder | None:
    """Copy a Wan 2.1 VAE of ComfyUI's to its device, with room for decoding; None for any other, which cannot stream.

    The copy is at most half a GiB and goes with the decoder.
    """
    network = getattr(vae, "first_stage_model", None)
    if network is None:
        return None
    dtype = vae.vae_dtype
    room = vae.memory_used_decode(tuple(samples_BCFHW.shape), dtype)
    comfy.model_management.free_memory(room + dtype.itemsize * sum(t.numel() for t in network.parameters()), vae.device)
    ours = streaming_module(vae, device=vae.device)
    return None if ours is None else decoder_for(ours)


def streaming_module(vae: Any, *, device: torch.device) -> torch.nn.Module | None:
    """Return a copy on ``device`` of a Wan 2.1 VAE of ComfyUI's, small ones included; None for any other."""
    network = getattr(vae, "first_stage_model", None)
    if network is None or getattr(vae, "latent_channels", None) != LATENT_CHANNELS or vae.patcher.patches:
        return None
    state = network.state_dict()
    if LAST_NORM in state:
        return _wan(state, device=device, dtype=vae.vae_dtype)
    if TINY_LAYER in state and network.latent_format is None:  # else ComfyUI takes it for another model's
        return tiny_vae_of(state, source="the VAE", raw=True, dtype=vae.vae_dtype, device=device)
    return None


def _wan(state: dict[str, Tensor], *, device: torch.device, dtype: torch.dtype) -> torch.nn.Module | None:
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            ours = AutoencoderKLWan(base_dim=len(state[LAST_NORM]))
        converted = convert_wan_vae_to_diffusers(state)
        try:
            ours.load_state_dict({name: t.to(device, dtype, copy=True) for name, t in converted.items()}, assign=True)
        except RuntimeError:  # names or shapes of a relative of Wan 2.1's autoencoder
            log.debug("the VAE does not have Wan 2.1's layers", exc_info=True)
            return None
    made: torch.nn.Module = ours.requires_grad_(False).eval()
    return made
