"""One point of the search: a choice of streamed tensors, arena and placement, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flextensor.planner.build import assemble
from flextensor.planner.copies import runs_of
from flextensor.planner.gaps import place_apart, place_largest_first
from flextensor.planner.layout import Layout, NoRoom, Placement, place_ring
from flextensor.planner.mix import kind_weights, kinds_of, resident_seconds
from flextensor.planner.plan import Plan
from flextensor.planner.simulate import CopyTimes, settle

FEW_TENSORS = 10
"""Arenas of fewer streamed tensors than this are worth ``place_apart``; in larger ones the ring loses little."""

APART_EFFORT = 150_000
"""Tensors placed by a search after which only the ring is tried: ``place_apart`` takes ten times as long."""


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to. num_blocks, min_blocks: the arena in units of the most that one visit streams.

    In latency mode (no budget) copies may fill ``scale`` of the compute time, the step may take ``tolerance`` more
    than the resident model's, and both must hold on a link slower by ``margin``.
    """

    budget_bytes: int | None
    num_blocks: int | None = None
    min_blocks: int = 1
    scale: float = 1.0
    tolerance: float = 0.003
    margin: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A choice and what the simulation says of it. Seconds are over the mix of step kinds."""

    streamed: frozenset[int]
    arena: int
    placement: Placement
    seconds: float
    transfer: float
    weight_bytes: int
    streamed_bytes: int


class Judge:
    """Simulates choices within limits. ``spent`` counts the tensors placed: the search's effort."""

    def __init__(self, layout: Layout, limits: Limits) -> None:
        self.layout, self.limits = layout, limits
        self.everything = frozenset(range(len(layout.size))) - layout.forced
        self.spent = 0
        self._known: dict[tuple[frozenset[int], int, Placement], Trial | None] = {}
        self._kinds = kinds_of(layout.profile)
        self._mix = kind_weights(self._kinds)
        self.resident_seconds = sum(w * resident_seconds(k) for w, k in zip(self._mix, self._kinds, strict=True))
        slower = 1 + limits.margin if limits.budget_bytes is None else 1.0
        curve = layout.profile.transfer
        self._curve = cache(lambda nbytes: slower * curve.seconds(nbytes))

    @property
    def time_limit(self) -> float:
        """Latency mode: the slowest step that is allowed."""
        return max(1.0, self.limits.scale) * (1 + self.limits.tolerance) * self.resident_seconds

    def placements(self, streamed: frozenset[int], arena: int) -> tuple[Placement, ...]:
        """The ways to place that are worth a trial."""
        if not streamed:
            return (place_ring,)
        mean = sum([self.layout.size[t] for t in streamed]) / len(streamed)
        few = arena < FEW_TENSORS * mean and self.spent < APART_EFFORT
        return (place_ring, place_apart, place_largest_first) if few else (place_ring,)

    def evaluate(self, streamed: frozenset[int], arena: int, placement: Placement = place_ring) -> Trial | None:
        """Simulate one choice; None when it does not fit the arena or the budget."""
        layout, limits = self.layout, self.limits
        rows = [[t for t in row if t in streamed] for row in layout.reads]
        largest = max(layout.unit_bytes(rows), default=0)
        held = sum([layout.size[t] for t in streamed])
        if limits.num_blocks is not None:
            arena = min(arena, limits.num_blocks * largest)
        arena = max(min(arena, held), min(limits.min_blocks * largest, held))
        if largest > arena:
            return None
        self.spent += len(layout.profile.visits) + len(streamed) * (
            1 if placement is place_ring else 2 + min(10, len(streamed) // 4)
        )
        choice = streamed, arena, placement
        if choice not in self._known:
            self._known[choice] = self._simulate(rows, *choice)
        return self._known[choice]

    def _simulate(
        self, rows: list[list[int]], streamed: frozenset[int], arena: int, placement: Placement
    ) -> Trial | None:
        layout, limits = self.layout, self.limits
        held = sum([layout.size[t] for t in streamed])
        try:
            offsets = placement(layout, rows, arena)
        except NoRoom:
            return None
        used = max([offsets[t] + layout.size[t] for t in offsets], default=0)
        weight_bytes = layout.total_bytes - held + used
        if limits.budget_bytes is not None and weight_bytes > limits.budget_bytes:
            return None
        times: CopyTimes = [[] for _ in layout.profile.visits]
        steps = len(times)
        transfer, nbytes = 0.0, 0
        for run in runs_of(layout, rows, offsets, used):
            seconds = self._curve(run.nbytes)
            times[run.visit].append((seconds, run.after % steps, 0 if run.after >= 0 else 1))
            transfer += seconds
            nbytes += run.nbytes
        total = sum([w * settle(times, kind, transfer)[0] for w, kind in zip(self._mix, self._kinds, strict=True)])
        # ``arena`` and not ``used``: the plan is made again from it, and must come out the same.
        return Trial(streamed, arena, placement, total, transfer, weight_bytes, nbytes)

    def least_seconds(self, streamed: frozenset[int]) -> float:
        """No plan that streams these tensors takes less: each is fetched once a step, a unit's in as few copies as
        there can be. (One that stays in its place all step long is as good as resident: another set.)"""
        layout, transfer = self.layout, 0.0
        for unit in set(layout.profile.visits):
            row = [t for t in layout.reads[unit] if t in streamed and t not in layout.shared]
            transfer += layout.link_seconds(self._curve, row)
        return max(transfer, self.resident_seconds)

    def slowest_worth(self, best: Trial) -> float:
        """Seconds above which no trial can be better than ``best``."""
        return self.time_limit if self.limits.budget_bytes is None else (1 + 1e-3) * best.seconds

    def allowed(self, trial: Trial) -> bool:
        """Latency mode: no slower than the resident model, copies within their share."""
        return trial.seconds <= self.time_limit and trial.transfer <= self.limits.scale * self.time_limit

    def plan_of(self, trial: Trial) -> Plan:
        """The Plan of a point."""
        layout = self.layout
        resident = frozenset(range(len(layout.size))) - trial.streamed
        rows = layout.streamed(resident)
        offsets = trial.placement(layout, rows, trial.arena)
        used = max([offsets[t] + layout.size[t] for t in offsets], default=0)
        return assemble(layout, resident, rows, offsets, used, self.limits.budget_bytes)

    def smallest(self) -> Trial:
        """The least device memory that works: one unit at a time in the arena, all else streamed."""
        unbound = Judge(self.layout, Limits(None))
        size, reads = self.layout.size, self.layout.reads
        own = self.everything - frozenset(self.layout.shared)
        points: list[Trial | None] = []
        for streamed in {self.everything, own}:
            largest = max((sum(size[t] for t in row if t in streamed) for row in reads), default=0)
            points.append(unbound.evaluate(streamed, largest))
        return min((p for p in points if p is not None), key=lambda p: p.weight_bytes)
