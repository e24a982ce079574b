"""Workflows through the real server: a video comes out, the same one again, and bad input is refused by name."""

import copy
import io
import itertools
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfy_client import Client, Result, RunError
from comfy_host import Server
from PIL import Image

from flashforward_core.media import probe, read_frames

from .conftest import change, node_id

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
RENDER, PLAN = "FlashForwardRender", "FlashForwardPlan"
NINE_LATENTS_FRAMES = 33  # 4·9 − 3
LAST_PICTURED = 28  # the last of the four frames of latent frame 7, the middle of the last chunk
INTERRUPT_S = 20.0  # one forward on a busy machine, with a wide margin; the whole run takes minutes


def forget(client: Client) -> None:
    """Drop the server's cached results, so that nodes really run again."""
    client.request("/free", {"unload_models": True, "free_memory": True})
    time.sleep(4.0)  # the server frees when it is next idle, a second later, or more on a busy machine


def executed(result: Result, node: str) -> bool:
    cached = [data["nodes"] for name, data in result.status["messages"] if name == "execution_cached"]
    return all(node not in nodes for nodes in cached)


@pytest.fixture(scope="module")
def first(server: Server, quickstart: Json, object_info: Json) -> Result:
    """A 9-latent run whose digest the other tests compare with."""
    from comfy_workflow import to_api

    api = change(to_api(quickstart, object_info), PLAN, seconds=NINE_LATENTS_FRAMES / 16)
    return Client(server.url).run(api, workflow=quickstart)


def test_a_run_writes_a_playable_mp4_with_its_workflow(first: Result, server: Server, quickstart: Json) -> None:
    (path,) = first.files(server.output)
    info = probe(path)
    assert (info.width, info.height, info.frames, info.codec) == (192, 128, NINE_LATENTS_FRAMES, "h264")
    assert float(info.fps) == 16.0
    assert sum(1 for _ in read_frames(path)) == NINE_LATENTS_FRAMES
    assert json.loads(info.metadata["workflow"]) == quickstart
    assert "FlashForwardRender" in info.metadata["prompt"]


def test_nothing_of_a_scene_shines_through_a_hard_cut(client: Client, prompt: Json, server: Server) -> None:
    """The cut after a second falls into latents 3 to 5; the scene begins with the next chunk, at video frame 21."""
    day, night = "a red ball bounces over green hills at noon", "a blue boat drifts left over snowy hills at night"
    change(prompt, "FlashForwardEncodePrompt", text=f"{day} [1s] | {night} [1s#]")
    change(prompt, PLAN, anchor_stride=3)  # so that both scenes have anchors
    (path,) = client.run(prompt).files(server.output)
    light = [float(frame.mean()) for frame in read_frames(path)]
    assert len(light) == NINE_LATENTS_FRAMES
    assert light[20] - light[21] > 60  # of 255
    assert abs(light[21] - light[-1]) < 10


def test_a_blocks_anchors_are_shown_side_by_side(client: Client, prompt: Json) -> None:
    forget(client)
    change(prompt, PLAN, anchor_stride=3)  # anchors at 0, 3 and 6, in one block
    previews: list[bytes] = []
    client.run(prompt, on_progress=lambda *_: None, on_preview=previews.append)
    shapes = {round(width / height, 1) for width, height in (Image.open(io.BytesIO(p)).size for p in previews)}
    assert shapes == {1.5, 4.5}  # chunks of 192x128, and three of those in a row


def test_progress_and_previews_reach_the_page(client: Client, prompt: Json, server: Server) -> None:
    forget(client)
    steps: dict[str, list[tuple[int, int]]] = {}
    previews: list[bytes] = []
    result = client.run(
        prompt,
        on_progress=lambda node, done, total: steps.setdefault(node, []).append((done, total)),
        on_preview=previews.append,
    )
    for class_type in ("FlashForwardPlanAnchors", RENDER, "FlashForwardDecodeVideo"):
        seen = steps[node_id(prompt, class_type)]
        assert all(before[0] <= after[0] for before, after in pairwise(seen)), class_type
        assert seen[-1][0] == seen[-1][1], class_type
    assert previews
    assert all(image.startswith(b"\xff\xd8") for image in previews)  # JPEG
    (path,) = result.files(server.output)
    shown, true = (as_seen(picture) for picture in (io.BytesIO(previews[-1]), frame_of(path, LAST_PICTURED)))
    # Of 255: half as fine and compressed is 7.5; without what came before it is 16, by a projection of the latents 20.
    difference = np.abs(shown - true).mean()
    assert difference < 12


def as_seen(picture: Any) -> np.ndarray:
    """A picture's colours in 8-pixel squares, where fine detail does not count [16, 24, 3]."""
    return np.asarray(Image.open(picture).convert("RGB").resize((24, 16), Image.Resampling.BOX), np.float64)


def frame_of(path: Path, index: int) -> io.BytesIO:
    file = io.BytesIO()
    frame = next(itertools.islice(read_frames(path), index, None))
    Image.fromarray(np.asarray(frame)[0]).save(file, "PNG")
    file.seek(0)
    return file


def test_the_same_seed_gives_the_same_latents_again(client: Client, latents: Json, first: Result) -> None:
    forget(client)
    again = client.run(change(latents, "SaveLatent", filename_prefix="again"))
    assert executed(again, node_id(latents, RENDER))
    assert again.sha256() == first.sha256()


@pytest.mark.parametrize(
    ("class_type", "inputs"),
    [
        ("FlashForwardEncodePrompt", {"text": "a white bird circles over snowy hills at night"}),
        (RENDER, {"seed": 12345}),
        ("FlashForwardPlanAnchors", {"seed": 12345}),
    ],
)
def test_another_prompt_or_seed_gives_other_latents(
    client: Client, latents: Json, first: Result, class_type: str, inputs: Json
) -> None:
    assert client.run(change(latents, class_type, **inputs)).sha256() != first.sha256()


def test_a_change_of_the_render_does_not_run_the_planner_again(client: Client, latents: Json) -> None:
    client.run(latents)
    again = client.run(change(latents, RENDER, seed=99))
    assert executed(again, node_id(latents, RENDER))
    assert not executed(again, node_id(latents, "FlashForwardPlanAnchors"))


def test_anchors_that_the_render_plans_itself_give_the_same_video(client: Client, latents: Json, first: Result) -> None:
    del latents[node_id(latents, RENDER)]["inputs"]["anchors"]
    assert client.run(latents).sha256() == first.sha256()


def test_a_changed_model_file_is_noticed(client: Client, latents: Json, assets: Path) -> None:
    load = node_id(latents, "FlashForwardLoadBackbone")
    client.run(latents)
    assert not executed(client.run(change(latents, RENDER, seed=1)), load)
    os.utime(assets / "vae" / "config.json")
    assert executed(client.run(change(latents, RENDER, seed=2)), load)


def test_a_missing_model_file_names_itself(client: Client, prompt: Json, assets: Path) -> None:
    path = assets / "vae" / "diffusion_pytorch_model.safetensors"
    away = path.rename(path.with_suffix(".away"))
    try:
        with pytest.raises(RunError, match=f"{path} is missing"):
            client.run(prompt)
    finally:
        away.rename(path)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"width": 100}, ("width=100", "16", "width=96")),
        ({"height": 0}, ("height=0", "16", "height=16")),
        ({"seconds": 0}, ("seconds=0", "use seconds=")),
        ({"seconds": 1e6}, ("seconds=1e+06", "3600")),
        ({"fps": 0}, ("fps=0", "fps=16")),
        ({"anchor_stride": 0}, ("anchor_stride=0", "below 1", "anchor_stride=10")),
        ({"history": -1}, ("history=-1", "history=5")),
        ({"history": 1, "sink": 9}, ("sink=9", "sink <= 3")),
        ({"schedule": "fast"}, ("schedule='fast'", "flashforward")),
        ({"anchor_rule": "any"}, ("anchor_rule='any'", "nearest")),
        ({"width": 832}, ("width=832", "192x128 only", "width=192")),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(
    client: Client, prompt: Json, inputs: Json, words: tuple[str, ...]
) -> None:
    with pytest.raises(RunError) as refusal:
        client.run(change(prompt, PLAN, **inputs))
    for word in words:
        assert word in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 2  # said once, under the server's own headline


def test_a_video_needs_something_to_decode_with(client: Client, prompt: Json) -> None:
    del prompt[node_id(prompt, "FlashForwardDecodeVideo")]["inputs"]["backbone"]
    with pytest.raises(RunError, match="vae and backbone are both unconnected"):
        client.run(prompt)


def test_an_image_latent_is_refused_by_name(client: Client, prompt: Json) -> None:
    prompt["900"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 192, "height": 128, "batch_size": 1}}
    with pytest.raises(RunError, match="samples has 4 axes"):
        client.run(change(prompt, "FlashForwardDecodeVideo", samples=["900", 0]))


def interrupted_after(client: Client, prompt: Json, class_type: str, *, tasks: int = 3) -> float:
    """Run, interrupt in the middle of a node, and return the seconds that stopping took."""
    pressed: list[float] = []

    def press(node: str, done: int, total: int) -> None:
        if node == node_id(prompt, class_type) and tasks <= done < total and not pressed:
            client.interrupt()
            pressed.append(time.monotonic())

    with pytest.raises(RunError, match=rf"interrupted in node .* \({class_type}\)"):
        client.run(prompt, on_progress=press)
    return time.monotonic() - pressed[0]


def test_interrupt_stops_a_render_and_the_next_run_is_right(client: Client, latents: Json, first: Result) -> None:
    long = change(copy.deepcopy(latents), PLAN, seconds=60.0)
    assert interrupted_after(client, long, RENDER) < INTERRUPT_S
    forget(client)
    assert client.run(latents).sha256() == first.sha256()


def test_interrupt_of_a_long_render_leaves_a_video_that_plays(client: Client, server: Server, latents: Json) -> None:
    """601 latent frames run in parts. Two chunks and the anchors that they read are done after 20 tasks, at most."""
    before = set(server.output.rglob("*.mp4"))
    interrupted_after(client, change(copy.deepcopy(latents), PLAN, seconds=150.0), RENDER, tasks=20)
    (path,) = set(server.output.rglob("*.mp4")) - before
    frames = probe(path).frames
    assert frames % 12 == 9 and 9 <= frames < 100  # whole chunks
    assert sum(1 for _ in read_frames(path)) == frames


def test_interrupt_while_decoding_leaves_no_file(client: Client, server: Server, prompt: Json) -> None:
    before = set(server.output.rglob("*"))
    change(prompt, PLAN, seconds=5.0)
    assert interrupted_after(client, prompt, "FlashForwardDecodeVideo") < INTERRUPT_S
    assert set(server.output.rglob("*")) == before
