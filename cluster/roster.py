"""The workers of a run as its coordinator sees them: who is there, how they are, and who hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.asking import Member, ask, ask_all, ask_each, why
from cluster.events import EventLog
from cluster.messages import CoordinatorOptions, WorkerState
from cluster.metrics import RunMetrics

logger = logging.getLogger(__name__)

LONGER_THAN_EVER = 4.0
"""A worker hangs when it shows no step boundary for so many times the longest that it ever took, however long that is
(a step of a video takes minutes)."""

BOUNDARY_PATIENCE = 2.0
"""A round waits for a step boundary so many times the longest that one ever took."""


class Roster:
    """``spawn`` keeps a coroutine running beside."""

    def __init__(
        self,
        options: CoordinatorOptions,
        events: EventLog,
        metrics: RunMetrics,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._options = options
        self._events = events
        self._metrics = metrics
        self._spawn = spawn
        self.members: dict[int, Member] = {}
        self.paused = False
        self.settled = False
        """What the run has agreed on is known: from the beginning, or once it was learned from the workers."""
        self.on_found: Callable[[Member], Coroutine[Any, Any, None]] | None = None
        """What is to be done when a worker that was away answers, and its process is the one that was set up."""
        self.on_own_plan: Callable[[Member, WorkerState], Coroutine[Any, Any, None]] | None = None
        """What is to be done when a worker that has joined made a plan by itself."""

    def add(self, member: Member) -> None:
        """Watch a worker."""
        self.drop(member.rank)
        self.members[member.rank] = member
        member.watcher = self._spawn(self._watch(member))

    def drop(self, rank: int) -> None:
        """Forget a worker."""
        member = self.members.pop(rank, None)
        if member is not None and member.watcher is not None:
            member.watcher.cancel()

    def joined(self) -> list[Member]:
        """The workers that take part in rounds, by rank."""
        return [m for _, m in sorted(self.members.items()) if m.joined and not m.lost]

    def away(self) -> list[Member]:
        """Those that took part and are out of reach, by rank."""
        return [m for _, m in sorted(self.members.items()) if m.joined and m.lost]

    def states(self) -> list[WorkerState]:
        """What those said last."""
        return [m.state for m in self.joined() if m.state is not None]

    @property
    def complete(self) -> bool:
        """True when nobody is away and nobody is on the way."""
        return bool(self.members) and all(m.joined and not m.lost for m in self.members.values())

    def missing(self) -> tuple[str, ...]:
        """Who is away, starting or silent, in words."""
        now, found = time.monotonic(), []
        for rank, member in sorted(self.members.items()):
            if member.lost or member.state is None:
                found.append(f"worker {rank}: {member.lost or 'starting'}")
            elif now - member.seen > 5 * self._options.poll + 5:
                found.append(f"worker {rank}: silent for {now - member.seen:.0f} s")
        return tuple(found)

    def slowest_step(self) -> float:
        """Measured seconds of a step of the slowest worker's own manager."""
        return max((state.step_seconds for state in self.states()), default=0.0)

    def boundary_timeout(self) -> float:
        """How long a round waits until all have come to a step boundary."""
        longest = max((longest_between_boundaries(state) for state in self.states()), default=0.0)
        return max(self._options.prepare_timeout, BOUNDARY_PATIENCE * longest)

    def join(self, member: Member, state: WorkerState) -> None:
        """The worker takes part in rounds from now on, unless it was dismissed or replaced meanwhile."""
        if self.members.get(member.rank) is member:
            member.state, member.seen, member.incarnation = state, time.monotonic(), state.incarnation
            member.own_changes, member.joined, member.lost = state.own_changes, True, ""
            member.set_up = False

    def mark_lost(self, member: Member, reason: str) -> None:
        """A worker's process is gone."""
        if not member.lost:
            member.lost = reason
            self._events.write("worker_lost", rank=member.rank, reason=reason)

    # ---- questions

    async def ask(
        self, member: Member, question: Callable[[Member], Awaitable[Any]], timeout: float | None = None
    ) -> Any:
        """One worker's answer. Raises TimeoutError, and RayError as the call does."""
        return await ask(member, question, timeout or self._options.commit_timeout)

    async def ask_all(
        self,
        what: str,
        members: list[Member],
        question: Callable[[Member], Awaitable[Any]],
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """The answers of all, by rank. Raises RoundFailed as soon as one fails or is late."""
        return await ask_all(what, members, question, timeout or self._options.measure_timeout, self.mark_lost)

    async def ask_each(
        self, members: list[Member], question: Callable[[Member], Awaitable[Any]], timeout: float | None = None
    ) -> list[Any]:
        """Each one's answer or its failure."""
        return await ask_each(members, question, timeout or self._options.commit_timeout)

    # ---- watching

    async def _watch(self, member: Member) -> None:
        """Ask one worker for its state, over and over; a worker that hangs is started again."""
        while True:
            silence = hang_after(member.state, self._options.hang)
            try:
                state: WorkerState = await ask(member, lambda m: m.handle.state.remote(), silence)
                member.state, member.seen = state, time.monotonic()
                if self.settled:
                    self._reconcile(member, state)
                self._metrics.observe(state)
                limit = hang_after(state, self._options.hang)
                if state.busy_seconds > limit and not self.paused:
                    self._restart(member, f"no step for {state.busy_seconds:.0f} s (limit {limit:.0f} s)")
            except RayActorError as error:
                self.mark_lost(member, why(error))
            except RayError as error:
                logger.warning("worker %d: no state: %s", member.rank, why(error))
            except TimeoutError:
                self._restart(member, f"silent for {silence:.0f} s")
            await asyncio.sleep(self._options.poll)

    def _reconcile(self, member: Member, state: WorkerState) -> None:
        """What a worker has missed while it was out of reach, and what it has done by itself."""
        if member.lost:
            known = member.set_up or member.incarnation == state.incarnation
            if known and state.phase == "ready" and not member.returning and self.on_found is not None:
                member.returning = True
                self._spawn(self._bring_back(member, self.on_found))
            elif not member.incarnation and not member.returning:
                member.lost = ""  # it is being started, and will be admitted
        elif member.joined:
            if state.own_changes > member.own_changes and self.on_own_plan is not None:
                member.own_changes = state.own_changes
                self._spawn(self.on_own_plan(member, state))
            if state.paused != self.paused:
                member.handle.pause.remote(self.paused)

    async def _bring_back(self, member: Member, work: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
        try:
            await work(member)
        finally:
            member.returning = False

    def _restart(self, member: Member, reason: str) -> None:
        self.mark_lost(member, reason)
        self._events.write("worker_killed", rank=member.rank, reason=reason)
        ray.kill(member.handle, no_restart=False)


def longest_between_boundaries(state: WorkerState) -> float:
    """The longest that a worker took from one sign of progress to the next, as far as is known."""
    return max(state.longest_busy_seconds, state.slowest_step_seconds)


def hang_after(state: WorkerState | None, least: float) -> float:
    """Seconds without a step boundary after which a worker hangs; see LONGER_THAN_EVER."""
    return least if state is None else max(least, LONGER_THAN_EVER * longest_between_boundaries(state))
