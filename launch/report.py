"""What a run did, at its end: a table for people and a JSON file."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from cluster.batch_size import BatchChoice
from cluster.job import JobEnd, verify_leases
from cluster.messages import EpochRecord, JobProgress, RunStatus, WorkerState
from launch import words
from launch.run_config import RunConfig

logger = logging.getLogger(__name__)

WORKER_TIMEOUT = 60.0


@dataclass(frozen=True)
class RunReport:
    """Sizes are bytes, times seconds.

    weights_bytes: the weights in the host store. weights_pss_bytes: host memory for them, over all processes, by node.
    batch_size: the size that was chosen by measuring, and the curve that it was chosen from. joules_an_item: of all
    GPUs together, from their energy counters (None: not known).
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
    batch_size: dict[str, Any] | None = None
    joules_an_item: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data, the derived figures included."""
        data = asdict(self)
        for row, state in zip(data["workers"], self.workers, strict=True):
            row["stall_share"] = state.stall_share
            row["link_share"] = state.link_share
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
        for line in compile_lines(self.details):
            console.print(line)
        job = self.job
        energy = f"{self.joules_an_item:.1f} J an item" if self.joules_an_item is not None else ""
        done = f"{job.done} items done now, {job.skipped} before, {job.failed} with an error"
        console.print("; ".join(filter(None, [done, words.rate(job), energy])))
        if self.verify is not None:
            console.print(_verify_words(self.verify))


def _verify_words(verify: dict[str, Any]) -> str:
    if "error" in verify:
        return f"verify: not done: {verify['error']}"
    if verify.get("checked") == verify.get("identical"):
        return f"verify: {verify.get('checked')} items on an un-offloaded copy, all results identical"
    return (
        f"verify: {verify.get('identical')} of {verify.get('checked')} items have identical results; "
        f"different: {', '.join(verify.get('different', []))}"
    )


def _model_named(details: Sequence[Mapping[str, Any]], otherwise: str) -> str:
    """What the task itself says that it ran (with ``tiny`` not what the configuration names)."""
    named = [str(detail["task"]["model"]) for detail in details if detail.get("task", {}).get("model")]
    return named[0] if named else otherwise


def compile_lines(details: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was compiled, a line for each outcome that workers have; none where nothing was asked to be."""
    ranks: dict[str, list[str]] = {}
    for detail in details:
        managers = detail.get("task", {}).get("managers") or {"": detail.get("engine", {})}
        found = [manager["compile"] for manager in managers.values() if manager.get("compile")]
        asked = [one for one in found if one["compiled"] + one["shared"] + one["pending"]]
        if not asked:
            continue
        total = {key: sum(one[key] for one in asked) for key in asked[0]}
        graphs = f"{total['graphs']} compiled graph{'' if total['graphs'] == 1 else 's'}"
        said = f"{total['compiled'] + total['shared']} units run {graphs}"
        left = [
            f"{total[key]} {word}" for key, word in (("eager", "eager"), ("pending", "not called yet")) if total[key]
        ]
        ranks.setdefault(", ".join([said, *left]), []).append(str(detail.get("rank", 0)))
    return [f"worker {', '.join(some)}: {said}" for said, some in ranks.items()]


def collect_report(config: RunConfig, device: str, end: JobEnd) -> RunReport:
    """Ask the workers while they still hold their models."""
    pool = end.pool
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
        epochs, joules = status.epochs, status.joules_an_item
    except ray.exceptions.RayError as error:
        logger.warning("no epochs in the report: the coordinator does not answer: %s", error)
        epochs, joules = (), None
    return RunReport(
        created=time.time(),
        device=device,
        model=_model_named(details, config.model.name),
        versions={"python": platform.python_version(), **_versions("torch", "ray", "transformers", "flextensor-ray")},
        job=end.progress,
        workers=tuple(states),
        details=tuple(details),
        epochs=epochs,
        weights_bytes=max((detail.get("store_bytes", 0) for detail in details), default=0),
        weights_pss_bytes={detail["node"]: detail["weights_pss_bytes"] for detail in details if "node" in detail},
        verify=verify_leases(end) if config.verify else None,
        batch_size=asdict(end.choice) if end.choice is not None else None,
        joules_an_item=joules,
    )


def curve_table(choice: BatchChoice) -> Table:
    """Batch size -> what it was predicted to bring, over all workers; the one that was taken is marked."""
    rows = words.table("batch", "tokens/s", "step", "resident", "streamed", "beside weights", "peak", "", title="")
    for point in choice.curve:
        mark = "<- taken" if point.batch_size == choice.batch_size else ""
        if point.refused:
            rows.add_row(str(point.batch_size), *[""] * 4, words.size(point.beside_bytes), "", "does not fit")
            continue
        rows.add_row(
            str(point.batch_size),
            f"{point.job_tokens_per_second:.1f}",
            words.milliseconds(point.step_seconds),
            words.size(point.resident_bytes),
            words.size(point.streamed_bytes),
            words.size(point.beside_bytes),
            words.size(point.peak_bytes),
            mark,
        )
    rows.columns[-1].justify = "left"
    return rows


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
