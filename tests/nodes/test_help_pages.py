"""The help pages that the editor shows, `web/docs/<node>/<language>.md`, against the live schema."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from translations import LANGUAGES, path  # noqa: E402

pytestmark = pytest.mark.cpu
Json = dict[str, Any]
PAGES = ROOT / "web" / "docs"  # what relative pictures are relative to, in every language
ITEM = {
    "en": re.compile(r"- `(?P<key>\w+)`"),
    "ko": re.compile(r"- \*\*(?P<label>.+?)\*\* \(`(?P<key>\w+)`\)"),
    "zh": re.compile(r"- \*\*(?P<label>.+?)\*\*（`(?P<key>\w+)`）"),
}
PICTURE = re.compile(r"!\[(?P<alt>[^\]]+)\]\((?P<at>[^)]+)\)")


def ours(object_info: Json) -> list[str]:
    return [name for name in object_info if name.startswith("FlashForward")]


def page(name: str, language: str) -> str:
    return (PAGES / name / f"{language}.md").read_text(encoding="utf-8")


def sections(text: str) -> list[str]:
    """What stands under the title, and under each heading of the second level."""
    return re.split(r"^## .+$", text, flags=re.MULTILINE)


def described(section: str, language: str) -> dict[str, str | None]:
    """The keys that a list describes, with the labels that the node shows in this language."""
    found = [ITEM[language].match(line) for line in section.splitlines() if line.startswith("- ")]
    return {match["key"]: match.groupdict().get("label") for match in found if match is not None}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_page_describes_exactly_the_nodes_inputs_and_outputs(object_info: Json, language: str) -> None:
    texts = json.loads(path(language).read_text(encoding="utf-8"))
    for name in ours(object_info):
        info, told = object_info[name], texts[name]
        top, _, inputs, outputs, example, *_ = sections(page(name, language))
        labels = {} if language == "en" else {key: entry["name"] for key, entry in told["inputs"].items()}
        shown = [entry for group in ("required", "optional") for entry in info["input_order"].get(group, [])]
        wanted = {entry: labels.get(entry) for entry in shown}
        out = [None if language == "en" else told["outputs"][str(at)]["name"] for at in range(len(info["output"]))]
        assert top.startswith(f"# {told['display_name']}\n"), (name, language)
        assert described(inputs, language) == wanted, (name, language)
        assert described(outputs, language) == dict(zip(info["output_name"], out, strict=True)), (name, language)
        assert example.strip(), (name, language)


def test_every_page_has_its_picture(object_info: Json) -> None:
    total = 0
    for name in ours(object_info):
        for language in LANGUAGES:
            (found,) = PICTURE.finditer(page(name, language))
            assert found["at"] == f"{name}/{language}.webp"  # the help panel puts .../docs/ before it
            with Image.open(PAGES / found["at"]) as image:
                image.load()
                assert image.format == "WEBP"
                assert min(image.size) >= 200
            size = (PAGES / found["at"]).stat().st_size
            assert size < 60_000, f"{found['at']}: {size} bytes"
            total += size
    assert total < 1_500_000, f"{total} bytes of pictures in every installation"


def test_other_languages_get_the_english_page(object_info: Json) -> None:
    for name in ours(object_info):
        english = page(name, "en")
        assert (PAGES / f"{name}.md").read_text(encoding="utf-8") == english, f"copy {name}/en.md to {name}.md"


def test_there_are_no_pages_of_other_nodes(object_info: Json) -> None:
    assert {file.stem for file in PAGES.iterdir()} == set(ours(object_info))
