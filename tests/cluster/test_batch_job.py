"""Batch jobs on real workers: every item once, whatever dies; and replans in the middle change no answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.messages import Item, JobProgress, ReplanOutcome, ReplanRequest, RunStatus
from cluster.pool import NoWorkers
from tests.cluster.conftest import TINY_BYTES, TINY_OPTIONS, Run

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def answers_of(run: Run) -> dict[str, dict[str, Any]]:
    """The output by id; every line whole, no id twice."""
    lines = [json.loads(line) for line in run.output.read_text().splitlines()]
    by_id = {str(line["id"]): line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def assert_all_right(run: Run, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    from tiny_task import expected

    answers = answers_of(run)
    assert set(answers) == {str(item["id"]) for item in run.items}
    want = expected([item for item in run.items if str(item["id"]) not in but], TINY_OPTIONS)
    assert {key: answers[key].get("text") for key in want} == want


def finish(run: Run) -> set[str]:
    """No more items; those under way are answered. The ids of the others."""
    queue, left = run.job._queue, set()
    while (lease := queue.take()) is not None:
        left |= {str(item["id"]) for item in lease.items}
        queue.finish(lease.number)
    return left


def assert_answers_right(run: Run) -> None:
    """Those that there are, of a job that was finished early."""
    from tiny_task import expected

    answers = answers_of(run)
    want = expected([item for item in run.items if item["id"] in answers], TINY_OPTIONS)
    assert len(want) >= 4 and {key: answer["text"] for key, answer in answers.items()} == want


def events_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def status_of(run: Run) -> RunStatus:
    status: RunStatus = ray.get(run.coordinator.status.remote(), timeout=120)
    return status


def status_with(run: Run, what: Callable[[RunStatus], bool]) -> RunStatus:
    """The run's status once it is so: the coordinator looks at the workers now and then only."""
    end = time.monotonic() + 120
    while not what(status := status_of(run)):
        assert time.monotonic() < end, status
        time.sleep(0.1)
    return status


def on_one_epoch(status: RunStatus) -> bool:
    return bool(status.workers) and all(state.epoch == status.epoch for state in status.workers)


def await_event(run: Run, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first event of the run's log that ``what`` is true for."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = [event for event in events_of(run) if what(event)]
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"it does not come; events: {events_of(run)[-5:]}")


def items_of(count: int, **more: Any) -> list[Item]:
    return [{"id": f"i{k}", **more} for k in range(count)]


def run_with(run: Run, work: Callable[[], None]) -> JobProgress:
    """Run the job until ``work`` has ended, which begins when both workers take leases and items are done."""
    errors: list[BaseException] = []
    ended = threading.Event()

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # it may have ended while all stand
                ray.get(run.coordinator.pause.remote(False), timeout=120)
        finally:
            ended.set()

    thread = threading.Thread(target=guarded)

    def during(progress: Any) -> None:
        if ended.is_set():
            finish(run)
        elif progress.done >= 2 and len(run.pool.ready) == 2 and thread.ident is None:
            thread.start()

    run.during = during
    progress = run.job.run()
    assert thread.ident is not None, "the job ended before the test began"
    thread.join(120)
    assert not thread.is_alive(), "the items were too few"
    if errors:
        raise errors[0]
    return progress


def replan(run: Run, **request: Any) -> ReplanOutcome:
    outcome: ReplanOutcome = ray.get(run.coordinator.replan.remote(ReplanRequest(**request)), timeout=300)
    return outcome


def test_replans_in_the_middle_move_all_workers_and_change_no_answer(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(3000, steps=8, seconds=0.01))
    outcomes: list[ReplanOutcome] = []

    def replans() -> None:
        for budget in (0.9, 0.4, None, 0.6):
            outcomes.append(replan(run, budget=budget, latency=budget is None, reason=f"to {budget}"))
        outcomes.append(ray.get(run.coordinator.rollback.remote(), timeout=300))

    progress = run_with(run, replans)
    assert_answers_right(run)
    assert progress.tokens == len(answers_of(run)) * 8
    assert [outcome.committed for outcome in outcomes] == [True] * 5, [outcome.reason for outcome in outcomes]
    first = outcomes[0].epoch
    assert [outcome.epoch for outcome in outcomes] == list(range(first, first + 5))
    for outcome, share in zip(outcomes[:2], (0.9, 0.4), strict=True):
        assert {change.rank for change in outcome.changes} == {0, 1}
        assert all(change.weight_bytes <= share * TINY_BYTES for change in outcome.changes)
        assert all(change.streamed_bytes > 0 for change in outcome.changes)
    states = status_of(run).workers
    assert [state.copied_bytes_total > 10 * TINY_BYTES for state in states] == [True, True]
    assert all(outcome.parked_seconds < 10 for outcome in outcomes), "one waited for its patience to end"


def test_a_replan_that_fits_nobody_is_refused_and_names_what_is_needed(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(3000, steps=4, seconds=0.02))
    outcomes: list[ReplanOutcome] = []

    def replans() -> None:
        outcomes.append(replan(run, budget=1000))
        outcomes.append(replan(run, budget=0.8, dry_run=True))
        outcomes.append(replan(run, budget=0.8, workers=(7,)))

    run_with(run, replans)
    assert_answers_right(run)
    too_small, dry, nobody = outcomes
    assert not too_small.committed and "bytes are needed" in too_small.reason
    assert not dry.committed and dry.dry_run and dry.reason == "" and len(dry.changes) == 2
    assert not nobody.committed and "no worker 7" in nobody.reason
    assert status_of(run).epoch == too_small.epoch


def test_a_killed_worker_comes_back_with_the_agreed_plan_and_no_item_is_lost(start_run: Callable[..., Run]) -> None:
    """However long the new process takes to start, there is work left for it."""
    run = start_run(items_of(3000, steps=4, seconds=0.05))
    killed: list[int] = []
    left: set[str] = set()

    def during(progress: Any) -> None:
        pids = {answer["pid"] for answer in answers_of(run).values()}
        if len(pids) == 3:
            left.update(finish(run))
        elif len(run.pool.ready) == 2 and not killed and len(pids) == 2:
            outcome = replan(run, budget=0.7)
            assert outcome.committed, outcome.reason
            killed.append(status_of(run).workers[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    run.during = during
    run.job.run()
    assert_answers_right(run)
    assert left and {str(item["id"]) for item in run.items} - left == set(answers_of(run)), "an item was lost"
    pids = {answer["pid"] for answer in answers_of(run).values()}
    assert len(pids) == 3 and killed[0] in pids, "the new process took up work"
    states = status_with(run, lambda status: len(status.workers) == 2 and on_one_epoch(status)).workers
    assert len({state.weight_bytes for state in states}) == 1
    assert any(event["event"] == "worker_lost" for event in events_of(run))


def test_a_worker_that_dies_without_a_lease_is_set_up_again(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(3000, steps=4, seconds=0.05))
    while len(run.pool.ready) < 2:
        run.pool.settle_next(1.0)
    before = [ray.get(slot.handle.state.remote(), timeout=120) for slot in run.pool.slots]
    os.kill(before[1].pid, signal.SIGKILL)
    end = time.monotonic() + 120
    while True:  # nobody asks for anything that would tell the driver
        with contextlib.suppress(ray.exceptions.RayActorError):
            if ray.get(run.pool.slots[1].handle.state.remote(), timeout=120).pid != before[1].pid:
                break
        assert time.monotonic() < end, "Ray does not start it again"
        time.sleep(0.1)
    left: set[str] = set()

    def during(progress: Any) -> None:
        if left or len({answer["pid"] for answer in answers_of(run).values()}) == 2:
            left.update(finish(run))

    run.during = during
    run.job.run()
    assert_answers_right(run)
    assert left and {str(item["id"]) for item in run.items} - left == set(answers_of(run)), "an item was lost"
    after = ray.get(run.pool.slots[1].handle.state.remote(), timeout=120)
    assert {answer["pid"] for answer in answers_of(run).values()} == {before[0].pid, after.pid}
    assert not any(event["event"] == "lease_failed" for event in events_of(run)), (
        "its leases went to who could take them"
    )


def test_the_end_waits_for_a_worker_that_does_not_answer(start_run: Callable[..., Run]) -> None:
    """Its store is in use until its process is gone."""
    run = start_run(items_of(4), workers=1)
    run.job.run()
    (slot,) = run.pool.slots
    process = ray.get(slot.handle.state.remote(), timeout=120).pid
    for _ in range(4):  # all threads that it answers with
        slot.handle.__ray_call__.options(concurrency_group="control").remote(lambda worker: time.sleep(600))
    run.pool.close(timeout=0.5)
    assert not psutil.pid_exists(process)


def test_bad_items_and_results_are_set_aside_and_their_neighbours_answered(
    start_run: Callable[..., Run], tmp_path: Path
) -> None:
    items = items_of(8)
    items[1]["no_json"] = True
    items[3]["fail"] = True
    items[5]["kill_once"] = str(tmp_path / "killed")
    run = start_run(items)
    progress = run.job.run()
    assert_all_right(run, but={"i1", "i3"})
    assert progress.failed == 2
    assert "'text', which is no JSON" in answers_of(run)["i1"]["error"]
    assert "item i3 is broken" in answers_of(run)["i3"]["error"]


def test_a_hung_worker_is_started_again(start_run: Callable[..., Run], tmp_path: Path) -> None:
    items, hung, said = items_of(10), tmp_path / "hung", [600.0]
    items[2]["hang_once"] = str(hung)
    run = start_run(items, workers=1, hang=said[0])

    def patience(actor: Any, seconds: float) -> None:
        actor._roster._options = dataclasses.replace(actor._roster._options, hang=seconds)

    def during(progress: Any) -> None:
        """It is short only while the worker hangs: a new process may take longer to start."""
        killed = any(event["event"] == "worker_killed" for event in events_of(run))
        wanted = 2.0 if hung.exists() and not killed else 600.0
        if wanted != said[-1]:
            said.append(wanted)
            ray.get(run.coordinator.__ray_call__.remote(patience, wanted), timeout=120)

    run.during = during
    run.job.run()
    assert_all_right(run)
    assert any(event["event"] == "worker_killed" for event in events_of(run))


def test_a_worker_that_cannot_start_costs_the_job_nothing_while_another_can(
    start_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    failing = {"fail_load": "no room on this GPU", "fail_load_of": "worker-1"}
    run = start_run(items_of(3000, seconds=0.02), task_options=failing)

    def during(progress: Any) -> None:
        if run.pool.slots[1].phase == "given up" and progress.done >= 6:
            finish(run)

    run.during = during
    run.job.run()
    assert_answers_right(run)
    assert [slot.phase for slot in run.pool.slots] == ["ready", "given up"]
    assert "worker 1 is given up: RuntimeError: no room on this GPU" in caplog.text
    await_event(run, lambda event: event["event"] == "worker_given_up")


def test_a_task_that_cannot_load_ends_the_job_with_its_own_error(start_run: Callable[..., Run]) -> None:
    run = start_run(items_of(4), task_options={"fail_load": "the disk is on fire"})
    with pytest.raises(NoWorkers, match="the disk is on fire"):
        run.job.run()
    assert run.output.read_text() == ""
