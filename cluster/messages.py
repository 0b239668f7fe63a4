"""The dataclasses that cross a process boundary. Sizes are bytes, times are seconds, moments are Unix time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flextensor.config import OffloadConfig
from flextensor.planner.plan import Plan, Prediction
from flextensor.profile import TransferCurve

Item = dict[str, Any]
"""One input of a task, read from the prompts file; ``id`` identifies it."""

Budget = int | float | None
"""Weights on the device: bytes (int), a fraction of the model's weights (float), or None: latency mode."""

WorkerPhase = Literal["starting", "loading", "ready", "closed"]


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
class DeviceSample:
    """What NVML says of one GPU. A field that the driver does not answer is None.

    energy_joules counts from the driver's start. throttle names the reasons why clocks are held down now.
    """

    uuid: str
    name: str
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_receive_bytes_per_second: float | None = None
    pcie_send_bytes_per_second: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    throttle: tuple[str, ...] = ()
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    utilisation: float | None = None

    @property
    def link_nominal_bytes_per_second(self) -> float | None:
        """PCIe's raw rate one way: lanes times the generation's rate, encoding taken off."""
        lane = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
        if self.pcie_generation is None or self.pcie_width is None or self.pcie_generation not in lane:
            return None
        return lane[self.pcie_generation] * self.pcie_width


@dataclass(frozen=True)
class HostSample:
    """The worker's process and its node. ``pss_bytes`` counts each shared page once over all sharers (0: unknown)."""

    rss_bytes: int
    pss_bytes: int
    available_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class WorkerState:
    """One worker, now. Timings are medians of the recent steps; ``predicted`` is the plan's own prediction.

    incarnation grows when the process is started again. busy_seconds: how long the model's thread has been without
    a step boundary or a finished lease (0 when idle or parked); it grows without bound when the worker hangs.
    refusal: why the last committed plan could not be put in force (the one before is then).
    weight_bytes, resident_bytes: on the device, weights that no plan manages included; so does total_bytes.
    weights_pss_bytes: this process's part of the node's memory for the host store (sharers divided).
    """

    rank: int
    incarnation: int
    pid: int
    node: str
    device: str
    phase: WorkerPhase
    note: str = ""
    epoch: int = 0
    paused: bool = False
    parked: bool = False
    refusal: str = ""
    busy: bool = False
    busy_seconds: float = 0.0
    lease: int | None = None
    steps: int = 0
    budget: Budget = None
    weight_bytes: int = 0
    resident_bytes: int = 0
    streamed_bytes: int = 0
    total_bytes: int = 0
    copied_bytes_total: int = 0
    step_seconds: float = 0.0
    stall_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    link_bytes_per_second: float = 0.0
    predicted: Prediction | None = None
    weights_pss_bytes: int = 0
    host: HostSample | None = None
    gpu: DeviceSample | None = None

    @property
    def stall_share(self) -> float:
        """The share of a step that compute waits for copies."""
        return self.stall_seconds / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True)
class Assignment:
    """What the run has agreed on, told to a worker that joins.

    plan: the one to take; None where the run has none for this rank: then, with ``solve``, the worker makes one for
    ``budget``, and else it keeps its own first plan.
    """

    epoch: int
    plan: Plan | None
    budget: Budget
    solve: bool
    paused: bool


@dataclass(frozen=True)
class Joined:
    """The plan that a joining worker is on now, and why it is not the assigned one ("" when it is)."""

    plan: Plan
    budget: Budget
    refused: str


@dataclass(frozen=True)
class Measurement:
    """A worker's link, measured now beside the running steps. ``device``: the same text on one node: one link."""

    rank: int
    node: str
    device: str
    transfer: TransferCurve


@dataclass(frozen=True)
class Proposal:
    """A plan that a worker has solved and checked for a round. other_bytes: weights on its device that no plan manages.
    before_step_seconds: what a step took lately."""

    rank: int
    plan: Plan
    other_bytes: int
    before_step_seconds: float


@dataclass(frozen=True)
class Prepared:
    """A worker stands at a step boundary and waits for the decision. ``step``: steps that it has run so far."""

    rank: int
    step: int
    waited_seconds: float


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
    """One worker's part of a replan: the plan before and after, in bytes and in seconds a step."""

    rank: int
    before_weight_bytes: int
    before_streamed_bytes: int
    before_step_seconds: float
    weight_bytes: int
    resident_bytes: int
    streamed_bytes: int
    predicted: Prediction | None


@dataclass(frozen=True)
class ReplanOutcome:
    """committed: all workers moved to ``epoch``. Otherwise nobody did, ``epoch`` is the one still in force and
    ``reason`` says why (a dry run is not committed and has an empty reason).

    round_seconds: prepare until the last commit was answered. parked_seconds: the longest that a worker stood.
    """

    committed: bool
    epoch: int
    reason: str
    dry_run: bool = False
    changes: tuple[WorkerChange, ...] = ()
    measure_seconds: float = 0.0
    round_seconds: float = 0.0
    parked_seconds: float = 0.0


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
    """A snapshot of a run, as ``flextensor status`` shows it."""

    namespace: str
    epoch: int
    paused: bool
    workers: tuple[WorkerState, ...]
    job: JobProgress
    epochs: tuple[EpochRecord, ...] = ()
    missing: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class CoordinatorOptions:
    """How the coordinator behaves; times are seconds.

    hang: a worker whose model thread shows no step boundary for so long is started again.
    automatic: replan without being asked when the measured step leaves the prediction by ``drift`` (a share), at most
        once in ``minimum_interval``.
    rollback_margin: a new plan whose measured step is slower than the old one's by more than this share is rolled
        back (None: never).
    """

    namespace: str
    events_path: str | None = None
    poll: float = 1.0
    measure_timeout: float = 60.0
    prepare_timeout: float = 30.0
    commit_timeout: float = 30.0
    hang: float = 600.0
    automatic: bool = False
    drift: float = 0.25
    minimum_interval: float = 60.0
    rollback_margin: float | None = 0.25
    rollback_steps: int = 40
