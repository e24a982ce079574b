"""ComfyUI's own VAE as a streaming decoder: a long video need not be decoded as a whole."""

import logging
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from flashforward_core.model.vae import StreamingDecoder
from flashforward_core.specs import LATENT_CHANNELS

log = logging.getLogger(__name__)
LAST_NORM = "decoder.head.0.gamma"  # as wide as the whole autoencoder's first level


def streaming_decoder(vae: Any, samples_BCFHW: Tensor) -> StreamingDecoder | None:
    """Copy a Wan 2.1 VAE of ComfyUI's to its device, with room for decoding; None for any other, which cannot stream.

    The copy is a quarter to half a GiB and goes with the decoder.
    """
    network = getattr(vae, "first_stage_model", None)
    state = {} if network is None else network.state_dict()
    width = state.get(LAST_NORM)
    if width is None or getattr(vae, "latent_channels", None) != LATENT_CHANNELS or getattr(vae.patcher, "patches", {}):
        return None
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    device, dtype = vae.device, vae.vae_dtype
    room = (
        vae.memory_used_decode(tuple(samples_BCFHW.shape), dtype)
        + sum(t.numel() for t in state.values()) * dtype.itemsize
    )
    comfy.model_management.free_memory(room, device)
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            ours = AutoencoderKLWan(base_dim=len(width))
        converted = convert_wan_vae_to_diffusers(state)
        try:
            ours.load_state_dict({name: t.to(device, dtype, copy=True) for name, t in converted.items()}, assign=True)
        except RuntimeError:  # names or shapes of a relative of Wan 2.1's autoencoder
            log.debug("the VAE does not have Wan 2.1's layers", exc_info=True)
            return None
    return StreamingDecoder(ours.requires_grad_(False).eval())
