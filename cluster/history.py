"""The plans that a run had, epoch by epoch: for rollback, for workers that join, and for people."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from cluster.messages import Budget, EpochRecord, Plans, main_plan

KEPT_EPOCHS = 16


@dataclass
class Epoch:
    """One epoch: what is told of it, and each rank's plans and budget. before_step_seconds: what a step of the slowest
    worker took last in the epoch before."""

    record: EpochRecord
    before_step_seconds: float = 0.0
    plans: dict[int, Plans] = field(default_factory=dict)
    budgets: dict[int, Budget] = field(default_factory=dict)

    def put(self, rank: int, plans: Plans, budget: Budget) -> None:
        """A worker is on these plans. The slowest prediction is the epoch's."""
        self.plans[rank], self.budgets[rank] = plans, budget
        told = [main_plan(plans).prediction for plans in self.plans.values()]
        times = [one.step_seconds for one in told if one is not None]
        self.record = replace(self.record, predicted_step_seconds=max(times, default=0.0))

    def measured(self, step_seconds: float) -> None:
        """What a step of the slowest worker took in this epoch."""
        self.record = replace(self.record, measured_step_seconds=step_seconds)


class PlanHistory:
    """The epochs that were in force, oldest first; the last KEPT_EPOCHS of them."""

    def __init__(self) -> None:
        self._epochs: list[Epoch] = []

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def latest(self) -> Epoch | None:
        """The epoch in force."""
        return self._epochs[-1] if self._epochs else None

    @property
    def previous(self) -> Epoch | None:
        """The epoch before: where a rollback goes."""
        return self._epochs[-2] if len(self._epochs) > 1 else None

    def records(self, now: float) -> tuple[EpochRecord, ...]:
        """What is told of each epoch. ``now``: what a step of the slowest worker takes at present."""
        told = [epoch.record for epoch in self._epochs]
        if told and not told[-1].measured_step_seconds:
            told[-1] = replace(told[-1], measured_step_seconds=now)
        return tuple(told)

    def begin(self, number: int, reason: str, budget: Budget, *, parked: float = 0.0, before: float = 0.0) -> Epoch:
        """A new epoch is in force. ``before``: what a step took in the one that ends."""
        if self.latest is not None and not self.latest.record.measured_step_seconds:
            self.latest.measured(before)
        epoch = Epoch(EpochRecord(number, time.time(), reason, budget, 0.0, parked_seconds=parked), before)
        self._epochs = [*self._epochs[-KEPT_EPOCHS + 1 :], epoch]
        return epoch

    def go_on(self, number: int, budget: Budget) -> Epoch:
        """Some workers are at a later epoch than the latest, and nothing else is known of it: the others have no plans
        of it yet, and keep their budgets."""
        kept = {} if self.latest is None else dict(self.latest.budgets)
        epoch = self.begin(number, "decided by a coordinator before", budget)
        epoch.budgets = kept
        return epoch

    def forget_undone(self) -> None:
        """After a rollback: the epoch that it undid and the one whose plans are in force again leave the history, so
        that a second rollback goes further back."""
        self._epochs[-3:-1] = []
