"""The training loop continues where it stopped and averages what it should."""

import io
import math
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from flashforward_core.train.loop import LoopConfig, TrainingDiverged, averaging, rate, step_seed, train
from flashforward_core.train.progress import log_video

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


def test_a_run_that_was_stopped_between_two_states_goes_on_from_the_new_one(tmp_path: Path) -> None:
    """As a kill leaves it: the last state is half removed, the new one whole but not in its place yet."""
    whole = run(tmp_path / "whole", 60)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", 60, stop_after=47)
    state = tmp_path / "broken" / "state"
    state.rename(state.with_suffix(".new"))
    state.mkdir()
    (state / "0.pt").write_bytes(b"half")
    resumed = run(tmp_path / "broken", 60, stop_after=39)  # before step 40, where the new state is
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert not state.with_suffix(".new").exists()


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


def test_the_average_spans_a_tenth_of_a_short_run_and_no_more_than_its_decay() -> None:
    """How much of the weights after the first step is in the average after so many."""
    assert averaging(0, 0.996) == 0

    def of_the_first(steps: int) -> float:
        return math.prod(averaging(step, 0.996) for step in range(1, steps))

    assert of_the_first(90) < 1e-10 and averaging(90, 0.996) == pytest.approx(0.909, abs=1e-3)
    assert averaging(3000, 0.996) == 0.996


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


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    """Two batches of 16 give the step that one of 32 gives: the loss is a mean over equally many rows."""
    rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))

    def trained(folder: str, size: int, accumulate: int) -> nn.Module:
        batches = iter(rows.split(size))
        config = LoopConfig(out=tmp_path / folder, steps=3, lr=1e-2, warmup=1, accumulate=accumulate)
        return train(Regression(), config, accelerator=Accelerator(cpu=True), batch=lambda g, n: (next(batches),))

    whole, parts = trained("whole", 32, 1), trained("parts", 16, 2)
    for expected, found in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # sums in another order


def test_a_run_that_diverges_says_so_and_keeps_the_state_from_before(tmp_path: Path) -> None:
    def broken(generator: torch.Generator, step: int) -> tuple[Tensor]:
        return (batch(generator, step)[0] * (math.nan if step == 27 else 1),)

    config = LoopConfig(out=tmp_path, steps=60, lr=1e-2, warmup=5, save_every=20, ema_decay=0.9)
    with pytest.raises(TrainingDiverged, match=r"before step 40; run again with lr below 0\.01"):
        train(Regression(), config, accelerator=Accelerator(cpu=True), batch=broken)
    resumed = run(tmp_path, 60)  # from step 20, with batches that are whole
    whole = run(tmp_path / "whole", 60)
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_snapshot_has_the_averaged_weights_and_training_goes_on_from_the_others(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    config = LoopConfig(out=tmp_path / "a", steps=40, lr=1e-2, warmup=5, save_every=20, ema_decay=0.9)

    def keep(module: nn.Module, step: int) -> None:
        seen.append(module.layer.weight.detach().clone())

    looked = train(Regression(), config, accelerator=Accelerator(cpu=True), batch=batch, snapshot=keep)
    plain = run(tmp_path / "b", 40)
    assert torch.equal(looked.layer.weight, plain.layer.weight)
    assert torch.equal(seen[-1], plain.layer.weight) and not torch.equal(seen[0], seen[1])


def test_states_are_saved_by_the_clock_too(tmp_path: Path) -> None:
    steps: list[int] = []
    config = LoopConfig(out=tmp_path, steps=50, lr=1e-2, save_every_s=0.0)
    train(
        Regression(),
        config,
        accelerator=Accelerator(cpu=True),
        batch=batch,
        snapshot=lambda module, step: steps.append(step),
    )
    assert steps == list(range(1, 51))


def test_ctrl_c_saves_what_is_done_and_the_next_run_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 60)

    def interrupted(generator: torch.Generator, step: int) -> tuple[Tensor]:
        if step == 33:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # as torchrun passes on what its processes have had already
        return batch(generator, step)

    config = LoopConfig(out=tmp_path / "broken", steps=60, lr=1e-2, warmup=5, save_every=20, ema_decay=0.9)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 34; run the same again"):
        train(Regression(), config, accelerator=Accelerator(cpu=True), batch=interrupted)
    assert signal.getsignal(signal.SIGINT) is before
    asked: list[int] = []

    def counted(generator: torch.Generator, step: int) -> tuple[Tensor]:
        asked.append(step)
        return batch(generator, step)

    resumed = train(Regression(), config, accelerator=Accelerator(cpu=True), batch=counted)
    assert asked[0] == 34
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_state_of_another_origin_is_not_continued(tmp_path: Path) -> None:
    def config(**origin: str) -> LoopConfig:
        return LoopConfig(out=tmp_path / "run", steps=2, lr=1e-2, origin=origin)

    train(Regression(), config(init="a", rank="4"), accelerator=Accelerator(cpu=True), batch=batch)
    train(Regression(), config(init="a", rank="4"), accelerator=Accelerator(cpu=True), batch=batch)
    with pytest.raises(ValueError, match="holds a run with rank=4, this one has rank=8; name another out="):
        train(Regression(), config(init="a", rank="8"), accelerator=Accelerator(cpu=True), batch=batch)


def test_a_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2)
    config = LoopConfig(out=tmp_path, steps=4, lr=1e-2)
    wider = Regression()
    wider.layer = nn.Linear(4, 5)
    more = Regression()
    more.other = nn.Linear(1, 1)
    for other in (wider, more):
        with pytest.raises(ValueError, match="holds other weights than this run trains; name another out="):
            train(other, config, accelerator=Accelerator(cpu=True), batch=batch)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    config = LoopConfig(out=tmp_path, steps=2, lr=1e-2)

    def second(generator: torch.Generator, step: int) -> tuple[Tensor]:
        with pytest.raises(ValueError, match=f"another run is at work in {tmp_path}; wait for it"):
            train(Regression(), config, accelerator=Accelerator(cpu=True), batch=batch)
        return batch(generator, step)

    train(Regression(), config, accelerator=Accelerator(cpu=True), batch=second)


@pytest.mark.skipif(sys.platform == "win32", reason="files cannot be limited there")
def test_a_full_disk_is_told_and_the_last_state_stays_whole(tmp_path: Path) -> None:
    import resource

    config = LoopConfig(out=tmp_path, steps=40, lr=1e-2, warmup=5, save_every=20, ema_decay=0.9)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(generator: torch.Generator, step: int) -> tuple[Tensor]:
        if step == 30:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
        return batch(generator, step)

    try:
        with pytest.raises(
            OSError, match=r"cannot be written .*MiB are free there\. The last saved state is still whole"
        ):
            train(Regression(), config, accelerator=Accelerator(cpu=True), batch=filling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    whole, resumed = run(tmp_path / "whole", 40), run(tmp_path, 40)
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_the_first_and_the_last_step_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = LoopConfig(out=tmp_path, steps=3, lr=1e-2)
    train(Regression(), config, accelerator=Accelerator(cpu=True), batch=batch)
    told = [record.getMessage().split()[:2] for record in caplog.records if "loss" in record.getMessage()]
    assert told == [["step", "1/3"], ["step", "3/3"]]


def test_logs_hold_losses_and_moving_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoopConfig(out=tmp_path, steps=4, lr=1e-2, log_every=2, logs=True)
    train(Regression(), config, accelerator=Accelerator(cpu=True), batch=batch)
    log_video(tmp_path, "sample", np.arange(3, dtype=np.uint8).repeat(48).reshape(3, 4, 4, 3) * 80, 4, fps=16)
    found = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert [event.step for event in found.Scalars("loss/loss")] == [1, 2, 4]
    picture = Image.open(io.BytesIO(found.Images("sample")[0].encoded_image_string))
    assert picture.n_frames == 3 and picture.size == (4, 4)
