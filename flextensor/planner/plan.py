"""Plan: what is resident, where each streamed byte lands, in which order copies go.

One object, simulated by the planner and executed by the loader (law 1). Pure Python.

Words. A *step* runs ``visits`` in order, over and over; visit ``i`` of step ``s`` has the position
``s * len(visits) + i``. Streamed tensors live in the *arena*, one allocation on the device; a *slot* is the place in
it that a tensor takes. A tensor has one place in a plan, whatever the visit; tensors of different units share bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 256
"""Every tensor in store, arena and resident memory starts at a multiple of this many bytes."""

HOST = "host"


class BudgetError(ValueError):
    """No plan fits the budget. ``needed`` is the least number of bytes that works."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.needed)  # it crosses processes


@dataclass(frozen=True)
class Copy:
    """One contiguous run of bytes that travels for one visit.

    visit: the visit whose weights these are.
    source: where from; "host" is the host store.
    source_offset, arena_offset, nbytes: bytes.
    tensors: the tensors in the run, in order.
    after: the visit after whose exit the copy is issued: its destination is free then (no visit that still reads
        those bytes is open, and every earlier copy has been issued).
    lag: 0 when ``after`` is in the same step as ``visit``, 1 when it is in the step before.
    """

    visit: int
    source: str
    source_offset: int
    arena_offset: int
    nbytes: int
    tensors: tuple[int, ...]
    after: int
    lag: int


@dataclass(frozen=True)
class Prediction:
    """What the simulation says of one step in the steady state, the mix of step kinds weighted. Seconds."""

    step_seconds: float
    compute_seconds: float
    stall_seconds: float
    transfer_seconds: float
    floor_seconds: float
    by_kind: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """visits: unit index a visit. resident: tensor indexes that stay on the device. offsets: arena offset of each
    streamed tensor. copies: one step's copies in the order in which they go over the link.

    initial: copies made once, before the first step, whatever their ``after``: what the first step would have found in
    the arena from the step before.
    weight_bytes: device memory that the plan takes for weights: resident tensors, each rounded up to ALIGNMENT,
    plus the arena. Never above ``budget_bytes`` where one was given.
    """

    visits: tuple[int, ...]
    resident: frozenset[int]
    offsets: Mapping[int, int]
    arena_bytes: int
    copies: tuple[Copy, ...]
    resident_bytes: int
    weight_bytes: int
    streamed_bytes: int
    initial: tuple[Copy, ...] = ()
    budget_bytes: int | None = None
    prediction: Prediction | None = None


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
