"""Distribution matching: its gradient against closed forms, and what each step moves."""

import argparse
import copy
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from flashforward_core.cli import main
from flashforward_core.graph.task import Role
from flashforward_core.model.loading import ASSETS, load_embedded
from flashforward_core.model.roles import role_parameters
from flashforward_core.model.text import ByteT5Encoder, TextConfig
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.train.data import LatentPool
from flashforward_core.train.distill import (
    DistillConfig,
    DistillStep,
    Judge,
    Teacher,
    Turn,
    dmd_gradient,
    lora_critic,
    surrogate_loss,
    train_distill,
    window_starts,
)
from flashforward_core.train.loop import LoopConfig
from flashforward_core.train.rollout import layout_for
from flashforward_core.train.weights import base_model, student

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
LATENTS = 7  # three chunks and three anchors in two blocks
WINDOW = 4


def gaussian(mean: float, std: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The exact denoiser of normally distributed data: E[x0 | x_sigma]."""

    def denoise(noisy: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.view(-1, 1, 1, 1, 1)
        gain = (1 - s) * std**2 / ((1 - s) ** 2 * std**2 + s**2)
        return mean + gain * (noisy - (1 - s) * mean)

    return denoise


def clip_like(seed: int) -> Tensor:
    return torch.randn(2, 16, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_the_gradient_is_the_normalised_difference_of_the_denoisers() -> None:
    clean, noise, sigma = clip_like(0), clip_like(1), torch.tensor([0.3, 0.8])
    found = dmd_gradient(clean, real=gaussian(2.0, 1.0), fake=gaussian(0.0, 1.0), sigma=sigma, noise=noise)
    s = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - s) * clean + s * noise
    real_x0, fake_x0 = gaussian(2.0, 1.0)(noisy, sigma), gaussian(0.0, 1.0)(noisy, sigma)
    for row in range(2):
        scale = float((clean[row] - real_x0[row]).abs().mean())
        torch.testing.assert_close(found[row], (fake_x0[row] - real_x0[row]) / scale)


def test_descending_the_gradient_moves_the_student_s_distribution_to_the_teacher_s() -> None:
    """A generator x = m + s·z, judged by exact denoisers of N(m, s) and N(2, 0.5), ends at m = 2, s = 0.5."""
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor(0.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    optimizer = torch.optim.Adam([mean, std], lr=0.05)
    for _ in range(400):
        z = torch.randn(64, 1, 1, 2, 2, generator=generator)
        sigma = torch.rand(64, generator=generator) * 0.9 + 0.05
        clean = mean + std * z
        fake = gaussian(mean.item(), std.item())
        noise = torch.randn(clean.shape, generator=generator)
        gradient = dmd_gradient(clean.detach(), real=gaussian(2.0, 0.5), fake=fake, sigma=sigma, noise=noise)
        optimizer.zero_grad()
        surrogate_loss(clean, gradient, counted=torch.ones(1)).backward()
        optimizer.step()
    assert mean.item() == pytest.approx(2.0, abs=0.1)  # Adam's steps of 0.05 keep it moving about there
    assert abs(std.item()) == pytest.approx(0.5, abs=0.15)


def test_the_surrogate_s_gradient_is_the_one_given_and_leaves_frames_out() -> None:
    clean, gradient = clip_like(0).requires_grad_(True), clip_like(1)
    surrogate_loss(clean, gradient, counted=torch.tensor([0.0, 1.0, 1.0])).backward()
    assert clean.grad is not None
    per_frame = clean[:, :, 0].numel()  # the mean over clips and pixels, then over the two frames
    torch.testing.assert_close(clean.grad[:, :, 1:], gradient[:, :, 1:] / per_frame / 2)
    assert clean.grad[:, :, 0].abs().max() == 0


class Trial:
    """A small student, teacher and critic with one rollout layout."""

    def __init__(self, rig: Any, config: DistillConfig, *, autocast: bool = False) -> None:
        self.student = rig.model(torch.float32).requires_grad_(True)
        self.teacher = plain_model(rig)
        self.critic = copy.deepcopy(self.teacher).requires_grad_(True)
        self.config = config
        layout = layout_for(rig.spec(latent_frames=LATENTS), device=CPU)
        self.step = DistillStep(self.student, self.critic, layout, config, autocast=autocast)
        self.texts = rig.texts(count=3, batch=2)

    def losses(
        self, *, of_student: bool, seed: int = 0, real: Tensor | None = None, starts: Sequence[int] = (0,)
    ) -> dict[str, Tensor]:
        turn = Turn(
            of_student=of_student,
            exit_stage=1,
            window_starts=starts,
            student_text=self.texts[0],
            teacher_text=self.texts[1],
            empty_text=self.texts[2][:1],
            real=real,
            teacher=self.teacher,
            generator=torch.Generator().manual_seed(seed),
        )
        found: dict[str, Tensor] = self.step(turn)
        return found


def plain_model(rig: Any) -> CausalWanTransformer:
    torch.manual_seed(5)
    return CausalWanTransformer(rig.model(torch.float32).config).requires_grad_(False)


def moved(parameters: Sequence[Tensor]) -> list[bool]:
    return [p.grad is not None and bool(p.grad.abs().max() > 0) for p in parameters]


def test_a_critic_that_equals_the_teacher_gives_no_gradient(rig: Any) -> None:
    trial = Trial(rig, DistillConfig(window=WINDOW, guidance=0.0))
    losses = trial.losses(of_student=True)
    assert losses["gradient"] == 0
    losses["loss"].backward()
    assert not any(moved(list(trial.student.parameters())))
    guided = Trial(rig, DistillConfig(window=WINDOW, guidance=3.0))
    assert guided.losses(of_student=True)["gradient"] > 0


def test_guidance_is_cond_plus_w_times_the_difference(rig: Any) -> None:
    model, texts = plain_model(rig), rig.texts(count=2, batch=2)
    noisy, sigma, frames = torch.randn(2, 16, 3, 4, 4), torch.tensor([0.3, 0.6]), torch.arange(3)
    cond = Judge(model=model, text=texts[0]).velocity(noisy, sigma, frames=frames)
    empty = texts[1][:1]
    uncond = Judge(model=model, text=empty.expand(2, -1, -1)).velocity(noisy, sigma, frames=frames)
    guided = Judge(model=model, text=texts[0], empty=empty, guidance=3.0).velocity(noisy, sigma, frames=frames)
    torch.testing.assert_close(guided, cond + 3 * (cond - uncond))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_student_s_turn_moves_both_roles_and_not_the_critic(rig: Any, autocast: bool) -> None:
    trial = Trial(rig, DistillConfig(window=WINDOW), autocast=autocast)
    losses = trial.losses(of_student=True)
    assert all(torch.isfinite(value) for value in losses.values())
    losses["loss"].backward()
    for role in Role:
        assert all(moved(role_parameters(trial.student, roles=[role])))
    assert not any(moved(list(trial.critic.parameters())))


def test_the_critic_s_turn_moves_only_the_critic(rig: Any) -> None:
    trial = Trial(rig, DistillConfig(window=WINDOW))
    trial.losses(of_student=False)["loss"].backward()
    assert not any(moved(list(trial.student.parameters())))
    assert all(moved(list(trial.critic.parameters())))


def test_the_critic_learns_what_the_student_makes(rig: Any) -> None:
    trial = Trial(rig, DistillConfig(window=WINDOW))

    def held_out() -> float:
        with torch.no_grad():
            return sum(float(trial.losses(of_student=False, seed=1000 + i)["critic"]) for i in range(4)) / 4

    before = held_out()
    optimizer = torch.optim.Adam(trial.critic.parameters(), lr=3e-3)
    for seed in range(60):
        optimizer.zero_grad()
        trial.losses(of_student=False, seed=seed)["loss"].backward()
        optimizer.step()
    assert held_out() < 0.7 * before


def test_a_lora_critic_learns_in_the_memory_of_a_teacher_that_stays_as_it_is(rig: Any) -> None:
    """The teacher is held in bfloat16, as frozen weights of large models are; the LoRA is float32."""
    trial = Trial(rig, DistillConfig(window=WINDOW), autocast=True)
    trial.teacher.to(torch.bfloat16)
    critic = trial.step.critic = lora_critic(trial.teacher, rank=4)
    before = {name: tensor.clone() for name, tensor in trial.teacher.state_dict().items()}
    trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in role_parameters(critic)}
    assert {p.dtype for p in trained} == {torch.float32}
    for name, tensor in trial.teacher.named_parameters():
        assert critic.get_parameter(name).data_ptr() == tensor.data_ptr()  # one copy of what is frozen
    first = trial.losses(of_student=False)["loss"].item()
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(12):
        optimizer.zero_grad()
        trial.losses(of_student=False)["loss"].backward()
        optimizer.step()
    assert trial.losses(of_student=False)["loss"].item() < 0.9 * first
    assert all(torch.equal(tensor, before[name]) for name, tensor in trial.teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in trial.teacher.parameters())


def test_anchors_and_forward_kl_are_options_that_count(rig: Any) -> None:
    plain = Trial(rig, DistillConfig(window=WINDOW)).losses(of_student=False)["loss"]
    both = Trial(rig, DistillConfig(window=WINDOW, anchor_weight=1.0)).losses(of_student=False)["loss"]
    assert both.item() > 1.2 * plain.item()
    real = torch.randn(2, 16, WINDOW, 4, 4)
    losses = Trial(rig, DistillConfig(window=WINDOW, forward_kl=0.1)).losses(of_student=True, real=real)
    torch.testing.assert_close(losses["loss"], losses["dmd"] + 0.1 * losses["forward_kl"])


def test_several_windows_count_as_their_mean(rig: Any) -> None:
    """Their noise differs, so means over a few draws are compared; the last window has no first frame of a video."""
    trial = Trial(rig, DistillConfig(window=WINDOW))

    def mean_loss(starts: Sequence[int]) -> float:
        with torch.no_grad():
            return sum(float(trial.losses(of_student=False, seed=s, starts=starts)["loss"]) for s in range(40)) / 40

    first, second, both = mean_loss([0]), mean_loss([3]), mean_loss([0, 3])
    assert both == pytest.approx((first + second) / 2, rel=0.02)  # seen: 0.004


@pytest.mark.parametrize(
    ("latents", "windows", "count", "last"), [(81, 3, 3, 18), (81, 1, 1, 60), (30, 3, 1, 9), (21, 3, 1, 0)]
)
def test_windows_lie_side_by_side_within_the_rollout(latents: int, windows: int, count: int, last: int) -> None:
    config, choice = DistillConfig(window=21, windows=windows), random.Random(1)
    drawn = [window_starts(config, latents, choice) for _ in range(2000)]
    assert all([b - a for a, b in pairwise(starts)] == [21] * (count - 1) for starts in drawn)
    assert {starts[0] for starts in drawn} == set(range(last + 1))
    beginnings = sum(starts[0] == 0 for starts in drawn) / 2000
    assert beginnings == pytest.approx(0.3 + 0.7 / (last + 1), abs=0.04)  # 4 standard errors


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="critic_steps=0 is below 1"):
        DistillConfig(critic_steps=0)
    with pytest.raises(ValueError, match="rise within"):
        DistillConfig(lowest=0.9, highest=0.1)


def tiny_pool(text: ByteT5Encoder) -> LatentPool:
    ids, mask = text.tokenise(["a", "b", "c"])
    empty_ids, empty_mask = text.tokenise([""])
    latents = torch.randn(3, 16, LATENTS, 4, 4, generator=torch.Generator().manual_seed(3)).bfloat16()
    return LatentPool(latents=latents, ids=ids, mask=mask, empty_ids=empty_ids, empty_mask=empty_mask)


def distilled(
    rig: Any,
    folder: Path,
    *,
    steps: int,
    stop_after: int | None = None,
    window: int = WINDOW,
    snapshot: Callable[[CausalWanTransformer, int], None] | None = None,
) -> CausalWanTransformer:
    torch.manual_seed(9)
    encoder = ByteT5Encoder(TextConfig(d_model=12, d_kv=4, d_ff=8, num_heads=2, num_layers=1, text_len=5))
    pool = tiny_pool(encoder)
    if stop_after is not None:
        pool = interrupted(pool, stop_after)
    return train_distill(
        rig.model(torch.float32).requires_grad_(True),
        encoder,
        plain_model(rig).requires_grad_(True),
        Teacher(model=plain_model(rig), text=copy.deepcopy(encoder)),
        pool,
        layout_for(rig.spec(latent_frames=LATENTS), device=CPU),
        LoopConfig(out=folder, steps=steps, lr=1e-2, warmup=1, ema_decay=0.5, save_every=4, lr_scales={"critic.": 0.5}),
        accelerator=Accelerator(cpu=True),
        clips=2,
        distill=DistillConfig(window=window, critic_steps=2, forward_kl=0.1),
        compiled=False,
        snapshot=snapshot,
    )


def interrupted(pool: LatentPool, stop_after: int) -> LatentPool:
    class Interrupted(LatentPool):
        """Stops as a killed run would, after so many batches."""

        __slots__ = ()

        def sample(self, count: int, generator: torch.Generator, *, drop: float) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(count)
            if len(calls) > stop_after:
                raise KeyboardInterrupt
            return LatentPool.sample(self, count, generator, drop=drop)

    calls: list[int] = []
    return Interrupted(**{name: getattr(pool, name) for name in ("latents", "ids", "mask", "empty_ids", "empty_mask")})


def test_a_resumed_run_equals_an_uninterrupted_one(rig: Any, tmp_path: Path) -> None:
    whole = distilled(rig, tmp_path / "whole", steps=9)
    with pytest.raises(KeyboardInterrupt):
        distilled(rig, tmp_path / "broken", steps=9, stop_after=6)  # its last saved state is that of step 4
    resumed = distilled(rig, tmp_path / "broken", steps=9)
    start = rig.model(torch.float32)
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), whole.parameters(), strict=True))


def test_a_window_longer_than_the_rollout_is_refused(rig: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"window=21 is longer than the rollout of {LATENTS} latents"):
        distilled(rig, tmp_path, steps=1, window=21)


def test_the_step_is_part_of_the_training_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "distill", "--out", str(tmp_path), "--clips", "0"]) == 2
    assert "clips=0 is not above 0; use clips=8" in capsys.readouterr().err
    assert main(["train", "distill", "--out", str(tmp_path)]) == 2
    assert "run first: train vae" in capsys.readouterr().err  # the step before has not run


def test_the_shipped_weights_are_a_student_and_a_teacher() -> None:
    """The student plays its roles as the loaded backbone does; the teacher is the same transformer without them."""
    options, accelerator = argparse.Namespace(wan=None), Accelerator(cpu=True)
    model, text = student(ASSETS, options, accelerator)
    base, _ = base_model(ASSETS, options, accelerator)
    assert all(parameter.requires_grad for parameter in model.parameters())
    backbone = load_embedded()
    x, frames, times = torch.randn(1, 16, 2, 4, 4), torch.arange(2), torch.full((1, 2), 800.0)
    prompt = text.encode(["a red ball bounces over green hills at dusk"])

    def velocity(model: CausalWanTransformer, role: Role) -> Tensor:
        context = model.text_context(prompt, role)
        return model(x, timestep_BF=times, text=context, frames=frames, role=role).detach()

    for role in Role:
        # merged weights round sums differently
        torch.testing.assert_close(velocity(model, role), velocity(backbone.models[role], role), rtol=0, atol=1e-4)
        assert (velocity(base, role) - velocity(model, role)).abs().max() > 1e-2


def test_a_saved_run_hands_out_its_averaged_student(rig: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, Tensor]] = []

    def keep(student: CausalWanTransformer, step: int) -> None:
        seen.append((step, student.role_embedding.weight.detach().clone()))

    best = distilled(rig, tmp_path, steps=6, snapshot=keep)
    assert [step for step, _ in seen] == [4, 6]
    assert torch.equal(seen[-1][1], best.role_embedding.weight)
    assert not torch.equal(seen[0][1], seen[1][1])
