"""The timeline on the Plan node, in a real browser on a real server."""

import base64
import io
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "scripts"))

from comfy_host import Server  # noqa: E402

pytestmark = pytest.mark.browser
Json = dict[str, Any]
NINE_LATENTS_S = 33 / 16


@pytest.fixture(scope="module")
def seen(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Json:
    """What the timeline showed, step by step; the screenshots stay in .out."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or not (HERE / "node_modules").is_dir():
        pytest.skip("no chromium, or no playwright-core (npm ci --prefix tests/browser)")
    graph = json.loads((ROOT / "workflows" / "quickstart.json").read_text())
    (plan,) = [node for node in graph["nodes"] if node["type"] == "FlashForwardPlan"]
    plan["widgets_values"][2] = NINE_LATENTS_S
    plan["size"][1] = 630  # an equal share of its room would be too little for the text
    workflow = tmp_path_factory.mktemp("workflow") / "short.json"
    workflow.write_text(json.dumps(graph))
    folder = ROOT / ".out" / "timeline"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["node", str(HERE / "check_timeline.mjs"), server.url, chromium, str(workflow), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def image(look: Json) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(look["pixels"].split(",")[1]))).convert("RGB")


def test_the_console_has_no_complaint_of_ours(seen: Json) -> None:
    refused = [text for text in seen["messages"] if "/flashforward/plan" in text and "400" in text]
    assert len(refused) == 1  # the browser's own note of the plan that cannot work
    assert [text for text in seen["messages"] if text not in refused] == []


def test_the_plan_is_drawn_without_running(seen: Json) -> None:
    first = seen["first"]
    assert first["error"] == ""
    assert first["anchors"] == [0]
    assert first["tasks"] == 4 + 1 + 12  # Plan Anchors' stages; its block's commit and 3 chunks of 4 stages
    assert first["measured"] == 0
    assert len(image(first).getcolors(maxcolors=1 << 16) or []) > 8


def test_a_stride_change_redraws_it_and_back_again(seen: Json) -> None:
    assert seen["denser"]["anchors"] == [0, 2, 4, 6, 8]
    assert seen["denser"]["pixels"] != seen["first"]["pixels"]
    assert seen["again"]["anchors"] == [0]
    assert seen["again"]["pixels"] == seen["first"]["pixels"]


def test_a_plan_that_cannot_work_says_so_on_the_timeline(seen: Json) -> None:
    assert "sink=30" in seen["wrong"]["error"]
    assert "sink <= 15" in seen["wrong"]["error"]
    assert seen["four"]["error"] == ""


def test_it_follows_the_devices_node(seen: Json) -> None:
    assert (seen["first"]["lanes"], seen["four"]["lanes"], seen["two"]["lanes"]) == (1, 4, 2)
    assert seen["four"]["rounds"] < seen["two"]["rounds"] < seen["first"]["rounds"]
    assert seen["four"]["minimum"] > seen["first"]["minimum"]
    assert all(seen[name]["height"] >= seen[name]["minimum"] for name in ("first", "four", "ran"))


def test_a_devices_node_that_is_off_does_not_count(seen: Json) -> None:
    assert seen["off"] == [1, 1]


def test_hovering_a_chunk_lights_up_what_it_reads(seen: Json) -> None:
    assert (seen["hover"]["hover"]["kind"], seen["hover"]["hover"]["index"]) == ("chunk", 2)
    assert seen["hover"]["pixels"] != seen["two"]["pixels"]


def test_a_run_fills_it_live(seen: Json) -> None:
    counts = seen["live"]
    assert all(before < after for before, after in pairwise(counts))
    # Not only when it has ended; how often in between depends on how busy the machine is.
    assert any(0 < count < seen["ran"]["tasks"] for count in counts), counts
    assert seen["ran"]["measured"] == seen["ran"]["tasks"]
    assert seen["ran"]["states"] == ["done", "done"]
    assert seen["ran"]["pictures"] == 3


def test_the_result_plays_in_the_page(seen: Json) -> None:
    video = seen["video"]
    assert (video["width"], video["height"]) == (192, 128)
    assert video["length"] == pytest.approx(NINE_LATENTS_S, abs=0.1)  # containers round times
    assert video["at"] > 0


def test_expert_inputs_are_folded_away_and_saved_all_the_same(seen: Json) -> None:
    folded, unfolded = seen["folded"], seen["unfolded"]
    assert "anchor_stride" in folded["shown"]
    assert set(unfolded["shown"]) - set(folded["shown"]) >= {"schedule", "history", "sink", "shift", "preset"}
    assert (folded["state"], unfolded["state"]) == (False, True)
    assert folded["values"] == unfolded["values"] == seen["first"]["values"]


def test_the_plans_text_fits_on_the_node(seen: Json) -> None:
    text = seen["text"]
    assert text["lines"] >= 6
    assert text["needs"] <= text["has"]  # nothing to scroll to
    assert text["bottom"] <= text["node"]


def test_it_follows_the_theme(seen: Json) -> None:
    dark, light = (sum(image(seen[name]).getpixel((2, 40))) / 3 for name in ("ran", "light"))  # type: ignore[arg-type]
    assert dark < 80 < light


def test_it_stays_sharp_when_zoomed(seen: Json) -> None:
    assert seen["near"]["density"] == pytest.approx(2 * seen["light"]["density"], rel=0.15)


def test_it_is_saved_as_png_json_and_trace(seen: Json) -> None:
    png, plan, trace = (Path(path) for path in seen["files"])
    assert Image.open(png).format == "PNG"
    saved = json.loads(plan.read_text())
    assert len(saved["measured"]["render"]["spans"]) == len(saved["plan"]["graph"]["tasks"])
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "renderer/denoise/c2/s3" in names


def test_another_plan_drops_what_was_measured(seen: Json) -> None:
    assert seen["changed"]["measured"] == 0
    assert seen["changed"]["states"] == [None, None]


def test_what_nodes_only_show_is_not_saved(seen: Json) -> None:
    """Values are saved by position: a shown text would land in an input that a later version appends."""
    assert seen["first"]["values"][:12] == [192, 128, NINE_LATENTS_S, 16, 10, "flashforward", "nearest", 5, 6, 3, 0, 5]
    assert seen["saved"]["before"] == seen["saved"]["after"]
