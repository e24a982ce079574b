"""The nodes' texts in every language, as the server hands them to the editor."""

import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from comfy_host import Server  # noqa: E402
from translations import LANGUAGES, english, flat, path, problems, unescape  # noqa: E402

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
QUOTED = re.compile(r"\{'([{}@|])'\}")
SIMPLE_CHINESE, KOREAN = re.compile(r"[\u4e00-\u9fff]"), re.compile(r"[\uac00-\ud7a3]")
SAME_IN_ALL = {"VAE", "CLIP", "LoRA", "FPS", "JSON", "Latent"}  # names that are not translated


@pytest.fixture(scope="module")
def served(server: Server) -> Json:
    with urllib.request.urlopen(f"{server.url}/i18n") as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def texts(object_info: Json, name: str) -> Json:
    """Every text of a node by its key, straight from the schema."""
    info = object_info[name]
    found = {"display_name": info["display_name"], "description": info["description"]}
    for entry, (_, options) in {**info["input"].get("required", {}), **info["input"].get("optional", {})}.items():
        found |= {f"inputs.{entry}.name": entry, f"inputs.{entry}.tooltip": options["tooltip"]}
    for at, (label, tooltip) in enumerate(zip(info["output_name"], info["output_tooltips"], strict=True)):
        found |= {f"outputs.{at}.name": label, f"outputs.{at}.tooltip": tooltip}
    return found


def test_english_is_the_schema_itself(object_info: Json, served: Json) -> None:
    ours = [name for name in object_info if name.startswith("FlashForward")]
    wanted = {f"{name}.{key}": text for name in ours for key, text in texts(object_info, name).items()}
    found = {key: unescape(text) for key, text in flat(served["en"]["nodeDefs"])}
    assert found == wanted, "run: .venv/bin/python scripts/translations.py"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_there_in_every_language_and_none_is_stale(
    object_info: Json, served: Json, language: str
) -> None:
    found = json.loads(path(language).read_text(encoding="utf-8"))
    assert problems(english(object_info), found) == [], "run: .venv/bin/python scripts/translations.py"
    assert served[language]["nodeDefs"] == found  # the server reads the same file


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_pages_words_are_served(served: Json, language: str) -> None:
    """`tests/web` compares the languages; here they reach the page under the name that it asks for."""
    assert served[language]["flashforward"] == json.loads(path(language, "main").read_text())["flashforward"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_holds_the_editors_message_syntax(language: str) -> None:
    """An unquoted bar would cut a text in two, and braces or @ would look for other messages."""
    messages = dict(flat(json.loads(path(language).read_text(encoding="utf-8"))))
    assert [key for key, text in messages.items() if re.search(r"[{}@|]", QUOTED.sub("", text))] == []


@pytest.mark.parametrize(("language", "letters"), [("ko", KOREAN), ("zh", SIMPLE_CHINESE)])
def test_texts_are_translated(language: str, letters: re.Pattern[str]) -> None:
    messages = dict(flat(json.loads(path(language).read_text(encoding="utf-8"))))
    assert [key for key, text in messages.items() if not letters.search(text) and text not in SAME_IN_ALL] == []


def test_a_missing_and_a_stale_text_are_told() -> None:
    own = {"Node": {"display_name": "Node", "inputs": {"a": {"name": "a"}}}}
    found = {"Node": {"display_name": " ", "inputs": {"a": {"name": "가"}, "b": {"name": "나"}}}}
    assert problems(own, found) == ["missing: Node.display_name (Node)", "stale: Node.inputs.b.name"]
