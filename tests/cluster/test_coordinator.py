"""Replans that go wrong: nobody moves, the job goes on, the reason is told; and a coordinator that dies itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.messages import ReplanOutcome, RunStatus
from tests.cluster.conftest import Run
from tests.cluster.test_batch_job import (
    assert_answers_right,
    events_of,
    items_of,
    on_one_epoch,
    replan,
    run_with,
    status_of,
    status_with,
)

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def all_stand(status: RunStatus) -> bool:
    return len(status.workers) == 2 and all(state.parked for state in status.workers)


def test_a_worker_that_dies_in_a_round_stops_it_and_the_next_round_goes_well(start_run: Callable[..., Run]) -> None:
    # Steps of half a second: a prepare waits long enough that the kill comes in the middle of it.
    run = start_run(items_of(2000, steps=2, seconds=0.5), batch=1)
    outcomes: list[ReplanOutcome] = []

    def work() -> None:
        pid = status_of(run).workers[1].pid
        threading.Timer(0.15, os.kill, (pid, signal.SIGKILL)).start()
        outcomes.append(replan(run, budget=0.8, measure=False))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            outcomes.append(replan(run, budget=0.9))
            if outcomes[-1].committed and len(outcomes[-1].changes) == 2:
                return
            time.sleep(0.5)

    run_with(run, work)
    assert_answers_right(run)
    assert outcomes[-1].committed and len(outcomes[-1].changes) == 2, outcomes[-1].reason
    first = outcomes[0]
    if first.committed:  # the kill came after the decision: then the worker took the plan when it came back
        assert first.epoch == 2
    else:
        assert "worker 1" in first.reason and first.epoch == 1


def test_a_late_worker_stops_the_round_and_nobody_moves(start_run: Callable[..., Run], tmp_path: Path) -> None:
    # Two quick items, so that a step is known to be short; then steps that last longer than all before a prepare, on a
    # busy machine too.
    items = items_of(4, steps=1, seconds=0.01)
    for item in items[2:]:
        item |= {"seconds": 300.0, "hurry": str(tmp_path / "hurry")}
    run = start_run(items, batch=1, prepare_timeout=0.1)
    outcomes: list[ReplanOutcome] = []
    epochs: list[set[int]] = []
    torch_there: list[bool] = []

    def patient(actor: Any) -> None:
        from cluster import rounds

        rounds.ANSWER_SLACK = 120.0  # it is told by the worker itself, however late that answers

    def work() -> None:
        try:
            ray.get(run.coordinator.__ray_call__.remote(patient), timeout=120)
            outcomes.append(replan(run, budget=0.9, measure=False))
            epochs.append({state.epoch for state in status_of(run).workers})
            torch_there.append(ray.get(run.coordinator.__ray_call__.remote(lambda actor: "torch" in sys.modules)))
        finally:
            (tmp_path / "hurry").touch()

    run_with(run, work)
    assert_answers_right(run)
    assert torch_there == [False], "a coordinator that has seen plans makes no CUDA context"
    assert not outcomes[0].committed and "step boundary" in outcomes[0].reason
    assert outcomes[0].epoch == 1 and epochs == [{1}]
    refused = [event for event in events_of(run) if event["event"] == "replan_refused"]
    assert len(refused) == 1


def test_pause_holds_every_worker_and_a_replan_works_meanwhile(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(3000, steps=4, seconds=0.02))
    steps: list[list[int]] = []
    outcomes: list[ReplanOutcome] = []

    def work() -> None:
        assert ray.get(run.coordinator.pause.remote(True), timeout=120) == 2
        status_with(run, all_stand)
        for _ in range(2):
            steps.append([state.steps for state in status_of(run).workers])
            time.sleep(0.7)
        outcomes.append(replan(run, budget=0.9, workers=(1,)))
        ray.get(run.coordinator.pause.remote(False), timeout=120)

    run_with(run, work)
    assert_answers_right(run)
    assert steps[0] == steps[1]
    assert outcomes[0].committed, outcomes[0].reason
    states = status_with(run, on_one_epoch).workers
    assert states[1].weight_bytes > states[0].weight_bytes
    assert [state.budget for state in states] == [0.5, 0.9]


def test_a_coordinator_started_again_knows_the_run_from_its_workers(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(4000, steps=4, seconds=0.03), learn_timeout=120.0)
    outcomes: list[ReplanOutcome] = []
    learned: list[RunStatus] = []

    def kill_coordinator() -> None:
        before = restarts()
        ray.kill(run.coordinator, no_restart=False)
        deadline = time.monotonic() + 120
        while restarts() == before:
            assert time.monotonic() < deadline
            with contextlib.suppress(ray.exceptions.RayActorError):
                status_of(run)  # its first call makes it learn
            time.sleep(0.1)
        learned.append(status_of(run))

    def restarts() -> int:
        return sum(event["event"] == "coordinator_restarted" for event in events_of(run))

    def work() -> None:
        outcomes.append(replan(run, budget=0.8))
        kill_coordinator()
        outcomes.append(replan(run, budget=0.7))
        # Workers that stand have agreed on what they take at their next step: that is what the run is at.
        assert ray.get(run.coordinator.pause.remote(True), timeout=120) == 2
        status_with(run, all_stand)
        outcomes.append(replan(run, budget=0.6))
        kill_coordinator()
        outcomes.append(replan(run, budget=0.9))
        ray.get(run.coordinator.pause.remote(False), timeout=120)

    run_with(run, work)
    assert_answers_right(run)
    told = [(outcome.committed, outcome.epoch, len(outcome.changes)) for outcome in outcomes]
    assert told == [(True, epoch, 2) for epoch in (2, 3, 4, 5)], [outcome.reason for outcome in outcomes]
    running, standing = learned
    assert running.epoch == 2 and not running.paused
    assert standing.epoch == 4 and standing.paused
    assert [state.agreed.epoch for state in standing.workers] == [4, 4]
    assert all(state.epoch < 4 for state in standing.workers)
    assert standing.epochs[-1].epoch == 4 and standing.epochs[-1].budget == 0.6
