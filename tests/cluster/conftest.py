"""A Ray of the tests' own, started once, and jobs of the tiny task on it."""

from __future__ import annotations

import itertools
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.batch import BatchJob
from cluster.journal import OutputJournal
from cluster.leases import LeaseQueue, make_batches
from cluster.messages import CoordinatorOptions, Item, JobProgress, WorkerStart
from cluster.pool import WorkerPool
from cluster.session import make_coordinator, make_worker, start_local
from flextensor.config import OffloadConfig

TINY = "tiny_task:TinyTask"
TINY_OPTIONS: dict[str, Any] = {"units": 6, "width": 128}
METRICS = "RAY_metrics_report_interval_ms"
TINY_BYTES = 6 * (128 * 128 + 128) * 4


@pytest.fixture(scope="session")
def local_ray(request: pytest.FixtureRequest) -> Iterator[str]:
    """Four logical GPUs, and this folder on the workers' path; gives the address."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        # pytest 9.2 ignores how pytest-xdist 3.8 groups tests: each process would start a cluster.
        strays = [item.nodeid for item in request.session.items if "local_ray" in fixtures(item) and not grouped(item)]
        assert not strays, f"not in a group of tests with a Ray cluster: {strays}"
    if ray.is_initialized():  # by the same fixture of another folder
        yield str(ray.get_runtime_context().gcs_address)
        return
    here = str(Path(__file__).parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    os.environ[METRICS] = "1000"  # not 10 s: tests wait for what actors publish
    sys.path.insert(0, here)
    try:
        yield start_local(gpus=4, namespace="tests")
    finally:
        ray.shutdown()
        sys.path.remove(here)
        os.environ.pop(METRICS, None)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def fixtures(item: pytest.Item) -> Sequence[str]:
    names: Sequence[str] = getattr(item, "fixturenames", ())
    return names


def grouped(item: pytest.Item) -> bool:
    return item.nodeid.endswith(("@ray", "@ray_launch"))


class Run:
    """A coordinator, a pool of tiny workers and a job over ``items``."""

    def __init__(
        self,
        items: list[Item],
        output: Path,
        *,
        workers: int = 2,
        batch: int = 2,
        task: str = TINY,
        task_options: dict[str, Any] | None = None,
        config: OffloadConfig | None = None,
        budget: int | float | None = 0.5,
        **options: Any,
    ) -> None:
        self.items, self.output = items, output
        self.namespace = f"tests-{uuid.uuid4().hex[:8]}"
        self.events = output.with_suffix(".events")
        self.coordinator = make_coordinator(
            CoordinatorOptions(
                namespace=self.namespace, events_path=str(self.events), **({"poll": 0.2, "automatic": False} | options)
            )
        )
        ray.get(self.coordinator.start.remote(), timeout=120)

        def make(rank: int) -> Any:
            start = WorkerStart(
                namespace=self.namespace,
                rank=rank,
                workers=workers,
                device="host",
                config=config or OffloadConfig(host_link_bytes_per_second=1e9),
                task=task,
                task_options=TINY_OPTIONS | (task_options or {}),
                budget=budget,
                store_namespace="tests",
                threads=1,
            )
            return make_worker(start, num_gpus=1)

        self.pool = WorkerPool(make, workers=workers, coordinator=self.coordinator)
        self.journal = OutputJournal(output)
        self.seen: list[JobProgress] = []
        self.during: Callable[[JobProgress], None] = lambda progress: None
        left = [batch for batch in make_batches(items, batch, lambda item: 0)]
        self.job = BatchJob(
            self.pool,
            LeaseQueue(left),
            self.journal,
            progress=JobProgress(total=len(items)),
            tokens_of=lambda result: int(result.get("tokens", 0)),
            on_progress=self._progressed,
            tick=0.1,
        )

    def _progressed(self, progress: JobProgress) -> None:
        self.seen.append(progress)
        self.during(progress)

    def close(self) -> None:
        self.pool.close(timeout=60)
        self.journal.close()
        ray.kill(self.coordinator)


@pytest.fixture
def start_run(local_ray: str, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a ``Run``; it is closed at the test's end."""
    runs: list[Run] = []
    numbers = itertools.count()

    def start(items: list[Item], **options: Any) -> Run:
        run = Run(items, options.pop("output", tmp_path / f"answers-{next(numbers)}.jsonl"), **options)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.close()
