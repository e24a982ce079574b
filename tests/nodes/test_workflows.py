"""The workflows that need no file: each runs in the real server, cut to nine latents and fewer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from comfy_client import Client
from comfy_host import Server
from comfy_workflow import to_api

from flashforward_core.media import probe

from .conftest import NINE_LATENTS_S, ROOT

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
FILES = {path.stem: path for path in sorted((ROOT / "workflows").glob("*.json"))}
LOAD, PLAN, DECODE = "FlashForwardLoadBackbone", "FlashForwardPlan", "FlashForwardDecodeVideo"


def editor(name: str) -> Json:
    return json.loads(FILES[name].read_text())  # type: ignore[no-any-return]


def is_embedded(workflow: Json) -> bool:
    return any(node["type"] == LOAD and node["widgets_values"][0] == "embedded" for node in workflow["nodes"])


RUN_ELSEWHERE = ("compare_policies",)
"""Longer, so that its policies have something to do: test_policies.py."""
EMBEDDED = tuple(name for name in FILES if is_embedded(editor(name)) and name not in RUN_ELSEWHERE)


def nodes(api: Json, class_type: str) -> dict[str, Json]:
    return {key: node for key, node in api.items() if node["class_type"] == class_type}


def shrink(api: Json) -> Json:
    """Cut all times in proportion, so that the longest plan has nine latents; anchors get as much closer."""
    factor = NINE_LATENTS_S / max(node["inputs"]["seconds"] for node in nodes(api, PLAN).values())
    for node in api.values():
        inputs = node["inputs"]
        if "seconds" in inputs:
            inputs["seconds"] *= factor
        if "anchor_stride" in inputs:
            inputs["anchor_stride"] = max(1, round(inputs["anchor_stride"] * factor))
        if isinstance(inputs.get("text"), str):
            inputs["text"] = re.sub(
                r"([\d.]+)s(?=#?\])", lambda found: f"{float(found[1]) * factor:.3f}s", inputs["text"]
            )
    return api


def latents(seconds: float) -> int:
    """The length that Plan makes of a time: the nearest 4n+1 frames at 16 a second."""
    return 1 + round((seconds * 16 - 1) / 4)


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_workflow_runs(name: str, client: Client, server: Server, object_info: Json) -> None:
    """Every plan becomes a video of its length; the embedded model's only size is 192x128."""
    api = shrink(to_api(editor(name), object_info))
    made = [probe(path) for path in client.run(api).files(server.output) if path.suffix == ".mp4"]
    wanted = sorted(4 * latents(node["inputs"]["seconds"]) - 3 for node in nodes(api, PLAN).values())
    assert sorted(video.frames for video in made) == wanted
    assert {(video.width, video.height) for video in made} == {(192, 128)}
    assert wanted[-1] == 33


@pytest.mark.parametrize("name", FILES)
def test_a_workflow_has_notes_groups_and_a_thumbnail(name: str) -> None:
    workflow = editor(name)
    assert any(node["type"] == "MarkdownNote" for node in workflow["nodes"])
    assert workflow["groups"]
    assert Path(FILES[name]).with_suffix(".jpg").read_bytes()[:3] == b"\xff\xd8\xff"  # how a JPEG begins
