"""The optimiser: which tensors stay resident and how large the arena is, judged by the simulation.

Memory mode: the least step time within a budget. Latency mode: the least memory whose step costs no time. Both look
at a grid of arenas and of the most bytes that one unit may stream, spread the streaming over the step for each
(``choose.py``), and then improve the best by small moves. The same input gives the same plan: the effort is counted in
simulated copies, never in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flextensor.planner.build import assemble, default_arena
from flextensor.planner.choose import Menus
from flextensor.planner.copies import runs_of
from flextensor.planner.layout import Layout, NoRoom, Placement, place_ring
from flextensor.planner.mix import kind_weights, kinds_of, resident_seconds
from flextensor.planner.plan import ALIGNMENT, BudgetError, Plan, align
from flextensor.planner.simulate import CopyTimes, predicted, settle
from flextensor.planner.verify import verify_plan
from flextensor.profile import Profile

logger = logging.getLogger(__name__)

SAME_TIME = 2e-4
"""Steps whose times differ by less than this share count as equally fast; then fewer bytes win."""


@dataclass(frozen=True)
class Limits:
    """What a search must keep to. num_blocks, min_blocks: the arena in units of the most that one visit streams."""

    budget_bytes: int | None
    num_blocks: int | None
    min_blocks: int
    scale: float
    tolerance: float


@dataclass(frozen=True)
class Trial:
    """One point of the search, simulated."""

    streamed: frozenset[int]
    arena: int
    placement: Placement
    seconds: float
    transfer: float
    weight_bytes: int
    streamed_bytes: int


def search(
    profile: Profile,
    *,
    budget_bytes: int | None = None,
    num_blocks: int | None = None,
    min_blocks: int = 1,
    transfer_budget_scale: float = 1.0,
    tolerance: float = 0.003,
) -> Plan:
    """The best plan found, verified, with its prediction.

    budget_bytes: device memory for weights (memory mode); None is latency mode: the least memory whose step is within
        ``tolerance`` of the resident model's.
    num_blocks, min_blocks: the most and fewest units whose streamed bytes the arena holds.
    transfer_budget_scale: latency mode lets copies take this share of the compute time.
    Raises BudgetError, with the least bytes that work, when no plan fits.
    """
    limits = Limits(budget_bytes, num_blocks, min_blocks, transfer_budget_scale, tolerance)
    finder = _Search(Layout.of(profile), limits)
    plan = predicted(finder.plan(), profile)
    verify_plan(plan, profile)
    logger.debug("planned with %d simulations: %s", finder.spent, plan.prediction)
    return plan


class _Search:
    def __init__(self, layout: Layout, limits: Limits) -> None:
        self.layout, self.limits = layout, limits
        self.profile = layout.profile
        self.kinds = kinds_of(self.profile)
        self.mix = kind_weights(self.kinds)
        self.menus = Menus(layout)
        self.spent = 0
        self.copy_seconds: dict[int, float] = {}
        self.resident_time = sum(w * resident_seconds(k) for w, k in zip(self.mix, self.kinds, strict=True))
        self.everything = frozenset(range(len(layout.size))) - layout.forced
        self.best: Trial | None = None
        streamable = sum(len(row) for row in layout.reads) + len(self.profile.visits)
        self.effort = max(60, min(1500, 60_000 // max(streamable, 1)))

    # -- one point ---------------------------------------------------------------------------------------------

    def evaluate(self, streamed: frozenset[int], arena: int, placement: Placement = place_ring) -> Trial | None:
        """Simulate one choice; None when it does not fit the arena or the budget."""
        layout = self.layout
        resident_bytes = layout.total_bytes - sum([layout.size[t] for t in streamed])
        rows = [[t for t in row if t in streamed] for row in layout.reads]
        largest = max(layout.unit_bytes(rows), default=0)
        if self.limits.num_blocks is not None:
            arena = min(arena, self.limits.num_blocks * largest)
        arena = max(arena, min(self.limits.min_blocks * largest, sum(layout.size[t] for t in streamed)))
        if largest > arena:
            return None
        try:
            offsets = placement(layout, rows, arena)
        except NoRoom:
            return None
        self.spent += 1
        used = max([offsets[t] + layout.size[t] for t in offsets], default=0)
        if self.limits.budget_bytes is not None and resident_bytes + used > self.limits.budget_bytes:
            return None
        times: CopyTimes = [[] for _ in self.profile.visits]
        steps, known, curve = len(times), self.copy_seconds, self.profile.transfer
        transfer, nbytes = 0.0, 0
        for run in runs_of(layout, rows, offsets, used):
            seconds = known.get(run.nbytes)
            if seconds is None:
                seconds = known[run.nbytes] = curve.seconds(run.nbytes)
            times[run.visit].append((seconds, run.after % steps, 0 if run.after >= 0 else 1))
            transfer += seconds
            nbytes += run.nbytes
        total = sum(w * settle(times, kind, transfer)[0] for w, kind in zip(self.mix, self.kinds, strict=True))
        return Trial(streamed, used, placement, total, transfer, resident_bytes + used, nbytes)

    def plan_of(self, trial: Trial) -> Plan:
        """The Plan of a point."""
        resident = frozenset(range(len(self.layout.size))) - trial.streamed
        rows = self.layout.streamed(resident)
        offsets = trial.placement(self.layout, rows, trial.arena)
        return assemble(self.layout, resident, rows, offsets, trial.arena, self.limits.budget_bytes)

    # -- what is better ----------------------------------------------------------------------------------------

    @property
    def time_limit(self) -> float:
        """Latency mode: the slowest step that is allowed."""
        return max(1.0, self.limits.scale) * (1 + self.limits.tolerance) * self.resident_time

    def allowed(self, trial: Trial) -> bool:
        """Latency mode: no slower than the resident model, copies within their share."""
        return trial.seconds <= self.time_limit and trial.transfer <= self.limits.scale * self.time_limit

    def key(self, trial: Trial) -> tuple[float, ...]:
        """Less is better."""
        if self.limits.budget_bytes is None:
            return (0.0 if self.allowed(trial) else 1.0, trial.weight_bytes, trial.streamed_bytes, trial.seconds)
        step = max(SAME_TIME * self.resident_time, 1e-12)
        return (round(trial.seconds / step), trial.streamed_bytes, trial.weight_bytes, trial.seconds)

    def offer(self, trial: Trial | None) -> bool:
        """Keep a better point; True when it was better."""
        if trial is None or (self.best is not None and self.key(trial) >= self.key(self.best)):
            return False
        self.best = trial
        return True

    # -- the search --------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The best plan found."""
        budget = self.limits.budget_bytes
        nothing = frozenset[int]()
        if not self.everything or (budget is not None and budget >= self.layout.total_bytes):
            if budget is not None and budget < self.layout.total_bytes:
                raise self._too_small(self.layout.total_bytes)
            resident = self.evaluate(nothing, 0)
            assert resident is not None, "a model without streamed tensors fits any arena"
            return self.plan_of(resident)
        if budget is None:
            self.offer(self.evaluate(nothing, 0))
        self._look_over_grid()
        if self.best is None:
            self._least()
        if self.best is None:
            raise self._too_small(self.needed())
        self._improve()
        return self.plan_of(self.best)

    def needed(self) -> int:
        """The least bytes of device memory that work: one unit at a time in the arena, all else streamed."""
        return self._smallest().weight_bytes

    def _smallest(self) -> Trial:
        unbound = _Search(self.layout, Limits(None, None, 1, 1.0, 0.0))
        rows = [list(row) for row in self.layout.reads]
        largest = max(self.layout.unit_bytes(rows), default=0)
        found = unbound.evaluate(self.everything, largest)
        own = self.everything - frozenset(self.layout.shared)
        held = unbound.evaluate(own, max([sum(self.layout.size[t] for t in row if t in own) for row in rows]))
        points = [p for p in (found, held) if p is not None]
        return min(points, key=lambda p: p.weight_bytes)

    def _least(self) -> None:
        smallest = self._smallest()
        self.offer(self.evaluate(smallest.streamed, smallest.arena, smallest.placement))

    def _too_small(self, needed: int) -> BudgetError:
        return BudgetError(
            f"no plan fits a budget of {self.limits.budget_bytes} bytes of device memory; at least {needed} bytes are "
            f"needed (what must be resident, and the streamed tensors of the largest unit)",
            needed,
        )

    def _arenas(self) -> list[int]:
        """Arena sizes worth a look: small multiples of the largest tensors and units, and a geometric grid."""
        layout = self.layout
        sizes = sorted({layout.size[t] for t in self.everything}, reverse=True)
        units = layout.unit_bytes([list(row) for row in layout.reads])
        most = sum(layout.size[t] for t in self.everything)
        if self.limits.budget_bytes is not None:
            most = min(most, self.limits.budget_bytes - layout.forced_bytes)
        found = {most}
        for base in {sizes[0], sizes[len(sizes) // 2], max(units)}:
            found.update(align(int(base * k)) for k in (1, 1.5, 2, 2.5, 3, 4))
        low = max(sizes[-1], most // 400)
        found.update(align(int(low * (most / low) ** (i / 12))) for i in range(12) if most > low)
        return sorted(a for a in found if ALIGNMENT <= a <= most)

    def _caps(self, arena: int) -> Iterator[int]:
        for share in (1.0, 0.75, 0.5, 0.34, 0.2):
            yield int(arena * share)

    def _look_over_grid(self) -> None:
        shared = frozenset(self.layout.shared)
        for arena in self._arenas():
            for cap in self._caps(arena):
                for held in {True, False} if shared else {True}:
                    self._look(arena, cap, frozenset() if held else shared)

    def _look(self, arena: int, cap: int, shared: frozenset[int]) -> None:
        """The best spread for one arena and cap."""
        base = self.layout.forced_bytes
        base += sum(self.layout.size[t] for t in self.layout.shared if t not in shared)
        if self.limits.budget_bytes is not None:
            picked = self.menus.fit(self.limits.budget_bytes - base - arena, cap)
            if picked is not None:
                self.offer(self.evaluate(self.menus.streamed(picked, shared), arena))
            return
        low, high = 0.0, max(1.0, self.limits.scale) * (1 + self.limits.tolerance)
        for _ in range(6):
            rate = high if low == 0.0 and _ == 0 else (low + high) / 2
            picked = self.menus.spread(rate, cap)
            if self.best is not None and base + self.menus.resident_bytes(picked) > self.best.weight_bytes:
                low = rate
                continue
            trial = self.evaluate(self.menus.streamed(picked, shared), arena)
            if trial is not None and self.allowed(trial):
                self.offer(trial)
                low = rate
                if rate == high:
                    break
            else:
                high = rate

    def _improve(self) -> None:
        """Small moves from the best point, until none helps or the effort is spent."""
        end = self.spent + self.effort
        while self.spent < end:
            if not any(self.offer(trial) for trial in self._moves(end)):
                break

    def _moves(self, end: int) -> Iterator[Trial | None]:
        best = self.best
        assert best is not None
        arenas = [align(int(best.arena * f)) for f in (0.7, 0.85, 0.93, 0.97, 1.03, 1.08, 1.2, 1.5)]
        rows = [[t for t in row if t in best.streamed] for row in self.layout.reads]
        arenas.append(align(default_arena(self.layout, rows)))
        for arena in arenas:
            yield self.evaluate(best.streamed, arena)
        for streamed in self._neighbours(best):
            if self.spent >= end:
                return
            yield self.evaluate(streamed, best.arena)

    def _neighbours(self, best: Trial) -> Iterable[frozenset[int]]:
        size = self.layout.size
        inside = sorted(best.streamed, key=lambda t: (-size[t], t))
        outside = sorted(self.everything - best.streamed, key=lambda t: (-size[t], t))
        for t in inside:
            yield best.streamed - {t}
        for t in outside:
            yield best.streamed | {t}
        for a in inside:
            for b in outside:
                yield best.streamed - {a} | {b}
