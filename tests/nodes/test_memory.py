"""Memory in the real server: said before the run, refused when it cannot be, and given back when asked."""

import itertools
import re
import time
from typing import Any

import pytest
from comfy_client import Client, Result, RunError

from .conftest import change, node_id

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
BACKBONE, PLAN, RENDER = "FlashForwardLoadBackbone", "FlashForwardPlan", "FlashForwardRender"
_counter = itertools.count()


def with_devices(prompt: Json, **values: Any) -> Json:
    """Connect a Devices node to Plan."""
    inputs = {"devices": "cpu", "layout": "auto", "order": "latency", **values}
    prompt["900"] = {"class_type": "FlashForwardDevices", "inputs": inputs}
    return change(prompt, PLAN, devices=["900", 0])


def with_look(prompt: Json) -> Json:
    """Look at the server's copies of weights once the latents are there."""
    samples = prompt["800"]["inputs"]["samples"]
    prompt["950"] = {"class_type": "StandInMemory", "inputs": {"samples": samples, "again": next(_counter)}}
    return prompt


def held(result: Result) -> tuple[int, int]:
    """Copies of weights in the server, and bytes of blocks in host memory."""
    count, size = result.outputs["950"]["text"]
    return int(count), int(size)


def unload(client: Client) -> None:
    """Have models unloaded, while results stay."""
    client.request("/free", {"unload_models": True, "free_memory": False})
    time.sleep(1.5)  # the server frees when it is next idle, at most a second later


def test_plan_says_what_a_rollout_takes(client: Client, latents: Json) -> None:
    (text,) = client.run(latents).outputs[node_id(latents, PLAN)]["text"]
    found = re.search(r"^memory: ([\d.]+) MiB on cpu \(weights ([\d.]+) MiB, KV ([\d.]+) MiB, workspace", text, re.M)
    assert found is not None, text
    total, *parts = (float(number) for number in found.groups())
    assert sum(parts) < total < 400  # the embedded model at its only size


def test_what_cannot_fit_is_refused_by_plan_and_the_next_run_works(client: Client, latents: Json) -> None:
    with pytest.raises(RunError, match=r"memory: cpu needs about .* the budget is 51\.2 MiB; use order=memory \("):
        client.run(with_devices(latents, budget_gib=0.05))
    assert client.run(with_devices(latents, budget_gib=0.0)).sha256()


def test_unloading_models_gives_host_memory_back(client: Client, latents: Json) -> None:
    """A CPU gains nothing by offloading, but copies of weights arise as they do for a GPU."""
    before = client.run(with_look(with_devices(latents, kv="fp8")))
    assert held(before) == (0, 0)
    streamed = client.run(with_look(with_devices(latents, kv="fp8", offload="on", budget_gib=0.06)))
    assert streamed.sha256() == before.sha256()
    copies, host_bytes = held(streamed)
    assert copies == 1 and host_bytes > 1 << 20
    unload(client)
    again = client.run(with_look(latents))
    cached = [node for name, data in again.status["messages"] if name == "execution_cached" for node in data["nodes"]]
    assert {node_id(latents, BACKBONE), node_id(latents, RENDER)} <= set(cached)  # it is not gone with its handle
    assert held(again) == (0, 0)
