"""Replans of all workers at once: everyone moves to the new plans, or nobody does.

[Note: a replan] measure: all workers measure their links at the same time, beside the running steps. propose: each
solves and checks plans for the link that it really gets. prepare: each comes to a step boundary in time, with plans
that fit, and so agrees; it goes on under the old ones. commit: one decision; each takes its plans at its next boundary,
so none runs a step under them before all have agreed, and none waits for another. Lockstep groups, which must change at
the same step: hold, before prepare, has each say which step is its next; in prepare all of the group come to the
largest and stand there until commit. Anyone missing, failing or late before the decision: abort, all go on with the old
plans. A worker lost after it: it gets the plans when it joins again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ray.exceptions import RayActorError, RayError

from cluster.asking import Member, RoundFailed, why
from cluster.events import EventLog
from cluster.history import Epoch, PlanHistory
from cluster.messages import (
    Assignment,
    Budget,
    CoordinatorOptions,
    Joined,
    Plans,
    ReplanOutcome,
    ReplanRequest,
    WorkerChange,
    WorkerState,
)
from cluster.roster import Roster
from cluster.solving import Budgets, Proposal, Proposals, Solver

logger = logging.getLogger(__name__)

ABORT_TIMEOUT = 5.0
ANSWER_SLACK = 5.0
"""How much longer than a worker itself the coordinator waits, so that the worker's own reason arrives first."""
CATCH_UP_ATTEMPTS = 5

Proposing = Callable[[list[Member], ReplanRequest, int], Awaitable[tuple[Proposals, Budgets]]]


class Replans:
    """The epoch in force and the way to the next one. ``on_new``: called with a new epoch and the one before."""

    def __init__(
        self,
        options: CoordinatorOptions,
        roster: Roster,
        events: EventLog,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        on_new: Callable[[Epoch, Epoch | None], None],
    ) -> None:
        self._options = options
        self._roster = roster
        self._events = events
        self._spawn = spawn
        self._on_new = on_new
        self._solver = Solver(roster, options, events)
        # Round numbers grow across restarts of the coordinator too, since workers refuse older ones; ``heard`` sees to
        # it where this node's clock is behind.
        self._round = int(time.time() * 1000)
        self._decided = 0
        """The round whose commit is the epoch's, as far as is known."""
        self.history = PlanHistory()
        self.epoch = 0
        self.apart = False
        """Workers have agreed on different epochs: this coordinator was started again after another's commit that did
        not reach all."""
        self.one_at_a_time = asyncio.Lock()

    # ---- what is asked for

    async def replan(self, request: ReplanRequest) -> ReplanOutcome:
        """Move every worker to new plans, or none; see the module's note."""
        async with self.one_at_a_time:
            return await self._replan(request, self._solve)

    async def rollback(self, reason: str, *, only_from: int | None = None) -> ReplanOutcome:
        """Move every worker back to the plans before those in force, under a new epoch's number. only_from: not when
        another epoch than this one is in force by then."""
        async with self.one_at_a_time:
            if only_from is not None and self.epoch != only_from:
                return ReplanOutcome(False, self.epoch, f"epoch {only_from} is over")
            return await self._rollback(reason)

    async def admit(self, member: Member, *, again: bool = False) -> tuple[WorkerState, str]:
        """A worker is set up: it takes what the run has agreed on. Its state before, and why it did not ("").

        again: it was out of reach, and perhaps is in the midst of a step, whose number it knows.
        """
        async with self.one_at_a_time:
            state: WorkerState = await self._roster.ask(member, lambda m: m.handle.state.remote())
            self.heard(state)
            if self.history.latest is None:
                self.epoch = max(self.epoch, state.epoch)
                self._roster.paused = self._roster.paused or state.paused
                self.history.begin(self.epoch, "first plans", state.budget)
            late = 0 < state.agreed.epoch < self.epoch and not await self._hears(member, state)
            if state.agreed.epoch == self.epoch:
                await self._take_word(member, state, again=again)
            index = None if again else await self._index_in_group(member)
            assignment = self._assignment(member.rank, index, late=late)
            joined = await self._join(member, assignment)
            self.in_force().put(member.rank, joined.plans, joined.budget)
            self._roster.join(member, state)
        return state, joined.refused

    def heard(self, state: WorkerState) -> None:
        """A worker's word of the run, which may be of a coordinator before this one."""
        agreed = state.agreed
        if agreed.epoch > self.epoch or (agreed.epoch == self.epoch and not self._decided):
            self._decided = agreed.decided
        self.epoch, self._round = max(self.epoch, agreed.epoch), max(self._round, agreed.latest)

    async def _take_word(self, member: Member, state: WorkerState, *, again: bool) -> None:
        """What the epoch's plans of a worker are that has agreed on it, where it knows better than this coordinator."""
        ahead = state.agreed.epoch > self.in_force().record.epoch
        own = again and state.own_changes > member.own_changes
        if not (ahead or member.set_up or own):
            return
        plans, budget = await self._plans_of(member)
        if ahead:
            self.apart = True
            self.history.go_on(self.epoch, budget).put(member.rank, plans, budget)
        elif member.set_up:
            self.in_force().put(member.rank, plans, budget)
        else:
            self._put_own(member, state, plans, budget)

    async def _hears(self, member: Member, state: WorkerState) -> bool:
        """True when a worker that is prepared for what others have committed commits it now."""
        decided = self._decided
        if not decided or state.agreed.prepared != decided:
            return False
        try:
            await self._roster.ask(member, lambda m: m.handle.commit.remote(decided))
            plans, budget = await self._plans_of(member)
        except (RayError, TimeoutError):
            return False
        self.in_force().put(member.rank, plans, budget)
        self._events.write("commit_completed", epoch=self.epoch, rank=member.rank)
        return True

    async def agree(self, *, by_round: bool) -> bool:
        """Put all that are ``apart`` on one epoch; True when they are. by_round: also where no commit can be
        completed."""
        async with self.one_at_a_time:
            if self.apart and not await self._complete() and by_round:
                request = ReplanRequest(measure=False, reason="workers disagreed on the epoch")
                await self._replan(request, self._solve)
        return not self.apart

    async def _complete(self) -> bool:
        """Commit what a coordinator before this one has decided, where all that have not heard of it are prepared."""
        members, timeout = self._roster.joined(), self._options.commit_timeout
        if self._roster.away():
            return False
        try:
            states = await self._roster.ask_all("state", members, lambda m: m.handle.state.remote(), timeout)
        except RoundFailed:
            return False
        late = [m for m in members if states[m.rank].agreed.epoch < self.epoch]
        heard = await asyncio.gather(*(self._hears(m, states[m.rank]) for m in late))
        if not all(heard) or any(s.refusal and s.refused_epoch == self.epoch for s in states.values()):
            return False
        self.apart = False
        if late:
            self._on_new(self.in_force(), None)
        return True

    async def take_up(self, member: Member, state: WorkerState) -> None:
        """A worker has made a plan by itself, since memory did not suffice: it is what the run has agreed on for it
        from now on, also when its process is started again."""
        async with self.one_at_a_time:
            try:
                plans, budget = await self._plans_of(member)
            except (RayError, TimeoutError) as error:
                logger.warning("worker %d made a plan by itself, and does not tell it: %s", member.rank, why(error))
                member.own_changes = state.own_changes - 1  # asked again when it is next seen
                return
            self._put_own(member, state, plans, budget)

    async def _plans_of(self, member: Member) -> tuple[Plans, Budget]:
        """What a worker has agreed on."""
        agreed: tuple[Plans, Budget] = await self._roster.ask(member, lambda m: m.handle.plans.remote())
        return agreed

    def _put_own(self, member: Member, state: WorkerState, plans: Plans, budget: Budget) -> None:
        self.in_force().put(member.rank, plans, budget)
        weights = sum(plan.weight_bytes for plan in plans.values())
        self._events.write("gave_way", rank=member.rank, reason=state.own_reason, budget=budget, weight_bytes=weights)

    def in_force(self) -> Epoch:
        """The epoch in force."""
        epoch = self.history.latest
        assert epoch is not None, "no worker has joined yet"
        return epoch

    # ---- one round, ``one_at_a_time`` held

    async def _replan(self, request: ReplanRequest, proposing: Proposing) -> ReplanOutcome:
        self._round += 1
        number, members = self._round, self._roster.joined()
        began = time.monotonic()
        try:
            self._all_there(request, members)
        except RoundFailed as failed:  # nobody has heard of the round
            return self._refused(number, request, failed)
        try:
            before = {m.rank: m.state for m in members}
            proposals, budgets = await proposing(members, request, number)
            solved = time.monotonic()
            changes = tuple(_change(before[rank], proposals[rank]) for rank in sorted(proposals))
            if request.dry_run:
                self._events.write("replan_tried", round=number, asked=request.reason)
                return ReplanOutcome(False, self.epoch, "", True, changes, solved - began)
            indexes = await self._prepare(members, number, proposals, budgets)
        except RoundFailed as failed:
            there = [m for m in members if not m.lost]
            await self._roster.ask_each(there, lambda m: m.handle.abort.remote(number), ABORT_TIMEOUT)
            return self._refused(number, request, failed)
        parked = await self._commit(members, number)
        outcome = ReplanOutcome(
            committed=True,
            epoch=self.epoch + 1,
            reason=request.reason,
            changes=changes,
            measure_seconds=solved - began,
            round_seconds=time.monotonic() - solved,
            parked_seconds=parked,
            step_indexes=indexes,
        )
        self._take(outcome, proposals, budgets, request)
        return outcome

    def _refused(self, number: int, request: ReplanRequest, failed: RoundFailed) -> ReplanOutcome:
        self._events.write("replan_refused", round=number, reason=str(failed), asked=request.reason)
        return ReplanOutcome(False, self.epoch, str(failed), request.dry_run)

    async def _rollback(self, reason: str) -> ReplanOutcome:
        target = self.history.previous
        if target is None:
            return ReplanOutcome(False, self.epoch, "there is no earlier plan to go back to")

        async def old_plans(members: list[Member], request: ReplanRequest, number: int) -> tuple[Proposals, Budgets]:
            # Of a worker that has joined since, the epoch knows what all were given.
            budgets = {m.rank: target.budgets.get(m.rank, target.record.budget) for m in members}
            return await self._solver.ask(members, number, budgets, target.plans), budgets

        outcome = await self._replan(ReplanRequest(reason=reason), old_plans)
        if outcome.committed:
            self.history.forget_undone()
        return outcome

    def _all_there(self, request: ReplanRequest, members: list[Member]) -> None:
        if away := self._roster.away():
            raise RoundFailed(f"worker {away[0].rank} is away ({away[0].lost}); ask again when it is back")
        if not members:
            raise RoundFailed("no worker is ready yet")
        unknown = sorted(set(request.workers or ()) - {m.rank for m in members})
        if unknown:
            raise RoundFailed(f"there is no worker {unknown[0]}; ready: {[m.rank for m in members]}")

    async def _solve(self, members: list[Member], request: ReplanRequest, number: int) -> tuple[Proposals, Budgets]:
        return await self._solver.solve(members, request, number, self.in_force())

    async def _prepare(
        self, members: list[Member], number: int, proposals: Proposals, budgets: Budgets
    ) -> dict[int, int]:
        """All have agreed when this returns; the numbers of the next steps of those in lockstep groups, which stand.

        Raises RoundFailed.
        """
        timeout = self._roster.boundary_timeout()
        epoch = self.epoch + 1
        meet = await self._meeting_points(members, number)
        prepared = await self._roster.ask_all(
            "prepare",
            members,
            lambda m: m.handle.prepare.remote(
                number, epoch, proposals[m.rank].plans, budgets.get(m.rank), timeout, meet.get(m.rank)
            ),
            timeout + ANSWER_SLACK,
        )
        return {rank: prepared[rank].step_index for rank in meet}

    async def _meeting_points(self, members: list[Member], number: int) -> dict[int, int]:
        """For each worker of a lockstep group, the number of the step before which the group stands."""
        grouped = [m for m in members if self._options.group_of(m.rank)]
        if not grouped:
            return {}
        held = await self._roster.ask_all(
            "hold", grouped, lambda m: m.handle.hold.remote(number), self._options.commit_timeout
        )
        return {rank: max(held[other] for other in self._options.group_of(rank) if other in held) for rank in held}

    async def _commit(self, members: list[Member], number: int) -> float:
        """Tell all; the decision is made. Returns the longest time that a worker stood."""
        answers = await self._roster.ask_each(members, lambda m: m.handle.commit.remote(number))
        parked = 0.0
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                self._events.write("commit_unanswered", rank=member.rank, error=why(answer))
                self._spawn(self._catch_up(member, number))
            else:
                parked = max(parked, answer)
        return parked

    def _take(self, outcome: ReplanOutcome, proposals: Proposals, budgets: Budgets, request: ReplanRequest) -> None:
        old = self.history.latest
        self.epoch, self.apart, self._decided = outcome.epoch, False, self._round
        asked = request.budget is not None or request.latency
        budget = request.budget if asked else next(iter(budgets.values()), None)
        before = self._roster.slowest_step()
        epoch = self.history.begin(outcome.epoch, request.reason, budget, parked=outcome.parked_seconds, before=before)
        for rank, proposal in proposals.items():
            epoch.put(rank, proposal.plans, budgets.get(rank))
        self._events.write(
            "replanned",
            epoch=outcome.epoch,
            reason=request.reason,
            budgets=budgets,
            measure_seconds=round(outcome.measure_seconds, 4),
            round_seconds=round(outcome.round_seconds, 4),
            parked_seconds=round(outcome.parked_seconds, 4),
            streamed_bytes={change.rank: change.streamed_bytes for change in outcome.changes},
            weight_bytes={change.rank: change.weight_bytes for change in outcome.changes},
            moved_bytes={change.rank: change.moved_bytes for change in outcome.changes},
            predicted_step_seconds=epoch.record.predicted_step_seconds,
            step_indexes=outcome.step_indexes,
        )
        self._on_new(epoch, old)

    async def _catch_up(self, member: Member, number: int) -> None:
        """A worker that did not answer the commit takes the agreed plans now; a dead one does when it joins. One that
        lives and refuses goes on in the run, on its old plans: it is told, and the next round takes it along."""
        error = "it did not answer"
        for _ in range(CATCH_UP_ATTEMPTS):
            await asyncio.sleep(self._options.poll)
            if self._roster.members.get(member.rank) is not member or member.lost:
                return  # dismissed, or its process is gone: it joins again
            try:
                async with self.one_at_a_time:
                    joined = await self._join(member, self._assignment(member.rank, None))
                self.in_force().put(member.rank, joined.plans, joined.budget)
                self._events.write("caught_up", rank=member.rank, epoch=self.epoch, refused=joined.refused)
                return
            except RayActorError as gone:
                self._roster.mark_lost(member, why(gone))
                return
            except (RayError, TimeoutError) as refused:
                error = why(refused)
                await self._roster.ask_each([member], lambda m: m.handle.abort.remote(number), ABORT_TIMEOUT)
        self._events.write("catch_up_refused", rank=member.rank, epoch=self.epoch, error=error)

    # ---- what joins

    def _assignment(self, rank: int, step_index: int | None, *, late: bool = False) -> Assignment:
        """``late``: the worker is at an earlier epoch."""
        agreed = self.in_force()
        return Assignment(
            epoch=self.epoch,
            plans=agreed.plans.get(rank),
            budget=agreed.budgets.get(rank, agreed.record.budget),
            solve=late or len(self.history) > 1,
            paused=self._roster.paused,
            step_index=step_index,
        )

    async def _join(self, member: Member, assignment: Assignment) -> Joined:
        """The worker's word; one that makes a plan for it has the time that planning may take."""
        plans = assignment.plans is None and assignment.solve
        timeout = self._options.measure_timeout if plans else None
        joined: Joined = await self._roster.ask(member, lambda m: m.handle.join.remote(assignment), timeout)
        return joined

    async def _index_in_group(self, member: Member) -> int | None:
        """The number of the step that a worker's lockstep group is at: one that is in the midst of a step waits there
        for the others, also for this one."""
        group = self._options.group_of(member.rank)
        if not group:
            return None
        others = [m for m in self._roster.joined() if m.rank in group and m.rank != member.rank]
        answers = await self._roster.ask_each(others, lambda m: m.handle.state.remote())
        states = [answer for answer in answers if not isinstance(answer, BaseException)]
        return max((s.step_index - (1 if s.busy and not s.parked and s.step_index else 0) for s in states), default=0)


def _change(before: WorkerState | None, proposal: Proposal) -> WorkerChange:
    plans = proposal.plans.values()
    return WorkerChange(
        rank=proposal.rank,
        before_weight_bytes=before.weight_bytes if before else 0,
        before_streamed_bytes=before.streamed_bytes if before else 0,
        before_step_seconds=proposal.before_step_seconds,
        weight_bytes=sum(plan.weight_bytes for plan in plans) + proposal.other_bytes,
        resident_bytes=sum(plan.resident_bytes for plan in plans) + proposal.other_bytes,
        streamed_bytes=proposal.plan.streamed_bytes,
        predicted=proposal.plan.prediction,
        moved_bytes=proposal.moved_bytes,
    )
