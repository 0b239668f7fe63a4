"""The dataclasses that cross a process boundary. Sizes are bytes, times are seconds, moments are Unix time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.options import CoordinatorOptions
from cluster.states import Agreement, Budget, DeviceSample, EngineState, HostSample, WorkerPhase, WorkerState
from flextensor.config import OffloadConfig
from flextensor.planner.plan import Plan, Prediction
from flextensor.profile import TransferCurve

Item = dict[str, Any]
"""One input of a task, read from the prompts file; ``id`` identifies it."""

Plans = dict[str, Plan]
"""A worker's plans, by the name of the offload manager that executes each; its own manager's comes first."""


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is made from; a restarted worker gets the same.

    rank: 0 .. workers - 1, kept across restarts. device: ``cuda`` or ``host``. task: ``module:name``, or a callable
    packed by ``cluster.task.pack_task``. threads: CPU threads for torch (0: as it is). checkpoint_dir: where items that
    take long keep how far they are, each checkpoint_seconds ("": nowhere).
    """

    namespace: str
    rank: int
    workers: int
    device: str
    config: OffloadConfig
    task: str | bytes
    task_options: dict[str, Any]
    budget: Budget
    store_namespace: str
    threads: int = 0
    checkpoint_dir: str = ""
    checkpoint_seconds: float = 60.0

    @property
    def manager_name(self) -> str:
        """The offload manager's name in the worker's process."""
        return f"worker-{self.rank}"


@dataclass(frozen=True)
class Assignment:
    """What the run has agreed on, told to a worker that joins.

    plans: the ones to take; None where the run has none for this rank: then, with ``solve``, the worker makes them for
    ``budget``, and else it keeps its own first ones. step_index: the number that its next step has in its lockstep
    group (None: it is in none).
    """

    epoch: int
    plans: Plans | None
    budget: Budget
    solve: bool
    paused: bool
    step_index: int | None = None


@dataclass(frozen=True)
class Joined:
    """The plans that a joining worker is on now, and why they are not the assigned ones ("" when they are)."""

    plans: Plans
    budget: Budget
    refused: str


@dataclass(frozen=True)
class Measurement:
    """A worker's link. ``device``: the same text on one node: one link.

    transfer: measured now, beside the running steps and while all other workers measure. alone: as it was measured at
    set-up, while this worker ran nothing else.
    """

    rank: int
    node: str
    device: str
    transfer: TransferCurve
    alone: TransferCurve


@dataclass(frozen=True)
class Proposal:
    """The plans that a worker has solved and checked for a round. other_bytes: weights on its device that no plan
    manages. before_step_seconds: what a step of its own manager took lately. moved_bytes: over the link, by the change
    itself: what becomes resident, and what the first step finds in its slots."""

    rank: int
    plans: Plans
    other_bytes: int
    before_step_seconds: float
    moved_bytes: int = 0

    @property
    def plan(self) -> Plan:
        """The worker's own manager's."""
        return main_plan(self.plans)


@dataclass(frozen=True)
class Prepared:
    """A worker has agreed at a step boundary. step_index: the number of its next step, before which it stands until
    the decision if it is in a lockstep group."""

    rank: int
    step_index: int


@dataclass(frozen=True)
class ReplanRequest:
    """budget: None keeps each worker's. latency: drop the budget (least memory that costs no time).

    workers: ranks that get a new plan (None: all); the others keep theirs under the new epoch's number.
    """

    budget: Budget = None
    latency: bool = False
    workers: tuple[int, ...] | None = None
    measure: bool = True
    dry_run: bool = False
    reason: str = "asked for"


@dataclass(frozen=True)
class WorkerChange:
    """One worker's part of a replan: the plan before and after, in bytes and in seconds a step; moved_bytes: over the
    link, by the change itself."""

    rank: int
    before_weight_bytes: int
    before_streamed_bytes: int
    before_step_seconds: float
    weight_bytes: int
    resident_bytes: int
    streamed_bytes: int
    predicted: Prediction | None
    moved_bytes: int = 0


@dataclass(frozen=True)
class ReplanOutcome:
    """committed: all workers moved to ``epoch``. Otherwise nobody did, ``epoch`` is the one still in force and
    ``reason`` says why (a dry run is not committed and has an empty reason).

    round_seconds: prepare until the last commit was answered. parked_seconds: the longest that a worker of a lockstep
    group stood for it.
    step_indexes: the number of the first step under the new plans, of each worker in a lockstep group.
    """

    committed: bool
    epoch: int
    reason: str
    dry_run: bool = False
    changes: tuple[WorkerChange, ...] = ()
    measure_seconds: float = 0.0
    round_seconds: float = 0.0
    parked_seconds: float = 0.0
    step_indexes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Lease:
    """Items that one worker runs as one batch. ``attempt`` counts from 1."""

    number: int
    items: tuple[Item, ...]
    attempt: int = 1


@dataclass(frozen=True)
class LeaseResult:
    """``results`` has one dict an item, each with the item's ``id``."""

    lease: int
    rank: int
    results: tuple[dict[str, Any], ...]
    seconds: float
    epoch: int


@dataclass(frozen=True)
class BatchPoint:
    """What one batch size would bring on one worker, and with which plan.

    tokens: that a batch brings (or whatever unit of work the task counts). steps: forwards that a batch takes.
    step_seconds: predicted, mean of these steps; measured_step_seconds: under the plan in force while it was measured.
    beside_bytes: caches and activations of a batch at their greatest. refused: why the size cannot be used.
    """

    batch_size: int
    tokens: float = 0.0
    steps: float = 0.0
    step_seconds: float = 0.0
    measured_step_seconds: float = 0.0
    resident_bytes: int = 0
    weight_bytes: int = 0
    streamed_bytes: int = 0
    beside_bytes: int = 0
    refused: str = ""

    @property
    def batch_seconds(self) -> float:
        """Predicted seconds of a batch."""
        return self.steps * self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of one worker that runs batch after batch."""
        return self.tokens / self.batch_seconds if self.batch_seconds > 0 else 0.0


@dataclass(frozen=True)
class JobProgress:
    """How far the batch job is. ``tokens``: new tokens (or whatever unit of work the task counts) in this run."""

    total: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    started: float = 0.0
    updated: float = 0.0
    finished: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Mean since the first lease went out."""
        span = self.updated - self.started
        return self.tokens / span if span > 0 else 0.0


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of the run: since when, why, and what was predicted and measured of it, worst worker first."""

    epoch: int
    since: float
    reason: str
    budget: Budget
    predicted_step_seconds: float
    measured_step_seconds: float = 0.0
    parked_seconds: float = 0.0


@dataclass(frozen=True)
class RunStatus:
    """A snapshot of a run, as ``flextensor status`` shows it. joules_an_item: of all its GPUs (None: not known)."""

    namespace: str
    epoch: int
    paused: bool
    workers: tuple[WorkerState, ...]
    job: JobProgress
    epochs: tuple[EpochRecord, ...] = ()
    missing: tuple[str, ...] = field(default=())
    joules_an_item: float | None = None


def main_plan(plans: Plans) -> Plan:
    """The plan of the worker's own manager."""
    return next(iter(plans.values()))


__all__ = [
    "Agreement",
    "Budget",
    "CoordinatorOptions",
    "DeviceSample",
    "EngineState",
    "HostSample",
    "WorkerPhase",
    "WorkerState",
]
