"""What models, files and users write is never put into the page as HTML."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

PAGE = Path(__file__).parents[2] / "web" / "js"
AS_HTML = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc|\beval\b"


def test_the_page_makes_no_html_of_texts() -> None:
    """Texts are drawn on a canvas or set as textContent, which takes them as they are."""
    files = sorted(PAGE.rglob("*.js"))
    assert files
    found = [f"{file.name}: {match[0]}" for file in files for match in re.finditer(AS_HTML, file.read_text())]
    assert not found
