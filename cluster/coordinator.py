"""The actor that watches all workers and moves them to a better plan at the same step.

Async, named, in the run's namespace, without a CUDA context. It owns no items: the batch job goes on without it, and
a coordinator that is started again learns what it needs from the workers. ``rounds`` has the replans, ``roster`` the
workers, ``autopilot`` what happens without being asked, ``recovery`` the restart; here is who may ask for what.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from cluster.asking import Member, why
from cluster.autopilot import Autopilot
from cluster.energy import EnergyMeter
from cluster.events import EventLog
from cluster.history import Epoch
from cluster.messages import (
    CoordinatorOptions,
    JobProgress,
    ReplanOutcome,
    ReplanRequest,
    RunStatus,
)
from cluster.metrics import RunMetrics
from cluster.recovery import Recovery
from cluster.roster import Roster
from cluster.rounds import Replans
from cluster.switching import NotSetUp, OutOfReach

NAME = "coordinator"


class Coordinator:
    """See the module."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self._options = options
        self._events = EventLog(options.events_path)
        self._background: set[asyncio.Task[Any]] = set()
        self._metrics = RunMetrics(options.namespace)
        self._roster = Roster(options, self._events, self._metrics, self._spawn)
        self._replans = Replans(options, self._roster, self._events, self._spawn, self._planned)
        self._roster.on_own_plan, self._roster.on_found = self._replans.take_up, self._readmit
        self._autopilot = Autopilot(options, self._roster, self._replans, self._events)
        self._energy = EnergyMeter()
        self._job = JobProgress()
        self._recovery = Recovery(options, self._roster, self._replans, self._events, self._spawn)
        self._recover = _is_started_again()
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
                await self._recovery.learn()
                self._autopilot.planned()
            else:
                self._events.write("run_started", options=dataclasses.asdict(self._options))
            self._roster.settled = True
            self._spawn(self._autopilot.run())
        finally:
            self._started.set()

    async def enlist(self, rank: int, handle: Any) -> None:
        """A worker's process exists (again); watch it."""
        await self.start()
        self._roster.add(Member(rank, handle))
        self._events.write("worker_enlisted", rank=rank)

    async def admit(self, rank: int, handle: Any) -> None:
        """The worker is set up; tell it what the run has agreed on. It may take leases when this returns.

        Raises NotSetUp when its process is gone, or is not the one that was set up; OutOfReach when it is not known.
        """
        await self.start()
        if rank not in self._roster.members:  # this actor was down when it was enlisted
            self._roster.add(Member(rank, handle))
        member = self._roster.members[rank]
        try:
            state, refused = await self._replans.admit(member)
        except ActorUnavailableError as error:  # a RayActorError at the caller is of this actor itself
            raise OutOfReach(f"it does not answer: {why(error)}") from None
        except (RayActorError, NotSetUp) as error:
            raise NotSetUp(f"it died before it joined: {why(error)}") from None
        except TimeoutError:
            member.set_up = True  # it works on its own plan, and joins when it answers again
            self._roster.mark_lost(member, "it did not answer when it was to join")
            raise
        self._recovery.agree()
        self._events.write("worker_joined", rank=rank, pid=state.pid, epoch=self._replans.epoch, refused=refused)

    async def lose(self, rank: int, reason: str) -> None:
        """The driver has seen the worker die."""
        await self.start()
        if (member := self._roster.members.get(rank)) is not None:
            self._roster.mark_lost(member, reason)

    async def dismiss(self, rank: int) -> None:
        """The worker will not come back."""
        await self.start()
        self._roster.drop(rank)
        self._events.write("worker_dismissed", rank=rank)

    async def progress(self, job: JobProgress) -> None:
        """How far the batch job is."""
        await self.start()
        self._job = job
        self._energy.look(self._roster.states(), job)
        if (joules := self._energy.joules_an_item(job)) is not None:
            self._metrics.observe_energy(joules)

    async def event(self, name: str, details: dict[str, Any]) -> None:
        """Write an event of the driver's to the run's log."""
        await self.start()
        self._events.write(name, **details)

    # ---- people's calls

    async def status(self) -> RunStatus:
        """The run now."""
        await self.start()
        members = sorted(self._roster.members.items())
        return RunStatus(
            namespace=self._options.namespace,
            epoch=self._replans.epoch,
            paused=self._roster.paused,
            workers=tuple(member.state for _, member in members if member.state is not None),
            job=self._job,
            epochs=self._replans.history.records(self._roster.slowest_step()),
            missing=self._roster.missing(),
            joules_an_item=self._energy.joules_an_item(self._job),
        )

    async def pause(self, on: bool) -> int:
        """All workers stand at their next step boundary until ``pause(False)``. Returns how many were told."""
        await self.start()
        self._roster.paused = on
        members = self._roster.joined()
        answers = await self._roster.ask_each(members, lambda m: m.handle.pause.remote(on))
        deaf = [m.rank for m, answer in zip(members, answers, strict=True) if isinstance(answer, BaseException)]
        self._events.write("paused" if on else "resumed", workers=len(members), unanswered=deaf)
        return len(members) - len(deaf)

    async def replan(self, request: ReplanRequest) -> ReplanOutcome:
        """Move every worker to a new plan, or none; see ``cluster.rounds``."""
        await self.start()
        return await self._replans.replan(request)

    async def rollback(self) -> ReplanOutcome:
        """Move every worker back to the plan before the one in force, under a new epoch's number."""
        await self.start()
        return await self._replans.rollback("rollback asked for")

    async def _readmit(self, member: Member) -> None:
        """A worker that was out of reach answers again: it takes what the run has agreed on meanwhile, and was told to
        do."""
        was = member.lost
        try:
            state, refused = await self._replans.admit(member, again=True)
        except (RayError, TimeoutError):
            return  # it is looked for again, unless the driver sets it up again
        self._recovery.agree()
        self._events.write("worker_found", rank=member.rank, pid=state.pid, was=was, refused=refused)

    # ---- small things

    def _planned(self, epoch: Epoch, old: Epoch | None) -> None:
        self._autopilot.planned()
        self._spawn(self._autopilot.observe(epoch, old))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.write("coordinator_error", error=f"{type(error).__name__}: {error}")


def _is_started_again() -> bool:
    """True in an actor that Ray has started again; False outside of Ray, and in a driver, which is no actor."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)
