"""Days of trouble in a minute: random kills, replans, link changes and pauses change no answer and leak nothing.

    pytest tests/cluster/test_soak.py -m ray                  # about a minute, in CI
    FLEXTENSOR_SOAK_SECONDS=1800 pytest tests/cluster/test_soak.py -m soak       # 30 minutes

The options of the tests are the constants below.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.messages import Item, ReplanOutcome, ReplanRequest
from cluster.session import RESTARTS
from flextensor.store.inventory import StoreEntry, list_stores
from tests.cluster.conftest import Run
from tests.cluster.test_batch_job import assert_all_right, assert_answers_right, events_of, finish

logger = logging.getLogger(__name__)

SHORT_SECONDS = 25
LONG_SECONDS = float(os.environ.get("FLEXTENSOR_SOAK_SECONDS", "1800"))
MOST_ITEMS_A_SECOND = 14
"""More than two cores answer in the midst of the trouble, so that there is work as long as it lasts."""
LONGEST = 4
"""Times the seconds asked for: so long it goes on until there has been enough of each trouble."""
ENOUGH = {"kill": 1, "replan": 3, "link": 1}
STEPS = 6
KILL_EVERY = 9.0
FAST_LINK = 4e9
WARM_SAMPLES = 4
"""The first samples of a process are of its start; growth is counted from here."""
LEAST_SAMPLES = {"worker": 3, "coordinator": 3, "driver": 3 * WARM_SAMPLES}
"""Of the process that lived longest: workers and coordinators are killed every few seconds."""
MOST_AWAY = 60.0
"""Seconds in which a worker that was killed, its coordinator too, must work again; on a busy machine."""

GROWN_BYTES = 48 << 20
GROWN_FILES = 24


@dataclass
class Footprint:
    """Samples of one process: (resident bytes, open files)."""

    samples: list[tuple[int, int]] = field(default_factory=list)

    def take(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self.samples.append((process.memory_info().rss, process.num_fds()))

    def growth(self) -> tuple[int, int]:
        """(bytes, files) of the last third's least over the first third's most; 0 for a short life."""
        settled = self.samples[WARM_SAMPLES:]
        third = len(settled) // 3
        if third < 2:
            return 0, 0
        first, last = settled[:third], settled[-third:]
        return tuple(min(s[at] for s in last) - max(s[at] for s in first) for at in (0, 1))  # type: ignore[return-value]


def stores_of_the_run() -> list[StoreEntry]:
    return [entry for entry in list_stores("/dev/shm") if entry.namespace == "tests"]


class Chaos:
    """Does something to the run every second or so, until ``seconds`` are over and it was enough, or it is stopped."""

    def __init__(self, run: Run, seconds: float, seed: int) -> None:
        self.run, self.seconds = run, seconds
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.refusals: list[str] = []
        self.footprints: dict[tuple[str, int], Footprint] = {}
        self.most_stores = 0
        self.lasted = 0.0
        self.longest_away = 0.0
        self.first_start = 0.0
        self.over = threading.Event()
        self.pids: set[int] = set()
        self._away_since: dict[int, float] = {}
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._killed_at = 0.0
        self._thread = threading.Thread(target=self._guarded)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def finish(self) -> None:
        self._stop.set()
        self._thread.join(120)
        if self.errors:
            raise self.errors[0]

    def _guarded(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.over.set()

    @property
    def enough(self) -> bool:
        """Each sort of trouble has been, somebody who was killed is back, and all were looked at often enough."""
        looked = all(max(self.samples(what), default=0) > least for what, least in LEAST_SAMPLES.items())
        return looked and len(self.pids) > 2 and all(self.done[deed] >= least for deed, least in ENOUGH.items())

    def samples(self, what: str) -> list[int]:
        return [len(footprint.samples) for (kind, _), footprint in self.footprints.items() if kind == what]

    def _work(self) -> None:
        deeds = [self.replan, self.replan, self.replan, self.link, self.link, self.rollback, self.pause, self.kill]
        deeds += [self.kill_coordinator]
        began = time.monotonic()
        while not self._stop.wait(self.random.uniform(0.2, 1.0)):
            self.lasted = time.monotonic() - began
            self.look()
            if self.lasted >= (self.seconds if self.enough else LONGEST * self.seconds):
                break
            deed = self.random.choice(deeds)
            # The coordinator may be down just now: then nobody moves, which is what it is there for.
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                deed()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.run.coordinator.pause.remote(False), timeout=30)
        for slot in self.run.pool.slots:  # what is left to do needs no trouble
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                self._set_link(slot, FAST_LINK)

    def look(self) -> None:
        """Sample every process of the run, and the segments."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            status = ray.get(self.run.coordinator.status.remote(), timeout=10)
            now = time.monotonic()
            ready = {state.rank: state.pid for state in status.workers if state.phase == "ready"}
            for rank in (0, 1):
                if rank in ready:
                    self._away_since.pop(rank, None)
                else:
                    self.longest_away = max(self.longest_away, now - self._away_since.setdefault(rank, now))
            for pid in ready.values():
                self.pids.add(pid)
                self._footprint("worker", pid)
            pid = ray.get(self.run.coordinator.__ray_call__.remote(lambda actor: os.getpid()), timeout=10)
            self._footprint("coordinator", pid)
        self._footprint("driver", os.getpid())
        self.most_stores = max(self.most_stores, len(stores_of_the_run()))

    def _footprint(self, what: str, pid: int) -> None:
        self.footprints.setdefault((what, pid), Footprint()).take(pid)

    def replan(self) -> None:
        budget = self.random.choice([0.4, 0.5, 0.6, 0.75, 0.9, None])
        request = ReplanRequest(budget=budget, latency=budget is None, measure=self.random.random() < 0.5)
        self._count("replan", ray.get(self.run.coordinator.replan.remote(request), timeout=60))

    def rollback(self) -> None:
        self._count("rollback", ray.get(self.run.coordinator.rollback.remote(), timeout=60))

    def _count(self, what: str, outcome: ReplanOutcome) -> None:
        self.done[what if outcome.committed else f"{what} refused"] += 1
        if not outcome.committed:
            self.refusals.append(outcome.reason)

    def pause(self) -> None:
        ray.get(self.run.coordinator.pause.remote(True), timeout=30)
        time.sleep(0.3)
        ray.get(self.run.coordinator.pause.remote(False), timeout=30)
        self.done["pause"] += 1

    def link(self) -> None:
        """One worker's link gets another bandwidth, in the middle of its steps."""
        bandwidth = self.random.choice([5e7, 2e8, 1e9, FAST_LINK])
        self._set_link(self.random.choice(self.run.pool.slots), bandwidth)
        self.done["link"] += 1

    def _set_link(self, slot: Any, bandwidth: float) -> None:
        def change(worker: Any) -> None:
            if worker._manager is not None:
                worker._manager.device.link.bytes_per_second = bandwidth

        call = slot.handle.__ray_call__.options(concurrency_group="control")  # beside its steps
        ray.get(call.remote(change), timeout=30)

    def kill(self) -> None:
        """SIGKILL of one worker, not so often that none ever works."""
        if time.monotonic() - self._killed_at < KILL_EVERY or len(self.run.pool.ready) < 2:
            return
        status = ray.get(self.run.coordinator.status.remote(), timeout=10)
        ready = [state for state in status.workers if state.phase == "ready"]
        if len(ready) == 2:
            os.kill(self.random.choice(ready).pid, signal.SIGKILL)
            self._killed_at = time.monotonic()
            self.done["kill"] += 1
            if self.random.random() < 0.3:  # and the coordinator while that one comes back
                time.sleep(self.random.uniform(0, 3.5))
                ray.kill(self.run.coordinator, no_restart=False)
                self.done["kill of both"] += 1

    def kill_coordinator(self) -> None:
        if self.random.random() < 0.3:
            ray.kill(self.run.coordinator, no_restart=False)
            self.done["coordinator kill"] += 1


def answered(run: Run) -> list[str]:
    """The output without what may differ between two runs: the order, and which process answered."""
    kept = []
    for line in run.output.read_text().splitlines():
        answer = json.loads(line)
        del answer["pid"]
        kept.append(json.dumps(answer, sort_keys=True))
    return sorted(kept)


def soak(start_run: Callable[..., Run], seconds: float, seed: int) -> Chaos:
    items: list[Item] = [{"id": f"i{k}", "steps": STEPS} for k in range(int(LONGEST * seconds * MOST_ITEMS_A_SECOND))]
    began = time.monotonic()
    run = start_run([item | {"seconds": 0.02} for item in items], automatic=True, minimum_interval=5.0)
    chaos, left = Chaos(run, seconds, seed), set[str]()

    def during(progress: Any) -> None:
        if chaos.over.is_set():
            if left or len(run.pool.ready) == 2:  # who still starts would be killed at the end, store and all
                left.update(finish(run))
        elif progress.done >= 4 and len(run.pool.ready) == 2 and not chaos.started:
            chaos.first_start = time.monotonic() - began
            chaos.start()

    run.during = during
    try:
        progress = run.job.run()
    finally:
        chaos.finish()
    said = f"seed {seed}: {dict(chaos.done)}; refused: {chaos.refusals[-3:]}"
    logger.info(said)
    done = [item for item in items if item["id"] not in left]
    assert left, f"the job was done before the trouble was over; {said}"
    assert progress.done == len(done) and progress.failed == 0, said
    assert_answers_right(run)
    assert chaos.enough, said
    assert chaos.longest_away < max(MOST_AWAY, 4 * chaos.first_start), (
        f"a worker was away for {chaos.longest_away:.0f} s; {said}"
    )
    assert chaos.most_stores <= 1, f"{chaos.most_stores} segments of one model; {said}"
    for (what, pid), footprint in chaos.footprints.items():
        grown, files = footprint.growth()
        assert grown < GROWN_BYTES, f"{what} {pid} grew by {grown} bytes: {footprint.samples}; {said}"
        assert files < GROWN_FILES, f"{what} {pid} opened {files} files: {footprint.samples}; {said}"
    run.close()
    assert stores_of_the_run() == [], said
    quiet = start_run(done, workers=1)
    quiet.job.run()
    quiet.close()
    assert answered(run) == answered(quiet), said
    return chaos


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_worker_that_dies_more_often_than_ray_restarts_it_comes_back(
    start_run: Callable[..., Run], tmp_path: Path
) -> None:
    items: list[Item] = [{"id": f"i{k}", "steps": 2} for k in range(3 * (RESTARTS + 2))]
    for at in range(RESTARTS + 1):
        items[3 * at + 1]["kill_once"] = str(tmp_path / f"killed-{at}")
    run = start_run(items, workers=1, batch=1)
    run.job.run()
    assert_all_right(run)
    assert len(list(tmp_path.glob("killed-*"))) == RESTARTS + 1
    joined = [event["pid"] for event in events_of(run) if event["event"] == "worker_joined"]
    assert len(set(joined)) == len(joined) == RESTARTS + 2
    # A process may die while an answer of its own is on its way; that item is then answered by the next one.
    answered_by = {json.loads(line)["pid"] for line in run.output.read_text().splitlines()}
    assert joined[-1] in answered_by <= set(joined)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_short_while_of_kills_replans_and_link_changes(start_run: Callable[..., Run], tmp_path: Path) -> None:
    soak(start_run, SHORT_SECONDS, seed=20)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.soak
@pytest.mark.timeout(int((LONGEST + 2) * LONG_SECONDS) + 600)
def test_half_an_hour_of_kills_replans_and_link_changes(start_run: Callable[..., Run]) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    assert soak(start_run, LONG_SECONDS, seed).lasted >= LONG_SECONDS
