"""Phase 1: packed supervised fine-tuning of both roles in one block-causal forward (FlashForward)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flashforward_core.graph.task import Role
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import RolloutSpec, VideoShape
from flashforward_core.train.base import CAPTION_DROP, compile_blocks, draw_sigmas, flow_loss
from flashforward_core.train.data import LatentPool
from flashforward_core.train.loop import LoopConfig, train
from flashforward_core.train.packing import GroupedAttention, Packing, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """A packing on a device: what one step's forward needs besides the clips."""

    packing: Packing
    frames: Tensor
    used: Tensor
    attend: GroupedAttention


def spec_for_latents(latent_frames: int, *, width: int, height: int) -> RolloutSpec:
    """Describe the flashforward rollout that training imitates."""
    return RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=latent_frames))


def layouts_for(lengths: Sequence[int], *, width: int, height: int, device: torch.device) -> list[PackedLayout]:
    """Pack each length into the shape of the longest, so that one compiled step serves all of them."""
    specs = [spec_for_latents(n, width=width, height=height) for n in lengths]
    longest = max(specs, key=lambda spec: spec.shape.latent_frames)
    return [_layout(pack(spec, padded_to=longest), longest.shape.tokens_per_frame, device) for spec in specs]


def _layout(packing: Packing, tokens: int, device: torch.device) -> PackedLayout:
    return PackedLayout(
        packing=packing,
        frames=torch.tensor(packing.frames, device=device),
        used=packing.used.to(device),
        attend=GroupedAttention(packing.visible, tokens, device=device),
    )


class SftStep(nn.Module):
    """One packed forward of both roles and its two flow-matching losses."""

    def __init__(
        self, model: CausalWanTransformer, text: ByteT5Encoder, packing: Packing, *, autocast: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.text = text
        self.segments = packing.segments
        self.num_anchors = packing.num_anchors
        self.autocast = autocast

    def forward(
        self,
        packed: Tensor,
        noise: Tensor,
        sigma: Tensor,
        ids: Tensor,
        mask: Tensor,
        layout: PackedLayout,
    ) -> dict[str, Tensor]:
        """Score packed clean latents and noise [B, 16, P, h, w] at sigma [B, P] (0 on the clean anchors)."""
        s = sigma[:, None, :, None, None]
        with torch.autocast(packed.device.type, torch.bfloat16, enabled=self.autocast):
            embedded = self.text(ids, mask)
            texts = [self.model.text_context(embedded, role) for role in (Role.PLANNER, Role.RENDERER)]
            velocity = self.model(
                (1 - s) * packed + s * noise,
                timestep_BF=1000 * sigma,
                text=texts,
                frames=layout.frames,
                segments=self.segments,
                self_attend=layout.attend,
            )
        losses = flow_loss(velocity, packed, noise)
        count = self.num_anchors
        planner = _mean_over(losses[:, count : 2 * count], layout.used[count : 2 * count])
        renderer = _mean_over(losses[:, 2 * count :], layout.used[2 * count :])
        return {"loss": planner + renderer, "planner": planner, "renderer": renderer}


def _mean_over(losses: Tensor, used: Tensor) -> Tensor:
    return (losses * used).sum() / (used.sum() * losses.shape[0])


def packed_sigmas(packing: Packing, count: int, generator: torch.Generator, *, device: torch.device) -> Tensor:
    """Draw sigma [B, P]: 0 on clean anchors, one per planner block, one per renderer clip."""
    anchors = packing.num_anchors
    per_block = draw_sigmas((count, len(packing.blocks)), generator, device=device)
    block_of = torch.tensor([b for b, members in enumerate(packing.blocks) for _ in members], device=device)
    clean = torch.zeros(count, anchors, device=device)
    clip = draw_sigmas((count, 1), generator, device=device).expand(-1, len(packing.frames) - 2 * anchors)
    return torch.cat((clean, per_block[:, block_of], clip), dim=1)


def train_sft(
    model: CausalWanTransformer,
    text: ByteT5Encoder,
    pool: LatentPool,
    layouts: Sequence[PackedLayout],
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    clips: int,
    compiled: bool = True,
) -> tuple[CausalWanTransformer, ByteT5Encoder]:
    """Fine-tune a model with roles attached on ``clips`` per batch; each step draws one of the ``layouts``."""
    device = accelerator.device
    packing = layouts[0].packing
    step = SftStep(model, text, packing, autocast=device.type == "cuda")

    def batch(generator: torch.Generator, number: int) -> tuple[object, ...]:
        layout = layouts[number % len(layouts)]
        clean, ids, mask = pool.sample(clips, generator, drop=CAPTION_DROP)
        packed = clean[:, :, layout.frames]
        noise = torch.randn(packed.shape, generator=generator, device=device)
        sigma = packed_sigmas(packing, clips, generator, device=device)
        return packed, noise, sigma, ids, mask, layout

    compile_parts = partial(compile_blocks, model) if compiled else None
    best = train(step, config, accelerator=accelerator, batch=batch, prepare=compile_parts)
    return best.model, best.text
