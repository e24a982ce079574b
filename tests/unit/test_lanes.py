"""Lanes: threads that keep their tensors apart, and the devices that they stand for."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flashforward_core.engine.lanes import CallerLane, DevicePlan, LaneTensor, Signals, ThreadLane, open_lanes
from flashforward_core.engine.transfer import HostMark, carries

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 10.0  # far above what a thread needs to start, even on a busy machine


def on_lane(lane: Any, work: Any) -> Any:
    """Run ``work`` on a lane and return what it returns."""
    done, found = threading.Event(), []
    lane.submit(lambda: (found.append(work()), done.set()))
    assert done.wait(TIMEOUT_S)
    return found[0]


def test_a_tensor_is_refused_on_another_lane() -> None:
    with open_lanes([("lane0", "cpu"), ("lane1", "cpu")]) as lanes:
        value = LaneTensor("lane0", torch.ones(2))
        assert value.on(lanes[0]) is value.tensor
        with pytest.raises(AssertionError, match="a tensor of lane0 is used on lane1"):
            value.on(lanes[1])


def test_moving_a_tensor_copies_it() -> None:
    with open_lanes([("lane0", "cpu"), ("lane1", "cpu")]) as lanes:
        value = LaneTensor("lane0", torch.ones(2))
        moved = value.moved_to(lanes[1])
        assert moved.lane == "lane1"
        assert torch.equal(moved.tensor, value.tensor)
        assert moved.tensor.data_ptr() != value.tensor.data_ptr()
        assert value.moved_to(lanes[0]) is value


def test_a_state_cannot_leave_its_lane() -> None:
    with pytest.raises(AssertionError, match="a tuple cannot leave lane0"):
        LaneTensor("lane0", (torch.ones(2),)).moved_to(CallerLane())


def test_every_lane_is_a_thread_in_inference_mode() -> None:
    with open_lanes([("lane0", "cpu"), ("lane1", "cpu")]) as lanes:
        found = [on_lane(lane, lambda: (threading.get_ident(), torch.is_inference_mode_enabled())) for lane in lanes]
    assert len({thread for thread, _ in found} | {threading.get_ident()}) == 3
    assert all(inference for _, inference in found)
    assert not torch.is_inference_mode_enabled()


def test_lanes_leave_the_number_of_intra_op_threads_alone() -> None:
    """Kernels may split their sums by it, so it must not depend on the number of lanes."""
    before = torch.get_num_threads()
    with open_lanes([(f"lane{n}", "cpu") for n in range(3)]) as lanes:
        assert [on_lane(lane, torch.get_num_threads) for lane in lanes] == [before] * 3
    assert torch.get_num_threads() == before


def test_work_runs_in_order_and_closing_waits_for_it() -> None:
    seen: list[int] = []
    with open_lanes([("lane0", "cpu")]) as lanes:
        for n in range(50):
            lanes[0].submit(lambda n=n: seen.append(n))
    assert seen == list(range(50))


def test_lanes_are_joined_when_their_user_fails() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError), open_lanes([("lane0", "cpu"), ("lane1", "cpu")]):
        assert len(set(threading.enumerate()) - before) == 2
        raise KeyError("some failure")
    assert set(threading.enumerate()) == before


def test_only_the_lane_itself_waits_for_its_device() -> None:
    with open_lanes([("lane0", "cpu")]) as lanes:
        on_lane(lanes[0], lanes[0].deliver)
        with pytest.raises(AssertionError, match="only work of lane0"):
            lanes[0].deliver()


class SlowMark:
    """A point that a device comes past when told to, as events on CUDA do."""

    time_s = 0.0

    def __init__(self) -> None:
        self.gate = threading.Event()

    def passed(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> None:
        assert self.gate.wait(TIMEOUT_S)


class FailedMark:
    """A point that a failed device never comes past."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def passed(self) -> bool:
        raise RuntimeError("illegal memory access")

    def wait(self) -> None:
        raise RuntimeError("illegal memory access")


def test_a_lane_outlives_its_device_so_that_somebody_is_told() -> None:
    """Whoever looks at the results meets the same error; a thread that ended would leave everybody waiting."""
    lane, told = ThreadLane("lane0", "cpu"), []
    for name in ("first", "second"):
        lane.submit(lambda name=name: lane.defer(FailedMark(), lambda: told.append(name)))
    lane.close()
    assert told == ["first", "second"]


def test_a_lane_runs_ahead_of_its_device_by_its_lookahead_and_no_more() -> None:
    marks, launched, done = [SlowMark() for _ in range(3)], [threading.Event() for _ in range(3)], []
    lane = ThreadLane("lane0", "cpu", lookahead=1)

    def launch(n: int) -> None:
        lane.defer(marks[n], lambda: done.append(n))
        launched[n].set()

    for n in range(3):
        lane.submit(lambda n=n: launch(n))
    assert launched[0].wait(TIMEOUT_S)
    assert not launched[1].wait(0.05)  # the second waits for the first: one runs, one is queued
    marks[0].gate.set()
    assert launched[1].wait(TIMEOUT_S) and done == [0]
    assert not launched[2].wait(0.05)
    for mark in marks:
        mark.gate.set()
    lane.close()
    assert done == [0, 1, 2]


def test_what_is_done_is_delivered_in_order_and_without_waiting_for_the_rest() -> None:
    marks, done = [SlowMark() for _ in range(3)], []
    lane = ThreadLane("lane0", "cpu", lookahead=5)

    def work() -> list[tuple[bool, list[int]]]:
        for n, mark in enumerate(marks):
            lane.defer(mark, lambda n=n: done.append(n))
        found = []
        for n in (1, 0, 2):
            marks[n].gate.set()
            found.append((lane.deliver(), list(done)))
        return found

    assert on_lane(lane, work) == [(True, []), (True, [0, 1]), (False, [0, 1, 2])]
    lane.close()


def test_a_lane_without_work_delivers_what_it_deferred() -> None:
    """Nobody submits or closes: the last task's result must come all the same."""
    delivered = threading.Event()
    lane = ThreadLane("lane0", "cpu", lookahead=5)
    lane.submit(lambda: lane.defer(HostMark(0.0), delivered.set))
    assert delivered.wait(TIMEOUT_S)
    lane.close()


def test_a_pair_of_devices_that_loses_or_repeats_data_does_not_pass() -> None:
    cpu = torch.device("cpu")
    first: list[torch.Tensor] = []

    def stale(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        first.append(tensor.clone())
        return first[0]

    def broken(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise RuntimeError("peer access is not supported")

    def check(copy: Any) -> bool:
        return carries(copy, source=cpu, target=cpu)

    assert check(lambda tensor, device: tensor.clone())
    assert not check(lambda tensor, device: torch.zeros_like(tensor))
    assert not check(stale)
    assert not check(broken)


def test_a_wait_ends_when_all_is_finished_or_when_stopped() -> None:
    signals = Signals()
    signals.finish("a")
    assert signals.wait(["a"])
    assert signals.wait(["a", "b"], most_s=0.01) is None
    threading.Timer(0.02, signals.finish, ["b"]).start()
    assert signals.wait(["a", "b"])
    threading.Timer(0.02, signals.stop).start()
    assert not signals.wait(["never"])
    assert not signals.wait(["a"])  # after a stop, nothing goes on


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("cpu",), ("cpu",)),
        (("cpu*4",), ("cpu",) * 4),
        (("cpu*2", "cpu"), ("cpu",) * 3),
        (("cpu, cpu*2",), ("cpu",) * 3),
    ],
)
def test_devices_are_read(devices: tuple[str, ...], expected: tuple[str, ...], caplog: Any) -> None:
    assert DevicePlan(devices=devices).resolve() == expected
    assert not caplog.records


def test_auto_is_every_gpu_or_one_cpu() -> None:
    expected = tuple(f"cuda:{n}" for n in range(torch.cuda.device_count())) or ("cpu",)
    assert DevicePlan().resolve() == expected
    assert DevicePlan(devices=("",)).resolve() == expected


@pytest.mark.parametrize("text", ["cuda:90,cuda:91", "cuda:90*2", "mps,xpu:0"])
def test_absent_devices_fall_back_with_one_warning_that_names_both_counts(text: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert DevicePlan(devices=(text,)).resolve() == ("cpu",)
    (record,) = caplog.records
    assert "2 asked for, 0 present" in record.getMessage()
    assert text.split(",")[0].split("*")[0] in record.getMessage()


def test_present_devices_stay_when_others_are_absent(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert DevicePlan(devices=("cpu*2,cuda:90",)).resolve() == ("cpu", "cpu")
    assert "3 asked for, 2 present (not cuda:90)" in caplog.text


@pytest.mark.parametrize("text", ["tpu,cpu", "x", "nonsense", "cpu*-1", "cpu,cuda:x"])
def test_a_word_that_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"devices='.*' is no device; use auto, cpu, cpu\*4 or cuda:0"):
        DevicePlan(devices=(text,)).resolve()


@pytest.mark.parametrize("text", ["cpu*0", "cpu*65", "cpu*100000", "cuda:0*0"])
def test_a_count_outside_the_bounds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has a count outside 1 to 64"):
        DevicePlan(devices=(text,)).resolve()


def test_more_devices_than_the_bound_are_refused_in_all() -> None:
    assert DevicePlan(devices=("cpu*64",)).resolve() == ("cpu",) * 64
    with pytest.raises(ValueError, match="are 65, above 64"):
        DevicePlan(devices=("cpu*64", "cpu")).resolve()


SAME_BYTES = """
import torch
torch.set_num_threads(1)  # as a host program may
from flashforward_core.engine.rollout import DevicePlan, render
from tests.conftest import Rig
rig = Rig()
backbone, texts = rig.backbone(), rig.texts()
plans = [DevicePlan(devices=(name,)) for name in ("cpu*2", "cpu*3", "cpu")]
found = {render(backbone, rig.spec(), texts, devices=plan).sha256 for plan in plans}
assert len(found) == 1, found
"""


def test_lanes_compute_with_the_number_of_threads_that_the_process_was_given() -> None:
    """In a process of its own: kernels split their sums by it, and a new thread may begin with another number."""
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SAME_BYTES], check=True, cwd=ROOT, env=env)
