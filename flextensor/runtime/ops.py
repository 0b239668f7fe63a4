"""The two torch.library ops that mark a unit's boundaries inside a traced graph.

[Note: what the ops mutate] ``pre_compute`` declares the unit's weights as mutated: no compiler may read a weight before
it, not even for work that needs no activation (a dequantisation, a cast). ``post_compute`` declares the unit's outputs
as mutated: whatever goes into them has been computed before it. What the unit writes besides (an argument, a buffer) is
computed before it by the op's lowering, see [Note: what the end waits for]. (Were the weights mutated by both ops,
Inductor would find a second version of each, clone the weights, and leave reads behind the end.) A unit that returns
nothing writes into what it is given: that is mutated then, since an op that mutates nothing would be dropped.
The unit travels as a 0-dim CPU tensor, not as an int or a string, so that N identical units share one graph.

A backend that does not undo functionalisation hands ``pre_compute`` copies of the weights, made too early. The boundary
is given the tensors that arrive and refuses those.

Eager calls and units that are compiled on their own never go through here: their boundaries lie outside the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

NAMESPACE = "flextensor"


class Boundary(Protocol):
    """Who is told of a unit's boundaries."""

    def enter_traced(self, weights: list[torch.Tensor]) -> None:
        """The unit's weights are needed; ``weights`` are the tensors that the graph will read."""

    def exit_traced(self) -> None:
        """They are not any more."""


ONE_UNIT_A_GRAPH = (
    "an offloaded model cannot be compiled as a whole, nor several of its units in one graph: their weights take turns "
    "in the same memory. Compile each module of manager.offload_units() in place (`module.compile()`), or pass "
    "compile_fn to offload()"
)


class MonolithicGraphError(RuntimeError):
    """More than one unit of an offloaded model in one graph."""


_traces: weakref.WeakSet[object] = weakref.WeakSet()
_boundaries: weakref.WeakValueDictionary[int, Boundary] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library: torch.library.Library | None = None


def register_boundary(boundary: Boundary) -> torch.Tensor:
    """The tensor by which the ops name ``boundary``; defines the ops at the first call."""
    _define_ops()
    number = next(_numbers)
    _boundaries[number] = boundary
    with torch.inference_mode(False):
        return torch.tensor(number)


def _constant_in_graphs(function: Callable[[], int]) -> Callable[[], int]:
    """Dynamo runs it for real, once, while a graph is traced: the mark that ``torch.compiler.assume_constant_result``
    makes, without its import of the whole compiler (a second, which an eager model does not need)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_in_graphs
def note_traced_unit() -> int:
    """A unit is being traced, into a graph with our ops in it: Inductor must be right about what they mutate. Raises
    MonolithicGraphError for the second one in the same graph."""
    from flextensor.compile.correction import apply_correction
    from flextensor.compile.limits import bump_dynamo_limits_for_compiled_offload
    from flextensor.compile.order import order_reads_before_the_end

    apply_correction()
    order_reads_before_the_end()
    bump_dynamo_limits_for_compiled_offload(len(_boundaries))  # calls of all units are of one code
    trace = torch._guards.TracingContext.try_get()
    if trace is not None:
        if trace in _traces:
            raise MonolithicGraphError(ONE_UNIT_A_GRAPH)
        _traces.add(trace)
    return 0


@_constant_in_graphs
def refuse_whole_model() -> int:
    """The root is being traced."""
    raise MonolithicGraphError(ONE_UNIT_A_GRAPH)


@_constant_in_graphs
def refuse_unit_without_tensors() -> int:
    """A unit is being traced that neither returns a tensor nor is given one: nothing says when it ends."""
    raise MonolithicGraphError(
        "a unit that neither returns a tensor nor takes one cannot run inside somebody's graph: compile it in place "
        "(`module.compile()`)"
    )


def _define_ops() -> None:
    global _library
    if _library is not None:
        return
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, mutated, run in (("pre_compute", "weights", _pre_compute), ("post_compute", "outputs", _post_compute)):
        # What they do (wait, record, copy) must happen at each call: Inductor cuts its CUDA graphs at ops of the first
        # tag. The second is what it takes for granted, save where an op has a lowering of its own.
        tags = (torch.Tag.cudagraph_unsafe, torch.Tag.needs_exact_strides)
        library.define(f"{name}(Tensor(a!)[] {mutated}, Tensor unit) -> ()", tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=library)
    _library = library


def _pre_compute(weights: list[torch.Tensor], unit: torch.Tensor) -> None:
    _boundaries[int(unit)].enter_traced(weights)


def _post_compute(outputs: list[torch.Tensor], unit: torch.Tensor) -> None:
    _boundaries[int(unit)].exit_traced()


def _fake(mutated: list[torch.Tensor], unit: torch.Tensor) -> None:
    return None
