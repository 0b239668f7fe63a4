"""Joules an item, from the counters of GPUs that several workers may share."""

from __future__ import annotations

import pytest

from cluster.energy import EnergyMeter
from cluster.messages import DeviceSample, JobProgress, WorkerState


def state(rank: int, uuid: str, joules: float | None) -> WorkerState:
    return WorkerState(rank, 1, 1, "a", uuid, "ready", gpu=DeviceSample(uuid, "x", energy_joules=joules))


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
