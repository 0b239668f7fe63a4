"""A dataset in, results out: every item once, whatever dies in between.

Our own queue over plain actors. Ray Data works in blocks (a pause waits for whole ones) and an ActorPool loses the
items of a dead worker; here an item is one line of the journal, and a worker is always at a known step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.gate import StepStopped
from cluster.journal import OutputJournal, unwritable
from cluster.leases import LeaseQueue, SetAside
from cluster.messages import JobProgress, Lease, LeaseResult
from cluster.pool import Slot, WorkerPool
from cluster.task import TaskError
from cluster.worker import NotSetUp, Refused

logger = logging.getLogger(__name__)

WINDOW = 2
"""Leases that a worker has at once: one that runs, one that waits, so that it never idles for the driver."""


class BatchJob:
    """Feeds the pool from the queue and writes the answers; ``run`` returns when every item is in the journal.

    tokens_of: how much work a result stands for. on_progress: called with the job's progress about twice a second.
    sample: keep the first finished leases with at least so many items in ``finished_leases``, to be verified.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queue: LeaseQueue,
        journal: OutputJournal,
        *,
        progress: JobProgress,
        tokens_of: Callable[[dict[str, Any]], int],
        on_progress: Callable[[JobProgress], None],
        sample: int = 0,
        tick: float = 0.5,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._journal = journal
        self._tokens_of = tokens_of
        self._on_progress = on_progress
        self._tick = tick
        self._told = 0.0
        self._wanted = sample
        self.finished_leases: list[tuple[Lease, LeaseResult]] = []
        self.progress = progress

    def run(self) -> JobProgress:
        """Run all leases.

        Raises NoWorkers when none is left; what is finished is in the journal then.
        """
        while not self._queue.finished:
            self._feed()
            if (reference := self._pool.wait(self._tick)) is not None:
                self._settle(reference)
            self._tell()
        self.progress = replace(self.progress, finished=True, updated=time.time())
        self._tell(now=True)
        summary = {"done": self.progress.done, "failed": self.progress.failed, "tokens": self.progress.tokens}
        self._pool.coordinator.event.remote("job_finished", summary)
        return self.progress

    def _feed(self) -> None:
        for depth in range(WINDOW):
            for slot in self._pool.ready:
                if len(slot.in_flight) == depth and (lease := self._queue.take()) is not None:
                    self._pool.lend(slot, lease)
                    if not self.progress.started:
                        self.progress = replace(self.progress, started=time.time(), updated=time.time())
                        start = {"total": self.progress.total, "skipped": self.progress.skipped}
                        self._pool.coordinator.event.remote("job_started", start)

    def _settle(self, reference: Any) -> None:
        slot = self._pool.slot_of(reference)
        if reference is slot.setup:
            self._pool.settle(slot)
            return
        given = list(slot.in_flight.values())
        lease = slot.in_flight.pop(reference)
        try:
            answer: LeaseResult = ray.get(reference)
        except RayActorError as error:
            self._worker_died(slot, given, error, at_work=True)
        except NotSetUp as error:  # by the process after it: whether a lease was at work before is not known
            self._worker_died(slot, given, error, at_work=False)
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            self._failed(lease, cause)
        else:
            if wrong := unwritable(answer.results):
                self._failed(lease, TaskError(wrong))
                return
            self._pool.worked(slot)
            self._write(list(answer.results))
            self._queue.finish(lease.number)
            if self._wanted > 0:
                self._wanted -= len(lease.items)
                self.finished_leases.append((lease, answer))

    def _worker_died(self, slot: Slot, given: list[Lease], error: RayError | NotSetUp, *, at_work: bool) -> None:
        # Calls run in order, so only the oldest lease can have been at work when the worker died; which of them is told
        # first says nothing.
        for lease in given:
            self._give_back(lease, f"its worker died: {type(error).__name__}", blame=at_work and lease is given[0])
        slot.in_flight.clear()
        self._pool.lost(slot, error)

    def _failed(self, lease: Lease, cause: BaseException) -> None:
        message = f"{type(cause).__name__}: {cause}"
        blame = not isinstance(cause, Refused | StepStopped)
        self._pool.coordinator.event.remote(
            "lease_failed", {"lease": lease.number, "attempt": lease.attempt, "error": message}
        )
        self._give_back(lease, message, blame=blame)

    def _give_back(self, lease: Lease, error: str, *, blame: bool) -> None:
        aside = self._queue.give_back(lease.number, error=error, blame=blame)
        self._write([_as_error(one) for one in aside])

    def _write(self, results: list[dict[str, Any]]) -> None:
        fresh = self._journal.write(results)
        failed = sum(1 for result in fresh if result.get("error"))
        self.progress = replace(
            self.progress,
            done=self.progress.done + len(fresh),
            failed=self.progress.failed + failed,
            tokens=self.progress.tokens + sum(self._tokens_of(result) for result in fresh),
            updated=time.time(),
        )

    def _tell(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._told >= self._tick:
            self._told = time.monotonic()
            self._pool.coordinator.progress.remote(self.progress)
            self._on_progress(self.progress)


def _as_error(aside: SetAside) -> dict[str, Any]:
    return {"id": aside.item["id"], "error": aside.error}
