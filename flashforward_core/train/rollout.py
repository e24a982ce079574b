"""The student's own rollout, as training runs it: few forwards, and gradients from the video back to the planner.

The planner makes its anchors block by block. Then one block-causal forward per stage renders the whole clip on those
anchors: chunks of one stage see each other at that stage's noise level, which is what a wavefront sees too, so this is
inference's rollout with fewer and larger forwards. Only the last stage that is run, the exit stage, keeps gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashforward_core.flow import predict_x0, renoise
from flashforward_core.graph.task import Role
from flashforward_core.model.layers import Segment
from flashforward_core.model.transformer import CausalWanTransformer, TextContext
from flashforward_core.specs import RolloutSpec
from flashforward_core.train.packing import GroupedAttention, Packing, pack

Noise = Callable[[str, Sequence[int], int], Tensor]
"""(``anchor`` or ``render``, absolute latent indices, stage) -> noise [B, C, F, h, w]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One kind of forward: clean anchors as context, then the latents that are denoised."""

    frames: Tensor
    """Absolute latent index of each packed frame [P]."""
    num_clean: int
    """How many of them are clean anchors."""
    noisy: tuple[int, ...]
    """Absolute latent indices of what is denoised."""
    segments: tuple[Segment, ...]
    attend: GroupedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLayout:
    """The forwards of a rollout on a device; every rollout of one length shares them."""

    spec: RolloutSpec
    planner: tuple[Pass, ...]
    """One per anchor block: the clean anchors before it, then the block."""
    renderer: Pass
    """All anchors, then the whole clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfRollout:
    """What the student made."""

    anchors_BCAHW: Tensor
    video_BCFHW: Tensor


def layout_for(spec: RolloutSpec, *, device: torch.device) -> RolloutLayout:
    """Take the forwards of ``spec`` out of its packing. Raises ``ValueError`` for a schedule that cannot be packed."""
    assert len(spec.prompts) == 1, "training rolls out one prompt"
    packing = pack(spec)
    count, total = packing.num_anchors, len(packing.frames)
    blocks = [
        _pass(packing, clean=range(block[0]), noisy=[count + a for a in block], spec=spec, device=device)
        for block in packing.blocks
    ]
    whole = _pass(packing, clean=range(count), noisy=range(2 * count, total), spec=spec, device=device)
    return RolloutLayout(spec=spec, planner=tuple(blocks), renderer=whole)


def _pass(
    packing: Packing, *, clean: Sequence[int], noisy: Sequence[int], spec: RolloutSpec, device: torch.device
) -> Pass:
    kept = torch.tensor([*clean, *noisy])
    role = Role.RENDERER if noisy[0] >= 2 * packing.num_anchors else Role.PLANNER
    split, end = len(clean), len(kept)
    planner = Segment(Role.PLANNER, 0, split)
    return Pass(
        frames=torch.tensor(packing.frames)[kept].to(device),
        num_clean=split,
        noisy=tuple(packing.frames[index] for index in noisy),
        segments=(planner, Segment(role, split, end)) if role is Role.RENDERER else (Segment(role, 0, end),),
        attend=GroupedAttention(packing.visible[kept][:, kept], spec.shape.tokens_per_frame, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """The model that rolls out, and the prompts as its roles see them."""

    model: CausalWanTransformer
    texts: Mapping[Role, TextContext]
    checkpoint_blocks: bool = False
    """Whether the backward pass recomputes blocks, for memory."""

    @classmethod
    def of(cls, model: CausalWanTransformer, text_BLC: Tensor, *, checkpoint_blocks: bool = False) -> "Student":
        """Take prompt embeddings [B, text_len, text_dim]."""
        texts = {role: model.text_context(text_BLC, role) for role in Role}
        return cls(model=model, texts=texts, checkpoint_blocks=checkpoint_blocks)

    def predict(self, kind: Pass, clean: Tensor | None, noisy: Tensor, *, sigma: float) -> Tensor:
        """Return x0 of ``noisy`` at ``sigma``, seeing ``clean``, if any, at noise level 0."""
        packed = noisy if clean is None else torch.cat((clean, noisy), dim=2)
        levels = torch.zeros(packed.shape[0], packed.shape[2], dtype=noisy.dtype, device=noisy.device)
        levels[:, kind.num_clean :] = 1000 * sigma
        velocity = self.model(
            packed,
            timestep_BF=levels,
            text=[self.texts[segment.role] for segment in kind.segments],
            frames=kind.frames,
            segments=kind.segments,
            self_attend=kind.attend,
            checkpoint_blocks=self.checkpoint_blocks and torch.is_grad_enabled(),
        )
        return predict_x0(noisy, velocity[:, :, kind.num_clean :], sigma=sigma)

    def denoise(
        self, kind: Pass, clean: Tensor | None, *, purpose: str, noise: Noise, sigmas: Sequence[float], exit_stage: int
    ) -> Tensor:
        """Return x0 after stages 0..``exit_stage``; only the last of them keeps gradients, and only if they are on."""
        with_gradients = torch.is_grad_enabled()
        x = noise(purpose, kind.noisy, 0)
        for stage in range(exit_stage):
            with torch.no_grad():
                x0 = self.predict(kind, clean, x, sigma=sigmas[stage])
                x = renoise(x0, noise(purpose, kind.noisy, stage + 1), sigma=sigmas[stage + 1])
        with torch.set_grad_enabled(with_gradients):
            return self.predict(kind, clean, x, sigma=sigmas[exit_stage])


def self_rollout(student: Student, layout: RolloutLayout, *, noise: Noise, exit_stage: int) -> SelfRollout:
    """Plan, then render on what was planned, both through stage ``exit_stage`` (FlashForward, phase 2).

    The last stage gives inference's rollout. Gradients reach the planner's weights through the anchors that its later
    blocks and the renderer read.
    """
    spec = layout.spec
    sigmas = spec.stages.sigmas
    assert 0 <= exit_stage < spec.stages.num_stages
    anchors: Tensor | None = None
    for block in layout.planner:
        made = student.denoise(block, anchors, purpose="anchor", noise=noise, sigmas=sigmas, exit_stage=exit_stage)
        anchors = made if anchors is None else torch.cat((anchors, made), dim=2)
    assert anchors is not None
    video = student.denoise(
        layout.renderer, anchors, purpose="render", noise=noise, sigmas=sigmas, exit_stage=exit_stage
    )
    return SelfRollout(anchors_BCAHW=anchors, video_BCFHW=video)


def drawn_noise(generator: torch.Generator, *, batch: int, channels: int, spec: RolloutSpec) -> Noise:
    """Return noise that ``generator`` draws afresh at every call, on its own device."""
    shape = spec.shape

    def draw(purpose: str, frames: Sequence[int], stage: int) -> Tensor:
        size = (batch, channels, len(frames), shape.latent_height, shape.latent_width)
        return torch.randn(size, generator=generator, device=generator.device)

    return draw
