"""The run's figures as Ray metrics, which Ray serves to Prometheus."""

from __future__ import annotations

from ray.util.metrics import Gauge

from cluster.messages import WorkerState

_TAGS = ("run", "rank")


class RunMetrics:
    """Gauges of each worker's latest state, tagged with the run's namespace and the worker's rank."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(f"flextensor_{name}", description=description, tag_keys=_TAGS)

        self._step = gauge("step_seconds", "Median seconds of a step")
        self._stall = gauge("stall_share", "Share of a step that compute waits for copies")
        self._link = gauge("link_bytes_per_second", "Rate of the weight copies")
        self._nominal = gauge(
            "link_nominal_bytes_per_second", "The link's own rate (PCIe's generation and width in use)"
        )
        self._link_share = gauge("link_share", "Rate of the weight copies over the link's own rate")
        self._resident = gauge("resident_bytes", "Weights that stay on the device")
        self._streamed = gauge("streamed_bytes", "Weights copied a step")
        self._epoch = gauge("epoch", "Number of the plan in force")
        self._energy = gauge("energy_joules", "The GPU's energy counter")
        self._an_item = Gauge(
            "flextensor_joules_an_item",
            description="Energy of all GPUs of the run over the items done",
            tag_keys=("run",),
        )

    def observe(self, state: WorkerState) -> None:
        """Publish one worker's state."""
        tags = {"run": self._namespace, "rank": str(state.rank)}
        self._step.set(state.step_seconds, tags)
        self._stall.set(state.stall_share, tags)
        self._link.set(state.link_bytes_per_second, tags)
        if state.link_nominal_bytes_per_second:
            self._nominal.set(state.link_nominal_bytes_per_second, tags)
            self._link_share.set(state.link_share, tags)
        self._resident.set(state.resident_bytes, tags)
        self._streamed.set(state.streamed_bytes, tags)
        self._epoch.set(state.epoch, tags)
        if state.gpu is not None and state.gpu.energy_joules is not None:
            self._energy.set(state.gpu.energy_joules, tags)

    def observe_energy(self, joules_an_item: float) -> None:
        """Publish the run's joules an item."""
        self._an_item.set(joules_an_item, {"run": self._namespace})
