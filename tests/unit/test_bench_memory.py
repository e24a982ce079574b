"""The memory benchmark on a CPU: banks take what the rows say was predicted, and what cannot be is refused."""

import json
from pathlib import Path

import pytest

from flashforward_core.cli import main
from flashforward_core.model.config import EMBEDDED

pytestmark = pytest.mark.cpu
WORDS = ["bench", "memory", "--models", "embedded", "--device", "cpu", "--precision", "fp32"]


def test_a_row_says_what_banks_took_and_what_was_predicted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    assert main([*WORDS, "--schedules", "self_forcing", "--kv", "fp8", "--json", str(rows)]) == 0
    (row,) = json.loads(rows.read_text())
    prompt = EMBEDDED.kv_bytes_per_frame(EMBEDDED.text_len, element_bytes=4)  # one role reads one prompt
    assert row["metric"] == "peak_kv_bytes" and row["value"] == row["config"]["kv_bytes"] - prompt
    assert row["config"]["kv"] == "fp8" and row["config"]["latents"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "7B"], "models='7B' is unknown"),
        (["--kv", "int4"], "kv='int4' is unknown"),
        (["--cap-gib", "24"], "cap_gib=24 needs a CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    assert said in capsys.readouterr().err
