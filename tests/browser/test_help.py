"""The nodes' texts and help pages in the editor, in every language."""

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

from comfy_host import Server  # noqa: E402
from translations import LANGUAGES, path, unescape  # noqa: E402

pytestmark = pytest.mark.browser
Json = dict[str, Any]


@pytest.fixture(scope="module", params=LANGUAGES)
def seen(server: Server, request: pytest.FixtureRequest) -> Json:
    """What every node and its help panel show, after Comfy.Locale was set as an artist would."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or not (HERE / "node_modules").is_dir():
        pytest.skip("no chromium, or no playwright-core (npm ci --prefix tests/browser)")
    folder = ROOT / ".out" / "help"
    folder.mkdir(parents=True, exist_ok=True)
    line = ["node", str(HERE / "check_help.mjs"), server.url, chromium, request.param, str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    texts = json.loads(path(request.param).read_text(encoding="utf-8"))
    return {"language": request.param, "texts": texts, **json.loads(done.stdout)}


def test_nodes_speak_the_editors_language(seen: Json) -> None:
    assert set(seen["nodes"]) == set(seen["texts"])
    for name, texts in seen["texts"].items():
        shown = seen["nodes"][name]
        assert (shown["title"], shown["description"]) == (texts["display_name"], unescape(texts["description"])), name
        assert {key: shown["labels"].get(key) for key in texts["inputs"]} == {
            key: entry["name"] for key, entry in texts["inputs"].items()
        }, name
        assert shown["outputs"] == [entry["name"] for entry in texts["outputs"].values()], name


def test_help_panels_show_their_page_with_its_picture(seen: Json) -> None:
    assert seen["messages"] == []  # a page or picture that is not found would complain
    for name, shown in seen["nodes"].items():
        assert shown["heading"] == seen["texts"][name]["display_name"]
        assert shown["picture"].endswith(f"/docs/{name}/{seen['language']}.webp")
        assert "**" not in shown["text"], f"{name}: markup that was not understood"
