"""Figures as people read them."""

from __future__ import annotations


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
