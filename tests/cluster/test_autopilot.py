"""Replans that nobody asked for, set off through real workers; and a plan that was a mistake."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import ray

from flextensor.config import OffloadConfig
from tests.cluster.conftest import Run
from tests.cluster.test_batch_job import (
    assert_answers_right,
    await_event,
    events_of,
    items_of,
    on_one_epoch,
    replan,
    run_with,
    status_of,
    status_with,
)

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

LINK = 2e7
SLOW_LINK = 4e6
MEMORY = 4 << 20


def config() -> OffloadConfig:
    """Every step is timed, and copies of a tiny unit take milliseconds: figures settle within a few steps."""
    return OffloadConfig(host_link_bytes_per_second=LINK, host_memory_bytes=MEMORY, offload_timing="eager")


def in_worker(run: Run, rank: int, change: Callable[[Any], None]) -> None:
    """Beside its steps; in the model's queue it would come after the leases that wait there."""
    call = run.pool.slots[rank].handle.__ray_call__.options(concurrency_group="control")
    ray.get(call.remote(change), timeout=120)


def set_link(bandwidth: float) -> Callable[[Any], None]:
    def change(worker: Any) -> None:
        worker._manager.device.link.bytes_per_second = bandwidth

    return change


def fill_memory(worker: Any) -> None:
    """All of the device but 1 %: 2 % are to stay free."""
    device = worker._manager.device
    worker._filled = device.allocate(device.free_bytes() - device.total_bytes() // 100)


def assert_metrics_served() -> None:
    """Ray's own endpoint has the run's figures, as Prometheus reads them."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = ("step_seconds", "stall_share", "link_bytes_per_second", "link_nominal_bytes_per_second", "link_share")
    names = [f"ray_flextensor_{name}{{" for name in (*wanted, "resident_bytes", "streamed_bytes", "epoch")]
    end = time.monotonic() + 120
    missing = names
    while missing:
        assert time.monotonic() < end, missing
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
            missing = [name for name in names if name not in text]
        time.sleep(0.2)


def triggered(kind: str, words: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == "triggered" and event["kind"] == kind and words in event["reason"]


def replanned(words: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == "replanned" and words in event["reason"]


@pytest.mark.slow
def test_members_links_and_memory_that_change_are_planned_for(start_run: Callable[..., Run]) -> None:
    run = start_run(
        items_of(20_000, steps=4, seconds=0.002),
        config=config(),
        budget=0.9,
        automatic=True,
        minimum_interval=0.5,
        triggers=("members", "link", "memory"),
        link_change=1.5,
        rollback_margin=None,
    )

    def work() -> None:
        await_event(run, replanned("workers 0, 1 joined"))

        in_worker(run, 0, set_link(SLOW_LINK))
        await_event(run, replanned("worker 0's link gives"))
        measured = [event for event in events_of(run) if event["event"] == "links_measured"][-1]
        assert measured["bytes_per_second"]["0"] < 0.5 * LINK < 2 * measured["bytes_per_second"]["1"]

        before = status_of(run).workers[0].weight_bytes
        in_worker(run, 0, fill_memory)
        told = await_event(run, replanned("worker 0's device has"))
        assert told["weight_bytes"]["0"] < before and told["budgets"]["1"] == 0.9
        assert await_event(run, triggered("memory", "device has"))["rank"] == 0

        old = status_of(run).workers[1]
        os.kill(old.pid, signal.SIGKILL)
        await_event(run, replanned("worker 1 joined"))
        assert status_of(run).workers[1].incarnation != old.incarnation

        assert_metrics_served()

        ray.get(run.coordinator.dismiss.remote(1), timeout=120)
        await_event(run, replanned("worker 1 left"))

    run_with(run, work)
    assert_answers_right(run)
    times = [event["time"] for event in events_of(run) if event["event"] == "triggered"]
    assert len(times) >= 5 and all(b - a >= 0.45 for a, b in itertools.pairwise(times))


def test_a_plan_that_is_worse_than_the_one_before_is_rolled_back(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(4000, steps=4, seconds=0.02), config=config(), rollback_steps=80)

    def work() -> None:
        assert replan(run, budget=0.9).committed
        begun = {state.rank: state.steps for state in status_with(run, on_one_epoch).workers}
        status_with(run, lambda status: all(state.steps >= begun[state.rank] + 40 for state in status.workers))
        ray.get(run.coordinator.pause.remote(True), timeout=120)  # no step of the new plan on the good link
        better = replan(run)
        assert better.committed, better.reason
        for rank in (0, 1):
            in_worker(run, rank, set_link(SLOW_LINK / 4))  # 130 ms a step: no noise of a busy machine
        ray.get(run.coordinator.pause.remote(False), timeout=120)
        told = await_event(run, lambda event: event["event"] == "rolling_back")
        assert told["epoch"] == better.epoch and "ms a step, the one before took" in told["reason"]
        back = await_event(run, replanned(told["reason"]))
        assert back["epoch"] == better.epoch + 1 and back["budgets"] == {"0": 0.9, "1": 0.9}
        status_with(run, on_one_epoch)

    run_with(run, work)
    assert_answers_right(run)
