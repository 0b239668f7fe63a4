"""What a worker says of itself. Sizes are bytes, times are seconds, moments are Unix time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flextensor.planner.plan import Prediction

Budget = int | float | None
"""Weights on the device: bytes (int), a fraction of the model's weights (float), or None: latency mode."""


def budget_settings(budget: Budget) -> dict[str, Any]:
    """The budget as OffloadConfig takes it: it wins over one of the other kind there. None leaves what is there."""
    if budget is None:
        return {}
    exact = isinstance(budget, int)
    return {"budget_bytes": budget if exact else None, "budget_fraction": None if exact else budget}


WorkerPhase = Literal["starting", "loading", "ready", "closed"]


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


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """What a plan in force holds and takes: of one manager, or of a whole worker.

    refusal: why the last committed plan could not be put in force (the one before is then); refused_epoch: that plan's.
    own_changes: plans that it made by itself, where memory did not suffice; own_reason: why the last of them.
    weight_bytes, resident_bytes: on the device, weights that no plan manages included; so does total_bytes.
    """

    refusal: str = ""
    refused_epoch: int | None = None
    own_changes: int = 0
    own_reason: str = ""
    steps: int = 0
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

    @property
    def stall_share(self) -> float:
        """The share of a step that compute waits for copies."""
        return self.stall_seconds / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True)
class Pace:
    """What steps take on the device, without what is between two of them. Seconds; of several kinds of steps, the mean
    of the mix that ran.

    predicted: by the plan in force, for the kinds and the mix that ran. quick: three quarters of the steps took longer;
    slow: one quarter did.
    """

    predicted: float
    quick: float
    slow: float


@dataclass(frozen=True)
class EngineState(PlanFigures):
    """One offload manager of a worker, now. Timings: medians of its recent steps; ``predicted``: its plan's own.
    pace: None until enough steps were timed under the plan."""

    name: str
    phase: str
    epoch: int = 0
    pace: Pace | None = None


@dataclass(frozen=True)
class Agreement:
    """What a worker has agreed on: its plans in force, or from its next step on where it stands or is idle.

    epoch: of these plans (0: it has not joined yet, and has its own). decided: the round whose commit it had (0: it was
    told when it joined). prepared: the round whose commit it would take (0: none). latest: it refuses rounds of lesser
    numbers.
    """

    epoch: int = 0
    decided: int = 0
    prepared: int = 0
    latest: int = 0


@dataclass(frozen=True)
class WorkerState(PlanFigures):
    """One worker, now. Timings, streamed_bytes and ``predicted`` are those of the worker's own offload manager; the
    other sizes are sums over all its managers, which ``engines`` has one by one (its own first).

    incarnation grows when the process is started again. epoch: of the plans in force. busy_seconds: how long the
    model's thread has been without a step boundary or a finished lease (0 when idle or parked); it grows without bound
    when the worker hangs. longest_busy_seconds: the most that this was before it went on. steps: step boundaries of all
    managers; step_index: the number of the next one, which workers in lockstep share.
    weights_pss_bytes: this process's part of the node's memory for the host store (sharers divided).
    device_free_bytes, device_total_bytes: the device's memory. link_nominal_bytes_per_second: PCIe's own rate for the
    generation and width in use, or the host device's link (0: unknown).
    """

    rank: int
    incarnation: int
    pid: int
    node: str
    device: str
    phase: WorkerPhase
    note: str = ""
    epoch: int = 0
    agreed: Agreement = Agreement()
    paused: bool = False
    parked: bool = False
    busy: bool = False
    busy_seconds: float = 0.0
    longest_busy_seconds: float = 0.0
    lease: int | None = None
    step_index: int = 0
    budget: Budget = None
    weights_pss_bytes: int = 0
    device_free_bytes: int = 0
    device_total_bytes: int = 0
    link_nominal_bytes_per_second: float = 0.0
    host: HostSample | None = None
    gpu: DeviceSample | None = None
    engines: tuple[EngineState, ...] = ()

    @property
    def link_share(self) -> float:
        """The rate of the copies over the link's own rate (0: not known)."""
        nominal = self.link_nominal_bytes_per_second
        return self.link_bytes_per_second / nominal if nominal > 0 else 0.0

    @property
    def slowest_step_seconds(self) -> float:
        """A step of the slowest of its managers, as measured, or predicted where none was."""
        return max((_step_of(engine) for engine in self.engines), default=self.step_seconds)


def _step_of(engine: EngineState) -> float:
    if engine.step_seconds > 0 or engine.predicted is None:
        return engine.step_seconds
    return engine.predicted.step_seconds
