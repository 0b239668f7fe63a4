"""Many processes, one GPU each, on Ray. Knows the engine through its public API. ``run_batch`` is for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.program import BatchOutcome as BatchOutcome
    from cluster.program import run_batch as run_batch

__all__ = ["BatchOutcome", "run_batch"]


def __getattr__(name: str) -> Any:
    """The two names, when they are asked for: asking a run for its status needs none of what they bring."""
    if name in __all__:
        from cluster import program

        return getattr(program, name)
    raise AttributeError(f"module 'cluster' has no attribute {name!r}")
