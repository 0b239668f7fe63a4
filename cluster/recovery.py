"""A coordinator that was started again: the run is at what its workers say.

[Note: a decision half told] The one before it may have died between two commits: then some workers have agreed on an
epoch for which the others are only prepared. That was decided, so these commit it now. Where they cannot (one was not
prepared any more, or had no room), a round puts all on one epoch, each on its own budget; it is asked for until it is
committed. The same for a worker that was silent and knows of a later epoch when it answers; a round waits a while for
the silent ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.asking import Member, why
from cluster.events import EventLog
from cluster.messages import Budget, CoordinatorOptions, Plans, WorkerState
from cluster.roster import Roster
from cluster.rounds import Replans

WORKER_PREFIX = "worker-"
LEARN_ATTEMPTS = 20
MOST_WAIT = 60.0
"""Seconds between two tries to put all on one epoch."""


class Recovery:
    """See the module. ``spawn`` keeps a coroutine running beside."""

    def __init__(
        self,
        options: CoordinatorOptions,
        roster: Roster,
        replans: Replans,
        events: EventLog,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._options = options
        self._roster = roster
        self._replans = replans
        self._events = events
        self._spawn = spawn
        self._agreeing: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def learn(self) -> None:
        """Find the run's workers; take part with those that answer in time. The others are found when they do."""
        namespace = self._options.namespace
        for entry in await self._named_actors():
            name = entry["name"]
            if entry["namespace"] == namespace and name.startswith(WORKER_PREFIX):
                with contextlib.suppress(ValueError):  # it has ended since
                    handle = ray.get_actor(name, namespace=namespace)
                    self._roster.add(Member(int(name.removeprefix(WORKER_PREFIX)), handle, set_up=True))
        members = list(self._roster.members.values())
        words = await asyncio.gather(*(self._word_of(member) for member in members))
        known = [(member, *word) for member, word in zip(members, words, strict=True) if word is not None]
        if known:
            self._take_over(known)
        self._events.write("coordinator_restarted", epoch=self._replans.epoch, workers=len(known))
        self.agree()

    def _take_over(self, known: list[tuple[Member, WorkerState, Plans, Budget]]) -> None:
        replans = self._replans
        for _, state, _, _ in known:
            replans.heard(state)
        self._roster.paused = any(state.paused for _, state, _, _ in known)
        replans.apart = not all(_is_at(state, replans.epoch) for _, state, _, _ in known)
        budget = next(budget for _, state, _, budget in known if state.agreed.epoch == replans.epoch)
        epoch = replans.history.begin(replans.epoch, "coordinator started again", budget)
        for member, state, plans, own in known:
            self._roster.join(member, state)
            if state.agreed.epoch == replans.epoch:
                epoch.put(member.rank, plans, own)
            else:  # it has no plans of this epoch yet, and keeps its budget
                epoch.budgets[member.rank] = own

    async def _named_actors(self) -> list[dict[str, str]]:
        for _ in range(LEARN_ATTEMPTS):
            try:
                return list(ray.util.list_named_actors(all_namespaces=True))
            except RayError as error:
                self._events.write("coordinator_error", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(self._options.poll)
        return []

    async def _word_of(self, member: Member) -> tuple[WorkerState, Plans, Budget] | None:
        """A worker's state, plans and budget; None where it is not ready, has not joined or does not say in time."""
        try:
            async with asyncio.timeout(self._options.learn_timeout):
                state: WorkerState = await member.handle.state.remote()
                if state.phase == "ready" and state.agreed.epoch:
                    return (state, *await member.handle.plans.remote())
            if state.phase == "ready":
                self._roster.mark_lost(member, "it had not joined yet")
        except RayError as error:
            self._roster.mark_lost(member, why(error))  # it is found again; or the driver sets it up again
        except TimeoutError:
            self._roster.mark_lost(member, f"no answer within {self._options.learn_timeout:.1f} s")
        return None

    def agree(self) -> None:
        """See to it that all come to one epoch, where they are apart. Called whenever one more is there."""
        self._news.set()
        if self._replans.apart and (self._agreeing is None or self._agreeing.done()):
            self._agreeing = self._spawn(self._agree())

    async def _agree(self) -> None:
        wait, patience_ends = self._options.poll, time.monotonic() + self._options.commit_timeout
        while True:
            self._news.clear()
            by_round = self._roster.complete or time.monotonic() > patience_ends
            if await self._replans.agree(by_round=by_round):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait)
            wait = min(2 * wait, MOST_WAIT)


def _is_at(state: WorkerState, epoch: int) -> bool:
    """True for a worker that has agreed on the plans of ``epoch`` and, as far as is known, can put them in force."""
    return state.agreed.epoch == epoch and not (state.refusal and state.refused_epoch == epoch)
