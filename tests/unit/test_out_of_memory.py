"""Too little memory, wherever it shows: all is let go, the error says what to change, and the next run is right."""

import gc
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashforward_core.engine import run as engine_run
from flashforward_core.engine.batch import Job, render_many
from flashforward_core.engine.executor import TaskFailed
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.rollout import plan_anchors, render
from flashforward_core.kv.bank import LaneBanks
from flashforward_core.model.roles import Backbone

pytestmark = pytest.mark.cpu

TWO_LANES = DevicePlan(devices=("cpu*2",))


@pytest.fixture(scope="module")
def backbone(rig: Any) -> Backbone:
    return rig.backbone()


def held_bytes() -> int:
    """Bytes of all tensors that somebody holds; memory that several share counts once."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and has_bytes(thing)]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}.values())


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether it is no stand-in of a compilation, such as earlier tests leave behind."""
    return not type(tensor).__module__.startswith("torch._subclasses")


def fails_at(call: int, what: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``what`` with no memory left at one of its calls."""
    lock, calls = threading.Lock(), 0

    def tried(*args: Any, **options: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            now = calls
        if now == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return what(*args, **options)

    return tried


def forwards(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Attention finds no memory, in the middle of a forward."""
    resolve, count = engine_run.resolve_attention, {}

    def resolved(*args: Any, **options: Any) -> Any:
        found = resolve(*args, **options)
        attend = count.setdefault("attend", fails_at(call, found.attend))  # counted over all lanes
        return replace(found, attend=attend)

    monkeypatch.setattr(engine_run, "resolve_attention", resolved)


def banks(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """A bank finds no memory when it is made or used."""
    monkeypatch.setattr(LaneBanks, "_buffer", fails_at(call, LaneBanks._buffer))


@pytest.mark.parametrize(("where", "call"), [(forwards, 1), (forwards, 30), (forwards, 60), (banks, 1), (banks, 12)])
def test_a_render_lets_everything_go_and_the_next_one_is_right(
    rig: Any, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, where: Callable[..., None], call: int
) -> None:
    spec, texts = rig.spec(), rig.texts()
    expected = render(backbone, spec, texts, devices=TWO_LANES).sha256
    before = held_bytes()
    with monkeypatch.context() as patch, pytest.raises(TaskFailed) as failure:
        where(patch, call)
        render(backbone, spec, texts, devices=TWO_LANES)
    assert "out of memory" in str(failure.value) and "use order=memory" in str(failure.value)
    traceback.clear_frames(failure.value.__traceback__)  # the caller's: they hold finished latents, on the host
    assert held_bytes() <= before, "somebody holds a failed run's tensors"
    assert not any(thread.name.startswith("flashforward") for thread in threading.enumerate())
    assert render(backbone, spec, texts, devices=TWO_LANES).sha256 == expected


def test_planning_lets_everything_go_too(rig: Any, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, texts = rig.spec(), rig.texts()
    before = held_bytes()
    with monkeypatch.context() as patch, pytest.raises(TaskFailed, match="use order=memory") as failure:
        forwards(patch, 5)
        plan_anchors(backbone, spec, texts)
    traceback.clear_frames(failure.value.__traceback__)
    assert held_bytes() <= before


def test_of_several_rollouts_one_fails(rig: Any, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, ended = rig.texts(), {}
    before = held_bytes()
    with monkeypatch.context() as patch:
        forwards(patch, 40)
        several = [Job(spec=rig.spec(seed=seed), texts=texts) for seed in range(3)]
        render_many(backbone, several, devices=TWO_LANES, on_done=lambda n, o: ended.setdefault(n, str(o)[:300]))
    assert sum("out of memory" in outcome for outcome in ended.values()) == 1
    assert held_bytes() <= before
