"""Workflows for Wan models: real nodes and file names, tiny random weights in the place of the real ones."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from comfy_client import Client, Result, RunError
from comfy_host import Server
from comfy_workflow import to_api

from flashforward_core.media import probe

from .conftest import ROOT, change, node_id
from .standins import KREA, LORA, NATIVE, SELF_FORCING, TEXT_ENCODER, VAE

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
WORKFLOWS = ("wan_1_3b_long", "wan_14b_long", "from_native_model")
LOAD, PLAN, RENDER = "FlashForwardLoadBackbone", "FlashForwardPlan", "FlashForwardRender"
NINE_LATENTS = {"width": 64, "height": 48, "seconds": 33 / 16}


def workflow(name: str, object_info: Json) -> Json:
    return to_api(json.loads((ROOT / "workflows" / f"{name}.json").read_text()), object_info)


def runnable(name: str, object_info: Json) -> Json:
    """Cut to 9 small latents, with a random prompt embedding: Wan's text encoder has no small stand-in."""
    api = change(workflow(name, object_info), PLAN, **NINE_LATENTS)
    text = api.pop(node_id(api, "CLIPTextEncode"))["inputs"]["text"]
    del api[node_id(api, "CLIPLoader")]
    api["900"] = {"class_type": "StandInPrompt", "inputs": {"text": text, "width": 4096}}
    return change(api, RENDER, positive=["900", 0])


def latents_only(api: Json) -> Json:
    """End with the latents: nothing is decoded."""
    samples = api.pop(node_id(api, "FlashForwardDecodeVideo"))["inputs"]["samples"]
    del api[node_id(api, "VAELoader")]
    api["901"] = {"class_type": "SaveLatent", "inputs": {"samples": samples, "filename_prefix": "latents"}}
    return api


def said(result: Result, api: Json, class_type: str) -> str:
    """What a node showed."""
    return "\n".join(result.outputs[node_id(api, class_type)]["text"])


@pytest.fixture
def stock(object_info: Json) -> Json:
    """The 1.3B workflow, ending with latents."""
    return latents_only(runnable("wan_1_3b_long", object_info))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_valid_as_it_is_shipped(name: str, client: Client, object_info: Json) -> None:
    """The server takes it and runs it up to the text encoder, whose stand-in is no model."""
    with pytest.raises(RunError, match="CLIPLoader"):
        client.run(workflow(name, object_info))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_names_its_files(name: str, object_info: Json) -> None:
    graph = json.loads((ROOT / "workflows" / f"{name}.json").read_text())
    notes = "\n".join(node["widgets_values"][0] for node in graph["nodes"] if node["type"] == "MarkdownNote")
    main = {"wan_1_3b_long": SELF_FORCING, "wan_14b_long": KREA, "from_native_model": NATIVE}[name]
    for path in (f"diffusion_models/{main}", f"text_encoders/{TEXT_ENCODER}", f"vae/{VAE}"):
        assert f"models/{path}" in notes
    assert graph["groups"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_makes_a_video(name: str, client: Client, server: Server, object_info: Json) -> None:
    api = runnable(name, object_info)
    result = client.run(api)
    (path,) = result.files(server.output)
    info = probe(path)
    assert (info.width, info.height, info.frames) == (64, 48, 33)
    summary = said(result, api, PLAN)
    assert "self_forcing: 14 forwards (0 planner, 14 renderer)" in summary  # 3 chunks · 4 stages + 2 commits


def test_loading_says_what_came_from_where(client: Client, stock: Json) -> None:
    report = said(client.run(change(stock, RENDER, seed=11)), stock, LOAD)
    for words in ("2 blocks of width 128", SELF_FORCING, "original naming", "under 'generator_ema'", "'model.'"):
        assert words in report
    assert "preset self_forcing (the file's name says self_forcing): self_forcing, chunks of 3, 4 steps" in report


def test_loading_names_no_values_that_only_the_plan_decides(client: Client, latents: Json) -> None:
    """The embedded model has FlashForward's roles, with which Plan's own values hold, whatever its schedule is."""
    del latents[node_id(latents, RENDER)]["inputs"]["anchors"]  # the schedule has none
    change(latents, LOAD, attention="math")  # as nothing else here loads it, so that it is not there already
    report = said(client.run(change(latents, PLAN, schedule="self_forcing")), latents, LOAD)
    assert "preset flashforward (" in report
    assert "window" not in report and "chunks of" not in report


def test_flashforward_on_a_stock_checkpoint_gives_way_and_says_why(client: Client, stock: Json) -> None:
    asked = client.run(change(copy.deepcopy(stock), PLAN, schedule="flashforward"))
    summary = said(asked, stock, PLAN)
    assert "self_forcing: 14 forwards" in summary
    assert "flashforward needs role LoRAs" in summary
    assert asked.sha256() == client.run(stock).sha256()
    by_hand = client.run(change(stock, PLAN, schedule="flashforward", preset="manual"))
    assert "warning: flashforward without trained role LoRAs runs" in said(by_hand, stock, PLAN)
    assert by_hand.sha256() != asked.sha256()


def test_the_native_model_and_the_file_give_the_same_latents(client: Client, object_info: Json) -> None:
    native = latents_only(runnable("from_native_model", object_info))
    unet, lora = node_id(native, "UNETLoader"), node_id(native, "LoraLoaderModelOnly")
    with_lora = client.run(native).sha256()
    ours = latents_only(runnable("wan_1_3b_long", object_info))
    change(ours, LOAD, backbone=NATIVE)
    ours["902"] = {
        "class_type": "FlashForwardApplyLoRA",
        "inputs": {
            "backbone": [node_id(ours, LOAD), 0],
            "lora": LORA,
            "strength": 0.0,
            "role": "both",
            "mode": "merged",
        },
    }
    for class_type in (PLAN, RENDER):
        change(ours, class_type, backbone=["902", 0])
    without = client.run(ours)
    assert "1 layers and 0 plain differences matched, every key of the file" in said(
        without, ours, "FlashForwardApplyLoRA"
    )
    del native[lora]
    assert client.run(change(native, "FlashForwardBackboneFromModel", model=[unet, 0])).sha256() == without.sha256()
    assert with_lora != without.sha256()
    assert client.run(change(ours, "FlashForwardApplyLoRA", strength=0.8)).sha256() != without.sha256()


def test_a_name_with_the_other_slashes_is_found(client: Client, stock: Json, models: Path) -> None:
    folder = models / "diffusion_models" / "wan"
    folder.mkdir(exist_ok=True)
    (folder / "copy.pt").write_bytes((models / "diffusion_models" / SELF_FORCING).read_bytes())
    one, other = (client.run(change(stock, LOAD, backbone=name)).sha256() for name in ("wan/copy.pt", "wan\\copy.pt"))
    assert one == other


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"backbone": "gone.safetensors"}, ("backbone='gone.safetensors' is not in", "models/diffusion_models")),
        ({"planner_lora": "gone.safetensors"}, ("planner_lora='gone.safetensors' is not in", "models/loras")),
        ({"backbone": "embedded", "renderer_lora": LORA}, ("do not go with backbone='embedded'",)),
    ],
)
def test_files_that_are_not_there_are_refused_by_name(
    client: Client, stock: Json, inputs: Json, words: tuple[str, ...]
) -> None:
    with pytest.raises(RunError) as refusal:
        client.run(change(stock, LOAD, **inputs))
    for word in words:
        assert word in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 2  # said once, under the server's own headline


def test_a_truncated_file_is_named_and_the_next_run_works(client: Client, stock: Json, models: Path) -> None:
    path = models / "diffusion_models" / SELF_FORCING
    whole = path.read_bytes()
    expected = client.run(change(stock, RENDER, seed=21)).sha256()
    try:
        path.write_bytes(whole[:5000])
        with pytest.raises(RunError, match=rf"{SELF_FORCING} is not a Wan 2\.1 transformer.*found 5000 bytes"):
            client.run(stock)  # the same prompt: that the file changed must be noticed
    finally:
        path.write_bytes(whole)
    assert client.run(stock).sha256() == expected
