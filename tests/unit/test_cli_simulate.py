"""Claims about ``python -m flashforward_core simulate``, run as users run it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashforward_core.engine.cost import CostKey, CostModel, save_cost

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    # -S leaves site-packages out: whatever is not in the standard library cannot be imported
    line = [sys.executable, "-S", "-m", "flashforward_core", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def report(*words: str) -> dict[str, Any]:
    done = command("simulate", "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_needs_the_standard_library_only_and_has_the_contract_s_fields(tmp_path: Path) -> None:
    none = tmp_path / "none.json"
    none.write_text('{"fits": []}')
    frame = 2 * 30 * 1536 * 1560 * 2  # keys and values, blocks, width, tokens, bytes of bf16
    found = report("--latent-frames", "81", "--devices", "4", "--costs", str(none))
    assert [one["device"] for one in found.pop("memory")] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert found == {
        "schedule": "flashforward",
        "layout": "interleaved",
        "rounds": 37,
        "forwards": {
            "planner_denoise": 12,
            "planner_commit": 3,
            "renderer_denoise": 108,
            "renderer_commit": 0,
            "total": 123,
        },
        "predicted_s": None,
        "peak_kv_bytes": [24 * frame] * 4,  # a bank of 18, and six anchors while Γ moves from block to block
    }


def test_seconds_and_latent_frames_say_the_same() -> None:
    assert report("--seconds", "20") == report("--latent-frames", "81")


@pytest.mark.parametrize(("schedule", "total"), [("self_forcing", 134), ("hiar", 212), ("last_stage", 108)])
def test_other_schedules_count_their_forwards(schedule: str, total: int) -> None:
    forwards = report("--schedule", schedule)["forwards"]
    assert isinstance(forwards, dict)
    assert forwards["total"] == total


def test_memory_is_what_the_engine_predicts() -> None:
    """The numbers of docs/memory.md, which a loaded backbone gave; on an H200 such predictions were 4 % off at most."""
    done = command("simulate", "--model", "14B", "--seconds", "20")
    assert "memory per device, GiB  138.9  (weights 26.6, KV 111.5, workspace 0.8)" in done.stdout


def test_the_table_is_for_people() -> None:
    done = command("simulate", "--devices", "5", "--layout", "streaming")
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert {name.strip(): value.strip() for name, value in lines.items()}["rounds"] == "35"
    assert "0 renderer commit" in done.stdout


def test_the_table_says_what_was_asked_and_how_to_get_seconds(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"fits": []}')
    done = command("simulate", "--model", "embedded", "--seconds", "5", "--costs", str(tmp_path / "costs.json"))
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    shown = {name.strip(): value.strip() for name, value in lines.items()}
    assert (shown["model"], shown["resolution"]) == ("embedded", "192x128")
    assert shown["length"] == "5.06 s (21 latent frames, 16 fps)"
    assert "bench latency --fit" in shown["predicted seconds"]


@pytest.mark.parametrize("resolution", ["192x128", "128x192"])
def test_the_embedded_model_s_fit_is_found_by_either_order(tmp_path: Path, resolution: str) -> None:
    costs = tmp_path / "costs.json"
    key = CostKey(device="CPU", model="embedded", resolution="128x192", precision="bf16")
    save_cost(costs, key=key, cost=CostModel(forward_s=0.05))
    found = report("--model", "embedded", "--resolution", resolution, "--costs", str(costs))
    assert found["predicted_s"] == pytest.approx(123 * 0.05)


def test_a_fit_gives_seconds(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    key = CostKey(device="H200", model="1.3B", resolution="480p", precision="bf16")
    save_cost(costs, key=key, cost=CostModel(forward_s=0.05))
    assert report("--costs", str(costs))["predicted_s"] == pytest.approx(123 * 0.05)
    save_cost(costs, key=key, cost=CostModel(forward_s=0.05, pair_ratio=0.9))
    pairs = report("--costs", str(costs), "--batch-diagonal")["predicted_s"]
    # 108 forwards of the renderer save a tenth in pairs; up to six of a ramp, and any left over, run alone
    assert 123 * 0.05 - 108 * 0.005 <= pairs <= 123 * 0.05 - 98 * 0.005
    assert report("--costs", str(costs), "--model", "14B")["predicted_s"] is None
    save_cost(
        costs,
        key=CostKey(device="B200", model="1.3B", resolution="480p", precision="bf16"),
        cost=CostModel(forward_s=1),
    )
    assert "several: H200, B200" in command("simulate", "--costs", str(costs)).stderr
    assert report("--costs", str(costs), "--device-name", "B200")["predicted_s"] == pytest.approx(123)
    refused = command("simulate", "--costs", str(costs), "--device-name", "x")
    assert (refused.returncode, "these have: H200, B200" in refused.stderr) == (2, True)


def test_decoding_is_predicted_where_it_would_run(tmp_path: Path) -> None:
    """5 forwards of the planner, then 4 of each of two chunks; decoding a chunk takes 3 s, its front half 1.8.

    Beside other lanes a wavefront ends the first chunk after 11 s and the second after 13.
    """
    costs = tmp_path / "costs.json"
    key = CostKey(device="H200", model="1.3B", resolution="480p", precision="bf16")
    save_cost(costs, key=key, cost=CostModel(forward_s=1, decode_frame_s=1))
    asked = ("--costs", str(costs), "--latent-frames", "6")
    assert report(*asked)["predicted_s"] == 13 + 2 * 3
    assert report(*asked, "--devices", "2", "--decode", "own")["predicted_s"] == 11 + 2 * 3
    assert report(*asked, "--devices", "3", "--decode", "split")["predicted_s"] == pytest.approx(
        13 + 3
    )  # 11 + 3 and 13 + 3
    refused = command("simulate", "--devices", "2", "--decode", "split")
    assert (refused.returncode, "devices=2 is below 3 for decode='split'" in refused.stderr) == (2, True)


def test_costs_of_other_work_are_pointed_to(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    asked = ["simulate", "--latent-frames", "9", "--costs", str(costs)]

    def keep(device: str, resolution: str, precision: str) -> None:
        key = CostKey(device=device, model="1.3B", resolution=resolution, precision=precision)
        save_cost(costs, key=key, cost=CostModel(forward_s=0.05))

    keep("H200", "480p", "fp32")
    remedy = "add that, or measure with `bench latency --fit`"
    assert f"unknown: costs exist only with --precision fp32; {remedy}\n" in command(*asked).stdout
    assert "--precision fp32" in command(*asked, "--json").stderr  # where stdout is for programs
    assert "predicted seconds       0." in command(*asked, "--precision", "fp32").stdout
    same_size = command(*asked, "--precision", "fp32", "--resolution", "832x480").stdout
    assert f"costs exist only with --resolution 480p; {remedy}\n" in same_size
    keep("B200", "720p", "fp8")
    both = command(*asked).stdout
    assert "costs exist only with --precision fp32 or --resolution 720p --precision fp8; add" in both
    one = command(*asked, "--device-name", "B200")
    assert one.returncode == 2
    assert "(these have: none); costs exist only with --resolution 720p --precision fp8; add" in one.stderr
    assert "unknown: no fitted costs; measure them" in command(*asked, "--model", "14B").stdout


def test_a_trace_is_written(tmp_path: Path) -> None:
    report("--latent-frames", "9", "--trace", str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--latent-frames", "0"], "latent_frames=0 is below 1"),
        (["--devices", "0"], "devices=0 is below 1"),
        (["--devices", "-1"], "devices=-1 is below 1"),
        (["--devices", "99999999999"], "devices=99999999999 is above 64"),
        (["--latent-frames", "9999999999999999999999"], "is above 100000"),
        (["--seconds", "1e308"], "seconds=1e+308 is above"),
        (["--fps", "inf", "--seconds", "5"], "fps=inf is outside"),
        (["--precision", "x"], "precision='x' is unknown; use one of: fp32, bf16, fp8"),
        (["--costs", "no/such/costs.json"], "costs='no/such/costs.json' is no file"),
        (["--schedule", "fast"], "schedule='fast' is unknown"),
        (["--layout", "fast"], "layout='fast' is unknown"),
        (["--model", "2B"], "model='2B' is unknown; use one of: embedded, 1.3B, 14B"),
        (["--resolution", "big"], "resolution='big' is no size"),
        (["--resolution", "100x96"], "width=100 is not a positive multiple of 16; use width=96"),
        (["--model", "embedded", "--resolution", "480p"], "does not fit model='embedded'; use 192x128"),
        (["--anchor-stride", "0"], "anchor_stride=0 is below 1"),
        (["--anchor-rule", "first"], "anchor_rule='first' is unknown"),
        (["--history", "0", "--schedule", "hiar"], "history=0 reads nothing"),
        (["--sink", "16"], "sink=16 is longer than the history of 15"),
        (
            ["--trace", "/no/such/folder/x.json"],
            "trace='/no/such/folder/x.json' is in a folder that does not exist; make '/no/such/folder' first",
        ),
        (["--trace", "tests"], "trace='tests' is a folder; name a file, such as 'tests/trace.json'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: list[str], message: str) -> None:
    done = command("simulate", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_command_without_its_packages_says_which() -> None:
    done = command("train", "vae")
    assert done.returncode == 2
    assert "needs the Python package 'torch'" in done.stderr


def test_help_lists_the_commands_without_importing_them() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "simulate" in done.stdout
    assert "train" in done.stdout


def test_a_kv_policy_s_memory_ends_at_its_budget() -> None:
    """One bank: what it keeps, beside it what becomes of that, and what a chunk hands over, its queries too.

    A compaction takes no time here.
    """
    frame = 2 * 30 * 1536 * 1560 * 2
    found = report("--schedule", "self_forcing", "--kv-policy", "window", "--kv-budget", "9", "--latent-frames", "300")
    assert found["peak_kv_bytes"] == [(9 + 9 + 5) * frame]
    assert found["rounds"] == 499  # as without: 100 · 4 + 99


def test_ten_prompts_overlap() -> None:
    """Ten videos of 27 chunks, 4 stages and 15 planner forwards on 4 lanes: no lane idles for more than 5 % of it."""
    found = report("--devices", "4", "--prompts", "10")
    queue = found["queue"]
    assert isinstance(queue, dict) and isinstance(found["forwards"], dict)
    assert queue["lane_utilisation"] >= 0.95 > queue["one_by_one"]["lane_utilisation"]
    assert queue["rounds"] * 4 * queue["lane_utilisation"] == pytest.approx(10 * found["forwards"]["total"])
    assert queue["rounds"] < queue["one_by_one"]["rounds"]
    shown = command("simulate", "--devices", "4", "--prompts", "10").stdout
    assert "4 at a time, decoding not counted" in shown


@pytest.mark.parametrize("words", [["--prompts", "0"], ["--prompts", "2", "--in-flight", "0"]])
def test_no_prompts_or_places_are_refused(words: list[str]) -> None:
    done = command("simulate", "--devices", "2", *words)
    assert done.returncode == 2 and "=0 is" in done.stderr
