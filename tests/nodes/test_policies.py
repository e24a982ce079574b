"""KV Policy through the real server: it reaches the render, and settings that cannot work are refused by name."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import comfy_host
import headless
import pytest
from comfy_client import Client, RunError
from comfy_host import Host, Server
from comfy_workflow import to_api

from flashforward_core.media import read_frames

from .conftest import change

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def with_policy(prompt: Json, **values: Any) -> Json:
    """Connect a KV Policy node to the plan of a prompt."""
    settings = {"budget_frames": 9, "sink_frames": 3, "future_weight": 0.5, "threshold": 0.9, **values}
    prompt["900"] = {"class_type": "FlashForwardKVPolicy", "inputs": settings}
    return change(prompt, "FlashForwardPlan", kv_policy=["900", 0])


def test_only_a_policy_that_removes_something_changes_the_video(client: Client, latents: Json) -> None:
    """9 latents are 3 chunks: the last one looks back at 6."""
    plain = client.run(latents).sha256()
    kept = client.run(with_policy(latents, policy="window", budget_frames=9)).sha256()
    less = client.run(with_policy(latents, policy="window", budget_frames=4)).sha256()
    assert kept == plain
    assert less != plain


def test_sparse_attention_goes_with_any_policy_and_is_off_where_a_workflow_does_not_know_it(
    client: Client, latents: Json
) -> None:
    """The same as ``render --sparse``; of three chunks the last has two to look back at."""
    plain, sparse = (client.run(with_policy(latents, policy="keep", **more)) for more in ({}, {"sparse": "both"}))
    assert plain.sha256() != sparse.sha256()
    with pytest.raises(RunError, match="sparse='some' is unknown; use one of: none, cross, self, both"):
        client.run(with_policy(latents, policy="keep", sparse="some"))


def test_a_budget_that_leaves_no_choice_is_refused(client: Client, latents: Json) -> None:
    prompt = with_policy(latents, policy="future_forcing", budget_frames=6)
    with pytest.raises(RunError, match=r"budget_frames=6 leaves no choice beside sink_frames=3 and 3 recent frames"):
        client.run(prompt)


def test_the_workflow_that_compares_policies_makes_a_video_of_each(
    client: Client, server: Server, object_info: Json
) -> None:
    """Cut to 13 latents, where 9 are fewer than all that a chunk may look back at without a policy."""
    graph = json.loads((ROOT / "workflows" / "compare_policies.json").read_text())
    assert len(graph["groups"]) == 5
    api = to_api(graph, object_info)
    for node in api.values():
        if node["class_type"] == "FlashForwardPlan":
            node["inputs"]["seconds"] = 49 / 16
    result = client.run(api)
    videos = [path for path in result.files(server.output) if path.suffix == ".mp4"]  # reports are pictures
    assert [path.parent.name for path in videos] == ["policies"] * 4
    shown = [[frames.tobytes() for frames in read_frames(path)] for path in videos]
    assert [len(frames) for frames in shown] == [49] * 4
    assert len({b"".join(frames) for frames in shown}) == 4


def short(graph: Json) -> Json:
    """Cut the plans of a workflow in the editor's form to 3 latents, one chunk."""
    for node in graph["nodes"]:
        if node["type"] == "FlashForwardPlan":
            node["widgets_values"][2] = 9 / 16
    return graph


def refused_in_part(graph: Json) -> tuple[str, str]:
    """Give Future Forcing a budget that it refuses and the first render a title; return the ids of both nodes."""
    policy = next(node for node in graph["nodes"] if "future_forcing" in node.get("widgets_values", []))
    policy["widgets_values"] = ["future_forcing", 3, 3, 0.5, 0.9]
    titled = next(node for node in graph["nodes"] if node["type"] == "FlashForwardRender")
    titled["title"] = "nothing is forgotten"
    return str(policy["id"]), str(titled["id"])


@pytest.mark.parametrize("command", ["headless", "comfy_host"])
def test_a_refused_row_is_told_and_the_others_run(
    command: str,
    host: Host,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, file = short(json.loads((ROOT / "workflows" / "compare_policies.json").read_text())), tmp_path / "some.json"
    policy, titled = refused_in_part(graph)
    renders = {str(node["id"]) for node in graph["nodes"] if node["type"] == "FlashForwardRender"}
    file.write_text(json.dumps(graph))
    if command == "headless":
        status = headless.main(["run", str(file), "--server", server.url])
    else:
        monkeypatch.setattr(comfy_host, "provision", lambda **_: host)
        monkeypatch.setattr(comfy_host, "Server", lambda **_: contextlib.nullcontext(server))  # which runs already
        status = comfy_host.main(["run", str(file), "--seed", "11"])  # another, or ComfyUI would not render again
    shown, err = capsys.readouterr()
    out = shown.splitlines()
    assert status == 1
    (told,) = [line for line in err.splitlines() if line.startswith(f"node {policy} (FlashForwardKVPolicy): ")]
    assert "budget_frames=3 leaves no choice beside sink_frames=3 and 3 recent frames; use at least 7" in told
    assert err.splitlines()[:2] == ["refused in part; the rest runs", told]  # before hours of the rest
    assert (
        len(re.findall(r"not made: .*node \d+ \(FlashForwardDecodeVideo\)", err)) == 2
    )  # at the beginning and the end
    digests = [
        re.fullmatch(r"latents sha256 [0-9a-f]{64}  node (\d+) \(FlashForwardRender(.*)\)", line) for line in out
    ]
    titles = {found[1]: found[2] for found in digests if found}
    assert titles.keys() < renders and len(titles) == len(renders) - 1
    assert {key: title for key, title in titles.items() if title} == {titled: ", 'nothing is forgotten'"}
    assert len([line for line in out if line.endswith(".mp4")]) == len(titles)
