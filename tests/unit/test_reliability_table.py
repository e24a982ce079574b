"""The table of failures in docs/reliability.md names tests that exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))


def test_every_failure_has_a_test_that_exists() -> None:
    assert len(NAMED) > 40
    missing = [f"{file}::{name}" for file, name in NAMED if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
