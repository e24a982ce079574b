"""Whatever is put into the nodes' inputs, a run succeeds or is refused with a message that names one of them."""

import copy
import math
from typing import Any

import pytest
from comfy_client import Client, RunError
from comfy_host import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashforward_core.media import probe

pytestmark = pytest.mark.cpu
Json = dict[str, Any]

# Two latent frames of the embedded model: a run that succeeds takes about a second.
LOAD, POLICY, DEVICES, PLAN, TEXT, ANCHORS, SET, RENDER, SAVE = map(str, range(1, 10))
CLASSES = {
    LOAD: "FlashForwardLoadBackbone",
    POLICY: "FlashForwardKVPolicy",
    DEVICES: "FlashForwardDevices",
    PLAN: "FlashForwardPlan",
    TEXT: "FlashForwardEncodePrompt",
    ANCHORS: "FlashForwardPlanAnchors",
    SET: "FlashForwardSetAnchor",
    RENDER: "FlashForwardRender",
    SAVE: "FlashForwardDecodeVideo",
}
LINKS: dict[str, Json] = {
    PLAN: {"backbone": [LOAD, 0], "devices": [DEVICES, 0], "kv_policy": [POLICY, 0]},
    TEXT: {"backbone": [LOAD, 0]},
    ANCHORS: {"backbone": [LOAD, 0], "plan": [PLAN, 0], "positive": [TEXT, 0]},
    SET: {"anchors": [ANCHORS, 0]},
    RENDER: {"backbone": [LOAD, 0], "plan": [PLAN, 0], "positive": [TEXT, 0], "anchors": [SET, 0]},
    SAVE: {"samples": [RENDER, 0], "backbone": [LOAD, 0]},
}
SMALL: dict[str, Json] = {
    DEVICES: {"devices": "cpu"},
    PLAN: {"width": 192, "height": 128, "seconds": 0.3},
    RENDER: {"reuse_gib": 0.0},
}
LONG = {"seconds": 0.5}  # the most that is run here: an hour of video is a fine value, and takes hours


def widgets(info: Json) -> dict[str, tuple[Any, Json]]:
    """Name every input that has a widget, with its type and options."""
    declared = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    found = {name: (spec[0], spec[1] if len(spec) > 1 else {}) for name, spec in declared.items()}
    kinds = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
    return {name: (kind, more) for name, (kind, more) in found.items() if isinstance(kind, list) or kind in kinds}


def base(info: Json) -> Json:
    """A workflow that runs, with every widget at its default but for the length."""
    prompt: Json = {}
    for node, class_type in CLASSES.items():
        values = {}
        for name, (kind, options) in widgets(info[class_type]).items():
            choices = kind if isinstance(kind, list) else options.get("options", [None])
            values[name] = options.get("default", choices[0])
        prompt[node] = {"class_type": class_type, "inputs": {**values, **SMALL.get(node, {}), **LINKS.get(node, {})}}
    return prompt


def values(name: str, kind: Any, options: Json) -> st.SearchStrategy[Any]:
    """Values at, beside and beyond the bounds, of the right type and of wrong ones."""
    wrong = st.sampled_from([None, "", "x", [], {}, True, -1, 1e308, "\0", "<b>", "9" * 400])
    if isinstance(kind, list) or kind == "COMBO":
        return st.one_of(st.sampled_from(kind if isinstance(kind, list) else options["options"]), wrong)
    if kind == "STRING":
        return st.one_of(st.text(max_size=60), wrong, st.sampled_from(["../../x", "/x", "a | b", "a [0s#] | b"]))
    if kind == "BOOLEAN":
        return st.one_of(st.booleans(), wrong)
    low, high = options["min"], options["max"]
    edges: list[Any] = [low, low - 1, high + 1, 0, -1, 2**70, math.nan, math.inf, str(low), low + 0.5]
    inside = st.integers(low, high) if kind == "INT" else st.floats(low, high)
    if name in LONG:
        edges, inside = [*edges[:1], *edges[2:]], st.floats(low, LONG[name])
    else:
        edges.append(high)
    return st.one_of(st.sampled_from(edges), inside, wrong)


def test_any_input_is_taken_or_refused_by_name(server: Server, object_info: Json) -> None:
    client, workflow = Client(server.url), base(object_info)
    places = [
        (node, name, values(name, kind, options))
        for node, class_type in CLASSES.items()
        for name, (kind, options) in widgets(object_info[class_type]).items()
    ]
    seen = {"taken": 0, "refused": 0}

    @settings(max_examples=45, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        prompt = copy.deepcopy(workflow)
        chosen = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=2, unique=True))
        for place in chosen:
            node, name, drawn = places[place]
            prompt[node]["inputs"][name] = data.draw(drawn, label=f"{CLASSES[node]}.{name}")
        try:
            result = client.run(prompt)
        except RunError as refusal:
            seen["refused"] += 1
            names = [places[place][1] for place in chosen]
            names += ["schedule"] if "preset" in names else []  # what a preset sets is named as it is set
            assert any(name in str(refusal) for name in names), f"{names}: {refusal}"
            return
        seen["taken"] += 1
        for path in result.files(server.output):
            assert path.resolve().is_relative_to(server.output.resolve())
            assert probe(path).frames in (1, 5, 9)

    assert client.run(workflow).files(server.output)
    run()
    assert min(seen.values()) >= 10, f"nearly all went one way: {seen}"


@pytest.mark.parametrize("prefix", ["../outside", "a/../../outside", "/tmp/outside", "..\\..\\outside"])
def test_no_prefix_leads_out_of_the_output_folder(server: Server, object_info: Json, prefix: str) -> None:
    client, prompt = Client(server.url), base(object_info)
    prompt[SAVE]["inputs"]["filename_prefix"] = prefix
    try:
        files = client.run(prompt).files(server.output)
    except RunError as refusal:
        assert "filename_prefix" in str(refusal)
    else:  # on systems where a backslash is a letter
        assert all(path.resolve().is_relative_to(server.output.resolve()) for path in files)
    assert not list(server.output.parent.glob("outside*")) and not list(server.output.parent.parent.glob("outside*"))


SOCKETS = {PLAN: ("backbone", "devices", "kv_policy"), ANCHORS: ("positive", "plan"), SET: ("anchors",)}


@pytest.mark.parametrize("value", [5, "x", {}])
def test_a_value_in_the_place_of_a_link_is_refused_by_name(server: Server, object_info: Json, value: Any) -> None:
    for node, name in ((node, name) for node, names in SOCKETS.items() for name in names):
        prompt = base(object_info)
        prompt[node]["inputs"][name] = value
        with pytest.raises(RunError, match=rf"{name}=.* connect a node to {name}"):
            Client(server.url).run(prompt)
