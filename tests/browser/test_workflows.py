"""Every workflow in a real browser, with stand-ins for Wan's files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "scripts"))

from comfy_client import Client  # noqa: E402
from comfy_host import Server  # noqa: E402
from comfy_workflow import to_api  # noqa: E402

pytestmark = pytest.mark.browser
Json = dict[str, Any]
FILES = {path.stem: path for path in sorted((ROOT / "workflows").glob("*.json"))}
NAMES = tuple(FILES)


@pytest.fixture(scope="module")
def seen(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Json:
    """What the editor made of each workflow."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or not (HERE / "node_modules").is_dir():
        pytest.skip("no chromium, or no playwright-core (npm ci --prefix tests/browser)")
    shots = tmp_path_factory.mktemp("shots")
    script = HERE / "check_workflows.mjs"
    command = ["node", str(script), server.url, chromium, str(shots), *map(str, FILES.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_workflows_open_without_complaints(seen: Json) -> None:
    assert seen["messages"] == []
    assert {name: seen["opened"][name]["missing"] for name in NAMES} == {name: [] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_editor_queues_is_what_the_file_says(name: str, seen: Json, server: Server) -> None:
    """Widgets are saved by position: a value on the wrong one would show here."""
    queued = seen["opened"][name]["prompt"]
    theirs = {key: {part: node[part] for part in ("class_type", "inputs")} for key, node in queued.items()}
    assert theirs == to_api(json.loads(FILES[name].read_text()), Client(server.url).object_info())


def test_timelines_count_the_start_that_they_can_know(seen: Json) -> None:
    """A finished video of 5 seconds that goes on, and a picture, in the workflows that show them; elsewhere none."""
    starts = {
        (name, key): plan["start"]
        for name in NAMES
        for key, plan in seen["opened"][name]["plans"].items()
        if plan["start"]
    }
    assert starts == {("extension", "8"): 81 / 16, ("start_image", "4"): 1 / 16}


def test_timelines_show_hard_cuts(seen: Json) -> None:
    """The third prompt of `prompt_schedule` begins after 14 s, with latent frame 57, the first of chunk 19."""
    (plan,) = seen["opened"]["prompt_schedule"]["plans"].values()
    assert plan["scenes"] == [0, 19]
    (plain,) = seen["opened"]["quickstart"]["plans"].values()
    assert plain["scenes"] == [0]


def test_no_timeline_complains(seen: Json) -> None:
    errors = [plan["error"] for name in NAMES for plan in seen["opened"][name]["plans"].values()]
    assert errors == [""] * len(errors)


def meaning(workflow: Json) -> Json:
    """What a saved workflow says: nodes with what feeds their inputs, and groups. Names of links are the editor's."""
    sources = {link[0]: (link[1], link[2]) for link in workflow["links"]}
    nodes = {
        node["id"]: {
            **{
                key: node.get(key)
                for key in ("type", "pos", "size", "mode", "title", "color", "bgcolor", "showAdvanced")
            },
            "values": node.get("widgets_values"),
            "inputs": {entry["name"]: sources[entry["link"]] for entry in node.get("inputs", []) if entry.get("link")},
        }
        for node in workflow["nodes"]
    }
    groups = [{key: group[key] for key in ("title", "bounding", "color")} for group in workflow["groups"]]
    return {"nodes": nodes, "groups": groups}


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_is_saved_as_it_was_loaded(name: str, seen: Json) -> None:
    """The values of inputs that are newer than the file may follow, and nothing else."""
    file, saved = (
        meaning(workflow) for workflow in (json.loads(FILES[name].read_text()), seen["opened"][name]["saved"])
    )
    for key, node in file["nodes"].items():
        now = saved["nodes"][key]
        if node["values"] is not None:
            now["values"] = now["values"][: len(node["values"])]
    assert saved == file
