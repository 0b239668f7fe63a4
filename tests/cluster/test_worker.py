"""A worker without Ray around it: rounds by their numbers, and what it says of itself."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.drift import FEWEST_STEPS, TriggerWatch, steps_drift
from cluster.messages import Assignment, CoordinatorOptions, Lease, WorkerStart
from cluster.states import budget_settings
from cluster.task import TaskError
from cluster.worker import Refused, Worker
from flextensor import BudgetError, OffloadConfig, get_offload_manager
from tests.cluster.conftest import TINY, TINY_BYTES, TINY_OPTIONS


def start_of(**changes: object) -> WorkerStart:
    settings: dict[str, object] = {
        "namespace": "unit",
        "rank": 0,
        "workers": 1,
        "device": "host",
        "config": OffloadConfig(host_link_bytes_per_second=1e9),
        "task": TINY,
        "task_options": TINY_OPTIONS,
        "budget": 0.5,
        "store_namespace": f"unit-{uuid.uuid4().hex[:6]}",
    }
    return WorkerStart(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    made = Worker(start_of())
    made.setup()
    yield made
    made.close()
    sys.modules.pop("tiny_task", None)


def run_items(worker: Worker, *ids: str, **item: object) -> None:
    worker.run(Lease(0, tuple({"id": key, **item} for key in ids)))


def test_a_pause_meant_for_the_process_before_does_not_hold_up_one_that_has_not_joined(worker: Worker) -> None:
    """It was told while it warmed up: whoever pauses the run does not know it, and would not tell it to go on."""
    worker.pause(True)
    run_items(worker, "a")
    worker.join(Assignment(epoch=0, plans=None, budget=0.5, solve=False, paused=True))
    assert worker.state().paused
    worker.join(Assignment(epoch=0, plans=None, budget=0.5, solve=False, paused=False))
    assert not worker.state().paused
    worker.pause(True)
    assert worker.state().paused
    worker.pause(False)
    run_items(worker, "b")


def test_compute_that_became_slower_asks_for_one_plan_and_that_is_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = Worker(start_of(threads=1, config=OffloadConfig(host_link_bytes_per_second=1e9, offload_timing="eager")))
    watch = TriggerWatch(CoordinatorOptions(namespace="unit", triggers=("drift",)))
    try:
        worker.setup()
        manager = get_offload_manager("worker-0")
        run_items(worker, "quick", steps=40)
        watch.planned([worker.state()])
        for unit in manager.units:
            unit.module.register_forward_hook(lambda *_: time.sleep(0.03))
        run_items(worker, "slow", steps=FEWEST_STEPS + 4)
        slow = worker.state()
        told = steps_drift([(slow, slow.engines[0])], 0.25, lambda rank: False)
        assert told is not None and "worker 0's steps take" in told.reason and "ms, more than" in told.reason
        asked = watch.look([slow], complete=True)
        assert asked is not None and asked.kind == "drift"
        manager.stage(manager.solve(0.5, manager.current_profile()), epoch=2)
        watch.planned([worker.state()])
        run_items(worker, "b", steps=FEWEST_STEPS + 4)
        (engine,) = worker.state().engines
        assert engine.epoch == 2 and engine.pace is not None and engine.streamed_bytes > 0
        assert engine.pace.quick == pytest.approx(engine.pace.predicted, rel=0.2)
        assert watch.look([worker.state()], complete=True) is None
    finally:
        worker.close()
        sys.modules.pop("tiny_task", None)


def test_a_committed_plan_is_in_force_at_the_next_step(worker: Worker) -> None:
    run_items(worker, "a")
    before = worker.state()
    proposal = worker.propose(1, 0.9, None, None)
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.commit(1)
    assert worker.state().epoch == 1
    run_items(worker, "b")
    after = worker.state()
    assert after.epoch == 2 and after.budget == 0.9
    assert before.weight_bytes < after.weight_bytes <= 0.9 * TINY_BYTES
    assert after.copied_bytes_total > before.copied_bytes_total > 0


def test_an_aborted_round_leaves_the_old_plan_and_its_late_prepare_is_refused(worker: Worker) -> None:
    run_items(worker, "a")
    proposal = worker.propose(5, 0.9, None, None)
    worker.prepare(5, 2, proposal.plans, 0.9, 1.0)
    worker.abort(5)
    with pytest.raises(Refused, match="is not prepared"):
        worker.commit(5)
    with pytest.raises(Refused, match="round 5 is over"):
        worker.prepare(5, 2, proposal.plans, 0.9, 1.0)
    with pytest.raises(Refused, match="round 4 is over"):
        worker.measure(4)
    run_items(worker, "b")
    assert worker.state().epoch == 1
    worker.prepare(6, 2, proposal.plans, 0.9, 1.0)
    worker.commit(6)


def test_steps_go_on_until_the_decision_and_none_runs_under_the_new_plan_before_it(
    worker: Worker, tmp_path: Path
) -> None:
    proposal = worker.propose(1, 0.9, None, None)
    hurry = tmp_path / "hurry"
    lease = Lease(0, ({"id": "a", "steps": 600, "seconds": 0.02, "hurry": str(hurry)},))
    thread = threading.Thread(target=worker.run, args=(lease,))
    thread.start()
    prepared = worker.prepare(1, 2, proposal.plans, 0.9, 120.0)
    deadline = time.monotonic() + 120
    while worker.state().steps < prepared.step_index + 5:
        assert time.monotonic() < deadline, "it stands, and has no reason to"
    assert worker.state().epoch == 1
    assert worker.commit(1) == 0
    decided = worker.state().steps
    while (state := worker.state()).epoch == 1:
        assert state.steps <= decided + 1, "it takes the new plans later than at its next step"
    assert thread.is_alive(), "the lease was over before the decision"
    hurry.touch()
    thread.join(120)
    assert not thread.is_alive() and worker.state().epoch == 2


def test_a_worker_that_gave_way_after_it_agreed_keeps_what_it_has(worker: Worker) -> None:
    """Memory did not suffice in a step between: what it agreed to is more than it has now."""
    run_items(worker, "a")
    proposal = worker.propose(1, 0.9, None, None)
    worker.prepare(1, 2, proposal.plans, 0.9, 10.0)
    get_offload_manager("worker-0")._give_way()
    with pytest.raises(Refused, match="memory did not suffice"):
        worker.commit(1)
    joined = worker.join(Assignment(epoch=2, plans=proposal.plans, budget=0.9, solve=False, paused=False))
    assert "memory did not suffice" in joined.refused
    run_items(worker, "b")
    state = worker.state()
    assert state.epoch == 2 and state.weight_bytes < 0.5 * TINY_BYTES
    assert joined.plans["worker-0"].weight_bytes == state.weight_bytes
    proposal = worker.propose(3, 0.9, None, None)
    worker.prepare(3, 3, proposal.plans, 0.9, 10.0)
    worker.commit(3)
    run_items(worker, "c")
    assert worker.state().epoch == 3 and worker.state().weight_bytes > 0.5 * TINY_BYTES


def test_a_worker_that_gives_way_in_the_step_that_is_waited_for_does_not_agree(worker: Worker, tmp_path: Path) -> None:
    run_items(worker, "a")
    proposal = worker.propose(1, 0.9, None, None)
    refusals: list[str] = []

    def prepare() -> None:
        try:
            worker.prepare(1, 2, proposal.plans, 0.9, 120.0)
        except Refused as refused:
            refusals.append(str(refused))

    # The step lasts until it is told to hurry.
    lease = Lease(0, ({"id": "a", "steps": 2, "seconds": 300.0, "hurry": str(tmp_path / "hurry")},))
    running, preparing = threading.Thread(target=worker.run, args=(lease,)), threading.Thread(target=prepare)
    before = worker.state().steps
    running.start()
    while worker.state().steps == before:
        time.sleep(0.01)
    preparing.start()
    while worker._gate._awaited_by is None:
        time.sleep(0.01)
    get_offload_manager("worker-0")._give_way()
    (tmp_path / "hurry").touch()
    preparing.join(120)
    running.join(120)
    assert not preparing.is_alive() and not running.is_alive()
    assert refusals and "memory did not suffice" in refusals[0]
    with pytest.raises(Refused, match="is not prepared"):
        worker.commit(1)
    assert worker.state().weight_bytes < 0.5 * TINY_BYTES


def test_a_budget_that_does_not_work_is_refused_before_anyone_stands(worker: Worker) -> None:
    with pytest.raises(BudgetError) as error:
        worker.propose(1, 1000, None, None)
    assert error.value.needed > 1000
    assert not worker.state().parked


@pytest.mark.parametrize("share", [None, 0.5])
def test_without_a_budget_a_plan_keeps_to_what_the_device_and_the_configuration_leave(
    monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """A link so slow that latency mode wants all weights on a device that takes not much more than half of them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    memory = int(TINY_BYTES * (0.7 if share is None else 1.4))
    config = OffloadConfig(host_link_bytes_per_second=1e7, host_memory_bytes=memory, max_gpu_mem_fraction=share)
    worker = Worker(start_of(budget=None, config=config))
    try:
        worker.setup()
        proposal = worker.propose(1, None, None, None)
        assert 0 < proposal.plan.weight_bytes <= 0.7 * TINY_BYTES and proposal.plan.streamed_bytes > 0
    finally:
        worker.close()
        sys.modules.pop("tiny_task", None)


def test_a_runs_budget_wins_over_one_of_the_other_kind_in_the_configuration() -> None:
    settings = OffloadConfig(budget_bytes=1 << 30).updated(**budget_settings(0.5))
    assert (settings.budget_bytes, settings.budget_fraction) == (None, 0.5)
    settings = OffloadConfig(budget_fraction=0.5).updated(**budget_settings(1 << 30))
    assert (settings.budget_bytes, settings.budget_fraction) == (1 << 30, None)


def test_a_joining_worker_takes_the_agreed_plan_or_solves_for_the_agreed_budget(worker: Worker) -> None:
    joined = worker.join(Assignment(epoch=7, plans=None, budget=0.9, solve=True, paused=False))
    assert joined.refused == "" and joined.budget == 0.9
    run_items(worker, "a")
    assert worker.state().epoch == 7
    again = worker.join(Assignment(epoch=8, plans=None, budget=1000, solve=True, paused=False))
    assert "bytes are needed" in again.refused and again.plans == joined.plans and again.budget == 0.9


def test_a_worker_whose_commit_was_lost_goes_on_when_it_joins(worker: Worker) -> None:
    proposal = worker.propose(1, 0.9, None, None)
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.join(Assignment(epoch=2, plans=proposal.plans, budget=0.9, solve=False, paused=False))
    began = time.monotonic()
    run_items(worker, "a")
    assert time.monotonic() - began < 50, "it stood before its gate until its patience was over"
    assert worker.state().epoch == 2
    with pytest.raises(Refused, match="is not prepared"):
        worker.commit(1)


def test_who_is_told_late_of_an_epoch_that_is_over_keeps_to_the_later_one(worker: Worker) -> None:
    first = worker.join(Assignment(epoch=5, plans=None, budget=0.9, solve=True, paused=False))
    late = worker.join(Assignment(epoch=3, plans=None, budget=0.4, solve=True, paused=False))
    assert not first.refused and late.refused == "epoch 3 is over" and late.plans == first.plans and late.budget == 0.9
    run_items(worker, "a")
    assert worker.state().epoch == worker.state().agreed.epoch == 5 and worker.state().budget == 0.9


def test_a_worker_that_is_not_set_up_takes_no_lease_and_no_round() -> None:
    fresh = Worker(start_of())
    with pytest.raises(Refused, match="not set up"):
        run_items(fresh, "a")
    with pytest.raises(Refused, match="starting"):
        fresh.propose(1, 0.9, None, None)
    assert fresh.state().phase == "starting"


def test_a_task_that_cannot_be_found_is_named() -> None:
    with pytest.raises(TaskError, match="no_such"):
        Worker(start_of(task="no_such:Task")).setup()


def test_the_report_is_plain_data_with_the_memory_of_one_copy(worker: Worker) -> None:
    import json

    run_items(worker, "a", "b")
    report = json.loads(json.dumps(worker.report()))
    assert report["engine"]["epoch"] == 1
    assert 0 < report["weights_pss_bytes"] <= 1.1 * TINY_BYTES
    state = worker.state()
    assert state.host is not None and state.host.pss_bytes > 0 and state.weights_pss_bytes > 0
