"""What a run did, at its end: a table for people and a JSON file."""

from __future__ import annotations

import json
import logging
import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from cluster.messages import EpochRecord, JobProgress, Lease, LeaseResult, RunStatus, WorkerState
from cluster.pool import WorkerPool
from launch import words
from launch.run_config import RunConfig

logger = logging.getLogger(__name__)

WORKER_TIMEOUT = 60.0
VERIFY_TIMEOUT = 3600.0


@dataclass(frozen=True)
class RunReport:
    """Sizes are bytes, times seconds.

    weights_bytes: the weights in the host store. weights_pss_bytes: host memory for them, over all processes, by node.
    """

    created: float
    device: str
    model: str
    versions: dict[str, str]
    job: JobProgress
    workers: tuple[WorkerState, ...]
    details: tuple[dict[str, Any], ...]
    epochs: tuple[EpochRecord, ...]
    weights_bytes: int
    weights_pss_bytes: dict[str, int]
    verify: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """Plain data, the derived figures included."""
        data = asdict(self)
        for row, state in zip(data["workers"], self.workers, strict=True):
            row["stall_share"] = state.stall_share
        data["job"]["tokens_per_second"] = self.job.tokens_per_second
        data["weights_copies_in_host_memory"] = self.copies
        return data

    @property
    def copies(self) -> float:
        """Copies of the weights in host memory, of the node with the most."""
        most = max(self.weights_pss_bytes.values(), default=0)
        return most / self.weights_bytes if self.weights_bytes else 0.0

    def save(self, path: Path) -> None:
        """Write the JSON; whole when it appears under its name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n")
        beside.replace(path)

    def show(self, console: Console) -> None:
        """Print the table."""
        table = words.table(
            "worker",
            "resident",
            "streamed",
            "copied in all",
            "step",
            "predicted",
            "floor",
            "stall",
            title=f"{self.model} on {len(self.workers)} workers ({self.device})",
        )
        for state in self.workers:
            predicted = state.predicted
            table.add_row(
                str(state.rank),
                words.size(state.resident_bytes),
                words.size(state.streamed_bytes),
                words.size(state.copied_bytes_total),
                words.milliseconds(state.step_seconds),
                words.milliseconds(predicted.step_seconds if predicted else 0.0),
                words.milliseconds(predicted.floor_seconds if predicted else 0.0),
                f"{state.stall_share:.0%}",
            )
        console.print(table)
        for node, nbytes in self.weights_pss_bytes.items():
            console.print(
                f"host memory for weights on {node}, all processes: {words.size(nbytes)} "
                f"({nbytes / max(self.weights_bytes, 1):.2f} copies of {words.size(self.weights_bytes)})"
            )
        for epoch in self.epochs:
            console.print(
                f"epoch {epoch.epoch}: {epoch.reason}, budget {words.budget(epoch.budget)}, step predicted "
                f"{words.milliseconds(epoch.predicted_step_seconds)}, measured "
                f"{words.milliseconds(epoch.measured_step_seconds)}"
            )
        job = self.job
        console.print(
            f"{job.done} items done now, {job.skipped} before, {job.failed} with an error; "
            f"{job.tokens_per_second:.1f} tokens/s"
        )
        if self.verify is not None:
            console.print(_verify_words(self.verify))


def _verify_words(verify: dict[str, Any]) -> str:
    if "error" in verify:
        return f"verify: not done: {verify['error']}"
    if verify.get("checked") == verify.get("identical"):
        return f"verify: {verify.get('checked')} items on an un-offloaded copy, all tokens identical"
    return (
        f"verify: {verify.get('identical')} of {verify.get('checked')} items have identical tokens; "
        f"different: {', '.join(verify.get('different', []))}"
    )


def collect_report(
    config: RunConfig,
    device: str,
    pool: WorkerPool,
    progress: JobProgress,
    leases: list[tuple[Lease, LeaseResult]],
) -> RunReport:
    """Ask the workers while they still hold their models. ``leases``: finished ones, to verify."""
    details, states = [], []
    for slot in pool.ready:
        try:
            detail = ray.get(slot.handle.report.remote(), timeout=WORKER_TIMEOUT)
            state = ray.get(slot.handle.state.remote(), timeout=WORKER_TIMEOUT)
        except ray.exceptions.RayError as error:
            logger.warning("worker %d gave no report: %s", slot.rank, error)
            continue
        details.append({"rank": slot.rank, **detail})
        states.append(state)
    try:
        status: RunStatus = ray.get(pool.coordinator.status.remote(), timeout=WORKER_TIMEOUT)
        epochs = status.epochs
    except ray.exceptions.RayError as error:
        logger.warning("no epochs in the report: the coordinator does not answer: %s", error)
        epochs = ()
    return RunReport(
        created=time.time(),
        device=device,
        model=config.model.name,
        versions={"python": platform.python_version(), **_versions("torch", "ray", "transformers", "flextensor-ray")},
        job=progress,
        workers=tuple(states),
        details=tuple(details),
        epochs=epochs,
        weights_bytes=max((detail.get("store_bytes", 0) for detail in details), default=0),
        weights_pss_bytes={detail["node"]: detail["weights_pss_bytes"] for detail in details if "node" in detail},
        verify=_verify(pool, leases) if config.verify else None,
    )


def _verify(pool: WorkerPool, leases: list[tuple[Lease, LeaseResult]]) -> dict[str, Any]:
    """Each lease again, as one batch as before, on an un-offloaded copy in the first ready worker."""
    if not pool.ready:
        return {"error": "no worker is there"}
    worker = pool.ready[0].handle
    total: dict[str, Any] = {"checked": 0, "identical": 0, "different": []}
    for lease, answer in leases:
        try:
            found = ray.get(worker.verify.remote(lease.items, answer.results), timeout=VERIFY_TIMEOUT)
        except ray.exceptions.RayError as error:
            return {"error": str(getattr(error, "cause", error)).splitlines()[0]}
        total["checked"] += found["checked"]
        total["identical"] += found["identical"]
        total["different"] += found["different"]
    return total


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
