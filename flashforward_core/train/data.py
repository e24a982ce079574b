"""Training clips as normalised latents with tokenised captions, drawn from the procedural scenes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file
from torch import Tensor

from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.scenes import sample_scene
from flashforward_core.train.folder import refused_if_damaged, save_whole
from flashforward_core.train.synthetic import render_scene
from flashforward_core.train.vae_train import encode_mean

FIELDS = ("latents", "ids", "mask", "empty_ids", "empty_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPool:
    """Clips [N, 16, F, 16, 24] in bfloat16 with token ids [N, T] and their mask, all on one device."""

    latents: Tensor
    ids: Tensor
    mask: Tensor
    empty_ids: Tensor
    empty_mask: Tensor

    @classmethod
    @torch.no_grad()
    def encode(
        cls,
        vae: AutoencoderKLWan,
        text: ByteT5Encoder,
        seeds: Sequence[int],
        *,
        frames: int,
        device: torch.device,
    ) -> "LatentPool":
        """Draw the scenes numbered ``seeds``, ``frames`` video frames each, and encode them."""
        mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        latents, captions = [], []
        for seed in seeds:
            scene = sample_scene(seed)
            video = render_scene(scene, frames, device=device)[0].unsqueeze(0)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                z = encode_mean(vae, video)
            latents.append(((z.float() - mean) / std).bfloat16())
            captions.append(scene.caption)
        return cls.of_clips(text, torch.cat(latents), captions, device=device)

    @classmethod
    def of_clips(
        cls, text: ByteT5Encoder, latents: Tensor, captions: Sequence[str], *, device: torch.device
    ) -> "LatentPool":
        """Hold clips [N, 16, F, h, w], normalised, with their captions."""
        parts = (*text.tokenise(list(captions)), *text.tokenise([""]))
        ids, mask, empty_ids, empty_mask = (part.to(device) for part in parts)
        latents = latents.to(device, torch.bfloat16)
        return cls(latents=latents, ids=ids, mask=mask, empty_ids=empty_ids, empty_mask=empty_mask)

    @classmethod
    def of_captions(cls, text: ByteT5Encoder, captions: Sequence[str], *, device: torch.device) -> "LatentPool":
        """Hold captions alone, for a step that needs no clips: what ``sample`` gives then has no latent frames."""
        return cls.of_clips(text, torch.empty(len(captions), 16, 0, 1, 1), captions, device=device)

    def save(self, path: Path) -> None:
        """Keep the encoded clips, so that the next step need not draw and encode them again."""
        save_whole({name: getattr(self, name).cpu().contiguous() for name in FIELDS}, path)

    @classmethod
    def load(cls, path: Path, *, device: torch.device) -> "LatentPool":
        """Read what ``save`` wrote. Raises ``ValueError`` for a file that is not whole."""
        with refused_if_damaged(path):
            tensors = load_file(path)
        return cls(**{name: tensor.to(device) for name, tensor in tensors.items()})

    def sample(self, count: int, generator: torch.Generator, *, drop: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return clips in float32, ids and mask; captions are emptied with probability ``drop``."""
        device = self.latents.device
        rows = torch.randint(len(self.latents), (count,), generator=generator, device=device)
        dropped = torch.rand(count, 1, generator=generator, device=device) < drop
        ids = torch.where(dropped, self.empty_ids, self.ids[rows])
        mask = torch.where(dropped, self.empty_mask, self.mask[rows])
        return self.latents[rows].float(), ids, mask
