"""A run of real workers under a real coordinator, and how it is measured."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from benchmarks.cluster_model import RUN_AHEAD
from cluster.messages import (
    Budget,
    CoordinatorOptions,
    Lease,
    LeaseResult,
    Measurement,
    ReplanOutcome,
    ReplanRequest,
    WorkerStart,
)
from cluster.messages import WorkerState as State
from cluster.pool import WorkerPool
from cluster.session import make_coordinator, make_worker
from flextensor.config import OffloadConfig
from flextensor.store import StoreError
from flextensor.store.inventory import list_stores, remove_store

logger = logging.getLogger(__name__)

READY_SECONDS = 150.0
CALL_SECONDS = 120.0
STORE_SECONDS = 5.0
TRIAL_STEPS = 4
"""Of the item that tells how long a step takes, and whose output a Reading has."""


@dataclass(frozen=True)
class Crew:
    """How many workers, on what, with which model. num_gpus: of each worker. host_link: the host device's, bytes/s.
    copies_may_fill: in latency mode, this share of the compute time (None: the default)."""

    device: str
    workers: int
    num_gpus: float
    task: str
    task_options: dict[str, Any]
    host_link: float
    copies_may_fill: float | None = None

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def config(self) -> OffloadConfig:
        """Every step is timed: figures of a few seconds need them all."""
        settings: dict[str, Any] = {"offload_timing": "eager", "shm_wait_timeout": 120.0}
        if self.copies_may_fill is not None:
            settings["transfer_budget_scale"] = self.copies_may_fill
        if not self.cuda:
            settings |= {"host_link_bytes_per_second": self.host_link, "resident_below_bytes": 4096}
        return OffloadConfig(**settings)


@dataclass(frozen=True)
class Reading:
    """One worker over the time in which all that were measured with it worked, too. Seconds and bytes; joules of its
    GPU over the whole lease, None without NVML. copied_bytes: over the link, in the whole lease. digest: of the output
    of ``TRIAL_STEPS`` steps under the same plan."""

    rank: int
    steps: int
    seconds: float
    state: State
    joules_a_step: float | None
    copied_bytes: int
    digest: str

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds

    def as_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "rank": self.rank,
            "steps": self.steps,
            "step_seconds": self.seconds / self.steps,
            "compute_seconds": state.compute_seconds,
            "stall_seconds": state.stall_seconds,
            "stall_share": state.stall_seconds * self.steps / self.seconds,
            "link_bytes_per_second": state.link_bytes_per_second,
            "streamed_bytes": state.streamed_bytes,
            "weight_bytes": state.weight_bytes,
            "total_bytes": state.total_bytes,
            "predicted_step_seconds": state.predicted.step_seconds if state.predicted else None,
            "joules_a_step": self.joules_a_step,
        }


class _Apart(RuntimeError):
    """One worker was done before another had begun."""


class Rig:
    """Coordinator and workers, up and with their first plans. ``close`` ends them."""

    def __init__(self, crew: Crew, *, budget: Budget = 0.5, **options: Any) -> None:
        self.crew = crew
        self.namespace = f"bench-{uuid.uuid4().hex[:8]}"
        self._numbers = iter(range(1, 1 << 30))
        began = time.monotonic()
        settings = {"automatic": False, "rollback_margin": None, "hang": 120.0} | options
        self.coordinator = make_coordinator(CoordinatorOptions(namespace=self.namespace, **settings))
        self.pool: WorkerPool | None = None
        try:
            self._get(self.coordinator.start.remote())

            def make(rank: int) -> Any:
                start = WorkerStart(
                    namespace=self.namespace,
                    rank=rank,
                    workers=crew.workers,
                    device=crew.device,
                    config=crew.config(),
                    task=crew.task,
                    task_options=crew.task_options,
                    budget=budget,
                    store_namespace=self.namespace,
                    threads=0 if crew.cuda else 1,
                )
                return make_worker(start, num_gpus=crew.num_gpus)

            self.pool = WorkerPool(make, workers=crew.workers, coordinator=self.coordinator)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.setup_seconds = time.monotonic() - began

    def _wait_until_ready(self) -> None:
        assert self.pool is not None
        end = time.monotonic() + READY_SECONDS
        while len(self.pool.ready) < self.crew.workers:
            if not self.pool.settle_next(1.0) and time.monotonic() > end:
                notes = [slot.phase for slot in self.pool.slots]
                raise TimeoutError(f"workers are not ready after {READY_SECONDS:.0f} s: {notes}")

    @property
    def handles(self) -> list[Any]:
        """The workers' actors, by rank."""
        assert self.pool is not None
        return [slot.handle for slot in self.pool.slots]

    def _get(self, reference: Any) -> Any:
        return ray.get(reference, timeout=CALL_SECONDS)

    def states(self, ranks: Sequence[int] | None = None) -> list[State]:
        """What the workers say of themselves now."""
        chosen = range(self.crew.workers) if ranks is None else ranks
        found: list[State] = self._get([self.handles[rank].state.remote() for rank in chosen])
        return found

    def links(self, ranks: Sequence[int]) -> list[Measurement]:
        """What a replan would measure of these workers' links now."""
        number = int(time.time() * 1000)  # rounds count from the coordinator's start, and not one a millisecond
        found: list[Measurement] = self._get([self.handles[rank].measure.remote(number) for rank in ranks])
        return found

    def replan(self, **request: Any) -> ReplanOutcome:
        """Raises RuntimeError with the coordinator's reason when nobody moved."""
        return self._committed(self.coordinator.replan.remote(ReplanRequest(**request)), "replan")

    def rollback(self) -> ReplanOutcome:
        """To the plans before those in force. Raises RuntimeError with the coordinator's reason when nobody moved."""
        return self._committed(self.coordinator.rollback.remote(), "rollback")

    def _committed(self, asked: Any, what: str) -> ReplanOutcome:
        outcome: ReplanOutcome = self._get(asked)
        if not outcome.committed:
            raise RuntimeError(f"a {what} was refused: {outcome.reason}")
        return outcome

    def lease(self, rank: int, steps: int, **more: Any) -> Any:
        """Start ``steps`` steps on one worker; the reference of its LeaseResult."""
        number = next(self._numbers)
        item = {"id": f"m{number}", "seed": number % 7, "steps": steps, "fresh": True, **more}
        return self.handles[rank].run.remote(Lease(number, (item,)))

    def measure(
        self, ranks: Sequence[int], seconds: float, each: Mapping[int, dict[str, Any]] | None = None
    ) -> list[Reading]:
        """These workers run at the same time for about ``seconds``, the others idle. each: rank -> more for its items.

        Short leases first: one puts a staged plan in force, one tells how long a step takes.
        """
        try:
            return self._measure(ranks, seconds, each or {})
        except _Apart as apart:  # on a busy machine
            logger.warning("%s: once more, for longer", apart)
            return self._measure(ranks, 3 * seconds + 1.0, each or {})

    def _measure(self, ranks: Sequence[int], seconds: float, more: Mapping[int, dict[str, Any]]) -> list[Reading]:
        self._get([self.lease(rank, 1, **more.get(rank, {})) for rank in ranks])
        tried: list[LeaseResult] = self._get([self.lease(rank, TRIAL_STEPS, **more.get(rank, {})) for rank in ranks])
        took = [answer.results[0]["seconds"] / TRIAL_STEPS for answer in tried]
        steps = [min(max(round(seconds / max(one, 1e-5)), 8), 4000) for one in took]
        before = self.states(ranks)
        answers: list[LeaseResult] = self._get(
            [self.lease(rank, count, **more.get(rank, {})) for rank, count in zip(ranks, steps, strict=True)]
        )
        after = self.states(ranks)
        stamps = [answer.results[0]["stamps"][RUN_AHEAD:] for answer in answers]
        window = (max(one[0] for one in stamps), min(one[-1] for one in stamps))
        return [
            Reading(
                rank,
                *_within(window, stamped),
                state,
                _joules_a_step(was, state, count),
                state.copied_bytes_total - was.copied_bytes_total,
                trial.results[0]["digest"],
            )
            for rank, count, stamped, was, state, trial in zip(ranks, steps, stamps, before, after, tried, strict=True)
        ]

    def close(self) -> None:
        """End all actors of this run; nothing of their store stays."""
        if self.pool is not None:
            self.pool.close(timeout=15)
        ray.kill(self.coordinator)
        end = time.monotonic() + STORE_SECONDS
        while left := [entry for entry in list_stores("/dev/shm") if entry.namespace == self.namespace]:
            for entry in left:
                if entry.state in ("dead", "filling"):  # of a worker that was killed
                    with contextlib.suppress(StoreError):
                        remove_store(entry)
            if time.monotonic() > end:
                break
            time.sleep(0.1)


def _within(window: tuple[float, float], stamps: Sequence[float]) -> tuple[int, float]:
    """Whole steps that lie in the window, by the times at which steps began, and their seconds: who begins first or
    ends last has the link alone meanwhile."""
    inside = [stamp for stamp in stamps if window[0] <= stamp <= window[1]]
    if len(inside) < 2:
        raise _Apart(f"no step lies within the {window[1] - window[0]:.3f} s in which all workers work")
    return len(inside) - 1, inside[-1] - inside[0]


def _joules_a_step(before: State, after: State, steps: int) -> float | None:
    if before.gpu is None or after.gpu is None or before.gpu.energy_joules is None or after.gpu.energy_joules is None:
        return None
    return (after.gpu.energy_joules - before.gpu.energy_joules) / steps


@contextlib.contextmanager
def rig(crew: Crew, **options: Any) -> Iterator[Rig]:
    """A Rig that is closed at the block's end."""
    made = Rig(crew, **options)
    try:
        yield made
    finally:
        made.close()


def shared_gpu(crew: Crew) -> Crew:
    """Two workers on one GPU, each with a plan that takes all of the link that it sees."""
    return replace(crew, workers=2, num_gpus=0.5, copies_may_fill=1.0)


def process_id(handle: Any) -> int:
    """The process of an actor."""
    return int(ray.get(handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=CALL_SECONDS))


def median(values: Sequence[float]) -> float:
    """0.0 for no values."""
    return statistics.median(values) if values else 0.0
