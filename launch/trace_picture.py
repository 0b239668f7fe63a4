"""One step as a picture: compute with its stalls, the link, and who lies where in the arena over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flextensor.config import ConfigError
from flextensor.runtime.trace import SHORTEST_STALL, Occupancy, Timeline
from launch.words import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1c2733"
STALL = "#c1272d"
PAPER = "#ffffff"
LETTER_SHARE = 0.0062
"""The share of the picture's width that one letter of a name takes; names that do not fit are left out."""


def draw(step: Timeline, path: Path, *, title: str = "") -> None:
    """Write ``step`` as a PNG.

    Raises ConfigError where matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the picture needs matplotlib: pip install matplotlib (the JSON needs nothing)") from None
    figure = Figure(figsize=(15, 6.4), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    rows = figure.subplots(3, 1, sharex=True, height_ratios=[1, 1, 6])
    order = {span.unit: at for at, span in enumerate(step.computing)}
    colours = colormaps["turbo"]

    def colour(unit: str) -> Any:
        return colours(0.08 + 0.84 * order.get(unit, 0) / max(len(order) - 1, 1))

    _draw_compute(rows[0], step, colour)
    _draw_link(rows[1], step, colour)
    _draw_arena(rows[2], step, colour)
    rows[0].set_title(_headline(step, title), loc="left", fontsize=11, color=INK)
    rows[2].set_xlim(0, step.period * 1e3)
    rows[2].set_xlabel("ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _headline(step: Timeline, title: str) -> str:
    facts = [
        f"step {step.period * 1e3:.1f} ms",
        f"streamed {size(step.streamed_bytes)}",
        f"stalled {step.stall_seconds * 1e3:.2f} ms",
    ]
    return "   ·   ".join([title, *facts] if title else facts)


def _draw_compute(axes: Axes, step: Timeline, colour: Any) -> None:
    for span in step.computing:
        axes.broken_barh([(span.start * 1e3, (span.end - span.start) * 1e3)], (0, 1), facecolor=colour(span.unit))
        if span.stall > SHORTEST_STALL:
            axes.broken_barh(
                [(span.arrive * 1e3, span.stall * 1e3)],
                (0, 1),
                facecolor="#f9dcdc",
                edgecolor=STALL,
                hatch="////",
                linewidth=0.6,
            )
        _name(axes, step, span.unit, span.start, span.end, 0.5)
    _lane(axes, "compute\n(stalls hatched)")


def _draw_link(axes: Axes, step: Timeline, colour: Any) -> None:
    for span in step.copying:
        if span.start >= step.period:  # queued so deep that it began after the step: drawn at the beginning
            continue
        axes.broken_barh(
            [(span.start * 1e3, (min(span.end, step.period) - span.start) * 1e3)],
            (0, 1),
            facecolor=colour(span.unit),
            edgecolor=PAPER,
            linewidth=0.4,
        )
        _name(axes, step, span.unit, span.start, min(span.end, step.period), 0.5)
    _lane(axes, "copy\n(host to device)")


def _draw_arena(axes: Axes, step: Timeline, colour: Any) -> None:
    from matplotlib.patches import Patch

    for tenant in step.occupancies:
        _draw_tenant(axes, step, tenant, colour(tenant.unit))
    axes.set_ylim(max(step.arena_bytes, 1) / 2**20, 0)
    axes.set_ylabel("address in the arena, MiB")
    axes.set_facecolor("#f3f4f6")
    sample = colour(step.computing[len(step.computing) // 2].unit) if step.computing else INK
    axes.legend(
        handles=[
            Patch(facecolor=sample, alpha=0.45, hatch="....", edgecolor=PAPER, label="being filled"),
            Patch(facecolor=sample, alpha=0.45, label="there, not needed yet"),
            Patch(facecolor=sample, label="being read"),
            Patch(facecolor="#f9dcdc", edgecolor=STALL, hatch="////", label="stall"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=4,
        fontsize=9,
        frameon=False,
    )


def _draw_tenant(axes: Axes, step: Timeline, tenant: Occupancy, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    bottom, height = tenant.arena_offset / 2**20, tenant.nbytes / 2**20
    read = max(tenant.read, tenant.filled)

    def block(start: float, end: float, **style: Any) -> None:
        if end > start:
            axes.add_patch(Rectangle((start * 1e3, bottom), (end - start) * 1e3, height, **style))

    block(tenant.start, tenant.filled, facecolor=colour, alpha=0.45, hatch="....", edgecolor=PAPER, linewidth=0)
    block(tenant.filled, read, facecolor=colour, alpha=0.45, linewidth=0)
    block(read, tenant.end, facecolor=colour, linewidth=0)
    block(tenant.start, tenant.end, fill=False, edgecolor=INK, linewidth=0.5)
    if height > step.arena_bytes / 2**20 / 24:
        _name(axes, step, tenant.unit, tenant.start, tenant.end, bottom + height / 2)


def _name(axes: Axes, step: Timeline, name: str, start: float, end: float, y: float) -> None:
    text = _short(name)
    if (end - start) < LETTER_SHARE * (len(text) + 1) * step.period:
        return
    from matplotlib.patheffects import withStroke

    axes.text(
        (start + end) * 500,
        y,
        text,
        ha="center",
        va="center",
        fontsize=7.5,
        color=INK,
        clip_on=True,
        path_effects=[withStroke(linewidth=1.8, foreground=PAPER, alpha=0.75)],
    )


def _short(name: str) -> str:
    """``model.layers.7`` as ``7``: what tells units apart; a piece keeps its own name."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] :]) if numbers else name


def _lane(axes: Axes, label: str) -> None:
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    axes.set_facecolor("#f3f4f6")
