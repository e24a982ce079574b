"""The workflow in a real browser."""

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

from comfy_client import Client, load_workflow  # noqa: E402
from comfy_host import Server  # noqa: E402

pytestmark = pytest.mark.browser
Json = dict[str, Any]


@pytest.fixture(scope="module")
def seen(server: Server) -> Json:
    """What the editor made of the quickstart, loaded from the template browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or not (HERE / "node_modules").is_dir():
        pytest.skip("no chromium, or no playwright-core (npm ci --prefix tests/browser)")
    shot = ROOT / ".out" / "editor.png"
    shot.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        ["node", str(HERE / "check_editor.mjs"), server.url, chromium, str(shot)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_quickstart_loads_from_the_template_browser_without_complaints(seen: Json) -> None:
    assert seen["missing"] == []
    assert seen["messages"] == []


def test_our_conversion_is_the_editors(seen: Json, server: Server) -> None:
    ours, _ = load_workflow(Client(server.url), ROOT / "workflows" / "quickstart.json")
    theirs = {key: {name: node[name] for name in ("class_type", "inputs")} for key, node in seen["prompt"].items()}
    assert ours == theirs
