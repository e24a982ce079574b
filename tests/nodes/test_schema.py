"""The nodes' inputs and outputs, which saved workflows depend on."""

import json
from pathlib import Path
from typing import Any

import pytest

from flashforward_core.kv_policy import KV_POLICIES, OPTIONS, default_of, has_option

pytestmark = pytest.mark.cpu
Json = dict[str, Any]

SNAPSHOT = Path(__file__).with_name("schema.json")

# Typed from the contract, apart from inputs that later releases add at the end.
INPUTS = {
    "FlashForwardLoadBackbone": "backbone planner_lora renderer_lora preset weight_dtype attention",
    "FlashForwardBackboneFromModel": "model planner_lora renderer_lora preset attention",
    "FlashForwardApplyLoRA": "backbone lora strength role mode",
    "FlashForwardEncodePrompt": "backbone text",
    "FlashForwardPromptSchedule": "text fps clip backbone",
    "FlashForwardPlan": "backbone width height seconds fps anchor_stride schedule anchor_rule history planner_history "
    "chunk_frames sink shift devices kv_policy preset",
    "FlashForwardPlanAnchors": "backbone plan positive seed keep start_image vae",
    "FlashForwardSetAnchor": "anchors seconds lock image samples vae reseed",
    "FlashForwardDevices": "devices layout order decode ray_address kv offload budget_gib batch_diagonal",
    "FlashForwardKVPolicy": "policy budget_frames sink_frames future_weight threshold sparse",
    "FlashForwardRender": "backbone plan positive seed anchors reuse_gib start_samples",
    "FlashForwardRenderVideo": "backbone plan positive seed filename_prefix vae anchors start_samples decoder",
    "FlashForwardDecodeVideo": "samples fps filename_prefix vae backbone decoder",
    "FlashForwardReport": "timeline video plan",
}
OUTPUTS = {
    "FlashForwardLoadBackbone": {"backbone": "FF_BACKBONE"},
    "FlashForwardBackboneFromModel": {"backbone": "FF_BACKBONE"},
    "FlashForwardApplyLoRA": {"backbone": "FF_BACKBONE", "report": "STRING"},
    "FlashForwardEncodePrompt": {"positive": "CONDITIONING"},
    "FlashForwardPromptSchedule": {"positive": "CONDITIONING"},
    "FlashForwardPlan": {"plan": "FF_PLAN", "latent_frames": "INT", "summary": "STRING"},
    "FlashForwardSetAnchor": {"anchors": "FF_ANCHORS"},
    "FlashForwardPlanAnchors": {"anchors": "FF_ANCHORS", "samples": "LATENT"},
    "FlashForwardDevices": {"devices": "FF_DEVICES"},
    "FlashForwardKVPolicy": {"kv_policy": "FF_KV_POLICY"},
    "FlashForwardRender": {"samples": "LATENT", "timeline": "FF_TIMELINE"},
    "FlashForwardRenderVideo": {"video": "VIDEO", "timeline": "FF_TIMELINE"},
    "FlashForwardDecodeVideo": {"video": "VIDEO"},
    "FlashForwardReport": {"image": "IMAGE", "json": "STRING"},
}
PLAN_DEFAULTS = {
    "width": 832,
    "height": 480,
    "seconds": 20.0,
    "fps": 16,
    "anchor_stride": 10,
    "schedule": "flashforward",
    "anchor_rule": "nearest",
    "history": 5,
    "planner_history": 6,
    "chunk_frames": 3,
    "sink": 0,
    "shift": 5.0,
}


def ours(object_info: Json) -> Json:
    return {name: info for name, info in object_info.items() if name.startswith("FlashForward")}


def declared(info: Json) -> list[tuple[str, Any, Json]]:
    """Name, type and options of each input in order."""
    groups = [(group, name) for group in ("required", "optional") for name in info["input_order"].get(group, [])]
    return [(name, *info["input"][group][name]) for group, name in groups]


def frozen(info: Json) -> Json:
    """What a saved workflow depends on: order, types and defaults."""
    inputs = [
        [name, "COMBO" if isinstance(kind, list) else kind, more.get("default")] for name, kind, more in declared(info)
    ]
    return {"inputs": inputs, "outputs": info["output"], "output_names": info["output_name"]}


def test_exactly_the_promised_nodes_are_registered(object_info: Json) -> None:
    assert set(ours(object_info)) == set(INPUTS)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_and_outputs_are_the_contracts(object_info: Json, name: str) -> None:
    info = object_info[name]
    assert [entry[0] for entry in declared(info)] == INPUTS[name].split()
    assert dict(zip(info["output_name"], info["output"], strict=True)) == OUTPUTS[name]
    assert info["category"] == "FlashForward"


def test_plan_has_the_contracts_defaults(object_info: Json) -> None:
    options = {name: more for name, _, more in declared(object_info["FlashForwardPlan"])}
    assert {name: options[name]["default"] for name in PLAN_DEFAULTS} == PLAN_DEFAULTS


def test_kv_policy_has_the_command_line_s_defaults(object_info: Json) -> None:
    widgets = {name: more["default"] for name, _, more in declared(object_info["FlashForwardKVPolicy"])[1:-1]}
    assert widgets.keys() == OPTIONS.keys()
    for policy in KV_POLICIES:
        own = {name: default_of(policy, name) for name in OPTIONS if has_option(policy, name)}
        assert own == {name: widgets[name] for name in own}, policy


def test_saved_workflows_still_fit(object_info: Json) -> None:
    """Widgets are saved by position: inputs may be added at the end, nothing may move or go."""
    for name, before in json.loads(SNAPSHOT.read_text()).items():
        now = frozen(object_info[name])
        assert now["inputs"][: len(before["inputs"])] == before["inputs"], name
        assert now["outputs"][: len(before["outputs"])] == before["outputs"], name


def test_every_node_and_input_explains_itself(object_info: Json) -> None:
    for name, info in ours(object_info).items():
        assert info["description"], name
        assert all(info["output_tooltips"]), name
        for entry, _, options in declared(info):
            assert options.get("tooltip"), f"{name}.{entry}"
