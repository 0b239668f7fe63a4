"""Pictures of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import GIB, Row, median

OURS = "#0b6e4f"
FLOOR = "#444444"
COLOURS = {
    "resident": "#1f77b4",
    "resident-compiled": "#6baed6",
    "public-flextensor": "#d1495b",
    "diffusers-block": "#8e6c8a",
    "diffusers-leaf": "#b08bbb",
    "accelerate": "#edae49",
    "ours-piece": "#66a182",
    "ours-compiled": "#2e4057",
}
MARKS = {"public-flextensor": "D", "diffusers-block": "s", "diffusers-leaf": "^", "accelerate": "v", "ours-piece": "P"}


def engine_picture(rows: Sequence[Row], path: Path) -> None:
    """Step time over weights on the GPU, a panel a token count: ours, the floor as a line, contenders as points.

    A contender's weights on the GPU: its peak less the activations of the resident model.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.step_seconds is not None]
    counts = sorted({row.tokens for row in measured if not row.contender.startswith("resident")})
    if not counts:
        return
    figure = Figure(figsize=(5.4 * len(counts) + 0.6, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for at, tokens in enumerate(counts):
        axes = figure.add_subplot(1, len(counts), at + 1)
        _panel(axes, [row for row in measured if row.tokens == tokens], tokens)
    figure.axes[0].set_ylabel("a forward, back to back, ms")
    figure.savefig(path, dpi=150)


def _panel(axes: Any, rows: Sequence[Row], tokens: int) -> None:
    ours = sorted(
        (row for row in rows if row.contender == "ours" and row.device_weight_bytes is not None),
        key=lambda row: row.device_weight_bytes or 0,
    )
    scale, unit = (
        (GIB, "GiB") if max((row.total_weight_bytes or 0 for row in rows), default=0) > GIB else (2**20, "MiB")
    )
    top = 1.3 * max([_ms(row) for row in ours] + [_ms(row) for row in rows if row.contender == "resident"], default=1.0)
    if ours:
        x = [(row.device_weight_bytes or 0) / scale for row in ours]
        axes.plot(x, _floors(ours), color=FLOOR, lw=1.2, label="floor: max(resident, streamed / link)", zorder=2)
        axes.plot(x, [_ms(row) for row in ours], "o", color=OURS, ms=6, label="ours", zorder=4)
        axes.set_ylim(0, top)
    activations = _activations(rows)
    outside = [row for row in rows if ours and _ms(row) > top]
    for row in rows:
        if row.contender == "ours" or row in outside:
            continue
        weights = row.device_weight_bytes
        if weights is None:
            if row.peak_bytes is None or activations is None:
                continue
            weights = max(row.peak_bytes - activations, 0)
        _point(axes, row, weights / scale)
    for at, row in enumerate(outside):
        axes.annotate(
            f"above: {row.contender}, {_ms(row):.0f} ms",
            (0.98, 0.97 - 0.05 * at),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=8,
            color=COLOURS.get(row.contender, "black"),
        )
    axes.set_title(f"{tokens} tokens")
    axes.set_xlabel(f"weights on the GPU, {unit}")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, loc="lower left")


def _ms(row: Row) -> float:
    return (row.step_seconds or 0.0) * 1e3


def _floors(rows: Sequence[Row]) -> list[float]:
    """Milliseconds. The resident time is one for all: that it moved between rows is no property of the floor."""
    resident = median([row.resident_seconds or 0.0 for row in rows])
    return [max(resident, (row.streamed_bytes or 0) / (row.link_bytes_per_second or 1.0)) * 1e3 for row in rows]


def _point(axes: Any, row: Row, weights: float) -> None:
    axes.plot(
        [weights],
        [_ms(row)],
        MARKS.get(row.contender, "o"),
        color=COLOURS.get(row.contender, "black"),
        ms=6,
        label=row.contender,
        zorder=3,
    )


def _activations(rows: Sequence[Row]) -> int | None:
    """Peak less weights of the resident model."""
    for row in rows:
        if row.contender == "resident" and row.peak_bytes and row.total_weight_bytes:
            return row.peak_bytes - row.total_weight_bytes
    return None
