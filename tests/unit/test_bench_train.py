"""``bench train``: real steps of every phase, filed as rows."""

import argparse
import json
from pathlib import Path

import pytest

from flashforward_core.commands import bench_train
from flashforward_core.commands.bench_train import PHASES
from flashforward_core.model.config import MODELS, WanConfig

pytestmark = pytest.mark.cpu
TINY = WanConfig(name="tiny", dim=48, ffn_dim=64, num_heads=2, num_layers=2, text_dim=12, text_len=5, freq_dim=32)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_train.add_arguments(parser)
    return parser.parse_args(words)


def test_every_phase_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "embedded", TINY)
    monkeypatch.setitem(bench_train.SIZES, "128p", (32, 32))
    rows = tmp_path / "rows.json"
    words = ["--model", "embedded", "--resolution", "128p", "--latents", "11", "--window", "4", "--device", "cpu"]
    assert bench_train.run(arguments(*words, "--json", str(rows), "--commit", "abc")) == 0
    found = json.loads(rows.read_text())
    assert [row["config"]["phase"] for row in found] == list(PHASES)
    assert bench_train.run(arguments(*words, "--frozen", "--rank", "2", "--json", str(rows), "--commit", "abc")) == 0
    frozen = json.loads(rows.read_text())[len(PHASES) :]
    assert [(row["config"]["phase"], row["config"]["frozen"]) for row in frozen] == [(name, True) for name in PHASES]
    for row in found:
        assert row["metric"] == "train_step_s" and row["value"] > 0 and row["unit"] == "s"
        assert row["config"] | {"model": "embedded", "latents": 11, "batch": 1} == row["config"]


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats=0 is below 1"):
        bench_train.run(arguments("--repeats", "0"))
