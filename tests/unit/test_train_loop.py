"""The training loop continues where it stopped and averages what it should."""

import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flashforward_core.train.loop import LoopConfig, rate, step_seed, train

pytestmark = pytest.mark.cpu


class Regression(nn.Module):
    """Fits a fixed linear map from random inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.layer(x) - x[:, :3] * 2 - 1) ** 2).mean()}


def batch(generator: torch.Generator, step: int) -> tuple[Tensor]:
    return (torch.randn(16, 4, generator=generator),)


def run(folder: Path, steps: int, *, stop_after: int | None = None, ema_decay: float = 0.9) -> nn.Module:
    """Train to ``steps``, or stop at a saved state as a killed run would."""
    config = LoopConfig(out=folder, steps=steps, lr=1e-2, warmup=5, save_every=20, ema_decay=ema_decay)
    module = Regression()

    def failing(generator: torch.Generator, step: int) -> tuple[Tensor]:
        if step == stop_after:
            raise KeyboardInterrupt
        return batch(generator, step)

    return train(module, config, accelerator=Accelerator(cpu=True), batch=failing)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 60)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", 60, stop_after=47)  # its last saved state is that of step 40
    resumed = run(tmp_path / "broken", 60)
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_training_lowers_the_loss_of_the_averaged_weights(tmp_path: Path) -> None:
    inputs = torch.randn(64, 4)
    before = Regression()(inputs)["loss"].item()
    after = run(tmp_path, 400)(inputs)["loss"].item()
    assert after < 0.05 * before


def test_without_decay_the_average_is_the_last_step(tmp_path: Path) -> None:
    first = run(tmp_path / "a", 20, ema_decay=0.0)
    second = run(tmp_path / "b", 20, ema_decay=0.99)
    assert not torch.equal(first.layer.weight, second.layer.weight)
    start = Regression().layer.weight
    assert torch.norm(first.layer.weight - start) > torch.norm(second.layer.weight - start)


def test_rate_rises_then_falls_to_its_floor() -> None:
    assert rate(0.0, 0, 10) == pytest.approx(0.1)
    assert rate(0.0, 9, 10) == pytest.approx(1.0)
    assert rate(0.5, 100, 10) == pytest.approx(0.51)
    assert rate(1.0, 100, 10) == pytest.approx(0.02)


def test_seeds_differ_between_steps_and_processes() -> None:
    seeds = {step_seed(1, step, process) for step in range(50) for process in range(8)}
    assert len(seeds) == 400
    assert max(seeds) < math.pow(2, 63)


def test_a_learning_rate_of_zero_keeps_what_it_names(tmp_path: Path) -> None:
    config = LoopConfig(out=tmp_path, steps=3, lr=1e-2, warmup=1, ema_decay=0.0, lr_scales={"layer.bias": 0.0})
    best = train(Regression(), config, accelerator=Accelerator(cpu=True), batch=batch)
    start = Regression()
    assert torch.equal(best.layer.bias, start.layer.bias)
    assert not torch.equal(best.layer.weight, start.layer.weight)
