"""Phase 2: distribution matching on the student's own rollouts (FlashForward; DMD2, as Self-Forcing writes it).

The student renders clips from noise. A frozen bidirectional teacher and a critic, which learns what the student makes,
both denoise a re-noised clip; their difference is the gradient of the clip. Steps alternate: several of the critic,
then one of the student.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flashforward_core.flow import predict_x0, renoise
from flashforward_core.graph.task import Role
from flashforward_core.model.roles import attach_roles, role_parameters, shared_copy
from flashforward_core.model.text import ByteT5Encoder
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import shifted_sigma
from flashforward_core.train.base import compile_blocks, flow_loss, half_precision
from flashforward_core.train.loop import LoopConfig, train
from flashforward_core.train.rollout import RolloutLayout, Student, drawn_noise, self_rollout
from flashforward_core.train.sharding import shard

if TYPE_CHECKING:
    from flashforward_core.train.data import LatentPool  # it needs diffusers, which takes seconds

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(x at noise level sigma, sigma [B]) -> x0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """What the paper leaves open is marked [inferred] in docs/decisions.md."""

    critic_steps: int = 5
    """Steps of the critic per step of the student."""
    guidance: float = 3.0
    """w of the teacher's cond + w·(cond - uncond)."""
    lowest: float = 0.02
    """Least unshifted time that clips are re-noised to."""
    highest: float = 0.98
    """Most of it."""
    shift: float = 5.0
    window: int = 21
    """Consecutive latent frames that teacher and critic judge at once: what the teacher was trained on."""
    windows: int = 1
    """How many of them, side by side, are judged of each rollout, if it is that long; each takes the memory of one."""
    anchor_weight: float = 0.0
    """Weight of judging the anchors too, as a clip of their own; above 0 it needs a teacher that knows sparse clips."""
    forward_kl: float = 0.0
    """Weight of the first stage's flow loss on real clips with full attention, against low motion (HiAR: 0.1)."""
    checkpoint_blocks: bool = False
    """Whether backward passes recompute blocks, for memory."""

    def __post_init__(self) -> None:
        for name, least in (
            ("critic_steps", 1),
            ("window", 2),
            ("windows", 1),
            ("guidance", 0),
            ("anchor_weight", 0),
            ("forward_kl", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}; use {name}={least} or more")
        if not 0 < self.lowest < self.highest < 1:
            raise ValueError(
                f"lowest={self.lowest}, highest={self.highest}: must rise within (0, 1); use 0.02 and 0.98"
            )


def dmd_gradient(clean: Tensor, *, real: Denoiser, fake: Denoiser, sigma: Tensor, noise: Tensor) -> Tensor:
    """Return the gradient of the student's clips ``clean`` [B, C, F, h, w], re-noised to ``sigma`` [B] by ``noise``.

    (fake_x0 - real_x0) / mean |clean - real_x0|, the mean over each clip: DMD2's normalised score difference.
    """
    with torch.no_grad():
        noisy = renoise(clean, noise, sigma=_per_clip(sigma))
        real_x0, fake_x0 = real(noisy, sigma), fake(noisy, sigma)
        scale = (clean - real_x0).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
        return (fake_x0 - real_x0) / scale.clamp(min=1e-6)


def surrogate_loss(clean: Tensor, gradient: Tensor, *, counted: Tensor) -> Tensor:
    """Return a scalar whose gradient by ``clean`` is ``gradient``, averaged over ``counted`` [F] frames."""
    target = (clean - gradient).detach()
    per_frame = 0.5 * ((clean - target) ** 2).mean(dim=(0, 1, 3, 4))
    return (per_frame * counted).sum() / counted.sum()


def _per_clip(sigma: Tensor) -> Tensor:
    return sigma.view(-1, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A bidirectional model that denoises whole clips."""

    model: CausalWanTransformer
    text: Tensor
    """Prompt embeddings [B, text_len, text_dim]."""
    empty: Tensor | None = None
    """The empty prompt's embedding [1, text_len, text_dim], for guidance."""
    guidance: float = 0.0
    checkpoint_blocks: bool = False
    """Whether a backward pass recomputes blocks, for memory."""

    def velocity(self, noisy: Tensor, sigma: Tensor, *, frames: Tensor) -> Tensor:
        """Return the velocity at ``sigma`` [B], guided if there is an empty prompt; ``frames`` [F] are positions."""
        cond = self._velocity(noisy, sigma, text=self.text, frames=frames)
        if self.empty is None or self.guidance == 0:
            return cond
        uncond = self._velocity(noisy, sigma, text=self.empty.expand_as(self.text), frames=frames)
        return cond + self.guidance * (cond - uncond)

    def _velocity(self, noisy: Tensor, sigma: Tensor, *, text: Tensor, frames: Tensor) -> Tensor:
        return self.model(
            noisy,
            timestep_BF=1000 * sigma.unsqueeze(1).expand(-1, noisy.shape[2]),
            text=self.model.text_context(text, Role.RENDERER),
            frames=frames,
            role=Role.RENDERER,
            checkpoint_blocks=self.checkpoint_blocks and torch.is_grad_enabled(),
        ).to(noisy.dtype)

    def denoiser(self, frames: Tensor) -> Denoiser:
        """Return x0 predictions for clips at ``frames``."""
        return lambda noisy, sigma: predict_x0(
            noisy, self.velocity(noisy, sigma, frames=frames), sigma=_per_clip(sigma)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """All that one step takes in, besides the weights that it trains."""

    of_student: bool
    exit_stage: int
    window_starts: Sequence[int]
    """First latent frame of each window that teacher and critic judge."""
    student_text: Tensor
    """Prompt embeddings of the student's encoder [B, text_len, text_dim]."""
    teacher_text: Tensor
    """Of the teacher's, which the critic reads too."""
    empty_text: Tensor
    """The empty prompt [1, text_len, text_dim], by the teacher's encoder."""
    real: Tensor | None
    """Real clips [B, C, window, h, w] of the same prompts, for the forward KL."""
    teacher: CausalWanTransformer
    """Frozen. An argument, so that it is neither averaged nor saved with what is trained."""
    generator: torch.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A part of the student's rollout that is judged as a clip."""

    latents: Tensor
    frames: Tensor
    """Positions that the judges see, from 0 as in their training."""
    counted: Tensor
    """1 for frames that count [F]."""
    weight: float


class DistillStep(nn.Module):
    """The student and its critic; a step trains one of them."""

    def __init__(
        self,
        model: CausalWanTransformer,
        critic: CausalWanTransformer,
        layout: RolloutLayout,
        config: DistillConfig,
        *,
        autocast: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self.layout = layout
        self.config = config
        self.autocast = autocast

    def forward(self, turn: Turn) -> dict[str, Tensor]:
        """Return the losses of one step of the student or of the critic."""
        # no cache: it would hand weights that were cast without gradients to the forward that needs them
        autocast = partial(torch.autocast, dtype=torch.bfloat16, enabled=self.autocast, cache_enabled=False)
        with autocast(turn.student_text.device.type):
            views = self._views(turn)
            return self._student_losses(views, turn) if turn.of_student else self._critic_losses(views, turn)

    def _views(self, turn: Turn) -> list[View]:
        """Roll out and cut what is judged out of it; without gradients when it is the critic's turn."""
        batch, channels = turn.student_text.shape[0], self.model.config.channels
        noise = drawn_noise(turn.generator, batch=batch, channels=channels, spec=self.layout.spec)
        with torch.set_grad_enabled(turn.of_student):
            student = Student.of(self.model, turn.student_text, checkpoint_blocks=self.config.checkpoint_blocks)
            made = self_rollout(student, self.layout, noise=noise, exit_stage=turn.exit_stage)
        device, count = made.video_BCFHW.device, len(turn.window_starts)
        views = []
        for start in turn.window_starts:
            clip = made.video_BCFHW[:, :, start : start + self.config.window]
            counted = torch.ones(clip.shape[2], device=device)
            if start > 0:
                counted[0] = (
                    0  # a clip's first latent is one video frame, this one is four: the judges would misread it
                )
            positions = torch.arange(clip.shape[2], device=device)
            views.append(View(latents=clip, frames=positions, counted=counted, weight=1.0 / count))
        if self.config.anchor_weight > 0:
            anchors = made.anchors_BCAHW
            places = torch.tensor(self.layout.spec.anchor_positions(), device=device)
            every = torch.ones(len(places), device=device)
            views.append(View(latents=anchors, frames=places, counted=every, weight=self.config.anchor_weight))
        return views

    def _student_losses(self, views: list[View], turn: Turn) -> dict[str, Tensor]:
        teacher = Judge(
            model=turn.teacher, text=turn.teacher_text, empty=turn.empty_text, guidance=self.config.guidance
        )
        critic = Judge(model=self.critic, text=turn.teacher_text)
        total, norm = torch.zeros((), device=turn.student_text.device), []
        for view in views:
            gradient = dmd_gradient(
                view.latents.detach(),
                real=teacher.denoiser(view.frames),
                fake=critic.denoiser(view.frames),
                sigma=self._sigma(turn),
                noise=_noise_like(view.latents, turn.generator),
            )
            norm.append(gradient.abs().mean())
            total = total + view.weight * surrogate_loss(view.latents, gradient, counted=view.counted)
        losses = {"dmd": total, "gradient": torch.stack(norm).mean()}
        if turn.real is not None:
            losses["forward_kl"] = self._forward_kl(turn, turn.real)
            total = total + self.config.forward_kl * losses["forward_kl"]
        return {"loss": total, **losses}

    def _critic_losses(self, views: list[View], turn: Turn) -> dict[str, Tensor]:
        critic = Judge(model=self.critic, text=turn.teacher_text, checkpoint_blocks=self.config.checkpoint_blocks)
        total = torch.zeros((), device=turn.student_text.device)
        for view in views:
            sigma, noise = self._sigma(turn), _noise_like(view.latents, turn.generator)
            noisy = renoise(view.latents, noise, sigma=_per_clip(sigma))
            per_frame = flow_loss(critic.velocity(noisy, sigma, frames=view.frames), view.latents, noise)
            total = total + view.weight * per_frame.mean()
        return {"loss": total, "critic": total}

    def _sigma(self, turn: Turn) -> Tensor:
        """Draw a noise level per clip."""
        device = turn.student_text.device
        u = torch.rand(turn.student_text.shape[0], generator=turn.generator, device=device)
        u = self.config.lowest + (self.config.highest - self.config.lowest) * u
        return shifted_sigma(u, self.config.shift)

    def _forward_kl(self, turn: Turn, real: Tensor) -> Tensor:
        """Return the flow-matching loss of the first stage on real clips, every latent frame seeing every other."""
        first, second = self.layout.spec.stages.sigmas[:2]
        share = torch.rand(real.shape[0], generator=turn.generator, device=real.device)
        sigma = second + (first - second) * share
        noise = _noise_like(real, turn.generator)
        student = Judge(model=self.model, text=turn.student_text, checkpoint_blocks=self.config.checkpoint_blocks)
        frames = torch.arange(real.shape[2], device=real.device)
        velocity = student.velocity(renoise(real, noise, sigma=_per_clip(sigma)), sigma, frames=frames)
        return flow_loss(velocity, real, noise).mean()


BEGINNINGS = 0.3
"""Share of rollouts that are judged from their first latent frame on; other windows do not begin as clips do."""


def window_starts(config: DistillConfig, latent_frames: int, choice: random.Random) -> list[int]:
    """Draw where the windows that are judged begin in a rollout: one behind the other, from its start or anywhere."""
    count = min(config.windows, latent_frames // config.window)
    room = latent_frames - count * config.window
    first = choice.randint(0, room) if choice.random() >= BEGINNINGS else 0
    return [first + number * config.window for number in range(count)]


def _noise_like(latents: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(latents.shape, generator=generator, device=latents.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen base checkpoint and its prompt encoder."""

    model: CausalWanTransformer
    text: ByteT5Encoder


def lora_critic(teacher: CausalWanTransformer, *, rank: int) -> CausalWanTransformer:
    """Return a critic that is the teacher and a LoRA, which alone is trained, in the memory of the teacher's weights.

    Move the teacher to its device first: moving the two one after the other would copy the weights.
    """
    critic = shared_copy(teacher)
    attach_roles(critic, rank=rank, alpha=rank, roles=(Role.RENDERER,))
    for factor in role_parameters(critic):
        factor.data = factor.data.float()  # what is trained is float32, whatever stays as it is
    return critic


def train_distill(
    model: CausalWanTransformer,
    text: ByteT5Encoder,
    critic: CausalWanTransformer,
    teacher: Teacher,
    pool: "LatentPool",
    layout: RolloutLayout,
    config: LoopConfig,
    *,
    accelerator: Accelerator,
    clips: int,
    distill: DistillConfig = DistillConfig(),
    compiled: bool = True,
    snapshot: Callable[[CausalWanTransformer, int], None] | None = None,
) -> CausalWanTransformer:
    """Distil into ``model`` (roles attached), whose encoder ``text`` stays as it is; return its averaged weights.

    ``critic`` starts as a copy of the teacher's weights, or is its ``lora_critic``. A step of ``config`` is one of
    either, so ``critic_steps`` of ``critic_steps + 1`` leave the student alone. Set ``LoopConfig.lr_scales`` to slow
    the student down. ``snapshot`` gets the student, averaged, and the step, whenever the state is saved.
    """
    device = accelerator.device
    for frozen in (teacher.model, teacher.text, text):
        frozen.requires_grad_(False).eval()
    _check_window(distill, layout)
    half = any(half_precision(each, device) for each in (model, critic, teacher.model))
    step = DistillStep(model, critic, layout, distill, autocast=half)
    if config.shard:
        shard(teacher.model, device=device)
    for frozen in (teacher.text, text) if config.shard else (teacher.model, teacher.text, text):
        frozen.to(device)

    @torch.no_grad()
    def batch(generator: torch.Generator, number: int) -> tuple[Turn]:
        clean, ids, mask = pool.sample(clips, generator, drop=0.0)
        choice = random.Random(f"turn-{config.seed}-{number}")  # the same on every process
        of_student = (number + 1) % (distill.critic_steps + 1) == 0
        starts = window_starts(distill, layout.spec.shape.latent_frames, choice)
        turn = Turn(
            of_student=of_student,
            exit_stage=choice.randrange(layout.spec.stages.num_stages),
            window_starts=starts,
            student_text=text(ids, mask),
            teacher_text=teacher.text(ids, mask),
            empty_text=teacher.text(pool.empty_ids, pool.empty_mask),
            real=clean[:, :, : distill.window] if of_student and distill.forward_kl > 0 else None,
            teacher=teacher.model,
            generator=generator,
        )
        return (turn,)

    def compile_parts() -> None:
        for part in (model, critic, teacher.model):
            compile_blocks(part)

    def keep(module: nn.Module, number: int) -> None:
        if snapshot is not None:
            snapshot(module.model, number)

    prepare = compile_parts if compiled else None
    best = train(step, config, accelerator=accelerator, batch=batch, prepare=prepare, snapshot=keep)
    return best.model


def _check_window(config: DistillConfig, layout: RolloutLayout) -> None:
    length = layout.spec.shape.latent_frames
    if config.window > length:
        raise ValueError(f"window={config.window} is longer than the rollout of {length} latents; use window={length}")
