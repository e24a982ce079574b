"""The comparison of Ray lanes with lanes of this process: what its figures mean, and that a run leaves them as rows."""

import itertools
from pathlib import Path

import pytest

from flashforward_core.cli import main
from flashforward_core.commands.bench_ray import gaps
from flashforward_core.commands.bench_rows import read_rows
from flashforward_core.engine.events import TaskSpan

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.cpu


def test_gaps_are_between_neighbours_of_one_lane() -> None:
    """Lane 0 waits 0.5 and 0 s, lane 1 two seconds; in whatever order the spans come."""
    times = [(0, 0.0, 1.0), (0, 1.5, 2.0), (0, 2.0, 3.0), (1, 0.0, 1.0), (1, 3.0, 4.0)]
    spans = [TaskSpan(task=str(n), lane=lane, start_s=a, end_s=b) for n, (lane, a, b) in enumerate(times)]
    for order in itertools.permutations(spans):
        assert sorted(gaps(order)) == [0.0, 0.5, 2.0]


def test_both_ways_are_filed_with_their_ratio_and_the_cluster_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = ["bench", "ray", "--latents", "3", "--devices", "cpu*2", "--repeats", "2", "--json", str(path)]
    assert main(words) == 0
    rows = {(row["metric"], row["config"].get("lanes", "")): row for row in read_rows(path)}
    here, there = (rows["rollout_s", way]["config"]["all_s"] for way in ("in_process", "ray"))
    ratios = sorted(b / a for a, b in zip(here, there, strict=True))
    assert rows["ray_ratio", ""]["value"] == pytest.approx(sum(ratios) / 2, rel=1e-3)
    lane_ms = 1000 * 2 / rows["ray_ratio", ""]["config"]["tasks"]
    added_ms = sum(there) / 2 * lane_ms - sum(here) / 2 * lane_ms  # the median of two pairs is their mean
    assert rows["ray_task_overhead_ms", ""]["value"] == pytest.approx(added_ms, abs=0.1)
    assert {way for metric, way in rows if metric == "task_gap_ms"} == {"in_process", "ray"}
    assert all(rows["processor_s", way]["value"] > 0 for way in ("in_process", "ray"))
    assert not ray.is_initialized()


def test_a_second_cluster_of_one_process_gets_the_code_too() -> None:
    for _ in range(2):
        assert main(["bench", "ray", "--latents", "1", "--devices", "cpu", "--repeats", "1"]) == 0


def test_what_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ray", "--repeats", "0"]) == 2
    assert "repeats=0 is below 1" in capsys.readouterr().err
    assert main(["bench", "ray", "--ray", "nowhere"]) == 2
    assert "ray_address='nowhere' is no address" in capsys.readouterr().err
