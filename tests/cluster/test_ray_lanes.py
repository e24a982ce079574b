"""Renders on a Ray cluster of two nodes, both on this machine: one machine's bytes, and an end to everything."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flashforward_core.cli import main
from flashforward_core.engine import ray_lanes, ray_run
from flashforward_core.engine.events import ChunkReady, Event, TaskFinished
from flashforward_core.engine.executor import TaskFailed, run_sequential
from flashforward_core.engine.lanes import DevicePlan
from flashforward_core.engine.ops import NotFinite, RunInputs
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.ray_lanes import HeadLost, LaneLost
from flashforward_core.engine.rollout import plan_anchors, render
from flashforward_core.graph.schedules import SCHEDULES, build_graph, spec_for
from flashforward_core.media import probe
from flashforward_core.model.roles import Backbone

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.cpu

LANES = 2
STORE_BYTES = 100_000_000


class Cancelled(BaseException):
    """As ComfyUI's own, not an Exception."""


@dataclass(frozen=True)
class Site:
    """Two nodes, and weights."""

    cluster: Any
    backbone: Backbone
    devices: DevicePlan

    def lane_processes(self) -> list[psutil.Process]:
        nodes = [self.cluster.head_node, *self.cluster.worker_nodes]
        raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes]
        return [child for raylet in raylets for child in raylet.children() if "LaneWorker" in child.name()]


@pytest.fixture(scope="module")
def site(rig: Any) -> Iterator[Site]:
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    cluster.add_node(**options)
    yield Site(cluster, rig.backbone(), DevicePlan(devices=(f"cpu*{LANES}",), ray_address=cluster.address))
    ray_run.dismiss()
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("anchor_kv", ["send", "encode"])
def test_every_schedule_gives_one_machines_bytes(rig: Any, site: Site, anchor_kv: str) -> None:
    for schedule in SCHEDULES:
        spec = spec_for(rig.spec(schedule))
        graph, inputs = build_graph(spec, decode=False), RunInputs(spec=spec, texts=rig.texts())
        events: list[list[Event]] = [[], []]
        run_sequential(graph, inputs=inputs, backbone=site.backbone, on_event=events[0].append)
        ray_run.run_on_ray(
            graph,
            inputs=inputs,
            backbone=site.backbone,
            placement=place(graph, lanes=lanes_for(["cpu"] * LANES), layout="interleaved"),
            address=site.devices.ray_address,
            on_event=events[1].append,
            poison=True,
            anchor_kv=anchor_kv,
        )
        assert rig.video(events[1]).equal(rig.video(events[0])), schedule
        finished = [event for event in events[1] if isinstance(event, TaskFinished)]
        assert [event.done for event in finished] == list(range(1, finished[0].total + 1))
    assert len({process.ppid() for process in site.lane_processes()}) == 2, "both nodes have lanes"


def test_anchors_and_a_render_of_them_use_the_same_lanes(rig: Any, site: Site) -> None:
    assert_good(rig, site)  # the lanes are there
    before = {process.pid for process in site.lane_processes()}
    results = []
    for devices in (DevicePlan(devices=("cpu",)), site.devices):
        anchors = plan_anchors(site.backbone, rig.spec(), rig.texts(), devices=devices)
        results.append(render(site.backbone, rig.spec(), rig.texts(), anchors=anchors, devices=devices))
    assert results[0].sha256 == results[1].sha256
    assert {process.pid for process in site.lane_processes()} == before
    spans = results[1].timeline.spans
    ends = {span.task: span.end_s for span in spans}
    starts = {span.task: span.start_s for span in spans}
    # clocks of processes on one machine agree within their answers' round trip, a few ms
    assert starts["renderer/denoise/c0/s1"] > ends["renderer/denoise/c0/s0"] - 0.02


def test_a_cancel_ends_the_render_and_the_lanes_stay(rig: Any, site: Site) -> None:
    assert_good(rig, site)  # the lanes are there
    before = {process.pid for process in site.lane_processes()}
    seen: list[Event] = []

    def check_cancel() -> None:
        if seen:
            raise Cancelled

    long = rig.spec(latent_frames=60)
    with pytest.raises(Cancelled):
        render(site.backbone, long, rig.texts(), devices=site.devices, on_event=seen.append, check_cancel=check_cancel)
    finished = sum(isinstance(event, TaskFinished) for event in seen)
    assert finished <= 2 * LANES  # of some eighty: no lane is given more than the next task
    assert_good(rig, site)
    assert {process.pid for process in site.lane_processes()} == before


def test_a_failed_task_names_itself_and_the_lanes_stay(rig: Any, site: Site) -> None:
    assert_good(rig, site)  # the lanes are there
    before = {process.pid for process in site.lane_processes()}
    bad = [text.clone().fill_(torch.nan) for text in rig.texts()]
    with pytest.raises(TaskFailed, match="planner/denoise/b0/s0: anchor block 0 is not finite") as caught:
        render(site.backbone, rig.spec(), bad, devices=site.devices)
    assert isinstance(caught.value.__cause__, NotFinite)
    assert_good(rig, site)
    assert {process.pid for process in site.lane_processes()} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a process's priority")
def test_lanes_do_not_wait_for_all_other_work_of_their_machine(rig: Any, site: Site) -> None:
    """Ray's processes begin at the lowest priority but four; every thread of a lane has the usual one."""
    assert_good(rig, site)
    for lane in site.lane_processes():
        threads = [thread.id for thread in lane.threads()]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {0}


@pytest.mark.parametrize("hurt", [signal.SIGSTOP, signal.SIGKILL])
def test_a_dead_or_frozen_lane_ends_the_render_with_its_name(rig: Any, site: Site, hurt: signal.Signals) -> None:
    assert_good(rig, site)
    ray_run._crews[0].fleet.silence_s = 2.0  # a minute, for a frozen one, is too long for a test
    victims = site.lane_processes()
    chunks: list[ChunkReady] = []

    def on_event(event: Event) -> None:
        if isinstance(event, ChunkReady):
            chunks.append(event)
            if len(chunks) == 2:
                victims[0].send_signal(hurt)

    spec, began = rig.spec(latent_frames=60), time.monotonic()
    with pytest.raises(LaneLost, match=r"lane\d \(cpu on node .*\) is lost: it.*; \d+ of 20 chunks were finished"):
        render(site.backbone, spec, rig.texts(), devices=site.devices, on_event=on_event)
    assert time.monotonic() - began < 30  # 2 s of silence, at most 2 s between questions, and a busy machine
    whole = render(site.backbone, spec, rig.texts(), devices=DevicePlan(devices=("cpu",))).latents_BCFHW
    assert all(whole[:, :, list(chunk.frames)].equal(chunk.latents) for chunk in chunks)
    assert not wait_until(lambda: not site.lane_processes()), "no process is left"


def test_a_file_of_prompts_gives_one_machines_videos_and_goes_on(site: Site, tmp_path: Path) -> None:
    """``render --prompts`` with ``--ray``; what is there already needs no cluster's work again."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red balloon drifts right over green hills at dusk\na white bird circles over hills at noon\n")

    def rendered(folder: str, *options: str) -> list[dict[str, Any]]:
        command = ["render", "--prompts", str(prompts), "--out", str(tmp_path / folder), "--latent-frames", "4"]
        assert main([*command, "--devices", f"cpu*{LANES}", "--quiet", *options]) == 0
        return [json.loads(line) for line in (tmp_path / folder / "results.jsonl").read_text().splitlines()]

    there = rendered("there", "--ray", site.cluster.address)
    assert len(site.lane_processes()) == LANES
    here = rendered("here")
    assert [line["status"] for line in there] == ["done", "done"]
    assert {line["path"]: line["sha256"] for line in there} == {line["path"]: line["sha256"] for line in here}
    assert {probe(tmp_path / "there" / line["path"]).frames for line in there} == {13}
    assert rendered("there", "--ray", site.cluster.address) == there


def test_a_dead_head_ends_the_render_and_not_this_process(rig: Any, site: Site, monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_lanes, "PULSE_S", 0.2)  # five tries in a row then take a second, not ten
    head = site.cluster.head_node.all_processes["gcs_server"][0].process

    def on_event(event: Event) -> None:
        head.kill()
        time.sleep(0.05)  # a render of some 200 tasks is not to end before the head is missed

    with pytest.raises(HeadLost, match=r"the head of the Ray cluster at .* does not answer; \d+ of 30 chunks"):
        render(site.backbone, rig.spec(latent_frames=90), rig.texts(), devices=site.devices, on_event=on_event)
    assert not ray.is_initialized()


def test_where_no_cluster_is_it_says_so(rig: Any) -> None:
    with pytest.raises(ValueError, match=r"ray_address='127.0.0.1:1' does not answer; run `ray start"):
        render(rig.backbone(), rig.spec(), rig.texts(), devices=DevicePlan(ray_address="127.0.0.1:1"))


def test_nothing_imports_ray_unless_asked() -> None:
    code = (
        "import sys, flashforward_core.commands.render, flashforward_core.engine.ray_run\n"
        "from flashforward_core.engine.rollout import DevicePlan\n"
        "DevicePlan(devices=('cpu*2',)).resolve()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'ray']"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})


def assert_good(rig: Any, site: Site) -> None:
    expected = render(site.backbone, rig.spec(), rig.texts(), devices=DevicePlan(devices=("cpu",)))
    assert render(site.backbone, rig.spec(), rig.texts(), devices=site.devices).sha256 == expected.sha256


def wait_until(done: Callable[[], bool], *, seconds: float = 20.0) -> bool:
    """Return whether ``done`` is still False after a while."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    return not done()
