"""Joules an item, from the counters of GPUs that several workers may share."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from dataclasses import replace

import pytest
import ray

from cluster.coordinator import Coordinator
from cluster.energy import EnergyMeter
from cluster.messages import CoordinatorOptions, DeviceSample, JobProgress, WorkerState
from cluster.session import make_coordinator


def state(rank: int, uuid: str, joules: float | None) -> WorkerState:
    return WorkerState(rank, 1, 1, "a", uuid, "ready", gpu=DeviceSample(uuid, "x", energy_joules=joules))


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_prometheus_is_served_a_workers_figures_and_the_runs_joules_an_item(local_ray: str) -> None:
    coordinator = make_coordinator(CoordinatorOptions(namespace="energy-test", automatic=False))
    now = replace(state(3, "A", 812.5), step_seconds=0.25, stall_seconds=0.05, epoch=7)

    def publish(actor: Coordinator) -> None:
        actor._metrics.observe(now)
        actor._metrics.observe_energy(41.75)

    ray.get(coordinator.__ray_call__.remote(publish), timeout=120)
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    told: dict[str, float] = {}
    end = time.monotonic() + 120
    while not {"joules_an_item", "energy_joules", "step_seconds"} <= told.keys() and time.monotonic() < end:
        time.sleep(0.2)
        lines: list[str] = []
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if 'run="energy-test"' in line]
        ours = [line for line in lines if 'rank="3"' in line or "joules_an_item" in line]
        found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in ours}
        told = {name.removeprefix("ray_flextensor_"): value for name, value in found.items()}
    assert told["joules_an_item"] == 41.75 and told["energy_joules"] == 812.5
    ray.kill(coordinator)
    assert (told["step_seconds"], told["epoch"]) == (0.25, 7) and told["stall_share"] == pytest.approx(0.2)


def test_energy_is_counted_once_a_gpu_from_the_jobs_first_lease_on() -> None:
    meter = EnergyMeter()
    meter.look([state(0, "A", 1000.0)], JobProgress(total=9))
    assert meter.joules_an_item(JobProgress(total=9, done=3)) is None, "the job has not begun"
    meter.look([state(0, "A", 5000.0), state(1, "A", 5000.0), state(2, "B", 7.0)], JobProgress(started=1.0, done=2))
    assert meter.joules_an_item(JobProgress(started=1.0, done=2)) is None
    meter.look([state(0, "A", 5060.0), state(1, "A", 5061.0), state(2, "B", 46.0)], JobProgress(started=1.0, done=6))
    assert meter.joules_an_item(JobProgress(started=1.0, done=6)) == pytest.approx((61 + 39) / 4)


def test_a_counter_that_begins_anew_and_a_gpu_without_one_take_nothing_off() -> None:
    meter = EnergyMeter()
    job = JobProgress(started=1.0)
    for joules in (500.0, 600.0, 3.0, 13.0):
        meter.look([state(0, "A", joules), state(1, "C", None)], job)
    assert meter.joules_an_item(JobProgress(started=1.0, done=10)) == pytest.approx(11.0)


def test_without_counters_nothing_is_told() -> None:
    meter = EnergyMeter()
    for done in (0, 5):
        meter.look([WorkerState(0, 1, 1, "a", "host", "ready")], JobProgress(started=1.0, done=done))
    assert meter.joules_an_item(JobProgress(started=1.0, done=5)) is None
