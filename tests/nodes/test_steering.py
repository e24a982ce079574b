"""Steering through the real server: prompts over time, and anchors that are replaced, locked and planned again."""

import copy
import time
from typing import Any

import pytest
from comfy_client import Client, Result, RunError

from .conftest import change, node_id

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
RENDER, PLAN, PLAN_ANCHORS, PROMPT = (
    "FlashForwardRender",
    "FlashForwardPlan",
    "FlashForwardPlanAnchors",
    "FlashForwardEncodePrompt",
)
NOON = "a red balloon drifts right over green hills at noon"
NIGHT = "a red balloon drifts right over green hills at night"


def forget(client: Client) -> None:
    """Drop the server's cached results and the backbone with all that it keeps."""
    client.request("/free", {"unload_models": True, "free_memory": True})
    time.sleep(4.0)  # the server frees when it is next idle, a second later, or more on a busy machine


def ran(result: Result, node: str) -> bool:
    """Whether a node was executed, not taken from the server's cache."""
    cached = [data["nodes"] for name, data in result.status["messages"] if name == "execution_cached"]
    return all(node not in nodes for nodes in cached)


def reused(result: Result, prompt: Json) -> int:
    """Chunks that the render took from earlier ones, as the node shows them."""
    (count,) = result.outputs[node_id(prompt, RENDER)]["reused_chunks"]
    return int(count)


def shown(result: Result, node: str) -> str:
    return "\n".join(result.outputs[node]["text"])


def set_anchor(prompt: Json, **inputs: Any) -> Json:
    """Put a Set Anchor between Plan Anchors and the render."""
    changed = copy.deepcopy(prompt)
    anchors = changed[node_id(changed, RENDER)]["inputs"]["anchors"]
    values = {"anchors": anchors, "seconds": 0.0, "lock": True, **inputs}
    changed["700"] = {"class_type": "FlashForwardSetAnchor", "inputs": values}
    return change(changed, RENDER, anchors=["700", 0])


def without_reuse(prompt: Json) -> Json:
    return change(copy.deepcopy(prompt), RENDER, reuse_gib=0.0)


@pytest.fixture
def small(latents: Json) -> Json:
    """9 latents with anchors at latent frames 0, 2, 4, 6, 8: blocks of 3 and 2."""
    return change(latents, PLAN, anchor_stride=2)


def test_stride_10_5_10_gives_the_first_result_again(client: Client, latents: Json) -> None:
    """In one session of the server, with nothing reused but what it caches itself; that is the last run."""
    change(latents, RENDER, reuse_gib=0.0)
    digests = []
    for stride in (10, 5, 10):
        result = client.run(change(latents, PLAN, anchor_stride=stride))
        assert not digests or ran(result, node_id(latents, RENDER))
        digests.append(result.sha256())
    assert digests[0] == digests[2]
    assert digests[0] != digests[1]


def test_an_anchor_from_a_picture_renders_again_only_what_reads_it(client: Client, small: Json) -> None:
    before = client.run(small)
    picture = set_anchor(small, seconds=2.0, image=["710", 0])
    picture["710"] = {
        "class_type": "EmptyImage",
        "inputs": {"width": 300, "height": 100, "batch_size": 1, "color": 0x3366CC},
    }
    after = client.run(picture)
    assert "anchor 5 of 5 at 2.00 s (latent frame 8): from the picture, locked" in shown(after, "700")
    assert after.sha256() != before.sha256()
    assert reused(after, picture) == 1  # the first chunk reads the first block alone
    assert "reused 1 of 3 chunks" in shown(after, node_id(picture, RENDER))
    assert client.run(without_reuse(picture)).sha256() == after.sha256()


def test_free_gives_the_kept_memory_back(client: Client, small: Json) -> None:
    client.run(small)
    assert reused(client.run(set_anchor(small, seconds=2.0, reseed=4)), small) == 1
    forget(client)
    assert reused(client.run(set_anchor(small, seconds=2.0, reseed=5)), small) == 0


def test_an_anchor_set_to_its_own_latents_changes_nothing(client: Client, small: Json) -> None:
    before = client.run(small)
    same = set_anchor(small, seconds=1.0, samples=[node_id(small, PLAN_ANCHORS), 1])
    after = client.run(same)
    assert "anchor 3 of 5 at 1.00 s (latent frame 4): from samples, locked" in shown(after, "700")
    # The latents make the way to ComfyUI's units and back in float32, which may cost their last bit.
    assert reused(after, same) in (0, 3)
    assert (after.sha256() == before.sha256()) == (reused(after, same) == 3)


def test_one_anchor_is_planned_again_from_another_seed(client: Client, small: Json) -> None:
    seed = small[node_id(small, PLAN_ANCHORS)]["inputs"]["seed"]
    first = client.run(set_anchor(small, seconds=2.0, reseed=seed + 1, lock=False))
    assert f"planned again with seed {seed + 1}, not locked" in shown(first, "700")
    assert first.sha256() != client.run(small).sha256()


def test_locked_anchors_stay_when_the_others_are_planned_again(client: Client, small: Json) -> None:
    other = set_anchor(small, seconds=0.0, reseed=77)
    again = copy.deepcopy(other[node_id(other, PLAN_ANCHORS)])
    again["inputs"] |= {"keep": ["700", 0]}
    other["720"] = again
    change(other, RENDER, anchors=["720", 0])
    assert client.run(other).sha256() != client.run(set_anchor(small, seconds=0.0, reseed=77)).sha256()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"seconds": 50.0}, "seconds=50 is outside the video, 0 to 2.0625 s"),
        ({"samples": ["800x", 0], "reseed": 3}, "use only one of image, samples and reseed"),
    ],
)
def test_an_anchor_that_cannot_be_set_is_refused_by_name(client: Client, small: Json, inputs: Json, words: str) -> None:
    if "samples" in inputs:
        inputs = {**inputs, "samples": [node_id(small, PLAN_ANCHORS), 1]}
    with pytest.raises(RunError, match=words):
        client.run(set_anchor(small, **inputs))


def test_prompts_over_time_change_the_video_from_the_switch_on(client: Client, latents: Json) -> None:
    """Encode Prompt and Prompt Schedule read the same text the same way; the switch leaves a different video."""
    change(latents, PLAN, anchor_stride=2)
    plain = client.run(change(latents, PROMPT, text=NOON))
    switched = client.run(change(latents, PROMPT, text=f"{NOON} [1s] | {NIGHT}"))
    assert switched.sha256() != plain.sha256()
    node = latents[node_id(latents, PROMPT)]
    node["class_type"] = "FlashForwardPromptSchedule"
    node["inputs"] |= {"text": f"{NOON} [24f] | {NIGHT}", "fps": 24.0}
    assert client.run(latents).sha256() == switched.sha256()
    anchors = node_id(latents, PLAN_ANCHORS)
    assert anchors not in plain.outputs
    (told,) = switched.outputs[anchors]["text"]
    assert "without # may hardly show" in told and "use a planner history of 0, or # for a hard cut" in told


def test_a_render_without_anchors_says_itself_that_a_prompt_may_hardly_show(client: Client, latents: Json) -> None:
    render = node_id(latents, RENDER)
    del latents[render]["inputs"]["anchors"]
    change(latents, PLAN, anchor_stride=2, seconds=9 / 16)
    for text, told in ((f"{NOON} [2f] | {NIGHT}", 1), (f"{NOON} [2f] | {NIGHT} [#]", 0), (NOON, 0)):
        lines = client.run(change(latents, PROMPT, text=text)).outputs[render]["text"]
        assert "\n".join(lines).count("without # may hardly show") == told


def test_native_prompts_with_shares_of_the_video_are_a_schedule(client: Client, latents: Json) -> None:
    change(latents, PLAN, anchor_stride=2)
    scheduled = client.run(change(latents, PROMPT, text=f"{NOON} [16.5f] | {NIGHT}")).sha256()  # half of 33 frames
    encode = latents.pop(node_id(latents, PROMPT))
    for key, text in (("901", NOON), ("902", NIGHT)):
        latents[key] = {"class_type": PROMPT, "inputs": {**encode["inputs"], "text": text}}
    for key, source, start, end in (("903", "901", 0.0, 0.5), ("904", "902", 0.5, 1.0)):
        inputs = {"conditioning": [source, 0], "start": start, "end": end}
        latents[key] = {"class_type": "ConditioningSetTimestepRange", "inputs": inputs}
    # the later one first: combining has no order
    combined = {"conditioning_1": ["904", 0], "conditioning_2": ["903", 0]}
    latents["905"] = {"class_type": "ConditioningCombine", "inputs": combined}
    for name in (PLAN_ANCHORS, RENDER):
        change(latents, name, positive=["905", 0])
    assert client.run(latents).sha256() == scheduled


def picture(count: int) -> Json:
    inputs = {"width": 192, "height": 128, "batch_size": count, "color": 0x3366CC}
    return {"class_type": "EmptyImage", "inputs": inputs}


def test_a_start_image_reaches_the_render_through_the_anchors(client: Client, small: Json) -> None:
    """Five pictures are two latent frames, with which the anchors and the render begin."""
    plain = client.run(small).sha256()
    small["710"] = picture(5)
    change(small, PLAN_ANCHORS, start_image=["710", 0])
    started = client.run(small).sha256()
    assert started != plain
    change(small, RENDER, reuse_gib=0.0)
    assert client.run(small).sha256() == started
    small["710"] = picture(4)
    with pytest.raises(RunError, match="start_image holds 4 pictures; use 1, or 4n"):
        client.run(small)
    small["710"] = picture(1)
    small["710"]["inputs"].update(width=1, height=5000)
    with pytest.raises(RunError, match="start_image is 1x5000; use a picture more like 192x128"):
        client.run(small)


def test_a_finished_video_goes_on(client: Client, small: Json) -> None:
    """A second, longer plan goes on from the first one's 9 latents; one that is no longer has nothing to make."""
    longer = copy.deepcopy(small)
    for name, key in ((PLAN, "721"), (PLAN_ANCHORS, "722"), (RENDER, "723"), ("SaveLatent", "724")):
        longer[key] = copy.deepcopy(small[node_id(small, name)])
    longer["721"]["inputs"]["seconds"] = 77 / 16  # 20 latents
    longer["722"]["inputs"]["plan"] = longer["723"]["inputs"]["plan"] = ["721", 0]
    longer["723"]["inputs"] |= {"anchors": ["722", 0], "start_samples": [node_id(small, RENDER), 0]}
    longer["724"]["inputs"]["samples"] = ["723", 0]
    result = client.run(longer)
    assert len(set(result.sha256())) == 2
    too_long = copy.deepcopy(longer)
    too_long["721"]["inputs"]["seconds"] = small[node_id(small, PLAN)]["inputs"]["seconds"]
    with pytest.raises(RunError, match="start_frames=9 leaves nothing to make of 9 latent frames"):
        client.run(too_long)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("noon [5] | night", "5 at character 7 has no unit"),
        ("noon | night", "has no length"),
        ("noon [9s] | night", "prompt 2 starts at 9 s .*, but the video ends at 2.0625 s"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_by_name(client: Client, latents: Json, text: str, words: str) -> None:
    with pytest.raises(RunError, match=words) as refusal:
        client.run(change(latents, PROMPT, text=text))
    assert len(str(refusal.value).splitlines()) <= 2
