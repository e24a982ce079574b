"""What ``bench sparse`` assumes of buckets is what was measured, and it counts blocks and stages as rollouts do."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from flashforward_core.commands.bench_rows import RowBook, read_rows
from flashforward_core.commands.bench_sparse import NAMES, Bench, Densities, _largest_share

pytestmark = pytest.mark.cpu

ARGS = argparse.Namespace(model="embedded", resolution="128x192", precision="fp32", sparse_attention="auto")


def _bench(**changes: float) -> Bench:
    return Bench(args=ARGS, device=torch.device("cpu"), densities=Densities(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("density", [0.125, 0.2, 0.5, 0.9])
def test_random_buckets_meet_as_often_as_measured(density: float) -> None:
    share = _largest_share(density, 8)
    assert share**2 + (1 - share) ** 2 / 7 == pytest.approx(density)
    torch.manual_seed(0)
    q, k = (_bench()._codes(torch.empty(1, 3000, 2, 1), share, 8) for _ in range(2))
    assert (q.unsqueeze(2) == k.unsqueeze(1)).double().mean().item() == pytest.approx(density, abs=0.02)


def test_a_history_lies_in_pages_of_chunks() -> None:
    """96 tokens a frame: two chunks of three frames, one frame that is left over, and the chunk itself."""
    assert _bench()._page_sizes(7) == [288, 288, 96, 288]
    assert _bench()._page_sizes(3) == [288, 288]


def test_temp_cache_holds_the_measured_share_up_to_its_budget() -> None:
    bench = _bench(temp_cache=0.5)
    assert bench._kept_tokens(10) == 5 * 96
    assert bench._kept_tokens(1000) == 18 * 96


def test_densities_are_the_longest_caches(tmp_path: Path) -> None:
    row = lambda what, value, **config: {"metric": "density", "value": value, "config": {"what": what, **config}}  # noqa: E731
    rows = [row("ann_sa", 0.3, frames=78), row("ann_sa", 0.5, frames=12), row("ann_ca", 0.9)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="has no density of temp_cache; run bench policies first"):
        Densities.of(path)
    path.write_text(json.dumps([*rows, row("temp_cache", 0.4, frames=80)]))
    found = Densities.of(path)
    assert (found.ann_sa, found.ann_ca, found.temp_cache) == (0.3, 0.9, 0.4)


def test_every_setting_is_filed_with_its_speedup(tmp_path: Path) -> None:
    book = RowBook(path=tmp_path / "rows.json", machine="here", common={})
    with torch.inference_mode():
        _bench().measure(2, book=book)
    rows = {(row["metric"], row["config"]["policy"]): row["value"] for row in read_rows(tmp_path / "rows.json")}
    for name in NAMES:
        assert rows["speedup", name] == pytest.approx(rows["chunk_ms", "dense"] / rows["chunk_ms", name])
