"""Phase 1: packed supervised fine-tuning of both roles in one block-causal forward (FlashForward)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import RolloutSpec, VideoShape
from flashforward_core.train.base import (
    CAPTION_DROP,
    FIRST_FRAME,
    compile_blocks,
    crop_offset,
    draw_sigmas,
    flow_loss,
    half_precision,
    weighted_mean,
)
from flashforward_core.train.loop import LoopConfig, train

if TYPE_CHECKING:
    from flashforward_core.train.data import LatentPool  # it needs diffusers, which takes seconds
from flashforward_core.train.packing import GroupedAttention, Packing, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """A packing on a device: what one step's forward needs besides the clips."""

    clips: int
    """Clips per batch and process."""
    packing: Packing
    frames: Tensor
    weights: Tensor
    """Weight of each packed frame's loss [P]; 0 for an unused one."""
    length: int
    """Latent frames of a clip that are in use."""
    attend: GroupedAttention


def spec_for_latents(latent_frames: int, *, width: int, height: int) -> RolloutSpec:
    """Describe the flashforward rollout that training imitates."""
    return RolloutSpec(shape=VideoShape(width=width, height=height, latent_frames=latent_frames))


def layouts_for(
    steps: Sequence[tuple[int, int, bool]],
    *,
    width: int,
    height: int,
    device: torch.device,
    padded_to: int | None = None,
) -> list[PackedLayout]:
    """Pack each of ``steps`` (clips, latent frames, planner alone) into one shape: there are few to compile.

    It is that of ``padded_to`` latent frames, or of the longest.
    """
    specs = [spec_for_latents(latents, width=width, height=height) for _, latents, _ in steps]
    most = padded_to or max(latents for _, latents, _ in steps)
    longest = spec_for_latents(most, width=width, height=height)
    tokens = longest.shape.tokens_per_frame
    layouts = []
    for (clips, _, planner_only), spec in zip(steps, specs, strict=True):
        packing = pack(spec, padded_to=longest, planner_only=planner_only)
        frames = torch.tensor(packing.frames, device=device)
        layouts.append(
            PackedLayout(
                clips=clips,
                packing=packing,
                frames=frames,
                length=1 + max(frame for frame, used in zip(packing.frames, packing.used, strict=True) if used),
                weights=packing.used.to(device) * torch.where(frames == 0, FIRST_FRAME, 1.0),
                attend=GroupedAttention(packing.visible, tokens, device=device),
            )
        )
    return layouts


class SftStep(nn.Module):
    """One packed forward of both roles and its two flow-matching losses."""

    def __init__(
        self, model: CausalWanTransformer, text: nn.Module, *, autocast: bool, checkpoint_blocks: bool = False
    ) -> None:
        """``text`` turns ids and mask into prompt embeddings; ``checkpoint_blocks`` recomputes blocks, for memory."""
        super().__init__()
        self.model = model
        self.text = text
        self.autocast = autocast
        self.checkpoint_blocks = checkpoint_blocks

    def forward(
        self,
        packed: Tensor,
        noise: Tensor,
        sigma: Tensor,
        ids: Tensor,
        mask: Tensor,
        layout: PackedLayout,
        weights: Tensor,
    ) -> dict[str, Tensor]:
        """Score packed clean latents and noise [B, 16, P, h, w] at sigma [B, P] (0 on the clean anchors).

        ``weights`` [P] are those of each packed frame's loss.
        """
        s = sigma[:, None, :, None, None]
        packing = layout.packing
        with torch.autocast(packed.device.type, torch.bfloat16, enabled=self.autocast):
            embedded = self.text(ids, mask)
            velocity = self.model(
                (1 - s) * packed + s * noise,
                timestep_BF=1000 * sigma,
                text=[self.model.text_context(embedded, segment.role) for segment in packing.segments],
                frames=layout.frames,
                segments=packing.segments,
                self_attend=layout.attend,
                checkpoint_blocks=self.checkpoint_blocks,
            )
        losses = flow_loss(velocity, packed, noise)
        count = packing.num_anchors
        planner = weighted_mean(losses[:, count : 2 * count], weights[count : 2 * count])
        if not packing.num_chunk_frames:
            return {"loss": planner, "planner": planner}
        renderer = weighted_mean(losses[:, 2 * count :], weights[2 * count :])
        return {"loss": planner + renderer, "planner": planner, "renderer": renderer}


def packed_sigmas(packing: Packing, count: int, generator: torch.Generator, *, device: torch.device) -> Tensor:
    """Draw sigma [B, P]: 0 on clean anchors, one per planner block, one per renderer clip."""
    anchors = packing.num_anchors
    per_block = draw_sigmas((count, len(packing.blocks)), generator, device=device)
    block_of = torch.tensor([b for b, members in enumerate(packing.blocks) for _ in members], device=device)
    clean = torch.zeros(count, anchors, device=device)
    clip = draw_sigmas((count, 1), generator, device=device).expand(-1, packing.num_chunk_frames)
    return torch.cat((clean, per_block[:, block_of], clip), dim=1)


def train_sft(
    model: CausalWanTransformer,
    text: ByteT5Encoder,
    pool: "LatentPool",
    layouts: Sequence[PackedLayout],
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    compiled: bool = True,
    checkpoint_blocks: bool = False,
    rebase: float = 0.0,
    rebased: Sequence[PackedLayout] = (),
    snapshot: Callable[[CausalWanTransformer, ByteT5Encoder, int], None] | None = None,
) -> tuple[CausalWanTransformer, ByteT5Encoder]:
    """Fine-tune a model with roles attached; the steps take the ``layouts`` in turn.

    A share ``rebase`` of the steps crops its clips at a random place, with positions from 0: the anchors then lie on
    other moments of them (time-rebase). Such a step takes its layout out of ``rebased``, which are as many as
    ``layouts``, of the same shape, and shorter than the clips. ``snapshot`` gets both with their averaged weights, and
    the step, whenever the state is saved.
    """
    assert not rebase or len(rebased) == len(layouts)
    device = accelerator.device
    step = SftStep(model, text, autocast=half_precision(model, device), checkpoint_blocks=checkpoint_blocks)

    def batch(generator: torch.Generator, number: int) -> tuple[object, ...]:
        turn = number % len(layouts)
        layout, offset = layouts[turn], 0
        clean, ids, mask = pool.sample(layout.clips, generator, drop=CAPTION_DROP)
        if rebase > 0:
            room = clean.shape[2] - rebased[turn].length
            offset = crop_offset(room, share=rebase, seed=f"{config.seed}-{number}")
            layout = rebased[turn] if offset > 0 else layout
        packed = clean[:, :, (layout.frames + offset).clamp(max=clean.shape[2] - 1)]  # unused frames lie past the end
        noise = torch.randn(packed.shape, generator=generator, device=device)
        sigma = packed_sigmas(layout.packing, layout.clips, generator, device=device)
        # a clip's first latent frame is one video frame; one in its middle is four, like all others
        weights = layout.weights if offset == 0 else layout.weights.clamp(max=1.0)
        return packed, noise, sigma, ids, mask, layout, weights

    def keep(module: nn.Module, number: int) -> None:
        if snapshot is not None:
            snapshot(module.model, module.text, number)

    compile_parts = partial(compile_blocks, model) if compiled else None
    best = train(step, config, accelerator=accelerator, batch=batch, prepare=compile_parts, snapshot=keep)
    return best.model, best.text
