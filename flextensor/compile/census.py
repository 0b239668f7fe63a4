"""Who was compiled: which units made a graph, which share another's, which run eagerly."""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

MANY_GRAPHS = 8
"""From so many units with graphs of their own on, it is told what may let them share."""

WATCHED_CALLS = 8
"""Calls of each unit that are watched after Dynamo has given up on a frame."""


@dataclass(frozen=True)
class CompileReport:
    """Numbers of units. compiled: made graphs of their own (``graphs`` in all). shared: compiled, and every call ran a
    graph that another unit had made, or one of the caller's around it. eager: not compiled, or run eagerly all the same
    since Dynamo gave up on it (at its limit on recompilations). pending: compiled, but not called yet."""

    compiled: int
    shared: int
    eager: int
    pending: int
    graphs: int


class CompileCensus:
    """Counts the graphs that Dynamo makes, by the unit that was running. ``running()``: that unit, or None.

    Dynamo may compile several frames of a unit, some of which make no graph (a hook before its forward).

    [Note: given up] Where Dynamo gives up on a frame, at its limit on recompilations above all, it says so once for the
    frame's code; from then on any unit of that code that matches none of its graphs runs eagerly without a word. So
    some calls of each unit are watched then: in one that runs a graph, the code of the unit's own forward never runs.
    """

    def __init__(self, running: Callable[[], int | None]) -> None:
        self.graphs: Counter[int] = Counter()
        self.called: set[int] = set()
        self.given_up: set[int] = set()
        self._suspects: set[int] = set()
        """Dynamo gave up on something in their last call, and they have made no graph: the next call will tell."""
        self._watched: Counter[int] | None = None
        """Watched calls since Dynamo gave up on a frame, by unit; None: it never did."""
        self._running = running
        self._handler: Any = None
        self._before = 0

    def start(self) -> None:
        """Begin to count, or go on after ``torch._dynamo.reset()``, which forgets us and what it had given up on; again
        is free."""
        if self._handler is None:
            self._handler = torch._dynamo.callback.callback_handler
        elif self._begin in self._handler.start_callbacks:
            return
        self.given_up.clear()
        self._suspects.clear()
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

    def call(
        self,
        unit: int,
        name: str,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """``run(*args, **kwargs)``, the compiled unit's call, and whether it was one. See [Note: given up]."""
        before = _frames_given_up()
        if self._watched is None or self._watched[unit] >= WATCHED_CALLS or unit in self.given_up:
            result = run(*args, **kwargs)
        else:
            self._watched[unit] += 1
            self._suspects.discard(unit)
            result, eagerly = _watch(_code_of(module.forward), run, args, kwargs)
            if eagerly:
                self._tell(unit, name)
        if _frames_given_up() > before:
            self._watched = Counter()
            if not self.graphs[unit]:
                self._suspects.add(unit)
        return result

    def _tell(self, unit: int, name: str) -> None:
        self.given_up.add(unit)
        if len(self.given_up) == 1:
            logger.warning(
                "unit %r is compiled but runs eagerly, and others may too (compile_report() counts them): Dynamo "
                "gave up on it, as it does at torch._dynamo.config.recompile_limit = %d graphs of one code; raise "
                "that limit, or see with TORCH_LOGS=recompiles what differs from call to call",
                name,
                torch._dynamo.config.recompile_limit,
            )

    def _begin(self, _: Any) -> None:
        self._before = _graphs_made()

    def _end(self, _: Any) -> None:
        unit, made = self._running(), _graphs_made() - self._before
        if unit is not None and made > 0:
            self.graphs[unit] += made
            self.given_up.discard(unit)
            if made == self.graphs[unit] and len(self.graphs) == MANY_GRAPHS:
                logger.info(
                    "%d units have been compiled on their own; where their forwards differ by a number in an attribute "
                    "(an index) alone, torch._dynamo.config.allow_unspec_int_on_nn_module = True lets them share",
                    MANY_GRAPHS,
                )

    def report(self, compiled: list[bool]) -> CompileReport:
        """``compiled``: for each unit, whether something compiled is to run in its place."""
        eager = self.given_up | self._suspects
        compiled = [yes and unit not in eager for unit, yes in enumerate(compiled)]
        own = sum(1 for unit, yes in enumerate(compiled) if yes and self.graphs[unit])
        shared = sum(1 for unit, yes in enumerate(compiled) if yes and not self.graphs[unit] and unit in self.called)
        pending = sum(compiled) - own - shared
        return CompileReport(own, shared, len(compiled) - sum(compiled), pending, sum(self.graphs.values()))


def _graphs_made() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _frames_given_up() -> int:
    frames = torch._dynamo.utils.counters["frames"]
    return int(frames["total"] - frames["ok"])


def _code_of(forward: Callable[..., Any]) -> CodeType | None:
    """The code as it was written, without decorators."""
    return getattr(inspect.unwrap(forward), "__code__", None)


def _watch(
    code: CodeType | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """What the call returns, and whether ``code`` itself ran in it. Somebody's profiler has precedence."""
    if code is None or sys.getprofile() is not None:
        return run(*args, **kwargs), False
    ran = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal ran
        if event == "call" and frame.f_code is code:
            ran = True
            sys.setprofile(None)

    sys.setprofile(look)
    try:
        result = run(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return result, ran
