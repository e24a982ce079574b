"""The plan route over HTTP, and what a run tells the page."""

import asyncio
import json
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from comfy_client import Client, RunError
from comfy_host import Server

from flashforward_core.commands.bench_rows import machine
from flashforward_core.engine.cost import CostKey, CostModel, save_cost
from flashforward_core.engine.placement import lanes_for, place
from flashforward_core.engine.simulate import simulate
from flashforward_core.graph.passes import from_json
from flashforward_core.graph.schedules import build_graph
from flashforward_core.specs import RolloutSpec, VideoShape

from .conftest import NINE_LATENTS_S, change, node_id
from .test_schema import PLAN_DEFAULTS

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
EMBEDDED = {**PLAN_DEFAULTS, "width": 192, "height": 128}
DEVICES = {"class_type": "FlashForwardDevices", "inputs": {"devices": "cpu*2", "layout": "auto", "order": "latency"}}


def ask(server: Server, body: Any) -> tuple[int, Json]:
    """Status and JSON of the route's answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/flashforward/plan", data=data)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            kind, status, text = answer.headers["Content-Type"], answer.status, answer.read()
    except urllib.error.HTTPError as error:
        kind, status, text = error.headers["Content-Type"], error.code, error.read()
    assert kind.startswith("application/json")
    return status, json.loads(text)


def plan(server: Server, **changes: Any) -> Json:
    status, answer = ask(server, {**EMBEDDED, **changes})
    assert status == 200, answer
    return answer


def test_a_plan_knows_which_forwards_run_as_one(server: Server) -> None:
    """One device then goes along diagonals, instead of finishing a chunk before the next."""
    alone, pairs = (plan(server, devices="cpu", batch_diagonal=chosen) for chosen in (False, True))
    orders = [
        [s["task"] for s in answer["timeline"]["spans"] if s["task"].startswith("renderer")]
        for answer in (alone, pairs)
    ]
    assert orders[0][2] == "renderer/denoise/c0/s2" and set(orders[1][1:3]) == {
        "renderer/denoise/c0/s1",
        "renderer/denoise/c1/s0",
    }
    assert alone["timeline"]["rounds"] == pairs["timeline"]["rounds"]
    status, answer = ask(server, {**EMBEDDED, "devices": "cpu", "batch_diagonal": "yes"})
    assert status == 400 and "batch_diagonal='yes' is neither true nor false" in answer["error"]


def test_the_answer_is_the_cores_own_simulation(server: Server) -> None:
    answer = plan(server, devices="cpu*4", layout="interleaved")
    spec = RolloutSpec(shape=VideoShape(width=192, height=128, latent_frames=81))
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"] * 4), layout="interleaved")
    assert from_json(answer["graph"]).tasks == graph.tasks
    expected = simulate(graph, placement=placement).to_json()
    assert answer["timeline"]["spans"] == expected["spans"]
    assert answer["timeline"]["lanes"] == expected["lanes"]


def test_the_papers_numbers_reach_the_page(server: Server) -> None:
    answer = plan(server, devices="cpu*4")
    assert answer["totals"]["rounds"] == 37
    assert answer["totals"]["forwards"]["total"] == 123
    assert answer["totals"]["forwards"]["renderer_commit"] == 0
    assert answer["video"]["anchors"] == list(range(0, 81, 10))
    assert answer["video"]["chunks"][-1] == [78, 81]
    assert "37 rounds" in answer["summary"]
    assert "may get lost" not in answer["summary"]


def test_a_short_video_with_one_anchor_gets_advice(server: Server) -> None:
    assert "use an anchor stride of 4 or less" in plan(server, seconds=NINE_LATENTS_S)["summary"]


def test_kv_is_counted_for_the_backbone_that_is_connected(server: Server) -> None:
    # 30 blocks x (K, V) x dim 1536 x 2 bytes against 8 x 2 x 256 x 2, at the same size
    small, big = (
        plan(server, preset="manual", backbone={"backbone": name})["timeline"]["peak_kv_bytes"]
        for name in ("embedded", "wan_1.3B.safetensors")
    )
    assert big[0] / small[0] == 30 * 1536 / (8 * 256)


def test_given_anchors_are_planned_in_a_run_of_their_own(server: Server) -> None:
    answer = plan(server, given_anchors=True)
    planner, render = answer["planner"]["graph"]["tasks"], answer["graph"]["tasks"]
    assert {task["role"] for task in planner} == {"planner"}
    assert not [task for task in render if task["role"] == "planner" and task["kind"] == "denoise"]
    assert answer["totals"]["rounds"] == answer["planner"]["timeline"]["rounds"] + answer["timeline"]["rounds"]
    assert plan(server)["planner"] is None


def test_a_long_video_is_carried_on_from_its_steady_beginning(server: Server) -> None:
    answer = plan(server, seconds=600.0, devices="cpu*4", layout="interleaved")
    assert len(answer["video"]["chunks"]) == 120
    assert not answer["totals"]["exact"]
    spec = RolloutSpec(shape=VideoShape.from_seconds(600.0, width=192, height=128))
    graph = build_graph(spec, decode=False)
    placement = place(graph, lanes=lanes_for(["cpu"] * 4), layout="interleaved")
    whole = simulate(graph, placement=placement).rounds
    assert whole is not None
    assert answer["totals"]["rounds"] == pytest.approx(
        whole, rel=0.01
    )  # anchor blocks come every 10 chunks, not evenly
    assert answer["totals"]["forwards"]["total"] == pytest.approx(graph.counts()["total"], rel=0.01)


def test_a_stock_checkpoints_preset_is_followed_as_plan_follows_it(server: Server) -> None:
    stock = plan(server, backbone={"backbone": "hiar.safetensors"})
    assert stock["totals"]["schedule"] == "hiar"
    assert "preset hiar" in stock["note"]
    assert stock["totals"]["forwards"]["total"] == 212  # 27 chunks of 4 stages, and 26 · 4 commits
    roles = {"backbone": "hiar.safetensors", "planner_lora": "a.safetensors", "renderer_lora": "b.safetensors"}
    assert plan(server, backbone=roles)["totals"]["schedule"] == "flashforward"
    assert plan(server)["note"] == ""


def test_seconds_are_predicted_once_this_machine_has_been_measured(server: Server) -> None:
    assert server.data is not None
    path = server.data / "cache" / "flashforward" / "costs.json"
    key = CostKey(device=machine("cpu"), model="embedded", resolution="128x192", precision="fp32")
    assert plan(server)["totals"]["predicted_s"] is None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("no costs")
    assert plan(server)["totals"]["predicted_s"] is None  # an odd file takes the seconds away, not the plan
    path.unlink()
    save_cost(path, key=key, cost=CostModel(forward_s=0.5))
    try:
        assert plan(server)["totals"]["predicted_s"] == pytest.approx(123 * 0.5)  # one lane, forward after forward
        assert "predicted time: 61.5 s" in plan(server)["summary"]
        assert plan(server, devices="cpu*4")["totals"]["predicted_s"] is None  # they would share the cores
        estimate = plan(server, seconds=600.0)["totals"]
        assert estimate["predicted_s"] == pytest.approx(estimate["forwards"]["total"] * 0.5, rel=1e-3)  # whole counts
    finally:
        path.unlink()


def commits(answer: Json) -> list[str]:
    return [task["id"] for task in answer["graph"]["tasks"] if task["id"].startswith("renderer/commit")]


def test_a_given_start_is_counted(server: Server) -> None:
    """A chunk of three given frames needs no denoising: it is committed once for each of the four stages' banks."""
    answer = plan(server, start={"frames": 7})
    assert len(commits(answer)) == 2 * 4
    assert answer["totals"]["forwards"]["renderer_denoise"] == (27 - 2) * 4
    assert answer["video"]["start_seconds"] == (4 * 7 - 3) / 16
    assert plan(server)["video"]["start_seconds"] == 0


def test_a_start_is_as_long_as_the_plan_that_makes_it(server: Server) -> None:
    first = {name: EMBEDDED[name] for name in ("width", "height", "fps")} | {"seconds": 5.0}
    start = VideoShape.from_seconds(5.0, width=192, height=128).latent_frames
    answer = plan(server, start={"plan": first})
    assert answer["totals"] == plan(server, start={"frames": start})["totals"]
    assert len(commits(answer)) == start // 3 * 4


def test_a_start_of_unknown_length_is_said_not_to_be_counted(server: Server) -> None:
    answer = plan(server, start={"unknown": True})
    assert answer["video"]["start_seconds"] is None
    assert answer["graph"] == plan(server)["graph"]


def test_a_long_video_that_goes_on_is_carried_on_from_after_its_start(server: Server) -> None:
    answer = plan(server, seconds=200.0, devices="cpu*4", layout="interleaved", start={"frames": 240})
    assert not answer["totals"]["exact"]
    spec = RolloutSpec(shape=VideoShape.from_seconds(200.0, width=192, height=128), start_frames=240)
    graph = build_graph(spec, decode=False)
    assert answer["totals"]["forwards"]["total"] == pytest.approx(graph.counts()["total"], rel=0.01)


def test_a_hard_cut_is_drawn(server: Server) -> None:
    """81 latent frames: the third prompt begins with latent frame 57 (225 video frames), so with chunk 19."""
    text = "noon [7s] | dusk [7s] | night [6s#]"
    tasks = plan(server, prompts={"text": text})["graph"]["tasks"]
    reads = {
        task["index"]: [slot for slot in task["reads"] if slot.startswith("kv/")]
        for task in tasks
        if task["id"].startswith("renderer/denoise") and task["stage"] == 0
    }
    assert reads[18][-1] == "kv/17/0/stage0"
    assert reads[19] == []
    assert reads[20] == ["kv/19/0/stage0"]
    assert reads[5] == [f"kv/{chunk}/0/stage0" for chunk in range(5)]  # no cut there: dusk follows noon


def test_times_in_frames_count_at_the_prompts_rate(server: Server) -> None:
    """28 frames at 8 fps are 3.5 s: video frame 56, nearest to the beginning of latent frame 15 (57)."""
    video = {"text": "noon [28f] | night [#]", "fps": 8}
    tasks = plan(server, prompts=video)["graph"]["tasks"]
    first = [task for task in tasks if task["id"] == "renderer/denoise/c5/s0"]
    assert [slot for slot in first[0]["reads"] if slot.startswith("kv/")] == []


POLICY = {"policy": "window", "budget_frames": 9, "sink_frames": 3, "future_weight": 0.5, "threshold": 0.9}


def test_a_kv_policy_bounds_the_memory_that_is_drawn(server: Server) -> None:
    kept = [
        plan(server, kv_policy={**POLICY, "budget_frames": frames})["timeline"]["peak_kv_bytes"][0]
        for frames in (6, 30)
    ]
    assert kept[0] < kept[1]
    (policy,) = {task["kind"] for task in plan(server, kv_policy=POLICY)["graph"]["tasks"]} - {"denoise", "commit"}
    assert policy == "compact"


def test_a_schedule_without_anchors_has_none(server: Server) -> None:
    answer = plan(server, schedule="self_forcing", given_anchors=True)
    assert answer["video"]["anchors"] == []
    assert answer["planner"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"anchor_stride": 0}, ("anchor_stride=0", "anchor_stride=10")),
        ({"anchor_stride": "10"}, ("anchor_stride='10'", "whole number")),
        ({"seconds": None}, ("seconds=None", "number")),
        ({"seconds": float("nan")}, ("seconds=nan", "3600")),
        ({"width": 100}, ("width=100", "width=96")),
        ({"schedule": "fast"}, ("schedule='fast'", "flashforward")),
        ({"history": 1, "sink": 9}, ("sink=9", "sink <= 3")),
        ({"history": True}, ("history=True",)),
        ({"devices": "cpu*0"}, ("devices='cpu*0'", "cpu*4")),
        ({"devices": "cpu*1000"}, ("1000 lanes", "64")),
        ({"devices": "<b>"}, ("devices='<b>'",)),
        ({"devices": 4}, ("devices=4",)),
        ({"backbone": "embedded"}, ("backbone='embedded'", "JSON object")),
        ({"backbone": {"preset": "best"}}, ("preset='best'", "hiar")),
        ({"preset": "best"}, ("preset='best'", "manual")),
        ({"kv_policy": POLICY["policy"]}, ("kv_policy='window'", "JSON object")),
        ({"kv_policy": {**POLICY, "budget_frames": 0}}, ("budget_frames=0", "1 to 3000")),
        ({"kv_policy": {}}, ("policy=None", "KV Policy")),
        ({"kv_policy": {**POLICY, "sparse": "some"}}, ("sparse='some'", "none, cross, self, both")),
        ({"prompts": "noon"}, ("prompts='noon'", "JSON object")),
        ({"prompts": {"text": "noon [30s] | night"}}, ("prompt 2", "the video ends at")),
        ({"prompts": {"text": "noon", "fps": 0}}, ("fps=0", "1 to 240")),
        ({"start": 7}, ("start=7", "frames")),
        ({"start": {"frames": -1}}, ("start={'frames': -1}", "leave it out")),
        ({"start": {"frames": 81}}, ("start_frames=81", "longer video")),
        ({"start": {"plan": {"seconds": 5.0}}}, ("width=None", "whole number")),
        ({"layout": "round"}, ("layout='round'", "interleaved")),
        ({"devices": "cpu", "layout": "streaming"}, ("devices=1", "streaming")),
    ],
)
def test_what_cannot_work_is_refused_by_name(server: Server, changes: Json, words: tuple[str, ...]) -> None:
    status, answer = ask(server, {**EMBEDDED, **changes})
    assert status == 400
    assert list(answer) == ["error"]
    for word in words:
        assert word in answer["error"]


@pytest.mark.parametrize("body", [b"x", [], 3, b"\xff"])
def test_a_body_that_is_no_plan_is_refused(server: Server, body: Any) -> None:
    status, answer = ask(server, body)
    assert status == 400
    assert "JSON" in answer["error"]


def test_devices_that_this_machine_lacks_are_left_out(server: Server) -> None:
    answer = plan(server, devices="cuda:97,cpu*2")
    assert [lane["device"] for lane in answer["timeline"]["lanes"]] == ["cpu", "cpu"] or answer["timeline"]["lanes"]
    assert len(answer["timeline"]["lanes"]) == 2


async def _events(server: Server, prompt: Json) -> list[tuple[float, str, Any]]:
    """Run a prompt and return (arrival, event, data); progress texts as ``text``."""
    seen: list[tuple[float, str, Any]] = []
    clock = asyncio.get_running_loop().time
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=page") as socket:
        await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        while (await socket.receive_json())["type"] != "feature_flags":
            pass
        await session.post(f"{server.url}/prompt", json={"prompt": prompt, "client_id": "page"})
        while not seen or seen[-1][1] not in ("execution_success", "execution_error"):
            message = await socket.receive(timeout=120)
            if message.type is aiohttp.WSMsgType.TEXT:
                told = json.loads(message.data)
                seen.append((clock(), told["type"], told["data"]))
            elif message.data[:4] == b"\0\0\0\3":  # ComfyUI's progress text
                seen.append((clock(), "text", message.data[8:].decode()))
    return seen


@pytest.fixture(scope="module")
def run(server: Server, quickstart: Json, object_info: Json) -> list[tuple[float, str, Any]]:
    """The events of a 9-latent run on two lanes."""
    from comfy_workflow import to_api

    api = to_api(quickstart, object_info)
    del api[node_id(api, "FlashForwardDecodeVideo")]
    samples = [node_id(api, "FlashForwardRender"), 0]
    api["800"] = {"class_type": "SaveLatent", "inputs": {"samples": samples, "filename_prefix": "events"}}
    api["801"] = DEVICES
    change(api, "FlashForwardPlan", seconds=NINE_LATENTS_S, devices=["801", 0])
    change(api, "FlashForwardRender", seed=4321)  # no other test has made this one
    change(api, "FlashForwardPlanAnchors", seed=4321)
    return asyncio.run(_events(server, api))


def of(run: list[tuple[float, str, Any]], name: str, *, planner: bool = False) -> list[Json]:
    return [data for _, event, data in run if event == name and data["planner_only"] is planner]


def test_spans_tell_every_task_once_on_the_devices_nodes_lanes(run: Any, server: Server) -> None:
    batches = of(run, "flashforward.span")
    spans = [span for batch in batches for span in batch["spans"]]
    expected = plan(server, seconds=NINE_LATENTS_S, devices="cpu*2", given_anchors=True)
    assert sorted(span["task"] for span in spans) == sorted(task["id"] for task in expected["graph"]["tasks"])
    assert {span["lane"] for span in spans} == {0, 1}
    lane_of = {span["task"]: span["lane"] for span in expected["timeline"]["spans"]}
    assert {span["task"]: span["lane"] for span in spans} == lane_of  # it ran where the page drew it
    assert [lane["device"] for lane in batches[0]["lanes"]] == ["cpu", "cpu"]
    assert all(span["end_s"] > span["start_s"] >= 0 for span in spans)
    assert batches[-1]["done"] == batches[-1]["total"] == len(spans)


def test_batches_come_at_most_ten_times_a_second(run: Any) -> None:
    times = [at for at, event, data in run if event == "flashforward.span" and not data["planner_only"]]
    assert len(times) > 2
    # the last batch is sent when the run ends, whenever that is; 20 ms for the way over the socket
    assert all(later - earlier > 0.08 for earlier, later in pairwise(times[:-1]))


def test_pictures_are_small_jpegs_of_every_anchor_and_chunk(run: Any) -> None:
    anchors = [picture for data in of(run, "flashforward.preview", planner=True) for picture in data["pictures"]]
    chunks = [picture for data in of(run, "flashforward.preview") for picture in data["pictures"]]
    assert [(picture["kind"], picture["frame"]) for picture in anchors] == [("anchor", 0)]
    assert sorted((picture["kind"], picture["frame"]) for picture in chunks) == [("chunk", f) for f in (1, 4, 7)]
    assert all(picture["image"].startswith("data:image/jpeg;base64,/9j/") for picture in anchors + chunks)
    assert all(len(picture["image"]) < 10_000 for picture in anchors + chunks)


def test_done_brings_the_measured_timeline_and_the_digest(run: Any) -> None:
    (done,) = of(run, "flashforward.done")
    assert done["timeline"]["source"] == "measured"
    spans = [span for batch in of(run, "flashforward.span") for span in batch["spans"]]
    by_task = {span["task"]: span for span in spans}
    assert {span["task"]: span for span in done["timeline"]["spans"]} == by_task
    assert f"latents sha256 {done['sha256']}" in [
        text[-len(done["sha256"]) - 15 :] for _, event, text in run if event == "text"
    ]


def test_progress_says_where_the_run_is(run: Any) -> None:
    texts = [text for _, event, text in run if event == "text"]
    assert any(text.endswith("anchor block 1/1 · 1 lane") for text in texts)
    assert any(text.endswith("chunk 3/3 · 2 lanes") for text in texts)


def test_a_run_with_a_hard_cut_tells_its_blocks_and_shows_its_anchors(
    server: Server, quickstart: Json, object_info: Json
) -> None:
    """Anchors at 0, 2, 4, 6, 8; the cut at latent frame 2 (5 video frames) makes blocks of one, three and one."""
    from comfy_workflow import to_api

    api = to_api(quickstart, object_info)
    change(api, "FlashForwardPlan", seconds=NINE_LATENTS_S, anchor_stride=2)
    change(
        api, "FlashForwardEncodePrompt", text="a red ball bounces at noon [5f] | a white bird circles at night [4s#]"
    )
    anchors = [node_id(api, "FlashForwardPlanAnchors"), 1]
    del api[node_id(api, "FlashForwardDecodeVideo")], api[node_id(api, "FlashForwardRender")]
    api["800"] = {"class_type": "SaveLatent", "inputs": {"samples": anchors, "filename_prefix": "anchors"}}
    seen = asyncio.run(_events(server, api))
    assert seen[-1][1] == "execution_success"
    assert any(text.endswith("anchor block 3/3 · 1 lane") for _, event, text in seen if event == "text")
    pictures = [picture for data in of(seen, "flashforward.preview", planner=True) for picture in data["pictures"]]
    assert [(picture["kind"], picture["frame"]) for picture in pictures] == [("anchor", n) for n in (0, 2, 4, 6, 8)]


def test_events_name_the_plan_whose_timeline_shows_them(run: Any, quickstart: Json) -> None:
    (plan_node,) = [node["id"] for node in quickstart["nodes"] if node["type"] == "FlashForwardPlan"]
    assert {data["plan"] for data in of(run, "flashforward.span")} == {str(plan_node)}


def test_any_number_of_lanes_gives_the_same_latents(server: Server, latents: Json) -> None:
    client = Client(server.url)
    one = client.run(latents).sha256()
    latents["801"] = {**DEVICES, "inputs": {**DEVICES["inputs"], "devices": "cpu*4"}}
    change(latents, "FlashForwardPlan", devices=["801", 0])
    assert client.run(latents).sha256() == one


def test_devices_that_cannot_be_read_are_refused_before_the_run(client: Client, latents: Json) -> None:
    latents["801"] = {**DEVICES, "inputs": {**DEVICES["inputs"], "devices": "cpu*"}}
    with pytest.raises(RunError, match=r"devices='cpu\*' cannot be read"):
        client.run(change(latents, "FlashForwardPlan", devices=["801", 0]))


def test_the_timeline_is_served_to_the_page(server: Server) -> None:
    for path in sorted(Path(__file__).resolve().parents[2].glob("web/js/*.js")):
        address = f"{server.url}/extensions/ComfyUI-FlashForward/js/{path.name}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.read() == path.read_bytes()
