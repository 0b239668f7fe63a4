"""The actor that watches all workers and moves them to a better plan at the same step.

Async, named, in the run's namespace, without a CUDA context. It owns no items: the batch job goes on without it, and
a coordinator that is started again learns what it needs from the workers.

[Note: a replan] measure: all workers measure their links at the same time, beside the running steps. propose: each
solves and checks a plan for the link that it really gets; nothing stands still until all have one. prepare: each
comes to a step boundary and stands. commit: one decision; each takes its plan at that boundary. Anyone missing,
failing or late before the decision: abort, all go on with the old plan. A worker lost after it: it gets the plan when
it joins again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.asking import Member, RoundFailed, ask, ask_all, ask_each, why
from cluster.drift import reason_to_replan
from cluster.events import EventLog
from cluster.history import Epoch, PlanHistory
from cluster.joint import shared_curves
from cluster.messages import (
    Assignment,
    Budget,
    CoordinatorOptions,
    JobProgress,
    Proposal,
    ReplanOutcome,
    ReplanRequest,
    RunStatus,
    WorkerChange,
    WorkerState,
)
from cluster.metrics import RunMetrics
from flextensor.planner.plan import Plan
from flextensor.profile import TransferCurve

logger = logging.getLogger(__name__)

NAME = "coordinator"
WORKER_PREFIX = "worker-"
ABORT_TIMEOUT = 5.0
ANSWER_SLACK = 5.0
"""How much longer than a worker itself the coordinator waits, so that the worker's own reason arrives first."""

Budgets = dict[int, Budget]
Proposals = dict[int, Proposal]
Proposing = Callable[[list[Member], ReplanRequest, int], Awaitable[tuple[Proposals, Budgets]]]


class Coordinator:
    """See the module."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self._options = options
        self._events = EventLog(options.events_path)
        self._members: dict[int, Member] = {}
        self._history = PlanHistory()
        self._epoch = 0
        # Round numbers grow across restarts of this actor too: workers refuse older ones.
        self._round = int(time.time() * 1000)
        self._paused = False
        self._job = JobProgress()
        self._one_round = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._last_replan = time.monotonic()
        self._metrics = RunMetrics(options.namespace)
        self._recover = ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed
        self._started = asyncio.Event()
        self._starting = False

    # ---- the driver's calls

    async def start(self) -> None:
        """Begin to watch. Called by the driver; a restarted coordinator does so at its first call."""
        if self._starting:
            await self._started.wait()
            return
        self._starting = True
        try:
            if self._recover:
                await self._learn_from_workers()
            self._spawn(self._autopilot())
        finally:
            self._started.set()

    async def enlist(self, rank: int, handle: Any) -> None:
        """A worker's process exists (again); watch it."""
        await self.start()
        self._drop(rank)
        self._add(Member(rank, handle))
        self._events.write("worker_enlisted", rank=rank)

    async def admit(self, rank: int, handle: Any) -> None:
        """The worker is set up; tell it what the run has agreed on. It may take leases when this returns."""
        await self.start()
        if rank not in self._members:  # this actor was down when it was enlisted
            self._add(Member(rank, handle))
        member = self._members[rank]
        async with self._one_round:
            state = await self._ask(member, lambda m: m.handle.state.remote())
            if self._history.latest is None:
                self._epoch = state.epoch
                self._history.begin(self._epoch, "first plans", state.budget)
            joined = await self._ask(member, lambda m: m.handle.join.remote(self._assignment(rank)))
            self._in_force().put(rank, joined.plan, joined.budget)
            member.joined, member.lost = True, ""
            member.state, member.seen = state, time.monotonic()
        self._events.write("worker_joined", rank=rank, pid=state.pid, epoch=self._epoch, refused=joined.refused)

    async def lose(self, rank: int, reason: str) -> None:
        """The driver has seen the worker die."""
        await self.start()
        if (member := self._members.get(rank)) is not None:
            self._mark_lost(member, reason)

    async def dismiss(self, rank: int) -> None:
        """The worker will not come back."""
        await self.start()
        self._drop(rank)
        self._events.write("worker_dismissed", rank=rank)

    async def progress(self, job: JobProgress) -> None:
        """How far the batch job is."""
        await self.start()
        self._job = job

    async def event(self, name: str, details: dict[str, Any]) -> None:
        """Write an event of the driver's to the run's log."""
        await self.start()
        self._events.write(name, **details)

    # ---- people's calls

    async def status(self) -> RunStatus:
        """The run now."""
        await self.start()
        now = time.monotonic()
        states, missing = [], []
        for rank in sorted(self._members):
            member = self._members[rank]
            if member.lost or member.state is None:
                missing.append(f"worker {rank}: {member.lost or 'starting'}")
            elif now - member.seen > 5 * self._options.poll + 5:
                missing.append(f"worker {rank}: silent for {now - member.seen:.0f} s")
            if member.state is not None:
                states.append(member.state)
        return RunStatus(
            namespace=self._options.namespace,
            epoch=self._epoch,
            paused=self._paused,
            workers=tuple(states),
            job=self._job,
            epochs=self._history.records(self._slowest_step()),
            missing=tuple(missing),
        )

    async def pause(self, on: bool) -> int:
        """All workers stand at their next step boundary until ``pause(False)``. Returns how many were told."""
        await self.start()
        self._paused = on
        members = self._joined()
        await ask_each(members, lambda m: m.handle.pause.remote(on), self._options.commit_timeout)
        self._events.write("paused" if on else "resumed", workers=len(members))
        return len(members)

    async def replan(self, request: ReplanRequest) -> ReplanOutcome:
        """Move every worker to a new plan, or none; see the module's note."""
        await self.start()
        async with self._one_round:
            return await self._replan(request, self._solve)

    async def rollback(self) -> ReplanOutcome:
        """Move every worker back to the plan before the one in force, under a new epoch's number."""
        await self.start()
        async with self._one_round:
            return await self._rollback("rollback asked for")

    # ---- one round, ``self._one_round`` held

    async def _replan(self, request: ReplanRequest, proposing: Proposing) -> ReplanOutcome:
        self._round += 1
        number, members = self._round, self._joined()
        began = time.monotonic()
        try:
            self._all_there(members, request)
            before = {m.rank: m.state for m in members}
            proposals, budgets = await proposing(members, request, number)
            solved = time.monotonic()
            changes = tuple(_change(before[rank], proposals[rank]) for rank in sorted(proposals))
            if request.dry_run:
                return ReplanOutcome(False, self._epoch, "", True, changes, solved - began)
            await self._prepare(members, number, proposals, budgets)
        except RoundFailed as failed:
            there = [m for m in members if not m.lost]
            await ask_each(there, lambda m: m.handle.abort.remote(number), ABORT_TIMEOUT)
            self._events.write("replan_refused", round=number, reason=str(failed), asked=request.reason)
            return ReplanOutcome(False, self._epoch, str(failed), request.dry_run)
        parked = await self._commit(members, number)
        outcome = ReplanOutcome(
            committed=True,
            epoch=self._epoch + 1,
            reason=request.reason,
            changes=changes,
            measure_seconds=solved - began,
            round_seconds=time.monotonic() - solved,
            parked_seconds=parked,
        )
        self._take(outcome, proposals, budgets, request)
        return outcome

    async def _rollback(self, reason: str) -> ReplanOutcome:
        target = self._history.previous
        if target is None:
            return ReplanOutcome(False, self._epoch, "there is no earlier plan to go back to")

        async def old_plans(members: list[Member], request: ReplanRequest, number: int) -> tuple[Proposals, Budgets]:
            return await self._proposals(members, number, target.budgets, target.plans, {}), dict(target.budgets)

        outcome = await self._replan(ReplanRequest(reason=reason), old_plans)
        if outcome.committed:
            self._history.forget_undone()
        return outcome

    def _all_there(self, members: list[Member], request: ReplanRequest) -> None:
        away = [m for m in self._members.values() if m.joined and m.lost]
        if away:
            raise RoundFailed(f"worker {away[0].rank} is away ({away[0].lost}); ask again when it is back")
        if not members:
            raise RoundFailed("no worker is ready yet")
        unknown = sorted(set(request.workers or ()) - {m.rank for m in members})
        if unknown:
            raise RoundFailed(f"there is no worker {unknown[0]}; ready: {[m.rank for m in members]}")

    async def _solve(self, members: list[Member], request: ReplanRequest, number: int) -> tuple[Proposals, Budgets]:
        chosen = [m for m in members if request.workers is None or m.rank in request.workers]
        ranks = {m.rank for m in chosen}
        curves: dict[int, TransferCurve] = {}
        if request.measure:
            measured = await self._ask_all("measure", chosen, lambda m: m.handle.measure.remote(number))
            curves = shared_curves(measured.values())
        now = self._in_force()
        asked = request.budget is not None or request.latency
        budgets: Budgets = {
            m.rank: request.budget if asked and m.rank in ranks else now.budgets.get(m.rank) for m in members
        }
        kept = {rank: plan for rank, plan in now.plans.items() if rank not in ranks}
        return await self._proposals(members, number, budgets, kept, curves), budgets

    async def _proposals(
        self,
        members: list[Member],
        number: int,
        budgets: Budgets,
        plans: dict[int, Plan],
        curves: dict[int, TransferCurve],
    ) -> Proposals:
        return await self._ask_all(
            "propose",
            members,
            lambda m: m.handle.propose.remote(number, budgets.get(m.rank), plans.get(m.rank), curves.get(m.rank)),
        )

    async def _prepare(self, members: list[Member], number: int, proposals: Proposals, budgets: Budgets) -> None:
        timeout = max(self._options.prepare_timeout, 3 * self._slowest_step())
        epoch = self._epoch + 1
        await self._ask_all(
            "prepare",
            members,
            lambda m: m.handle.prepare.remote(number, epoch, proposals[m.rank].plan, budgets.get(m.rank), timeout),
            timeout + ANSWER_SLACK,
        )

    async def _commit(self, members: list[Member], number: int) -> float:
        """Tell all; the decision is made. Returns the longest time that a worker stood."""
        answers = await ask_each(members, lambda m: m.handle.commit.remote(number), self._options.commit_timeout)
        parked = 0.0
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                self._events.write("commit_unanswered", rank=member.rank, error=why(answer))
                self._spawn(self._catch_up(member))
            else:
                parked = max(parked, answer)
        return parked

    def _take(self, outcome: ReplanOutcome, proposals: Proposals, budgets: Budgets, request: ReplanRequest) -> None:
        old = self._history.latest
        self._epoch = outcome.epoch
        asked = request.budget is not None or request.latency
        budget = request.budget if asked else next(iter(budgets.values()), None)
        before = self._slowest_step()
        epoch = self._history.begin(outcome.epoch, request.reason, budget, parked=outcome.parked_seconds, before=before)
        for rank, proposal in proposals.items():
            epoch.put(rank, proposal.plan, budgets.get(rank))
        self._last_replan = time.monotonic()
        self._events.write(
            "replanned",
            epoch=outcome.epoch,
            reason=request.reason,
            budgets=budgets,
            round_seconds=round(outcome.round_seconds, 4),
            parked_seconds=round(outcome.parked_seconds, 4),
            streamed_bytes={change.rank: change.streamed_bytes for change in outcome.changes},
            weight_bytes={change.rank: change.weight_bytes for change in outcome.changes},
            predicted_step_seconds=epoch.record.predicted_step_seconds,
        )
        same_budgets = old is not None and old.budgets == epoch.budgets
        self._spawn(self._observe(epoch, old if same_budgets else None))

    async def _catch_up(self, member: Member) -> None:
        """A worker that did not answer the commit takes the agreed plan now; a dead one does when it joins."""
        try:
            await asyncio.sleep(self._options.poll)
            async with self._one_round:
                await self._ask(member, lambda m: m.handle.join.remote(self._assignment(m.rank)))
        except (RayError, TimeoutError) as error:
            self._mark_lost(member, why(error))

    # ---- watching

    async def _watch(self, member: Member) -> None:
        """Ask one worker for its state, over and over; a worker that hangs is started again."""
        hang = self._options.hang
        while True:
            try:
                state: WorkerState = await ask(member, lambda m: m.handle.state.remote(), hang)
                member.state, member.seen = state, time.monotonic()
                self._metrics.observe(state)
                if state.busy_seconds > hang:
                    self._restart(member, f"no step for {state.busy_seconds:.0f} s")
            except RayActorError as error:
                self._mark_lost(member, why(error))
            except RayError as error:
                logger.warning("worker %d: no state: %s", member.rank, why(error))
            except TimeoutError:
                self._restart(member, f"silent for {hang:.0f} s")
            await asyncio.sleep(self._options.poll)

    def _restart(self, member: Member, reason: str) -> None:
        self._mark_lost(member, reason)
        self._events.write("worker_killed", rank=member.rank, reason=reason)
        ray.kill(member.handle, no_restart=False)

    def _mark_lost(self, member: Member, reason: str) -> None:
        if not member.lost:
            member.lost = reason
            self._events.write("worker_lost", rank=member.rank, reason=reason)

    async def _autopilot(self) -> None:
        """Replan without being asked, where the run's options say so."""
        while self._options.automatic:
            await asyncio.sleep(self._options.poll)
            if self._paused or time.monotonic() - self._last_replan < self._options.minimum_interval:
                continue
            reason = reason_to_replan([m.state for m in self._joined() if m.state is not None], self._options.drift)
            if reason:
                self._last_replan = time.monotonic()
                await self.replan(ReplanRequest(reason=reason))

    async def _observe(self, epoch: Epoch, old: Epoch | None) -> None:
        """Measured against predicted once the new plan has run a while; back to the old plan where it is worse.

        ``old`` is given where both plans had the same budgets: a plan for less memory may be slower.
        """
        before = {m.rank: m.state.steps for m in self._joined() if m.state is not None}
        number = epoch.record.epoch
        while self._epoch == number:
            await asyncio.sleep(self._options.poll)
            states = [m.state for m in self._joined() if m.state is not None]
            refused = [state for state in states if state.refusal and state.epoch < number]
            if refused:
                await self._roll_back_from(number, f"worker {refused[0].rank} could not: {refused[0].refusal}")
                return
            if states and all(s.steps - before.get(s.rank, s.steps) >= self._options.rollback_steps for s in states):
                break
        else:
            return
        measured = max(state.step_seconds for state in states)
        epoch.measured(measured)
        self._events.write(
            "measured",
            epoch=number,
            step_seconds=round(measured, 6),
            predicted_step_seconds=round(epoch.record.predicted_step_seconds, 6),
        )
        margin, took = self._options.rollback_margin, old.record.measured_step_seconds if old is not None else 0.0
        if margin is not None and took > 0 and measured > took * (1 + margin):
            reason = f"epoch {number} takes {measured * 1e3:.1f} ms a step, the one before took {took * 1e3:.1f} ms"
            await self._roll_back_from(number, reason)

    async def _roll_back_from(self, number: int, reason: str) -> None:
        async with self._one_round:
            if self._epoch == number:
                await self._rollback(reason)

    # ---- after a restart of this actor

    async def _learn_from_workers(self) -> None:
        """The run's state is what the workers say."""
        namespace = self._options.namespace
        for entry in ray.util.list_named_actors(all_namespaces=True):
            name = entry["name"]
            if entry["namespace"] == namespace and name.startswith(WORKER_PREFIX):
                rank = int(name.removeprefix(WORKER_PREFIX))
                self._add(Member(rank, ray.get_actor(name, namespace=namespace)))
        for member in self._members.values():
            await self._learn_from(member)
        joined = [m.state for m in self._joined() if m.state is not None]
        self._epoch = max((state.epoch for state in joined), default=0)
        self._paused = any(state.paused for state in joined)
        self._events.write("coordinator_restarted", epoch=self._epoch, workers=len(joined))
        if any(state.epoch != self._epoch for state in joined):
            # It died between two commits, or a worker has not run a step since: one round puts all on one epoch.
            self._spawn(self.replan(ReplanRequest(measure=False, reason="workers disagreed on the epoch")))

    async def _learn_from(self, member: Member) -> None:
        try:
            state = await self._ask(member, lambda m: m.handle.state.remote())
            if state.phase != "ready":
                return
            plan, budget = await self._ask(member, lambda m: m.handle.plan.remote())
        except (RayError, TimeoutError) as error:
            self._mark_lost(member, why(error))
            return
        member.state, member.seen, member.joined = state, time.monotonic(), True
        epoch = self._history.latest or self._history.begin(state.epoch, "coordinator started again", budget)
        epoch.put(member.rank, plan, budget)

    # ---- small things

    def _assignment(self, rank: int) -> Assignment:
        agreed = self._in_force()
        return Assignment(
            epoch=self._epoch,
            plan=agreed.plans.get(rank),
            budget=agreed.budgets.get(rank, agreed.record.budget),
            solve=len(self._history) > 1,
            paused=self._paused,
        )

    def _in_force(self) -> Epoch:
        epoch = self._history.latest
        assert epoch is not None, "no worker has joined yet"
        return epoch

    def _joined(self) -> list[Member]:
        return [m for _, m in sorted(self._members.items()) if m.joined and not m.lost]

    def _slowest_step(self) -> float:
        return max((m.state.step_seconds for m in self._joined() if m.state is not None), default=0.0)

    def _add(self, member: Member) -> None:
        member.watcher = self._spawn(self._watch(member))
        self._members[member.rank] = member

    def _drop(self, rank: int) -> None:
        member = self._members.pop(rank, None)
        if member is not None and member.watcher is not None:
            member.watcher.cancel()

    async def _ask(self, member: Member, question: Callable[[Member], Awaitable[Any]]) -> Any:
        return await ask(member, question, self._options.commit_timeout)

    async def _ask_all(
        self,
        what: str,
        members: list[Member],
        question: Callable[[Member], Awaitable[Any]],
        timeout: float | None = None,
    ) -> dict[int, Any]:
        return await ask_all(what, members, question, timeout or self._options.measure_timeout, self._mark_lost)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.write("coordinator_error", error=f"{type(error).__name__}: {error}")


def _change(before: WorkerState | None, proposal: Proposal) -> WorkerChange:
    return WorkerChange(
        rank=proposal.rank,
        before_weight_bytes=before.weight_bytes if before else 0,
        before_streamed_bytes=before.streamed_bytes if before else 0,
        before_step_seconds=proposal.before_step_seconds,
        weight_bytes=proposal.plan.weight_bytes + proposal.other_bytes,
        resident_bytes=proposal.plan.resident_bytes + proposal.other_bytes,
        streamed_bytes=proposal.plan.streamed_bytes,
        predicted=proposal.plan.prediction,
    )
