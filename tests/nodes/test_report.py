"""The Report node in a real server."""

import io
import json
import urllib.request
from typing import Any

import pytest
from comfy_client import Client, Result, RunError
from comfy_host import Server
from comfy_workflow import to_api
from PIL import Image

from flashforward_core.media import read_frames
from flashforward_core.metrics import measure

from .conftest import NINE_LATENTS_S, ROOT, change, node_id

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
LANES = {"class_type": "FlashForwardDevices", "inputs": {"devices": "cpu*2", "layout": "auto", "order": "latency"}}


def node(class_type: str, **inputs: Any) -> Json:
    return {"class_type": class_type, "inputs": inputs}


@pytest.fixture(scope="module")
def reported(server: Server, quickstart: Json, object_info: Json) -> Result:
    """A 9-latent video on two lanes, with a report of everything and one of the frames as ComfyUI's own video."""
    api = to_api(quickstart, object_info)
    plan, render, decode = (node_id(api, f"FlashForward{name}") for name in ("Plan", "Render", "DecodeVideo"))
    api["900"] = LANES
    change(api, "FlashForwardPlan", seconds=NINE_LATENTS_S, devices=["900", 0])
    change(api, "FlashForwardRender", seed=777)  # no other test's, whose result would be reused
    api["901"] = node("FlashForwardReport", timeline=[render, 1], video=[decode, 0], plan=[plan, 0])
    api["902"] = node("PreviewAny", source=["901", 1])
    api["903"] = node("GetVideoComponents", video=[decode, 0])
    api["904"] = node("CreateVideo", images=["903", 0], fps=16.0)
    api["905"] = node("FlashForwardReport", video=["904", 0])
    api["906"] = node("PreviewAny", source=["905", 1])
    return Client(server.url).run(api)


@pytest.fixture(scope="module")
def numbers(reported: Result) -> Json:
    return json.loads(reported.outputs["902"]["text"][0])  # type: ignore[no-any-return]


def picture(server: Server, reported: Result) -> Image.Image:
    (shown,) = reported.outputs["901"]["images"]
    address = f"{server.url}/view?filename={shown['filename']}&type={shown['type']}&subfolder={shown['subfolder']}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return Image.open(io.BytesIO(answer.read())).convert("RGB")


def test_the_timeline_in_numbers(numbers: Json) -> None:
    timeline = numbers["timeline"]
    ends = [span["end_s"] for span in timeline["spans"]]
    assert timeline["length_s"] == max(ends)
    assert timeline["tasks"] == 13  # one commit, and three chunks of four stages
    assert set(timeline["mean_s"]) == {"planner/commit", "renderer/denoise"}
    for lane, busy in enumerate(timeline["busy"]):
        worked = sum(span["end_s"] - span["start_s"] for span in timeline["spans"] if span["lane"] == lane)
        assert busy == pytest.approx(worked / max(ends))
    assert len(timeline["busy"]) == 2


def test_the_video_in_numbers(numbers: Json, reported: Result, server: Server) -> None:
    (path,) = reported.files(server.output)
    expected = measure(read_frames(path))
    video = numbers["video"]
    assert (video["frames"], video["flicker"], video["motion"]) == (33, expected.flicker, expected.motion)
    assert len(video["curves"]["change"]) == 32
    mean = sum(video["curves"]["change"]) / 32
    assert 255 * (1 - video["flicker"]) == pytest.approx(mean, abs=1e-3)  # curves are rounded to four decimals
    assert video["seam_chunk"]["count"] == 2  # at the latent frames 3 and 6; the only anchor is at 0


def test_without_a_plan_no_seams_are_claimed(reported: Result, numbers: Json) -> None:
    alone = json.loads(reported.outputs["906"]["text"][0])
    assert "timeline" not in alone
    assert not [name for name in alone["video"] if name.startswith("seam")]
    # the same frames, from the file and from tensors
    assert alone["video"]["flicker"] == pytest.approx(numbers["video"]["flicker"], abs=1e-9)


def test_the_picture_shows_every_span_in_its_lanes_row(server: Server, reported: Result, numbers: Json) -> None:
    image, timeline = picture(server, reported), numbers["timeline"]
    left, right, top, row = 110, 1180, 34, 30  # the plot's margins
    stage_colours = [(0x2C, 0x57, 0x96), (0x2C, 0x86, 0xA8), (0x2F, 0x92, 0x77), (0x6F, 0x9F, 0x2A)]
    for span in timeline["spans"]:
        middle = (span["start_s"] + span["end_s"]) / 2 / timeline["length_s"]
        found = image.getpixel((round(left + middle * (right - left)), top + span["lane"] * row + 12))
        if "renderer" in span["task"]:
            assert found == stage_colours[int(span["task"][-1])], span["task"]


def test_the_workflow_for_several_devices_reports_on_them(server: Server, object_info: Json) -> None:
    workflow = json.loads((ROOT / "workflows" / "several_devices.json").read_text())
    api = to_api(workflow, object_info)
    change(api, "FlashForwardPlan", seconds=NINE_LATENTS_S)
    change(api, "FlashForwardDevices", devices="cpu*4")
    change(api, "FlashForwardRender", seed=778)  # no other test's, whose result would be reused
    api["950"] = node("PreviewAny", source=[node_id(api, "FlashForwardReport"), 1])
    told = json.loads(Client(server.url).run(api).outputs["950"]["text"][0])
    assert {span["lane"] for span in told["timeline"]["spans"]} == {0, 1, 2, 3}
    assert told["video"]["frames"] == 33


def test_a_report_on_nothing_is_refused(client: Client) -> None:
    with pytest.raises(RunError, match="timeline and video are both unconnected"):
        client.run({"1": node("FlashForwardReport")})
