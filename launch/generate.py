"""``flextensor generate``: a file of prompts in, a file of answers out, on every worker at once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from cluster.batch import BatchJob
from cluster.coordinator import NAME
from cluster.journal import OutputJournal
from cluster.leases import LeaseQueue, make_batches
from cluster.messages import CoordinatorOptions, Item, JobProgress, RunStatus, WorkerStart
from cluster.pool import WorkerPool
from cluster.session import (
    RunFile,
    SessionError,
    announced,
    attach,
    live_runs,
    make_coordinator,
    make_worker,
    require_gpus,
    start_local,
)
from cluster.task import pack_task, resolve_task
from flextensor.config import OffloadConfig
from flextensor.store import StoreError
from flextensor.store.inventory import list_stores, remove_store
from launch.errors import signals_held, termination_raises
from launch.items import read_items
from launch.progress import ProgressView
from launch.report import RunReport, collect_report
from launch.run_config import RunConfig

logger = logging.getLogger(__name__)

HOST_WORKERS = 2
CLOSE_TIMEOUT = 20.0
STOP_TIMEOUT = 8.0


@dataclass(frozen=True)
class Work:
    """What is left to do: batches with at least one unfinished item, and the journal that takes the answers."""

    batches: list[tuple[Item, ...]]
    journal: OutputJournal
    progress: JobProgress


def generate(config: RunConfig, *, console: Console) -> RunReport | None:
    """Run the job to its end; None when there was nothing left to do.

    Raises the errors of ``launch.errors.USER_ERRORS`` for what the user can put right, NoWorkers when no worker is
    left, KeyboardInterrupt and Terminated after a clean stop.
    """
    device = _resolve_device(config)
    packed = pack_task(config.task)
    resolve_task(packed)(config.task_settings())  # wrong options and model directories are told before Ray starts
    work = _open_work(config, console)
    try:
        if not work.batches:
            console.print(f"nothing left to do; answers: {config.output}", soft_wrap=True)
            return None
        # Twice: Ray installs a handler of its own when it starts.
        with termination_raises(), _ray_of(config, device) as (namespace, address), termination_raises():
            run = RunFile(
                namespace=namespace,
                address=address,
                pid=os.getpid(),
                started=time.time(),
                output=str(config.output),
                auth=os.environ.get("RAY_AUTH_MODE", ""),
            )
            if ray_address(config) is not None and config.device == "auto":
                device = _cluster_device()
            with announced(run):
                where = f" --address {address} --namespace {namespace}" if ray_address(config) is not None else ""
                commands = f"flextensor status{where} | flextensor replan --budget 40%{where}"
                console.print(f"run {namespace}; in another terminal: {commands}", soft_wrap=True)
                report = _run(config, device, packed, work, namespace, console)
        report.show(console)
        if config.report is not None:
            report.save(config.report)
            console.print(f"report: {config.report}", soft_wrap=True)
        console.print(f"answers: {config.output}", soft_wrap=True)
        return report
    finally:
        work.journal.close()


def _resolve_device(config: RunConfig) -> str:
    import torch

    if ray_address(config) is not None and config.device != "auto":
        return config.device
    count = torch.cuda.device_count()  # by NVML: makes no CUDA context
    if config.device == "cuda" and count == 0:
        raise SessionError("device 'cuda' asked for, but there is no CUDA device here; use device 'host' or 'auto'")
    return "cuda" if config.device != "host" and count > 0 else "host"


def _cluster_device() -> str:
    """Real GPUs have an accelerator type in Ray; logical ones, as CPU-only nodes are given for workers, have none."""
    return "cuda" if any(key.startswith("accelerator_type:") for key in ray.cluster_resources()) else "host"


def _open_work(config: RunConfig, console: Console) -> Work:
    items, bad = read_items(config.prompts)
    journal = OutputJournal(config.output, overwrite=config.overwrite)
    skipped = len(journal.finished)
    if skipped:
        failed = f", {len(journal.failed)} of them with an error" if journal.failed else ""
        console.print(
            f"{config.output}: {skipped} items are finished{failed}; they are skipped (--overwrite starts anew)",
            soft_wrap=True,
        )
    for one in journal.write(line.as_result() for line in bad):
        console.print(f"{config.prompts} {one['error']}", style="yellow", soft_wrap=True)
    batches = [
        batch
        for batch in make_batches(items, config.batch_size, _length)
        if any(str(item["id"]) not in journal.finished for item in batch)
    ]
    finished = sum(1 for item in items if str(item["id"]) in journal.finished)
    progress = JobProgress(total=len(items) + len(bad), skipped=finished + len(bad), failed=len(bad))
    return Work(batches, journal, progress)


def _length(item: Item) -> int:
    return len(item["prompt"]) if "prompt" in item else sum(len(message["content"]) for message in item["messages"])


@contextlib.contextmanager
def _ray_of(config: RunConfig, device: str) -> Iterator[tuple[str, str]]:
    """A session in Ray for this run: (namespace, address)."""
    try:
        if (cluster := ray_address(config)) is not None:
            namespace = config.namespace
            address = attach(cluster, namespace=namespace)
            if _is_taken(namespace):
                raise SessionError(
                    f"a run in namespace {namespace!r} is going on at {address}; give another --namespace"
                )
        else:
            taken = {run.namespace for run in live_runs()}
            namespace = config.namespace if config.namespace not in taken else f"{config.namespace}-{os.getpid()}"
            address = start_local(gpus=_gpus_here(config, device), namespace=namespace)
        yield namespace, address
    finally:
        with signals_held():
            ray.shutdown()
            _remove_dead_stores(config.offload_config())


def _remove_dead_stores(offload: OffloadConfig) -> None:
    """A worker that was killed leaves its store to the next start; a run that ends leaves nothing on this machine."""
    for entry in list_stores(offload.shm_dir):
        if entry.namespace == offload.shm_namespace and entry.state in ("dead", "filling"):
            with contextlib.suppress(StoreError):
                remove_store(entry)


def _gpus_here(config: RunConfig, device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    workers = HOST_WORKERS if config.workers == "auto" else config.workers
    return max(1, -int(-workers * config.num_gpus // 1))


def _is_taken(namespace: str) -> bool:
    try:
        ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        return False
    return True


def _worker_count(config: RunConfig, device: str) -> int:
    if config.workers != "auto":
        wanted = config.workers
    elif device == "host" and ray_address(config) is None:
        wanted = HOST_WORKERS
    else:
        wanted = max(1, int(float(ray.cluster_resources().get("GPU", 0)) / config.num_gpus + 1e-9))
    require_gpus(wanted, config.num_gpus)
    return wanted


def _run(
    config: RunConfig, device: str, packed: str | bytes, work: Work, namespace: str, console: Console
) -> RunReport:
    workers = min(_worker_count(config, device), len(work.batches))
    offload = config.offload_config()
    threads = max(1, (os.cpu_count() or 1) // workers) if device == "host" else 0

    def make(rank: int) -> Any:
        start = WorkerStart(
            namespace=namespace,
            rank=rank,
            workers=workers,
            device=device,
            config=offload,
            task=packed,
            task_options=config.task_settings(),
            budget=config.budget if config.budget is not None else offload.budget_bytes,
            store_namespace=offload.shm_namespace,
            threads=threads,
        )
        return make_worker(start, num_gpus=config.num_gpus)

    coordinator = make_coordinator(
        CoordinatorOptions(namespace=namespace, events_path=str(events_path(config.output)), **config.coordinator)
    )
    ray.get(coordinator.start.remote(), timeout=60)
    pool = WorkerPool(make, workers=workers, coordinator=coordinator, sample=work.batches[0])
    queue = LeaseQueue(work.batches)
    timeout = STOP_TIMEOUT
    try:
        with ProgressView(console, work.progress.total) as view:
            poll = _StatusPoll(coordinator)
            job = BatchJob(
                pool,
                queue,
                work.journal,
                progress=work.progress,
                tokens_of=tokens_of,
                on_progress=lambda progress: view.update(progress, poll.newest()),
                sample=config.verify,
            )
            progress = job.run()
        report = collect_report(config, device, pool, progress, job.finished_leases)
        timeout = CLOSE_TIMEOUT
        return report
    finally:
        with signals_held():
            pool.close(timeout=timeout)
            ray.kill(coordinator)


def events_path(output: Path) -> Path:
    """The run's event log lies beside its answers."""
    return output.with_name(output.stem + ".events.jsonl")


def tokens_of(result: dict[str, Any]) -> int:
    """New tokens of a result: the length of its ``tokens``, or the number there."""
    tokens = result.get("tokens", 0)
    return len(tokens) if isinstance(tokens, list | tuple) else int(tokens)


def ray_address(config: RunConfig) -> str | None:
    """The cluster to use: the run's own setting, or the one that this process was started in (``ray job submit``)."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


class _StatusPoll:
    """The coordinator's newest answer, never waited for."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._asked: Any = None
        self._newest: RunStatus | None = None

    def newest(self) -> RunStatus | None:
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self._newest = ray.get(self._asked)
            except ray.exceptions.RayError as error:
                logger.info("no status: %s", error)
            self._asked = None
        if self._asked is None:
            self._asked = self._coordinator.status.remote()
        return self._newest


if __name__ == "__main__":
    # ``ray submit launch/cluster.yaml launch/generate.py -- --config ...`` runs this file on the head node.
    from launch.cli import main

    main(["generate", "--address", "auto", *sys.argv[1:]])
