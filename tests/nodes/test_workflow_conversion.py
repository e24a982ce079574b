"""The editor's form of a workflow to the server's."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from comfy_workflow import WorkflowError, to_api, widget_slots, with_overrides

pytestmark = pytest.mark.cpu
Json = dict[str, Any]

INFO: Json = {
    "Text": {"input": {"required": {"text": ["STRING", {"multiline": True}]}}, "input_order": {"required": ["text"]}},
    "Sample": {
        "input": {
            "required": {
                "model": ["MODEL", {}],
                "seed": ["INT", {"control_after_generate": True}],
                "steps": ["INT", {}],
                "sampler": [["a", "b"], {}],
            },
            "optional": {"text": ["STRING", {"forceInput": True}], "mode": ["COMBO", {"options": ["x", "y"]}]},
        },
        "input_order": {"required": ["model", "seed", "steps", "sampler"], "optional": ["text", "mode"]},
    },
    "LoadImage": {
        "input": {"required": {"image": [["a.png"], {"image_upload": True}]}},
        "input_order": {"required": ["image"]},
    },
    "Load": {"input": {"required": {}}, "input_order": {"required": []}},
}


def node(id_: int, type_: str, *, widgets: list[Any], links: Json | None = None, **more: Any) -> Json:
    inputs = [{"name": name, "type": "MODEL", "link": link} for name, link in (links or {}).items()]
    outputs = [{"name": "model", "type": "MODEL"}]
    return {"id": id_, "type": type_, "inputs": inputs, "outputs": outputs, "widgets_values": widgets, **more}


def workflow(**nodes: Json) -> Json:
    return {
        "nodes": list(nodes.values()),
        "links": [[1, 1, 0, 3, 0, "MODEL"], [2, 4, 0, 3, 0, "MODEL"], [3, 1, 0, 4, 0, "MODEL"]],
    }


SAMPLE = [7, "randomize", 4, "b", "y"]


def test_values_that_the_editor_keeps_for_itself_are_skipped() -> None:
    assert widget_slots(INFO["Sample"]) == ["seed", None, "steps", "sampler", "mode"]
    assert widget_slots(INFO["LoadImage"]) == ["image", None]


def test_widgets_and_links_become_inputs() -> None:
    api = to_api(workflow(a=node(1, "Load", widgets=[]), b=node(3, "Sample", widgets=SAMPLE, links={"model": 1})), INFO)
    assert api == {
        "1": {"class_type": "Load", "inputs": {}},
        "3": {
            "class_type": "Sample",
            "inputs": {"seed": 7, "steps": 4, "sampler": "b", "mode": "y", "model": ["1", 0]},
        },
    }


def test_inputs_that_are_newer_than_the_workflow_get_their_defaults() -> None:
    old = workflow(a=node(1, "Load", widgets=[]), b=node(3, "Sample", widgets=[7, "fixed", 4], links={"model": 1}))
    inputs = to_api(old, INFO)["3"]["inputs"]
    assert inputs == {"seed": 7, "steps": 4, "sampler": "a", "mode": "x", "model": ["1", 0]}


@pytest.mark.parametrize("between", [{"type_": "Reroute"}, {"type_": "Sample", "mode": 4}])
def test_reroutes_and_bypassed_nodes_pass_their_input_on(between: Json) -> None:
    middle = node(4, widgets=[], links={"model": 3}, **between)
    api = to_api(
        workflow(a=node(1, "Load", widgets=[]), m=middle, b=node(3, "Sample", widgets=SAMPLE, links={"model": 2})), INFO
    )
    assert sorted(api) == ["1", "3"]
    assert api["3"]["inputs"]["model"] == ["1", 0]


def test_muted_nodes_and_what_they_feed_are_left_out() -> None:
    muted = node(1, "Load", widgets=[], mode=2)
    api = to_api(workflow(a=muted, b=node(3, "Sample", widgets=SAMPLE, links={"model": 1})), INFO)
    assert sorted(api) == ["3"]
    assert "model" not in api["3"]["inputs"]


def test_a_node_that_the_server_lacks_is_named() -> None:
    with pytest.raises(WorkflowError, match="node 9 is a 'Strange'"):
        to_api(workflow(a=node(9, "Strange", widgets=[])), INFO)


def test_an_override_changes_every_seed_and_nothing_else() -> None:
    before = workflow(a=node(3, "Sample", widgets=SAMPLE), b=node(5, "Sample", widgets=SAMPLE))
    after = with_overrides(before, INFO, seed=11)
    assert [entry["widgets_values"] for entry in after["nodes"]] == [[11, *SAMPLE[1:]]] * 2
    assert before["nodes"][0]["widgets_values"] == SAMPLE


def test_a_prompt_override_needs_one_prompt_node() -> None:
    with pytest.raises(WorkflowError, match="exactly one prompt node"):
        with_overrides(workflow(a=node(3, "Sample", widgets=SAMPLE)), INFO, prompt="a red ball")
