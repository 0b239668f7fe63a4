"""Replans that nobody asked for: because something has changed, or because the last one was a mistake."""

from __future__ import annotations

import asyncio
import logging
import time

from cluster.drift import Trigger, TriggerWatch
from cluster.events import EventLog
from cluster.history import Epoch
from cluster.messages import CoordinatorOptions, ReplanOutcome, ReplanRequest
from cluster.roster import Roster
from cluster.rounds import Replans

logger = logging.getLogger(__name__)

MOST_DOUBLINGS = 6
"""A trigger that helps nothing is heeded half as often each time, down to once in 64 minimum intervals."""


class Autopilot:
    """Watches the measured steps; see the module."""

    def __init__(self, options: CoordinatorOptions, roster: Roster, replans: Replans, events: EventLog) -> None:
        self._options = options
        self._roster = roster
        self._replans = replans
        self._events = events
        self._watch = TriggerWatch(options)
        self._last = time.monotonic()
        self._in_vain: tuple[str, int | None] | None = None
        self._doublings = 0

    def planned(self) -> None:
        """New plans are in force, whoever asked for them."""
        self._last = time.monotonic()
        self._watch.planned(self._roster.states())

    async def run(self) -> None:
        """Replan without being asked, where the run's options say so."""
        while self._options.automatic:
            await asyncio.sleep(self._options.poll)
            waited = time.monotonic() - self._last
            if self._roster.paused or waited < self._options.minimum_interval:
                continue
            try:
                trigger = self._watch.look(self._roster.states(), complete=self._roster.complete)
                if trigger is not None and waited >= self._interval(trigger):
                    await self._follow(trigger)
            except Exception as error:  # one look that fails must not end all later ones
                self._last = time.monotonic()
                self._events.write("autopilot_failed", error=f"{type(error).__name__}: {error}")
                logger.exception("a replan that nobody asked for failed")

    def _interval(self, trigger: Trigger) -> float:
        again = self._in_vain == (trigger.kind, trigger.rank)
        return self._options.minimum_interval * (2**self._doublings if again else 1)

    async def _follow(self, trigger: Trigger) -> None:
        self._events.write("triggered", kind=trigger.kind, reason=trigger.reason, rank=trigger.rank)
        self._last = time.monotonic()
        request = ReplanRequest(reason=trigger.reason)
        if trigger.budget is not None and trigger.rank is not None:
            request = ReplanRequest(budget=trigger.budget, workers=(trigger.rank,), reason=trigger.reason)
        outcome = await self._replans.replan(request)
        what = (trigger.kind, trigger.rank)
        if trigger.kind == "members" or _helped(outcome):
            self._in_vain, self._doublings = None, 0
        else:
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS) if self._in_vain == what else 1
            self._in_vain = what

    # ---- afterwards

    async def observe(self, epoch: Epoch, old: Epoch | None) -> None:
        """Measured against predicted once the new plan has run a while; back to the old plan where it is worse.

        Compared is with what the old plan took last, under the conditions that the new one was made for; and only where
        both had the same budgets: a plan for less memory may be slower.
        """
        before = {state.rank: state.steps for state in self._roster.states()}
        number, began = epoch.record.epoch, time.monotonic()
        while True:
            await asyncio.sleep(self._options.poll)
            if self._replans.epoch != number:
                return
            states = self._roster.states()
            # A refusal may be of an earlier plan, also one that is told after the commit.
            told = [m.state for m in self._roster.joined() if m.seen - began >= self._options.poll]
            refused = [one for one in told if one is not None and one.refusal and one.refused_epoch == number]
            if refused:
                await self._back(number, f"worker {refused[0].rank} could not: {refused[0].refusal}")
                return
            if states and all(s.steps - before.get(s.rank, s.steps) >= self._options.rollback_steps for s in states):
                break
        measured = max(state.step_seconds for state in states)
        epoch.measured(measured)
        self._events.write(
            "measured",
            epoch=number,
            step_seconds=round(measured, 6),
            predicted_step_seconds=round(epoch.record.predicted_step_seconds, 6),
        )
        margin, took = self._options.rollback_margin, epoch.before_step_seconds
        same_budgets = old is not None and old.budgets == epoch.budgets
        if margin is not None and same_budgets and took > 0 and measured > took * (1 + margin):
            reason = f"epoch {number} takes {measured * 1e3:.1f} ms a step, the one before took {took * 1e3:.1f} ms"
            await self._back(number, reason)

    async def _back(self, number: int, reason: str) -> None:
        self._events.write("rolling_back", epoch=number, reason=reason)
        await self._replans.rollback(reason, only_from=number)


def _helped(outcome: ReplanOutcome) -> bool:
    return outcome.committed and any(
        change.weight_bytes != change.before_weight_bytes or change.streamed_bytes != change.before_streamed_bytes
        for change in outcome.changes
    )
