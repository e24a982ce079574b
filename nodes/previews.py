"""Pictures of latents while they are made: by the embedded model's own decoder, or by ComfyUI's colours for Wan."""

import copy
from collections.abc import Sequence
from typing import Protocol

import comfy.latent_formats
import torch
from torch import Tensor
from torch.nn import functional as F

from flashforward_core.model.roles import Backbone
from flashforward_core.model.vae import SETTLED_LATENTS, Preview, StreamingDecoder, VaeState
from flashforward_core.specs import SPATIAL_FACTOR, TEMPORAL_FACTOR


class Look(Protocol):
    """Turns latents into small pictures."""

    @property
    def scale(self) -> int:
        """How many pixels of the video one pixel of a picture stands for, in height and width."""
        ...

    def frames(self, latents_BCFHW: Tensor, *, positions: Sequence[int]) -> Tensor:
        """Turn normalised latents at absolute latent frames into uint8 RGB [B, F, h, w, 3] on the CPU."""
        ...


class LinearLook:
    """One pixel per latent pixel, by a projection: the only look at models that bring no decoder."""

    scale = SPATIAL_FACTOR

    def __init__(self, preview: Preview) -> None:
        self._preview = preview

    def frames(self, latents_BCFHW: Tensor, *, positions: Sequence[int]) -> Tensor:
        return self._preview.frames(latents_BCFHW)


class DecodedLook:
    """The model's own decoder at half the size: chunks as the video has them, anchors as stills.

    What a decoder makes of a latent frame depends on those before it. Frames that go on where the last ones ended are
    decoded as a stream; others, such as anchors, stand still for long enough to get their own colours. The decoder is a
    copy on the CPU, where it meets no lane's work.
    """

    scale = 2

    def __init__(self, vae: torch.nn.Module) -> None:
        own = copy.deepcopy(vae)
        torch.nn.Module.to(own, "cpu", torch.float32)  # diffusers' own method warns of every cast
        self._decoder = StreamingDecoder(own)
        self._state: VaeState | None = None
        self._next = 0

    def frames(self, latents_BCFHW: Tensor, *, positions: Sequence[int]) -> Tensor:
        small = F.avg_pool3d(latents_BCFHW.detach().to("cpu", torch.float32), (1, self.scale, self.scale))
        first, count = positions[0], len(positions)
        goes_on = list(positions) == list(range(first, first + count)) and first in (0, self._next)
        if not goes_on:
            return self._stills(small, positions=positions)
        pictures, self._state = self._decoder.decode(small, self._state if first else None)
        self._next = first + count
        return pictures[:, -1 - TEMPORAL_FACTOR * (count - 1) :: TEMPORAL_FACTOR]

    def _stills(self, latents_BCFHW: Tensor, *, positions: Sequence[int]) -> Tensor:
        """Decode each on its own; the video's first latent frame, a picture of its own kind, is there at once."""
        batch, count = latents_BCFHW.shape[0], latents_BCFHW.shape[2]
        each = latents_BCFHW.movedim(2, 1).flatten(0, 1).unsqueeze(2)
        pictures, _ = self._decoder.decode(each.expand(-1, -1, SETTLED_LATENTS, -1, -1), None)
        clips = pictures.unflatten(0, (batch, count))
        return torch.stack([clips[:, n, -1 if at else 0] for n, at in enumerate(positions)], dim=1)


def look_of(backbone: Backbone) -> Look:
    """Give the look at a backbone's latents."""
    if backbone.vae is not None:
        return DecodedLook(backbone.vae)
    wan = comfy.latent_formats.Wan21()  # its factors give colours in -1 to 1
    weight = tuple((row[0] / 2, row[1] / 2, row[2] / 2) for row in wan.latent_rgb_factors)
    red, green, blue = (0.5 + value / 2 for value in wan.latent_rgb_factors_bias)
    return LinearLook(Preview(weight=weight, bias=(red, green, blue)))
