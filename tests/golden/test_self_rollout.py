"""Training's rollout is inference's, and its gradients go from the video back to the planner."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashforward_core.flow import keyed_noise_frames
from flashforward_core.graph.task import Role
from flashforward_core.model.reference import reference_rollout, rendered
from flashforward_core.model.roles import role_parameters
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.specs import RolloutSpec
from flashforward_core.train.rollout import Noise, SelfRollout, Student, layout_for, self_rollout

pytestmark = pytest.mark.cpu


def keyed(spec: RolloutSpec, batch: int, dtype: torch.dtype) -> Noise:
    """The noise that inference uses, so that both rollouts can be compared."""
    size = (16, spec.shape.latent_height, spec.shape.latent_width)
    seeds = list(range(spec.seed, spec.seed + batch))

    def noise(purpose: str, frames: Sequence[int], stage: int) -> Tensor:
        return keyed_noise_frames(seeds, purpose, frames, stage, size).to(dtype)

    return noise


def roll_out(
    model: CausalWanTransformer, spec: RolloutSpec, text: Tensor, *, exit_stage: int, checkpoint: bool = False
) -> SelfRollout:
    student = Student.of(model, text, checkpoint_blocks=checkpoint)
    noise = keyed(spec, text.shape[0], text.dtype)
    return self_rollout(student, layout_for(spec, device=text.device), noise=noise, exit_stage=exit_stage)


@pytest.mark.parametrize("latent_frames", [14, 7, 1])
def test_through_the_last_stage_it_is_inference_s_rollout(rig: Any, latent_frames: int) -> None:
    model, spec = rig.model(torch.float64), rig.spec(latent_frames=latent_frames)
    (text,) = rig.texts(torch.float64, count=1)
    expected = rendered(spec, reference_rollout(model, spec, [text]))
    with torch.no_grad():
        found = roll_out(model, spec, text, exit_stage=spec.stages.num_stages - 1)
    # float64: the sums differ only in the order of their terms
    torch.testing.assert_close(found.video_BCFHW, expected, rtol=0, atol=1e-10)


def gradients(model: CausalWanTransformer, loss: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, role_parameters(model, roles=[Role.PLANNER]), allow_unused=True))


@pytest.mark.parametrize("exit_stage", [0, 1])
def test_the_video_s_gradient_reaches_the_planner_through_its_latents(rig: Any, exit_stage: int) -> None:
    """What the planner's weights get from the video is more than its commits in the renderer's forward give."""
    spec = rig.spec()
    model = rig.model(torch.float64).requires_grad_(True)
    (text,) = rig.texts(torch.float64, count=1)
    made = roll_out(model, spec, text, exit_stage=exit_stage)
    by_anchor = torch.autograd.grad(made.video_BCFHW.square().mean(), made.anchors_BCAHW, retain_graph=True)[0]
    assert all(by_anchor[:, :, a].abs().max() > 0 for a in range(5))  # every anchor moves the video
    through = gradients(model, made.video_BCFHW.square().mean())
    alone = gradients(model, roll_out_detached(model, spec, text, exit_stage=exit_stage))
    moved = [a is not None and (b is None or not torch.allclose(a, b)) for a, b in zip(through, alone, strict=True)]
    assert sum(moved) > len(moved) // 2


def roll_out_detached(model: CausalWanTransformer, spec: RolloutSpec, text: Tensor, *, exit_stage: int) -> Tensor:
    """The same loss when anchors are treated as data."""
    student, layout, noise = Student.of(model, text), layout_for(spec, device=text.device), keyed(spec, 1, text.dtype)
    with torch.no_grad():
        anchors = self_rollout(student, layout, noise=noise, exit_stage=exit_stage).anchors_BCAHW
    sigmas = spec.stages.sigmas
    video = student.denoise(
        layout.renderer, anchors, purpose="render", noise=noise, sigmas=sigmas, exit_stage=exit_stage
    )
    return video.square().mean()


def test_later_chunks_teach_earlier_ones(rig: Any) -> None:
    """The renderer's weights get a gradient from the last chunk through the first one's keys and values."""
    spec, model = rig.spec(latent_frames=6), rig.model(torch.float64)
    (text,) = rig.texts(torch.float64, count=1)
    noise = keyed(spec, 1, torch.float64)
    first = noise("render", range(6), 0).requires_grad_(True)

    def leaf(purpose: str, frames: Sequence[int], stage: int) -> Tensor:
        return first if purpose == "render" else noise(purpose, frames, stage)

    student, layout = Student.of(model, text), layout_for(spec, device=text.device)
    made = self_rollout(student, layout, noise=leaf, exit_stage=0)
    (by_noise,) = torch.autograd.grad(made.video_BCFHW[:, :, 3:].square().mean(), first)
    assert by_noise[:, :, :3].abs().max() > 0
    made = self_rollout(student, layout, noise=leaf, exit_stage=0)
    (by_noise,) = torch.autograd.grad(made.video_BCFHW[:, :, :3].square().mean(), first)
    assert by_noise[:, :, 3:].abs().max() == 0  # and never the other way round


def test_recomputing_blocks_changes_no_gradient(rig: Any) -> None:
    spec = rig.spec(latent_frames=7)
    model = rig.model(torch.float64).requires_grad_(True)
    (text,) = rig.texts(torch.float64, count=1)
    found = [
        gradients(model, roll_out(model, spec, text, exit_stage=1, checkpoint=checkpoint).video_BCFHW.square().mean())
        for checkpoint in (False, True)
    ]
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=1e-12)  # the same sums in the same order
