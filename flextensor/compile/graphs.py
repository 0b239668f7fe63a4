"""CUDA graphs of an offloaded forward: a graph whose plan is no longer in force is refused, not replayed.

A captured graph holds addresses of slots and host bytes. ``note_capture`` is called while one is recorded; from the
first such call on, ``torch.cuda.CUDAGraph`` remembers which layout a graph was captured under and checks it at replay.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch


class StaleGraphError(RuntimeError):
    """A CUDA graph was captured under a plan that is no longer in force."""


class Layout(Protocol):
    """Whose weights a graph reads; ``layout_serial`` changes whenever they lie elsewhere."""

    name: str
    layout_serial: int


_pending: list[tuple[weakref.ref[Any], int, str]] = []
_watching = False
_TAGS = "_flextensor_layouts"


def note_capture(layout: Layout) -> None:
    """A step of this offloaded model is being captured now."""
    _watch()
    if not any(ref() is layout for ref, _, _ in _pending):
        _pending.append((weakref.ref(layout), layout.layout_serial, layout.name))


def _watch() -> None:
    global _watching
    if _watching:
        return
    graph = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _pending.clear()
        return begin(self, *args, **kwargs)

    @functools.wraps(end)
    def capture_end(self: Any) -> Any:
        result = end(self)
        setattr(self, _TAGS, tuple(_pending))
        _pending.clear()
        return result

    @functools.wraps(replay)
    def checked_replay(self: Any) -> Any:
        for ref, serial, name in getattr(self, _TAGS, ()):
            layout = ref()
            if layout is None or layout.layout_serial != serial:
                raise StaleGraphError(
                    f"this CUDA graph was captured before the last replan (or edit, or release) of the offloaded model "
                    f"{name!r}: its weights lie elsewhere now; capture it again"
                )
        return replay(self)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, checked_replay  # type: ignore[method-assign]
    _watching = True
