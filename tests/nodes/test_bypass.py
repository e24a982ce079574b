"""Bypassing or muting a node breaks nothing of ours: the rest runs without it, or the server says what is missing."""

import copy
import json
from typing import Any

import pytest
from comfy_client import Client, RunError
from comfy_workflow import BYPASSED, MUTED, to_api

from .conftest import ROOT, change

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
PREFIX = "FlashForward"
FIVE_LATENTS_S = 17 / 16
NEEDED = ("LoadBackbone", "EncodePrompt", "Plan", "PlanAnchors", "Render")
"""What the others have a required input from; Set Anchor needs Plan Anchors."""
OPTIONAL = ("Devices", "KVPolicy", "SetAnchor", "DecodeVideo", "Report")
MORE = {"Devices": "several_devices", "Report": "several_devices", "KVPolicy": "compare_policies"}
MORE |= {"SetAnchor": "anchors_from_images"}
LINKS = (
    ("Devices", 0, "Plan", "devices"),
    ("KVPolicy", 0, "Plan", "kv_policy"),
    ("PlanAnchors", 0, "SetAnchor", "anchors"),
    ("SetAnchor", 0, "Render", "anchors"),
    ("Render", 1, "Report", "timeline"),
    ("DecodeVideo", 0, "Report", "video"),
)


def node_of(workflow: str, name: str) -> Json:
    """A node as another workflow has it, without its links."""
    graph = json.loads((ROOT / "workflows" / f"{workflow}.json").read_text())
    node: Json = next(node for node in graph["nodes"] if node["type"] == PREFIX + name)
    for entry in node["inputs"]:
        entry["link"] = None
    return node


@pytest.fixture
def everything(quickstart: Json) -> Json:
    """The quickstart in the editor's form, cut to 5 latents, with all nodes that may be left out."""
    graph = copy.deepcopy(quickstart)
    by_name = {node["type"].removeprefix(PREFIX): node for node in graph["nodes"]}
    by_name["Plan"]["widgets_values"][2] = FIVE_LATENTS_S
    for number, (name, workflow) in enumerate(MORE.items()):
        by_name[name] = {**node_of(workflow, name), "id": 100 + number}
        graph["nodes"].append(by_name[name])
    by_name["SetAnchor"]["widgets_values"][0] = 0.0  # seconds
    for number, (origin, output, target, name) in enumerate(LINKS):
        (entry,) = [entry for entry in by_name[target]["inputs"] if entry["name"] == name]
        entry["link"] = 100 + number
        graph["links"].append([100 + number, by_name[origin]["id"], output, by_name[target]["id"], 0, "*"])
    return graph


def without(graph: Json, name: str, mode: int) -> Json:
    for node in graph["nodes"]:
        if node["type"] == PREFIX + name:
            node["mode"] = mode
    return graph


@pytest.mark.parametrize("mode", [BYPASSED, MUTED], ids=["bypassed", "muted"])
@pytest.mark.parametrize("name", OPTIONAL)
def test_the_rest_runs_without_what_is_optional(
    name: str, mode: int, client: Client, everything: Json, object_info: Json
) -> None:
    api = to_api(without(everything, name, mode), object_info)
    seed = 100 + 10 * OPTIONAL.index(name) + mode  # a render of its own: what the server has cached shows nothing
    result = client.run(change(api, "FlashForwardRender", seed=seed))
    assert len(result.sha256()) == 1


@pytest.mark.parametrize("mode", [BYPASSED, MUTED], ids=["bypassed", "muted"])
@pytest.mark.parametrize("name", NEEDED)
def test_the_server_says_what_is_missing_of_what_is_needed(
    name: str, mode: int, client: Client, everything: Json, object_info: Json
) -> None:
    """Nothing of ours is asked: its validation would speak otherwise, and so would a node that fails when it runs."""
    with pytest.raises(RunError) as refusal:
        client.run(to_api(without(everything, name, mode), object_info))
    assert "Required input is missing" in str(refusal.value)
    assert "Traceback" not in str(refusal.value)
