"""A lane's weights, and what a cluster's lanes are asked for: all that needs no cluster."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashforward_core.engine.lane_worker import KNOWN_ERRORS, LaneError, LaneWorker
from flashforward_core.engine.ops import NotFinite
from flashforward_core.engine.ray_lanes import Node, assign_nodes, check_address
from flashforward_core.engine.ray_run import check_marks
from flashforward_core.model.loading import load_embedded

pytestmark = pytest.mark.cpu


def node(name: str, gpus: int = 0) -> Node:
    return Node(id=name * 8, address=name, gpus=gpus)


def test_a_lane_loads_the_same_weights_from_its_own_disk_or_says_that_they_are_missing(tmp_path: Path) -> None:
    backbone = load_embedded()
    assert backbone.source is not None
    worker = LaneWorker("lane0", "cpu", torch.get_num_threads())
    assert worker.load(backbone.source) == backbone.fingerprint
    elsewhere = replace(backbone.source, options={**backbone.source.options, "assets": tmp_path / "nowhere"})
    assert worker.load(elsewhere) is None


def test_other_weights_are_refused_by_their_machine() -> None:
    check_marks(["a", "a"], nodes=[node("x"), node("y")], fingerprint="a")
    with pytest.raises(ValueError, match=r"the weights on node y .* fingerprint b instead of a; copy the same files"):
        check_marks(["a", "b"], nodes=[node("x"), node("y")], fingerprint="a")


def test_errors_keep_their_kind_between_processes() -> None:
    for name, kind in KNOWN_ERRORS.items():
        assert type(LaneError("task", name, "words").rebuilt()) is kind
    assert KNOWN_ERRORS["NotFinite"] is NotFinite
    assert str(LaneError("task", "Unheard", "words").rebuilt()) == "words"


def test_neighbouring_lanes_share_machines() -> None:
    """Hand-counted: GPUs fill one machine after the other, CPU lanes are spread evenly."""
    big, small, bare = node("big", 4), node("small", 2), node("bare")
    gpus = assign_nodes(["cuda"] * 5, [big, small, bare])
    assert gpus == [big, big, big, big, small]
    assert assign_nodes(["cpu"] * 4, [small, bare]) == [small, small, bare, bare]
    assert assign_nodes(["cuda", "cpu"], [big, bare]) == [big, big]
    with pytest.raises(ValueError, match="devices=cuda,cuda,cuda are more GPUs than the cluster has now"):
        assign_nodes(["cuda"] * 3, [small, bare])


@pytest.mark.parametrize("address", ["", "here", "host:", ":6379", "host:0", "host:70000", "ray://host:10001", "a:b"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"is no address; use auto .* or HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.example.org:6379"])
def test_addresses_are_not_dialled_to_be_checked(address: str) -> None:
    check_address(address)


def test_a_gpu_lane_names_the_only_gpu_that_it_sees() -> None:
    """Without an index a device is no other tensor's device, and weights would be copied onto their own GPU."""
    assert LaneWorker("lane0", "cuda", 1)._device == torch.device("cuda:0")
