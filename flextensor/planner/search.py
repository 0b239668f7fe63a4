"""The optimiser: which tensors stay resident and how large the arena is, judged by the simulation.

Memory mode: the least step time within a budget. Latency mode: the least memory whose step costs no time. Both look
at a grid of arenas and of the most bytes that one unit may stream, spread the streaming over the step for each
(``choose.py``), look closer around the best, and then improve it by small moves. The same input gives the same plan:
effort is counted in tensors placed, never in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from flextensor.planner.choose import Menus
from flextensor.planner.layout import Layout
from flextensor.planner.moves import FEW, SO_FEW_THAT_ALL, every_choice, neighbours
from flextensor.planner.plan import ALIGNMENT, BudgetError, Plan, align
from flextensor.planner.simulate import predicted
from flextensor.planner.trial import Judge, Limits, Trial
from flextensor.planner.verify import verify_plan
from flextensor.profile import Profile

logger = logging.getLogger(__name__)

SAME_TIME = 2e-4
"""Steps whose times differ by less than this share count as equally fast; then fewer bytes win."""

EFFORT = 60_000
"""Tensors placed by each closer look; half of it for models of many tensors, where a trial wins less."""

MANY_TENSORS = 400


def search(
    profile: Profile,
    *,
    budget_bytes: int | None = None,
    num_blocks: int | None = None,
    min_blocks: int = 1,
    transfer_budget_scale: float = 1.0,
    tolerance: float = 0.003,
    link_margin: float = 0.02,
    effort: float = 1.0,
) -> Plan:
    """The best plan found, verified, with its prediction.

    budget_bytes: device memory for weights (memory mode); None is latency mode: the least memory whose step is within
        ``tolerance`` of the resident model's, also on a link slower by ``link_margin``.
    num_blocks, min_blocks: the most and fewest units whose streamed bytes the arena holds.
    transfer_budget_scale: latency mode lets copies take this share of the compute time.
    effort: share of the closer looks and moves; a tenth finds most plans to about a per cent.
    Raises BudgetError, with the least bytes that work, when no plan fits.
    """
    limits = Limits(budget_bytes, num_blocks, min_blocks, transfer_budget_scale, tolerance, link_margin)
    finder = _Search(Judge(Layout.of(profile), limits), effort)
    plan = predicted(finder.plan(), profile)
    verify_plan(plan, profile)
    logger.debug("planned, %d tensors placed: %s", finder.judge.spent, plan.prediction)
    return plan


@dataclass(frozen=True)
class _Setting:
    """What a spread is made for: the arena, the most bytes a unit streams, and which shared tensors are streamed."""

    arena: int
    cap: int
    shared: frozenset[int]


class _Search:
    def __init__(self, judge: Judge, effort: float) -> None:
        self.effort = int(effort * EFFORT)
        self.judge, self.layout, self.limits = judge, judge.layout, judge.limits
        self.menus = Menus(judge.layout)
        self.unit_bytes = self.layout.unit_bytes([list(row) for row in self.layout.reads])
        self.best: Trial | None = None
        self.best_setting: _Setting | None = None

    def key(self, trial: Trial) -> tuple[float, ...]:
        """Less is better."""
        if self.limits.budget_bytes is None:
            slow = 0.0 if self.judge.allowed(trial) else 1.0
            return (slow, trial.weight_bytes, trial.streamed_bytes, trial.seconds)
        step = max(SAME_TIME * self.judge.resident_seconds, 1e-12)
        return (round(trial.seconds / step), trial.streamed_bytes, trial.weight_bytes, trial.seconds)

    def offer(self, trial: Trial | None, setting: _Setting | None = None) -> bool:
        """Keep a better point; True when it was better."""
        if trial is None or (self.best is not None and self.key(trial) >= self.key(self.best)):
            return False
        self.best, self.best_setting = trial, setting or self.best_setting
        return True

    def plan(self) -> Plan:
        """The best plan found."""
        budget, total = self.limits.budget_bytes, self.layout.total_bytes
        if budget is None or budget >= total or not self.judge.everything:
            self.offer(self.judge.evaluate(frozenset(), 0))
        if self.judge.everything and (budget is None or budget < total):
            for setting in self._grid():
                self._look(setting)
            for factors in ((1.25, 1.1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5), (1.06, 1.03, 0.98, 0.96, 0.93)):
                end = self.judge.spent + self._effort(moves=False)
                for setting in self._closer(factors):
                    if self.judge.spent < end:
                        self._look(setting)
            if self.best is None:
                smallest = self.judge.smallest()
                self.offer(self.judge.evaluate(smallest.streamed, smallest.arena, smallest.placement))
            if self.best is not None:
                self._improve()
        if self.best is None:
            needed = self.judge.smallest().weight_bytes
            raise BudgetError(
                f"no plan fits a budget of {budget} bytes of device memory; at least {needed} bytes are needed "
                f"(what must be resident, and the streamed tensors of the largest unit)",
                needed,
            )
        return self.judge.plan_of(self.best)

    # -- arenas and caps ---------------------------------------------------------------------------------------

    def _most(self) -> int:
        """The largest arena worth a look."""
        most = sum(self.layout.size[t] for t in self.judge.everything)
        if self.limits.budget_bytes is not None:
            most = min(most, self.limits.budget_bytes - self.layout.forced_bytes)
        return most

    def _grid(self) -> Iterator[_Setting]:
        """Small multiples of the largest tensors and units, and a geometric range."""
        most = self._most()
        sizes = sorted({self.layout.size[t] for t in self.judge.everything}, reverse=True)
        arenas = {most}
        for base in {sizes[0], sizes[len(sizes) // 2]}:
            arenas.update(align(int(base * k)) for k in (1, 2, 3, 4))
        arenas.update(align(int(max(self.unit_bytes) * k)) for k in (1, 1.25, 1.5, 2, 2.5, 3, 4))
        low = max(sizes[-1], most // 400)
        if most > low:
            arenas.update(align(int(low * (most / low) ** (i / 8))) for i in range(8))
        yield from self._settings((a for a in sorted(arenas, reverse=True) if a <= most), (1.0, 0.67, 0.5, 0.34))

    def _effort(self, *, moves: bool) -> int:
        tensors = len(self.judge.everything)
        if tensors <= FEW:
            # Each set of a small model is soon tried: spreads around the best tell less.
            return self.effort // (16 if not moves else 1 if tensors <= FEW // 2 else 2)
        return self.effort // (2 if tensors >= MANY_TENSORS else 1)

    def _closer(self, factors: tuple[float, ...]) -> Iterator[_Setting]:
        """Around the best of the grid."""
        if self.best is None or self.best_setting is None:
            return
        most, arena = self._most(), self.best.arena
        arenas = (align(int(arena * f)) for f in factors)
        yield from self._settings((a for a in arenas if a <= most), (1.0, 0.8, 0.6, 0.45, 0.3))

    def _settings(self, arenas: Iterator[int], shares: tuple[float, ...]) -> Iterator[_Setting]:
        every = frozenset(self.layout.shared)
        for arena in arenas:
            if arena < ALIGNMENT:
                continue
            for cap in dict.fromkeys(min(int(arena * share), max(self.unit_bytes)) for share in shares):
                for shared in dict.fromkeys((frozenset[int](), every)):
                    yield _Setting(arena, cap, shared)

    # -- a spread for one setting ------------------------------------------------------------------------------

    def _look(self, setting: _Setting) -> None:
        if self.limits.budget_bytes is None:
            self._least_memory(setting)
        else:
            self._least_time(setting, self.limits.budget_bytes)

    def _held(self, setting: _Setting) -> int:
        """Bytes on the device apart from what the menus decide."""
        size = self.layout.size
        kept = sum([size[t] for t in self.layout.shared if t not in setting.shared])
        return self.layout.forced_bytes + kept + setting.arena

    def _least_time(self, setting: _Setting, budget: int) -> None:
        room = budget - self._held(setting)
        bound_by_link = self.best is not None and self.best.transfer > 0.97 * self.best.seconds
        for fit in (self.menus.fit, self.menus.fit_cheapest) if bound_by_link else (self.menus.fit,):
            picked = fit(room, setting.cap)
            if picked is None:
                return
            if self.best is not None and self._hopeless(self.best, picked, setting):
                continue
            streamed = self.menus.streamed(picked, setting.shared)
            for placement in self.judge.placements(streamed, setting.arena):
                self.offer(self.judge.evaluate(streamed, setting.arena, placement), setting)

    def _hopeless(self, best: Trial, picked: list[int], setting: _Setting) -> bool:
        """True when no simulation is needed to see that ``best`` is better."""
        if self.menus.transfer(picked) > (1 + SAME_TIME) * best.seconds:
            return True
        resident = self._held(setting) - setting.arena + self.menus.resident_bytes(picked)
        fewer = self.layout.total_bytes - resident < best.streamed_bytes
        return best.seconds <= (1 + SAME_TIME / 4) * self.judge.resident_seconds and not fewer

    def _least_memory(self, setting: _Setting) -> None:
        """The highest rate of copies at which the step is still as fast as the resident model."""
        held = self._held(setting)
        high = max(1.0, self.limits.scale) * (1 + self.limits.tolerance)
        low, first = 0.0, True
        for _ in range(6):
            rate = high if first else (low + high) / 2
            picked = self.menus.spread(rate, setting.cap)
            if self.best is not None and held + self.menus.resident_bytes(picked) >= self.best.weight_bytes:
                if first:
                    return
                low = rate
                continue
            streamed = self.menus.streamed(picked, setting.shared)
            fine = False
            for placement in self.judge.placements(streamed, setting.arena):
                trial = self.judge.evaluate(streamed, setting.arena, placement)
                self.offer(trial, setting)
                if trial is not None and self.judge.allowed(trial):
                    fine = True
                    break
            if fine and first:
                return
            low, high = (rate, high) if fine else (low, rate)
            first = False

    def _improve(self) -> None:
        """From the best point, until no move helps or the effort is spent."""
        end = self.judge.spent + self._effort(moves=True)
        every = len(self.judge.everything) <= SO_FEW_THAT_ALL
        better = True
        while better and self.judge.spent < end:
            assert self.best is not None
            moves = every_choice(self.judge, lambda: self.best) if every else neighbours(self.judge, self.best)
            better = False
            for streamed, arena in moves:
                for placement in self.judge.placements(streamed, arena):
                    if self.judge.spent < end:
                        better |= self.offer(self.judge.evaluate(streamed, arena, placement))
                if (better and not every) or self.judge.spent >= end:
                    break
