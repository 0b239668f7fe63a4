"""Figures and tables as people read them."""

from __future__ import annotations

from rich import box
from rich.table import Table

from cluster.messages import JobProgress


def table(*columns: str, title: str) -> Table:
    """An empty table that fits 80 columns: the first column on the left, figures on the right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def size(nbytes: float) -> str:
    """``269.0 MB``: decimal units, as the link's GB/s."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def milliseconds(seconds: float) -> str:
    """``12.3 ms``; a dash where nothing was measured."""
    return f"{seconds * 1e3:.1f} ms" if seconds > 0 else "-"


def budget(value: int | float | None) -> str:
    """A budget as it is given: a share of the weights, a size, or ``latency``."""
    if value is None:
        return "latency"
    return f"{value:.0%}" if isinstance(value, float) else size(value)


def rate(job: JobProgress) -> str:
    """``223.4 tokens/s``; of results without tokens (videos, labels) ``12.0 items/min``. Empty before the first."""
    if not job.done:
        return ""
    if job.tokens:
        return f"{job.tokens_per_second:.1f} tokens/s"
    span = job.updated - job.started
    return f"{60 * job.done / span if span > 0 else 0.0:.1f} items/min"
