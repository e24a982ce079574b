"""The editor's form of a workflow to the server's."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import headless  # noqa: E402
from comfy_client import Client, RunError, load_workflow  # noqa: E402
from comfy_host import Server, free_port  # noqa: E402
from comfy_workflow import WorkflowError, to_api, widget_slots, with_overrides  # noqa: E402

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


def test_reroutes_in_a_circle_are_named() -> None:
    circle = workflow(
        a=node(1, "Reroute", widgets=[], links={"": 3}),
        b=node(3, "Sample", widgets=SAMPLE, links={"model": 1}),
        c=node(4, "Load", widgets=[]),
    )
    circle["links"][2] = [3, 1, 0, 1, 0, "MODEL"]
    with pytest.raises(WorkflowError, match="in a circle"):
        to_api(circle, INFO)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "type", "link", "x"]), inner),
    max_leaves=6,
)


@given(data=st.data())
def test_a_crafted_workflow_is_converted_or_refused(data: st.DataObject) -> None:
    """One part of a real workflow is replaced by anything; the answer is a workflow or an error of ours."""
    whole = workflow(
        a=node(1, "Reroute", widgets=[], links={"": 3}),
        b=node(3, "Sample", widgets=list(SAMPLE), links={"model": 1}),
        c=node(4, "Load", widgets=[], mode=data.draw(st.sampled_from([0, 2, 4]))),
    )
    whole["links"][2] = [3, 4, 0, 1, 0, "MODEL"]
    where: Any = whole
    while True:
        key = data.draw(st.sampled_from(list(where) if isinstance(where, dict) else list(range(len(where)))))
        if not where[key] or not isinstance(where[key], dict | list) or data.draw(st.booleans()):
            where[key] = data.draw(junk)
            break
        where = where[key]
    for convert in (to_api, lambda w, info: with_overrides(w, info, seed=1)):
        try:
            assert isinstance(convert(whole, INFO), dict)
        except WorkflowError as refusal:
            assert str(refusal)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "\ufffe", '{"nodes": 1', "7"])
def test_a_file_that_holds_no_workflow_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(text)
    with pytest.raises(RunError, match=re.escape(f"cannot read the workflow {file}")):
        load_workflow(Client("http://127.0.0.1:1"), file)


@pytest.mark.parametrize("name", ["quickstart", "several_devices"])
def test_a_workflow_is_converted_for_the_api(name: str, server: Server, object_info: Json, tmp_path: Path) -> None:
    """What the command writes is what the server takes: every input of every node is there, with the new seed."""
    file, out = ROOT / "workflows" / f"{name}.json", tmp_path / "api.json"
    assert headless.main(["api", str(file), "--server", server.url, "--seed", "5", "--out", str(out)]) == 0
    api = json.loads(out.read_text())
    assert api == to_api(with_overrides(json.loads(file.read_text()), object_info, seed=5), object_info)
    assert {node["inputs"]["seed"] for node in api.values() if "seed" in node["inputs"]} == {5}


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "workflows" / "quickstart.json"
    assert headless.main(["run", str(file), "--server", f"http://127.0.0.1:{free_port()}"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("headless: ") and shown.count("\n") == 1
