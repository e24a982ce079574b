"""Devices' ray_address through the real server: one machine's bytes, a bad address by name, and a lost lane's rest."""

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from comfy_client import Client, RunError
from comfy_host import Host, Server

from flashforward_core.media import probe, read_frames

from .conftest import change, node_id

pytest.importorskip("ray")
pytestmark = pytest.mark.cpu
Json = dict[str, Any]
PLAN, RENDER = "FlashForwardPlan", "FlashForwardRender"
NOWHERE = "127.0.0.1:1"
THIRTEEN_LATENTS_S = 49 / 16  # five chunks
STORE_BYTES = 100_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    calm = {"memory_monitor_refresh_ms": 0}  # else Ray ends lanes when others' work fills the machine's memory
    made = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False, "_system_config": calm})
    made.add_node(**options)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def trusting(cluster: Any, host: Host, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose owner lists the cluster, and an address where none is."""
    data = tmp_path_factory.mktemp("comfyui_ray")
    env = {
        "FLASHFORWARD_ASSETS": str(assets),
        "FLASHFORWARD_RAY": f"{cluster.address}, {NOWHERE}",
        "XDG_CACHE_HOME": str(data / "cache"),
    }
    with Server(host=host, cpu=True, data=data, env=env) as running:
        yield running


def with_devices(prompt: Json, **values: Any) -> Json:
    """Connect a Devices node to Plan, and let the render run again and whole."""
    inputs = {"devices": "cpu*2", "layout": "auto", "order": "latency", **values}
    prompt["900"] = {"class_type": "FlashForwardDevices", "inputs": inputs}
    change(prompt, RENDER, reuse_gib=0.0)
    return change(prompt, PLAN, devices=["900", 0])


def lane_processes(cluster: Any) -> list[psutil.Process]:
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, *cluster.worker_nodes)]
    children = [child for pid in raylets for child in psutil.Process(pid).children()]
    return [child for child in children if "LaneWorker" in child.name()]


def test_a_cluster_gives_the_bytes_of_local_lanes(cluster: Any, trusting: Server, latents: Json) -> None:
    client = Client(trusting.url)
    here = client.run(with_devices(latents)).sha256()
    there = client.run(with_devices(latents, ray_address=cluster.address)).sha256()
    assert here == there
    assert len(lane_processes(cluster)) == 2


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (NOWHERE, rf"ray_address='{NOWHERE}' does not answer; run `ray start --head` there"),
        ("10.9.8.7:6379", r"ray_address='10\.9\.8\.7:6379' is not trusted here; .* FLASHFORWARD_RAY=10\.9\.8\.7:6379"),
        ("the cluster", r"ray_address='the cluster' is no address; use auto"),
    ],
)
def test_a_bad_address_is_named_and_the_next_run_works(
    trusting: Server, latents: Json, address: str, words: str
) -> None:
    client = Client(trusting.url)
    with pytest.raises(RunError, match=words):
        client.run(with_devices(latents, ray_address=address, devices="cpu*2"))
    change(latents, RENDER, seed=len(address))  # one that nothing has rendered
    assert client.run(with_devices(latents)).sha256()


def test_a_lost_lane_leaves_what_is_finished_as_a_video(cluster: Any, trusting: Server, prompt: Json) -> None:
    """The video's beginning is that of the whole one, and the next run starts new lanes."""
    client = Client(trusting.url)
    change(prompt, PLAN, seconds=THIRTEEN_LATENTS_S)
    here = client.run(with_devices(prompt))
    (whole,) = here.files(trusting.output)
    render, killed = node_id(prompt, RENDER), []

    def kill_in_the_middle(node: str, done: int, total: int) -> None:
        if node == render and 2 * done > total > 1 and not killed:
            killed.extend(lane_processes(cluster))
            killed[0].send_signal(signal.SIGKILL)

    with pytest.raises(RunError, match=r"lane\d .* is lost: .* of 5 chunks were finished; the first \d+ frames") as end:
        client.run(with_devices(prompt, ray_address=cluster.address), on_progress=kill_in_the_middle)
    (left,) = trusting.output.rglob("FlashForward_unfinished*")
    assert f"output/{left.relative_to(trusting.output)}" in str(end.value)
    frames = probe(left).frames
    assert f"the first {frames} frames" in str(end.value)
    pairs = zip(read_frames(left), itertools.islice(read_frames(whole), frames), strict=True)
    differences = [np.abs(a.astype(int) - b).mean() for a, b in pairs]
    assert len(differences) == frames >= 9  # of a chunk
    assert max(differences) < 2  # of 255: two encodings of the same frames
    assert not list(trusting.output.rglob("*.partial.mp4"))
    assert client.run(with_devices(prompt, ray_address=cluster.address)).sha256() == here.sha256()
