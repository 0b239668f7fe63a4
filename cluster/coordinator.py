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
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from cluster.drift import reason_to_replan
from cluster.events import EventLog
from cluster.joint import shared_curves
from cluster.messages import (
    Assignment,
    Budget,
    CoordinatorOptions,
    EpochRecord,
    JobProgress,
    Prepared,
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

T = TypeVar("T")

NAME = "coordinator"
WORKER_PREFIX = "worker-"
KEPT_EPOCHS = 16


class RoundFailed(RuntimeError):
    """A round that nobody moved in; the message is the reason."""


@dataclass
class _Member:
    rank: int
    handle: Any
    state: WorkerState | None = None
    seen: float = 0.0
    joined: bool = False
    lost: str = ""
    watcher: asyncio.Task[None] | None = None


@dataclass
class _Epoch:
    record: EpochRecord
    plans: dict[int, Plan] = field(default_factory=dict)
    budgets: dict[int, Budget] = field(default_factory=dict)


class Coordinator:
    """See the module."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self._options = options
        self._events = EventLog(options.events_path)
        self._members: dict[int, _Member] = {}
        self._history: list[_Epoch] = []
        self._epoch = 0
        self._round = int(time.time() * 1000)
        self._paused = False
        self._job = JobProgress()
        self._one_round = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._last_replan = time.monotonic()
        self._metrics = RunMetrics(options.namespace)
        self._recover = _was_restarted()
        self._started = False

    # the driver

    async def start(self) -> None:
        """Begin to watch. Called by the driver; a restarted coordinator does so at its first call."""
        if self._started:
            return
        self._started = True
        if self._recover:
            await self._learn_from_workers()
        self._spawn(self._autopilot())

    async def enlist(self, rank: int, handle: Any) -> None:
        """A worker's process exists (again); watch it."""
        await self.start()
        old = self._members.get(rank)
        if old is not None and old.watcher is not None:
            old.watcher.cancel()
        member = _Member(rank, handle)
        member.watcher = self._spawn(self._watch(member))
        self._members[rank] = member
        self._events.write("worker_enlisted", rank=rank)

    async def admit(self, rank: int) -> None:
        """The worker is set up; tell it what the run has agreed on. It may take leases when this returns."""
        await self.start()
        member = self._members[rank]
        async with self._one_round:
            state = await self._call(member, lambda handle: handle.state.remote())
            if not self._history:
                self._epoch = state.epoch
                self._remember(self._epoch, "first plans", state.budget, 0.0)
            joined = await self._call(member, lambda handle: handle.join.remote(self._assignment(rank)))
            agreed = self._history[-1]
            agreed.plans[rank], agreed.budgets[rank] = joined.plan, joined.budget
            self._predict(agreed)
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
        member = self._members.pop(rank, None)
        if member is not None and member.watcher is not None:
            member.watcher.cancel()
        self._events.write("worker_dismissed", rank=rank)

    async def progress(self, job: JobProgress) -> None:
        """How far the batch job is."""
        await self.start()
        self._job = job

    async def event(self, name: str, details: dict[str, Any]) -> None:
        """Write an event of the driver's to the run's log."""
        await self.start()
        self._events.write(name, **details)

    # people

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
            epochs=tuple(epoch.record for epoch in self._history),
            missing=tuple(missing),
        )

    async def pause(self, on: bool) -> int:
        """All workers stand at their next step boundary until ``pause(False)``. Returns how many were told."""
        await self.start()
        self._paused = on
        members = self._joined()
        await asyncio.gather(*(self._call(m, lambda h: h.pause.remote(on)) for m in members), return_exceptions=True)
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

    # one round

    async def _rollback(self, reason: str) -> ReplanOutcome:
        if len(self._history) < 2:
            return ReplanOutcome(False, self._epoch, "there is no earlier plan to go back to")
        target = self._history[-2]

        async def old_plans(members: list[_Member], request: ReplanRequest, number: int) -> dict[int, Proposal]:
            missing = [m.rank for m in members if m.rank not in target.plans]
            if missing:
                raise RoundFailed(f"worker {missing[0]} had no plan in epoch {target.record.epoch}")
            return await self._proposals(members, number, target.budgets, target.plans, {})

        outcome = await self._replan(ReplanRequest(reason=reason), old_plans, budgets=target.budgets)
        if outcome.committed:
            # The two epochs that cancelled out leave the history, so that a second rollback goes further back.
            self._history[-3:-1] = []
            self._history[-1].record = replace(self._history[-1].record, reason=reason)
        return outcome

    async def _replan(
        self,
        request: ReplanRequest,
        proposals_of: Callable[[list[_Member], ReplanRequest, int], Awaitable[dict[int, Proposal]]],
        budgets: dict[int, Budget] | None = None,
    ) -> ReplanOutcome:
        self._round += 1
        number, members = self._round, self._joined()
        began = time.monotonic()
        try:
            self._all_there(members, request)
            before = {m.rank: m.state for m in members}
            proposals = await proposals_of(members, request, number)
            solved = time.monotonic()
            changes = tuple(_change(before[rank], proposals[rank]) for rank in sorted(proposals))
            if request.dry_run:
                return ReplanOutcome(False, self._epoch, "", True, changes, solved - began)
            budgets = budgets or {m.rank: self._budget_for(m, request) for m in members}
            await self._prepare(members, number, proposals, budgets)
        except RoundFailed as failed:
            await self._abort(members, number)
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

    def _take(
        self,
        outcome: ReplanOutcome,
        proposals: dict[int, Proposal],
        budgets: dict[int, Budget],
        request: ReplanRequest,
    ) -> None:
        old = self._history[-1] if self._history else None
        self._epoch = outcome.epoch
        asked = request.budget is not None or request.latency
        budget = request.budget if asked else next(iter(budgets.values()), None)
        epoch = self._remember(outcome.epoch, request.reason, budget, outcome.parked_seconds)
        epoch.plans = {rank: proposal.plan for rank, proposal in proposals.items()}
        epoch.budgets = dict(budgets)
        self._predict(epoch)
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
        keeps_budgets = old is not None and old.budgets == epoch.budgets
        self._spawn(self._observe(epoch, old if keeps_budgets else None))

    def _all_there(self, members: list[_Member], request: ReplanRequest) -> None:
        if not members:
            raise RoundFailed("no worker is ready yet")
        away = [m.rank for m in self._members.values() if m.joined and m.lost]
        if away:
            raise RoundFailed(f"worker {away[0]} is away ({self._members[away[0]].lost}); ask again when it is back")
        unknown = sorted(set(request.workers or ()) - {m.rank for m in members})
        if unknown:
            raise RoundFailed(f"there is no worker {unknown[0]}; ready: {[m.rank for m in members]}")

    def _budget_for(self, member: _Member, request: ReplanRequest) -> Budget:
        chosen = request.workers is None or member.rank in request.workers
        if chosen and (request.budget is not None or request.latency):
            return request.budget
        return self._history[-1].budgets.get(member.rank) if self._history else None

    async def _solve(self, members: list[_Member], request: ReplanRequest, number: int) -> dict[int, Proposal]:
        chosen = [m for m in members if request.workers is None or m.rank in request.workers]
        curves: dict[int, TransferCurve] = {}
        if request.measure:
            measured = await self._all(
                "measure", chosen, lambda m: m.handle.measure.remote(number), self._options.measure_timeout
            )
            curves = shared_curves(measured.values())
        kept = {rank: plan for rank, plan in self._history[-1].plans.items() if rank not in {m.rank for m in chosen}}
        budgets = {m.rank: self._budget_for(m, request) for m in members}
        return await self._proposals(members, number, budgets, kept, curves)

    async def _proposals(
        self,
        members: list[_Member],
        number: int,
        budgets: dict[int, Budget],
        plans: dict[int, Plan],
        curves: dict[int, TransferCurve],
    ) -> dict[int, Proposal]:
        return await self._all(
            "plan",
            members,
            lambda m: m.handle.propose.remote(number, budgets.get(m.rank), plans.get(m.rank), curves.get(m.rank)),
            self._options.measure_timeout,
        )

    async def _prepare(
        self, members: list[_Member], number: int, proposals: dict[int, Proposal], budgets: dict[int, Budget]
    ) -> dict[int, Prepared]:
        slowest = max((m.state.step_seconds for m in members if m.state is not None), default=0.0)
        timeout = max(self._options.prepare_timeout, 3 * slowest)
        return await self._all(
            "prepare",
            members,
            lambda m: m.handle.prepare.remote(
                number, self._epoch + 1, proposals[m.rank].plan, budgets.get(m.rank), timeout
            ),
            timeout + 1,
        )

    async def _commit(self, members: list[_Member], number: int) -> float:
        """Tell all; the decision is made. Returns the longest time that a worker stood."""
        answers = await self._each(members, lambda m: m.handle.commit.remote(number), self._options.commit_timeout)
        parked = 0.0
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                self._events.write("commit_unanswered", rank=member.rank, error=_why(answer))
                self._spawn(self._catch_up(member))
            else:
                parked = max(parked, answer)
        return parked

    async def _catch_up(self, member: _Member) -> None:
        """A worker that did not answer the commit takes the agreed plan now; a dead one does when it joins."""
        try:
            await asyncio.sleep(self._options.poll)
            async with self._one_round:
                await self._call(member, lambda handle: handle.join.remote(self._assignment(member.rank)))
        except (RayError, TimeoutError) as error:
            self._mark_lost(member, _why(error))

    async def _abort(self, members: Iterable[_Member], number: int) -> None:
        await self._each(list(members), lambda m: m.handle.abort.remote(number), self._options.commit_timeout)

    async def _all(
        self, what: str, members: list[_Member], call: Callable[[_Member], Awaitable[T]], timeout: float
    ) -> dict[int, T]:
        """The answers of all, by rank; RoundFailed as soon as one fails or is late."""

        async def one(member: _Member) -> T:
            try:
                return await asyncio.wait_for(_awaitable(call(member)), timeout)
            except TimeoutError:
                raise RoundFailed(f"worker {member.rank} did not answer {what!r} within {timeout:.1f} s") from None
            except RayActorError as error:
                self._mark_lost(member, _why(error))
                raise RoundFailed(f"worker {member.rank} died during {what!r}") from error
            except RayError as error:
                raise RoundFailed(f"worker {member.rank}: {_why(error)}") from error

        tasks = [asyncio.ensure_future(one(member)) for member in members]
        try:
            answers = await asyncio.gather(*tasks)
        except RoundFailed:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return {member.rank: answer for member, answer in zip(members, answers, strict=True)}

    async def _each(
        self, members: list[_Member], call: Callable[[_Member], Awaitable[T]], timeout: float
    ) -> list[T | BaseException]:
        return await asyncio.gather(
            *(asyncio.wait_for(_awaitable(call(member)), timeout) for member in members), return_exceptions=True
        )

    async def _call(self, member: _Member, call: Callable[[Any], Awaitable[T]]) -> T:
        return await asyncio.wait_for(_awaitable(call(member.handle)), self._options.commit_timeout)

    # watching

    async def _watch(self, member: _Member) -> None:
        """Ask one worker for its state, over and over; a worker that hangs is started again."""
        while True:
            try:
                state: WorkerState = await asyncio.wait_for(
                    _awaitable(member.handle.state.remote()), self._options.hang
                )
                member.state, member.seen = state, time.monotonic()
                self._metrics.observe(state)
                if state.busy_seconds > self._options.hang:
                    self._restart(member, f"no step for {state.busy_seconds:.0f} s")
            except TimeoutError:
                self._restart(member, f"silent for {self._options.hang:.0f} s")
            except RayActorError as error:
                self._mark_lost(member, _why(error))
            except RayError as error:
                logger.warning("worker %d: no state: %s", member.rank, _why(error))
            await asyncio.sleep(self._options.poll)

    def _restart(self, member: _Member, reason: str) -> None:
        self._mark_lost(member, reason)
        self._events.write("worker_killed", rank=member.rank, reason=reason)
        ray.kill(member.handle, no_restart=False)

    def _mark_lost(self, member: _Member, reason: str) -> None:
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

    async def _observe(self, epoch: _Epoch, old: _Epoch | None) -> None:
        """Measured against predicted once the new plan has run a while; back to the old plan where it is worse.

        ``old`` is given where both plans had the same budgets: a plan for less memory may be slower.
        """
        before = {m.rank: m.state.steps for m in self._joined() if m.state is not None}
        number = epoch.record.epoch
        while self._epoch == epoch.record.epoch:
            await asyncio.sleep(self._options.poll)
            states = [m.state for m in self._joined() if m.state is not None]
            refused = [state for state in states if state.refusal and state.epoch < number]
            if refused and len(self._history) > 1:
                await self._roll_back_from(number, f"worker {refused[0].rank} could not: {refused[0].refusal}")
                return
            if states and all(s.steps - before.get(s.rank, s.steps) >= self._options.rollback_steps for s in states):
                break
        else:
            return
        measured = max(state.step_seconds for state in states)
        epoch.record = replace(epoch.record, measured_step_seconds=measured)
        self._events.write(
            "measured",
            epoch=epoch.record.epoch,
            step_seconds=round(measured, 6),
            predicted_step_seconds=round(epoch.record.predicted_step_seconds, 6),
        )
        margin = self._options.rollback_margin
        if old is None or margin is None or old.record.measured_step_seconds <= 0:
            return
        if measured > old.record.measured_step_seconds * (1 + margin):
            await self._roll_back_from(
                number,
                f"epoch {number} takes {measured * 1e3:.1f} ms a step, "
                f"the one before took {old.record.measured_step_seconds * 1e3:.1f} ms",
            )

    async def _roll_back_from(self, number: int, reason: str) -> None:
        async with self._one_round:
            if self._epoch == number:
                await self._rollback(reason)

    async def _learn_from_workers(self) -> None:
        """After a restart: the run's state is what the workers say."""
        namespace = self._options.namespace
        for entry in ray.util.list_named_actors(all_namespaces=True):
            name = entry["name"]
            if entry["namespace"] != namespace or not name.startswith(WORKER_PREFIX):
                continue
            member = _Member(int(name.removeprefix(WORKER_PREFIX)), ray.get_actor(name, namespace=namespace))
            self._members[member.rank] = member
            member.watcher = self._spawn(self._watch(member))
            try:
                state = await self._call(member, lambda handle: handle.state.remote())
                if state.phase != "ready":
                    continue
                plan, budget = await self._call(member, lambda handle: handle.plan.remote())
            except (RayError, TimeoutError) as error:
                self._mark_lost(member, _why(error))
                continue
            member.state, member.seen, member.joined = state, time.monotonic(), True
            self._paused = self._paused or state.paused
            if not self._history:
                self._remember(state.epoch, "coordinator started again", budget, 0.0)
            self._history[-1].plans[member.rank], self._history[-1].budgets[member.rank] = plan, budget
        epochs = {m.state.epoch for m in self._joined() if m.state is not None}
        self._epoch = max(epochs, default=0)
        if self._history:
            self._history[-1].record = replace(self._history[-1].record, epoch=self._epoch)
            self._predict(self._history[-1])
        self._events.write("coordinator_restarted", epoch=self._epoch, workers=len(self._joined()))
        if len(epochs) > 1:  # it died between two commits: one more round puts all on one epoch
            self._spawn(self.replan(ReplanRequest(measure=False, reason="workers disagreed on the epoch")))

    def _assignment(self, rank: int) -> Assignment:
        agreed = self._history[-1]
        return Assignment(
            epoch=self._epoch,
            plan=agreed.plans.get(rank),
            budget=agreed.budgets.get(rank, agreed.record.budget),
            solve=len(self._history) > 1,
            paused=self._paused,
        )

    def _joined(self) -> list[_Member]:
        return [m for _, m in sorted(self._members.items()) if m.joined and not m.lost]

    def _remember(self, epoch: int, reason: str, budget: Budget, parked: float) -> _Epoch:
        if self._history:
            last = self._history[-1]
            measured = max((m.state.step_seconds for m in self._joined() if m.state is not None), default=0.0)
            if not last.record.measured_step_seconds:
                last.record = replace(last.record, measured_step_seconds=measured)
        entry = _Epoch(EpochRecord(epoch, time.time(), reason, budget, 0.0, parked_seconds=parked))
        self._history = [*self._history[-KEPT_EPOCHS + 1 :], entry]
        return entry

    def _predict(self, epoch: _Epoch) -> None:
        times = [plan.prediction.step_seconds for plan in epoch.plans.values() if plan.prediction is not None]
        epoch.record = replace(epoch.record, predicted_step_seconds=max(times, default=0.0))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
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


async def _awaitable(reference: Awaitable[T]) -> T:
    return await reference


def _why(error: BaseException) -> str:
    """The worker's own exception in one line."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayActorError):
        return f"its process is gone ({type(cause).__name__})"
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _was_restarted() -> bool:
    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)
