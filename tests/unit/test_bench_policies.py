"""What ``bench policies`` measures is what it says, on a small random backbone."""

import argparse
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from flashforward_core.cli import main
from flashforward_core.commands.bench_policies import BITS, Bench, LookOptions, Scores, half_width, policies
from flashforward_core.commands.bench_rows import RowBook, read_rows
from flashforward_core.commands.policy_checks import least_latents
from flashforward_core.commands.policy_choices import choices, latent_errors
from flashforward_core.commands.policy_errors import MOST, FollowOptions
from flashforward_core.engine.rollout import DevicePlan, render
from flashforward_core.kv_policy import WindowOptions
from flashforward_core.model.text import ByteT5Encoder, TextConfig
from flashforward_core.specs import History

pytestmark = pytest.mark.cpu

CPU = DevicePlan(devices=("cpu",))


def test_looking_changes_nothing_and_notes_every_block_of_every_chunk(rig: Any) -> None:
    """5 chunks; the first has nothing to look back at and the last publishes nothing: 3 looks at 2 blocks."""
    backbone, texts = rig.backbone(), rig.texts()
    spec = rig.spec("self_forcing", history=History(chunks=5))
    look = LookOptions(budget_frames=15, sink_frames=0)
    found = render(backbone, replace(spec, kv_policy=look), texts, devices=CPU)
    assert found.sha256 == render(backbone, spec, texts, devices=CPU).sha256
    assert len(look.stationarity) == 3 * 2
    assert all(0 < value < 1 for value in look.stationarity)
    assert set(look.recalls) == {(method, bits) for method, widths in BITS.items() for bits in widths}
    eight, two = (statistics.mean(look.recalls["quantised", bits]) for bits in (8, 2))
    assert 0 < two < eight <= 1


def test_the_past_alone_weighs_nothing_of_the_future() -> None:
    compared = policies(9)
    assert {policy.budget_frames for policy in compared.values()} == {9}
    ours = compared["future_forcing"]
    assert compared["history_only"] == replace(ours, lookahead=(1, 2, 4, 8), future_weight=0.0, weigh_merged=False)


def test_scores_are_one_number_per_video() -> None:
    """The last of four frames differs by a fifth of the range, in the second video only: 20·log10(5) dB there."""
    frames = torch.zeros(2, 4, 16, 16, 3, dtype=torch.uint8)
    other = frames.clone()
    other[1, 3] = 51
    scores = Scores()
    scores.add(other, frames)
    last = 20 * math.log10(5)
    assert scores.values["psnr"] == pytest.approx([100, (300 + last) / 4])
    assert scores.values["psnr_late"] == pytest.approx([100, last])
    assert scores.values["ssim"][0] == pytest.approx(1)
    assert scores.values["ssim"][1] < 1


def test_policies_are_filed_with_what_they_gain_over_first_in_first_out(rig: Any, tmp_path: Path) -> None:
    """Three captions in batches of two, 14 latent frames, at a budget of 7: every policy removes something."""
    torch.manual_seed(0)
    backbone = replace(
        rig.backbone(),
        vae=AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1, z_dim=16).eval(),
        text_encoder=ByteT5Encoder(TextConfig(d_model=12, d_kv=4, d_ff=8, num_heads=2, num_layers=1, text_len=5)),
    )
    args = argparse.Namespace(batch=2, seed=0)
    bench = Bench(backbone=backbone, device="cpu", captions=["dusk", "noon", "dawn"], args=args)
    spec = rig.spec("self_forcing", anchors=None, history=History(chunks=14))
    book = RowBook(path=tmp_path / "rows.json", machine="here", common={})
    bench.look(replace(spec, kv_policy=LookOptions(budget_frames=15, sink_frames=0)), book=book)
    bench.compare(spec, budgets=[7], book=book)
    short = replace(bench, captions=["dusk", "noon"])
    short.choose(rig.spec("self_forcing", latent_frames=12, history=History(chunks=14)), budgets=[7], book=book)
    rows = read_rows(tmp_path / "rows.json")
    errors = {(row["metric"], row["config"]["choice"]): row for row in rows if "choice" in row["config"]}
    assert set(errors) == {(metric, name) for metric in ("first_error", "late_error") for name in choices(7)}
    assert all(0 < row["value"] < 10 and row["ci95"] > 0 for row in errors.values())
    assert all(row["value"] == pytest.approx(statistics.mean(row["values"])) for row in errors.values())
    found = {(row["metric"], row["config"].get("policy")): row for row in rows}
    for name in policies(7):
        assert 0 < found["psnr", name]["value"] < 100
        assert 0 < found["ssim", name]["value"] < 1
        assert found["psnr", name]["ci95"] > 0
    gain = found["psnr_gain", "future_forcing"]["value"]
    assert gain == pytest.approx(found["psnr", "future_forcing"]["value"] - found["psnr", "window"]["value"])
    assert ("psnr_gain", "window") not in found and ("psnr", "full") not in found
    densities = {r["config"]["what"]: r["value"] for r in rows if r["metric"] == "density"}
    assert set(densities) == {"ann_sa", "ann_ca", "temp_cache"}
    assert all(0 < value <= 1 for value in densities.values())
    cosines = {(r["config"]["rotary"], r["config"]["frames"]) for r in rows if r["metric"] == "query_cosine"}
    assert cosines == {(when, frames) for when in ("before", "after") for frames in (3, 6, 9)}


def test_what_attention_reads_is_the_same_from_a_cache_that_holds_all_and_nearer_from_a_larger_one(rig: Any) -> None:
    spec = rig.spec("self_forcing", history=History(chunks=5))
    sizes = {f"{frames}": WindowOptions(budget_frames=frames, sink_frames=0) for frames in (3, 6, 100)}
    look = FollowOptions(budget_frames=6, sink_frames=0, policies=sizes)
    backbone, texts = rig.backbone(), rig.texts()
    found = render(backbone, replace(spec, kv_policy=look), texts, devices=CPU)
    assert found.sha256 == render(backbone, spec, texts, devices=CPU).sha256
    errors, kept = ({name: statistics.mean(seen) for name, seen in part.items()} for part in (look.errors, look.kept))
    assert errors["100"] < 1e-6 < errors["6"] < errors["3"]
    assert kept == pytest.approx({"3": 3 / 9, "6": 6 / 9, "100": 1, MOST: 6 / 9})
    assert set(look.shares) == set(range(1, 10))
    assert 0 < sum(statistics.mean(shares) for shares in look.shares.values()) < 1


def test_the_least_length_is_where_there_is_something_to_measure(rig: Any) -> None:
    backbone, texts = rig.backbone(), rig.texts()
    for latents, measured in ((12, False), (13, True)):
        assert least_latents("look", None, chunk_frames=3) == least_latents("follow", 7, chunk_frames=3) == 13
        spec = rig.spec("self_forcing", latent_frames=latents, history=History(chunks=5))
        look = LookOptions(budget_frames=15, sink_frames=0)
        follow = FollowOptions(budget_frames=7, sink_frames=0, policies={"window": WindowOptions(budget_frames=7)})
        for policy in (look, follow):
            render(backbone, replace(spec, kv_policy=policy), texts, devices=CPU)
        assert bool(follow.errors) == bool(look.densities) == measured
    assert [least_latents("choices", budget, chunk_frames=3) for budget in (7, 8, 9, 12)] == [10, 10, 13, 16]
    assert [least_latents("follow", budget, chunk_frames=3) for budget in (8, 9, 12, 18)] == [13, 19, 19, 25]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--parts look --latents 12", "latents=12 is too short for look; use latents=13 or more"),
        ("--parts compare --latents 1", "latents=1 is too short for compare; use latents=2 or more"),
        (
            "--parts follow --latents 12 --budgets 7",
            "latents=12 is too short for follow at a budget of 7; use latents=13",
        ),
        (
            "--parts choices --latents 12 --budgets 7,9",
            "latents=12 is too short for choices at a budget of 9; use latents=",
        ),
        ("--parts compare --budgets 9,3", "budgets=9,3: 3 is below 7; use 7 or more"),
        ("--parts look,compared", "parts='look,compared' are unknown; use some of: look,compare,follow,choices"),
        ("--latents 0", "latent_frames=0 is below 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = "flashforward_core.commands.bench_policies.load_embedded"
    monkeypatch.setattr(loading, lambda *_, **__: pytest.fail("loaded"))
    assert main(["bench", "policies", *words.split()]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_latents_are_compared_in_the_frames_that_are_asked_for() -> None:
    """One video differs by 3 in its second frame of four; the spread of the whole is 2."""
    whole = torch.tensor([-2.0, 2.0]).view(1, 1, 1, 1, 2).expand(2, 3, 4, 5, 2)
    other = whole.clone()
    other[1, :, 1] += 3
    spread = whole.std().item()
    assert latent_errors(other, whole, slice(1, 2)).tolist() == pytest.approx([0, 3 / spread])
    assert latent_errors(other, whole, slice(2, 4)).tolist() == [0, 0]


def test_the_interval_is_196_standard_errors_on_each_side() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert half_width(values) == pytest.approx(1.96 * statistics.stdev(values) / 2)
    assert half_width([3.0]) is None
