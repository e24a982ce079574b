"""A real ComfyUI server for the whole test run, and a small workflow for it."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from comfy_client import Client  # noqa: E402
from comfy_host import Host, Server, provisioned  # noqa: E402
from comfy_workflow import to_api  # noqa: E402

from .standins import write_models  # noqa: E402

Json = dict[str, Any]
NINE_LATENTS_S = 33 / 16


@pytest.fixture(scope="session")
def host() -> Host:
    """The provisioned ComfyUI; the tests of the nodes make no sense without one."""
    found = provisioned()
    if found is None:
        pytest.skip("no ComfyUI here; run: python3 scripts/comfy_host.py provision --dev")
    return found


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model's files that tests may harm for a moment."""
    own = os.environ.get("FLASHFORWARD_ASSETS", ROOT / "flashforward_core" / "assets")
    return Path(shutil.copytree(own, tmp_path_factory.mktemp("model") / "assets"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's model folders with tiny stand-ins for Wan's files, that tests may harm for a moment."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="session")
def server(host: Host, assets: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("comfyui")
    extra = ["--extra-model-paths-config", str(models / "paths.yaml")]
    env = {"FLASHFORWARD_ASSETS": str(assets), "XDG_CACHE_HOME": str(data / "cache")}  # no fits of this machine's
    with Server(host=host, cpu=True, data=data, extra=extra, env=env) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url)


@pytest.fixture(scope="session")
def object_info(server: Server) -> Json:
    return Client(server.url).object_info()


@pytest.fixture(scope="session")
def quickstart() -> Json:
    """The workflow in the editor's form."""
    return json.loads((ROOT / "workflows" / "quickstart.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def prompt(quickstart: Json, object_info: Json) -> Json:
    """The quickstart in the server's form, cut to 9 latents."""
    api = to_api(quickstart, object_info)
    change(api, "FlashForwardPlan", seconds=NINE_LATENTS_S)
    return api


@pytest.fixture
def latents(prompt: Json) -> Json:
    """The same, ending with the latents: nothing is decoded."""
    samples = prompt.pop(node_id(prompt, "FlashForwardDecodeVideo"))["inputs"]["samples"]
    prompt["800"] = {"class_type": "SaveLatent", "inputs": {"samples": samples, "filename_prefix": "latents"}}
    return prompt


def node_id(prompt: Json, class_type: str) -> str:
    """The id of the only node of a type."""
    found = [key for key, node in prompt.items() if node["class_type"] == class_type]
    assert len(found) == 1, f"{len(found)} nodes of {class_type}"
    return found[0]


def change(prompt: Json, class_type: str, **inputs: Any) -> Json:
    """Set inputs of the only node of a type, in place."""
    prompt[node_id(prompt, class_type)]["inputs"].update(inputs)
    return prompt
