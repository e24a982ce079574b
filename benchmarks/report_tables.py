"""What the pages that are made from benchmark rows share: finding rows, writing tables, drawing."""

import math
from collections.abc import Sequence
from typing import Any

from flashforward_core.commands.bench_rows import Row
from flashforward_core.metrics.plot import require_matplotlib

GIB = 2**30


def of(rows: Sequence[Row], metric: str, **config: Any) -> list[Row]:
    """Return the rows of a metric whose config has these entries."""
    return [
        row
        for row in rows
        if row["metric"] == metric and all(row["config"].get(name) == value for name, value in config.items())
    ]


def measured_on(rows: Sequence[Row]) -> str:
    """Say where and when rows were measured."""
    places = sorted({f"{row['machine']}, {row['date'][:10]}, {row['commit']}" for row in rows})
    return f"Measured on: {'; '.join(places)}."


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def interval(row: Row | None, digits: int) -> str:
    """Write a number with half of its interval."""
    if row is None:
        return "–"
    text = f"{row['value']:.{digits}f}"
    return f"{text} ± {row['ci95']:.{digits}f}" if "ci95" in row else text


def difference(ours: Row, theirs: Row) -> tuple[float, float]:
    """Return how far a number is above another, and half of that difference's interval.

    Rows hold no single videos, so the two are taken as independent. Measured on the same videos, they mostly rise and
    fall together, and then the true interval is narrower.
    """
    width = math.hypot(ours.get("ci95", math.inf), theirs.get("ci95", math.inf))
    return ours["value"] - theirs["value"], width


def figure_with(width: float, height: float, *, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes, one or a row of them."""
    figure = require_matplotlib()(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)
