"""Who was compiled: which units made a graph, which share another's, which run eagerly."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

MANY_GRAPHS = 8
"""From so many units with graphs of their own on, it is told what may let them share."""


@dataclass(frozen=True)
class CompileReport:
    """Numbers of units. compiled: made graphs of their own (``graphs`` in all). shared: compiled, and every call ran a
    graph that another unit had made, or one of the caller's around it. eager: not compiled. pending: compiled, but not
    called yet."""

    compiled: int
    shared: int
    eager: int
    pending: int
    graphs: int


class CompileCensus:
    """Counts the graphs that Dynamo makes, by the unit that was running. ``running()``: that unit, or None.

    Dynamo may compile several frames of a unit, some of which make no graph (a hook before its forward).
    """

    def __init__(self, running: Callable[[], int | None]) -> None:
        self.graphs: Counter[int] = Counter()
        self.called: set[int] = set()
        self._running = running
        self._handler: Any = None
        self._before = 0

    def start(self) -> None:
        """Begin to count; again is free."""
        if self._handler is None:
            self._handler = torch._dynamo.callback.callback_handler
            self._handler.register_start_callback(self._begin)
            self._handler.register_end_callback(self._end)

    @property
    def active(self) -> bool:
        """True between ``start`` and ``stop``: units are compiled."""
        return self._handler is not None

    def stop(self) -> None:
        """Stop counting; again is free."""
        if self._handler is None:
            return
        if self._begin in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._begin)
        if self._end in self._handler.end_callbacks:
            self._handler.remove_end_callback(self._end)
        self._handler = None

    def _begin(self, _: Any) -> None:
        self._before = _graphs_made()

    def _end(self, _: Any) -> None:
        unit, made = self._running(), _graphs_made() - self._before
        if unit is not None and made > 0:
            self.graphs[unit] += made
            if made == self.graphs[unit] and len(self.graphs) == MANY_GRAPHS:
                logger.info(
                    "%d units have been compiled on their own; where their forwards differ by a number in an attribute "
                    "(an index) alone, torch._dynamo.config.allow_unspec_int_on_nn_module = True lets them share",
                    MANY_GRAPHS,
                )

    def report(self, compiled: list[bool]) -> CompileReport:
        """``compiled``: for each unit, whether something compiled runs in its place."""
        own = sum(1 for unit, yes in enumerate(compiled) if yes and self.graphs[unit])
        shared = sum(1 for unit, yes in enumerate(compiled) if yes and not self.graphs[unit] and unit in self.called)
        pending = sum(compiled) - own - shared
        return CompileReport(own, shared, len(compiled) - sum(compiled), pending, sum(self.graphs.values()))


def _graphs_made() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
