"""One batch job from start to end: a Ray session, a coordinator, a pool of workers, a journal. For the command line and
for programs (``cluster.run_batch``); prints nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import ray

from cluster.batch import BatchJob
from cluster.batch_size import BatchChoice, choose, request_for, sizes_to_try
from cluster.coordinator import NAME
from cluster.job_spec import JobSpec, Work, keep_choice, kept_choice
from cluster.leases import LeaseQueue, by_length
from cluster.messages import CoordinatorOptions, JobProgress, Lease, LeaseResult, RunStatus, WorkerStart
from cluster.options import coordinator_settings, require_ranks
from cluster.pool import WorkerPool, first_line
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
from cluster.switching import NotSetUp
from cluster.task import TaskError
from flextensor.config import OffloadConfig
from flextensor.store import StoreError
from flextensor.store.inventory import list_stores, remove_store

logger = logging.getLogger(__name__)

HOST_WORKERS = 2
CLOSE_TIMEOUT = 20.0
STOP_TIMEOUT = 8.0
TICK = 0.5
VERIFY_TIMEOUT = 3600.0
WARM_UP_SIZE = 4
"""Items that workers warm up with where the batch size is chosen by them."""

Outcome = TypeVar("Outcome")
Seen = Callable[[JobProgress, RunStatus | None], None]


@dataclass(frozen=True)
class Session:
    """Where the job runs. device: ``cuda`` or ``host``. attached: to a cluster that goes on after the job."""

    namespace: str
    address: str
    device: str
    attached: bool


@dataclass(frozen=True)
class JobEnd:
    """The job is done and the workers still hold their models. leases: finished ones, to verify."""

    pool: WorkerPool
    progress: JobProgress
    leases: list[tuple[Lease, LeaseResult]]
    choice: BatchChoice | None


# ---- the session


def device_of(spec: JobSpec) -> str:
    """The device that this machine has, or on a cluster the one asked for (``auto`` is resolved there).

    Raises SessionError for ``cuda`` where there is none.
    """
    import torch

    if spec.address is not None and spec.device != "auto":
        return spec.device
    count = torch.cuda.device_count()  # by NVML: makes no CUDA context
    if spec.device == "cuda" and count == 0:
        raise SessionError("device 'cuda' asked for, but there is no CUDA device here; use device 'host' or 'auto'")
    return "cuda" if spec.device != "host" and count > 0 else "host"


@contextlib.contextmanager
def ray_session(
    spec: JobSpec, device: str, held: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> Iterator[Session]:
    """Ray for this job, and a run file by which other terminals find it. A Ray that this process has already is used
    and left as it is. ``held``: within it signals do not disturb the clean-up."""
    mine = not ray.is_initialized()
    try:
        if mine and spec.address is None:
            taken = {run.namespace for run in live_runs()}
            namespace = spec.namespace if spec.namespace not in taken else f"{spec.namespace}-{os.getpid()}"
            address = start_local(gpus=_gpus_here(spec, device), namespace=namespace)
        else:
            namespace = spec.namespace
            address = attach(spec.address or "auto", namespace=namespace) if mine else _own_address(spec.address)
            if _is_taken(namespace):
                raise SessionError(f"a run in namespace {namespace!r} is going on at {address}; give another namespace")
            if spec.device == "auto":
                device = _cluster_device()
        run = RunFile(
            namespace=namespace,
            address=address,
            pid=os.getpid(),
            started=time.time(),
            output=str(spec.output),
            auth=os.environ.get("RAY_AUTH_MODE", ""),
        )
        with announced(run):
            yield Session(namespace, address, device, attached=not mine or spec.address is not None)
    finally:
        with held():
            if mine:
                ray.shutdown()
            _remove_dead_stores(spec.config)


def _own_address(asked: str | None) -> str:
    """Of the Ray that this process uses. A host has several names, so it is by the port that another one is told."""
    address = str(ray.get_runtime_context().gcs_address)
    if asked not in (None, "auto") and str(asked).rpartition(":")[2] != address.rpartition(":")[2]:
        raise SessionError(
            f"this program uses the Ray at {address} already, not {asked}; leave address (--address) out"
        )
    return address


def _cluster_device() -> str:
    """Real GPUs have an accelerator type in Ray; logical ones, as CPU-only nodes are given for workers, have none."""
    return "cuda" if any(key.startswith("accelerator_type:") for key in ray.cluster_resources()) else "host"


def _gpus_here(spec: JobSpec, device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    workers = HOST_WORKERS if spec.workers == "auto" else spec.workers
    return max(1, -int(-workers * spec.num_gpus // 1))


def _is_taken(namespace: str) -> bool:
    try:
        ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        return False
    return True


def _remove_dead_stores(offload: OffloadConfig) -> None:
    """A worker that was killed leaves its store to the next start; a run that ends leaves nothing on this machine."""
    for entry in list_stores(offload.shm_dir):
        if entry.namespace == offload.shm_namespace and entry.state in ("dead", "filling"):
            with contextlib.suppress(StoreError):
                remove_store(entry)


def _worker_count(spec: JobSpec, session: Session) -> int:
    if spec.workers != "auto":
        wanted = spec.workers
    elif session.device == "host" and not session.attached:
        wanted = HOST_WORKERS
    else:
        wanted = max(1, int(float(ray.cluster_resources().get("GPU", 0)) / spec.num_gpus + 1e-9))
    require_gpus(wanted, spec.num_gpus)
    return wanted


# ---- the job


def run_job(
    spec: JobSpec,
    session: Session,
    work: Work,
    *,
    tokens_of: Callable[[dict[str, Any]], int],
    on_progress: Seen,
    collect: Callable[[JobEnd], Outcome],
    on_choice: Callable[[BatchChoice], None] = lambda choice: None,
    held: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Outcome:
    """Run all items that the journal lacks; returns what ``collect`` makes of the end.

    on_choice: told the batch size before the first lease, where it is chosen here. Raises NoWorkers when no worker is
    left, TaskError when no batch size works (what is finished is in the journal then), ConfigError for a lockstep group
    with a rank that the run does not have.
    """
    kept = kept_choice(spec)
    fixed = kept.batch_size if kept is not None else spec.batch_size
    sample_size = WARM_UP_SIZE if fixed == "auto" else fixed
    sample = work.batches(sample_size)
    workers = _worker_count(spec, session)
    if not spec.coordinator.get("lockstep"):  # whose ranks must all be there
        workers = min(workers, len(work.batches(1 if fixed == "auto" else fixed)))
    threads = spec.threads or (max(1, (os.cpu_count() or 1) // workers) if session.device == "host" else 0)
    budgets = (spec.budget, spec.config.budget_bytes, spec.config.budget_fraction)

    def make(rank: int) -> Any:
        start = WorkerStart(
            namespace=session.namespace,
            rank=rank,
            workers=workers,
            device=session.device,
            config=spec.config,
            task=spec.task,
            task_options=spec.task_options,
            budget=next((one for one in budgets if one is not None), None),
            store_namespace=spec.config.shm_namespace,
            threads=threads,
            checkpoint_dir=str(spec.checkpoints),
            checkpoint_seconds=spec.checkpoint_seconds,
        )
        return make_worker(start, num_gpus=spec.num_gpus)

    options = CoordinatorOptions(
        namespace=session.namespace, events_path=str(spec.events), **coordinator_settings(spec.coordinator)
    )
    require_ranks(options.lockstep, range(workers))
    coordinator = make_coordinator(options)
    ray.get(coordinator.start.remote(), timeout=60)
    pool = WorkerPool(make, workers=workers, coordinator=coordinator, sample=sample[0], hold=fixed == "auto")
    timeout = STOP_TIMEOUT
    try:
        poll = _StatusPoll(coordinator)
        choice = kept
        if fixed == "auto":
            choice = _chosen(pool, work, on_tick=lambda: on_progress(work.progress, poll.newest()))
            keep_choice(choice, spec.chosen)
        if choice is not None:
            on_choice(choice)
            coordinator.event.remote("batch_size", asdict(choice))
        job = BatchJob(
            pool,
            LeaseQueue(work.batches(choice.batch_size if choice is not None else sample_size)),
            work.journal,
            progress=work.progress,
            tokens_of=tokens_of,
            on_progress=lambda progress: on_progress(progress, poll.newest()),
            sample=spec.verify,
        )
        progress = job.run()
        outcome = collect(JobEnd(pool, progress, job.finished_leases, choice))
        shutil.rmtree(spec.checkpoints, ignore_errors=True)  # of items that were set aside
        timeout = CLOSE_TIMEOUT
        return outcome
    finally:
        with held():
            pool.close(timeout=timeout)
            ray.kill(coordinator)


def _chosen(pool: WorkerPool, work: Work, on_tick: Callable[[], None]) -> BatchChoice:
    """Once every worker is set up or given up, all try the sizes at the same time; each then takes the plan for the
    size that was chosen, and is admitted."""
    while pool.starting:
        pool.settle_next(TICK)
        on_tick()
    ordered = by_length(work.items, work.length)
    request = request_for(ordered, sizes_to_try(len(ordered), len(pool.held)))
    asked = {slot.rank: (slot, slot.handle.try_batch_sizes.remote(request)) for slot in pool.held}
    waiting = [reference for _, reference in asked.values()]
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=TICK)
        on_tick()
    points, reason = {}, "no worker is there"
    for rank, (slot, reference) in asked.items():
        try:
            points[rank] = ray.get(reference)
        except (ray.exceptions.RayActorError, NotSetUp) as error:
            pool.lost(slot, error)
        except ray.exceptions.RayError as error:
            reason = first_line(error)
            logger.warning("worker %d could not try batch sizes: %s", rank, reason)
    if not points:
        raise TaskError(f"batch_size auto: {reason}; set batch_size to a number")
    choice = choose(points, items=len(ordered))
    settled = [asked[rank][0].handle.settle_batch_size.remote(choice.batch_size) for rank in points]
    ray.wait(settled, num_returns=len(settled), timeout=CLOSE_TIMEOUT)
    pool.release()
    return choice


def verify_leases(end: JobEnd) -> dict[str, Any]:
    """Each kept lease again, as one batch as before, on an un-offloaded copy in the first ready worker: ``{"checked",
    "identical", "different": [ids]}``, or ``{"error"}`` where that cannot be."""
    if not end.pool.ready:
        return {"error": "no worker is there"}
    worker = end.pool.ready[0].handle
    total: dict[str, Any] = {"checked": 0, "identical": 0, "different": []}
    for lease, answer in end.leases:
        try:
            found = ray.get(worker.verify.remote(lease.items, answer.results), timeout=VERIFY_TIMEOUT)
        except ray.exceptions.RayError as error:
            return {"error": first_line(error)}
        total["checked"] += found["checked"]
        total["identical"] += found["identical"]
        total["different"] += found["different"]
    return total


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
