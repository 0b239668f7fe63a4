"""A worker with several offload managers: a replan reaches all of them, and a step boundary of any keeps the gate."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import flextensor
from cluster.engines import with_wait
from cluster.messages import Assignment, Lease
from cluster.worker import Worker
from flextensor import BudgetError, registry
from tests.cluster.conftest import TINY_BYTES
from tests.cluster.test_worker import start_of

NAMES = ("worker-0", "worker-0-2", "worker-0-text")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    made = Worker(start_of(task="twin_task:TwinTask"))
    made.setup()
    yield made
    made.close()
    for module in ("tiny_task", "twin_task"):
        sys.modules.pop(module, None)
    assert registry.names() == []


def weights(worker: Worker) -> dict[str, int]:
    return {one.name: one.weight_bytes for one in worker.state().engines}


def run_item(worker: Worker, **item: object) -> bool:
    (result,) = worker.run(Lease(0, ({"id": "a", **item},))).results
    return bool(result["same"])


def test_a_replan_reaches_every_manager_and_one_with_a_budget_of_its_own_keeps_it(worker: Worker) -> None:
    assert run_item(worker)
    before = weights(worker)
    proposal = worker.propose(1, 0.9, None, None)
    assert tuple(proposal.plans) == NAMES
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.commit(1)
    assert run_item(worker)
    state = worker.state()
    after = weights(worker)
    assert {one.name: one.epoch for one in state.engines if one.name in NAMES} == dict.fromkeys(NAMES, 2)
    for name in NAMES[:2]:
        assert before[name] <= 0.5 * TINY_BYTES < after[name] <= 0.9 * TINY_BYTES
    assert before[NAMES[2]] == after[NAMES[2]] <= 300_000
    assert state.weight_bytes == sum(after.values()) and state.epoch == 2
    assert all(one.copied_bytes_total > 0 for one in state.engines if one.name in NAMES)


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["text", "first", "second"])
def test_a_step_boundary_of_any_manager_keeps_the_gate(worker: Worker, wanted: int) -> None:
    """Six steps each of the text model, the first and the second one."""
    proposal = worker.propose(1, 0.8, None, None)
    began = worker.state().steps
    thread = threading.Thread(target=run_item, args=(worker,))
    worker.hold(1)  # it stands before its first step until it is said how far it goes
    thread.start()
    prepared = worker.prepare(1, 2, proposal.plans, 0.8, 120.0, stands_at=began + 6 * wanted + 3)
    stood = worker.state()
    assert stood.steps == began + 6 * wanted + 3 and stood.parked
    time.sleep(0.1)
    assert worker.state().steps == stood.steps == prepared.step_index
    assert worker.commit(1) > 0.09
    thread.join(120)
    assert worker.state().steps == began + 18 and not worker.state().refusal


def test_a_model_that_gets_its_first_plan_later_takes_the_runs_budget(worker: Worker) -> None:
    proposal = worker.propose(1, 0.9, None, None)
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.commit(1)
    assert run_item(worker, late=True) and run_item(worker, late=True)
    late = next(one for one in worker.state().engines if one.name.endswith("-late"))
    assert late.epoch == 2 and 0.5 * TINY_BYTES < late.weight_bytes <= 0.9 * TINY_BYTES
    plans, budget = worker.plans()
    assert "worker-0-late" in plans and budget == 0.9


def test_a_joining_worker_takes_the_plans_of_all_its_managers(worker: Worker) -> None:
    joined = worker.join(Assignment(epoch=5, plans=None, budget=0.8, solve=True, paused=False))
    assert tuple(joined.plans) == NAMES and joined.refused == ""
    run_item(worker)
    assert {one.epoch for one in worker.state().engines if one.name in NAMES} == {5}


def test_plans_that_fit_one_by_one_but_not_together_are_refused(worker: Worker) -> None:
    manager = flextensor.get_offload_manager("worker-0")
    proposal = worker.propose(1, 0.9, None, None)
    grown = {
        name: plan.weight_bytes - flextensor.get_offload_manager(name).get_gpu_memory_usage()["weights"]
        for name, plan in proposal.plans.items()
    }
    activations = max(flextensor.get_offload_manager(name).profile.activation_bytes for name in NAMES)  # type: ignore[union-attr]
    room = max(grown.values()) + activations + 4096
    assert sum(grown.values()) + activations > room
    taken = manager.device.allocate(manager.device.free_bytes() - room)
    try:
        with pytest.raises(BudgetError, match=r"worker-0, worker-0-2, worker-0-text take \d+ bytes"):
            worker.propose(2, 0.9, None, None)
    finally:
        del taken


def test_the_wait_for_a_group_is_a_part_of_each_step(worker: Worker) -> None:
    profile = flextensor.get_offload_manager("worker-0").current_profile()
    waiting = with_wait(profile, 0.5)
    for kind, was in zip(waiting.kinds, profile.kinds, strict=True):
        assert kind.gap[0] == pytest.approx(was.gap[0] + 0.5) and kind.gap[1:] == was.gap[1:]
    plan = worker.propose(1, None, None, None, 0.5).plan
    assert plan.prediction is not None and plan.prediction.step_seconds > 0.5


def test_the_bytes_that_a_change_moves_are_known_before_it(worker: Worker) -> None:
    proposal = worker.propose(1, 0.9, None, None)
    before = worker.state()
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.commit(1)
    run_item(worker, steps=1)
    after = worker.state()
    steps = sum(one.streamed_bytes for one in after.engines if one.name in NAMES)
    moved = after.copied_bytes_total - before.copied_bytes_total - steps
    assert proposal.moved_bytes > 0
    # A manager fetches up to a step ahead, in the plan before and in the one after.
    assert abs(moved - proposal.moved_bytes) <= steps
    again = worker.propose(2, 0.9, proposal.plans, None)
    assert again.moved_bytes < proposal.moved_bytes, "nothing becomes resident any more"


def test_a_model_whose_first_plan_is_solved_while_a_round_comes_in_takes_the_rounds_budget(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, budget in ((1, 0.9), (3, 0.7)):
        proposal = worker.propose(number, budget, None, None)
        worker.prepare(number, number + 1, proposal.plans, budget, 10.0)
        if budget == 0.9:
            worker.commit(number)
    engines, solving, decided = worker._engines, threading.Event(), threading.Event()
    solve = engines._solve_one

    def solve_slowly(*arguments: object, **settings: object) -> object:
        solved = solve(*arguments, **settings)  # type: ignore[arg-type]
        if not solving.is_set():
            solving.set()
            assert decided.wait(120)
        return solved

    monkeypatch.setattr(engines, "_solve_one", solve_slowly)
    thread = threading.Thread(target=run_item, args=(worker,), kwargs={"late": True})
    thread.start()
    assert solving.wait(120)
    worker.commit(3)
    decided.set()
    thread.join(120)
    run_item(worker, late=True)
    states = {one.name: one for one in worker.state().engines}
    assert {one.epoch for one in states.values()} == {4}
    assert 0.5 * TINY_BYTES < states["worker-0-late"].weight_bytes <= 0.7 * TINY_BYTES


def late_of(worker: Worker) -> tuple[int, int]:
    """Epoch and bytes of the model that has its first step later than the others."""
    return next((one.epoch, one.weight_bytes) for one in worker.state().engines if one.name.endswith("-late"))


def test_a_worker_that_is_started_again_gives_a_late_model_its_plan_too(worker: Worker) -> None:
    proposal = worker.propose(1, 0.9, None, None)
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.commit(1)
    run_item(worker, late=True)
    run_item(worker, late=True)
    before, (plans, budget) = late_of(worker), worker.plans()
    assert "worker-0-late" in plans
    worker.close()
    again = Worker(start_of(task="twin_task:TwinTask"))
    again.setup()
    try:
        again.join(Assignment(epoch=2, plans=plans, budget=budget, solve=True, paused=False))
        run_item(again, late=True)
        run_item(again, late=True)
        assert late_of(again) == before and before[0] == 2
    finally:
        again.close()


def test_the_link_is_measured_also_while_a_further_model_warms_up(worker: Worker) -> None:
    worker._engines.find()
    answer = sys.modules["tiny_task"].answer
    answer(worker._task.models["-late"], {"id": "a"}, 1)  # type: ignore[union-attr]
    assert worker._engines._stepped == "worker-0-late"
    assert worker.measure(1).transfer.bandwidth > 0


def test_a_late_model_whose_own_budget_has_no_plan_takes_the_runs(worker: Worker) -> None:
    main, late = (flextensor.get_offload_manager(name) for name in ("worker-0", "worker-0-late"))
    late.config = late.config.updated(budget_fraction=None, budget_bytes=1)
    with pytest.raises(BudgetError):
        run_item(worker, late=True)
    assert late.phase == "inference" and late.plan is None
    late.config = main.config
    proposal = worker.propose(1, 0.9, None, None)
    del proposal.plans["worker-0-late"]  # it was solved before the model had its profile
    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    worker.commit(1)
    assert "worker-0-late" not in worker.plans()[0]
    run_item(worker, late=True)
    run_item(worker, late=True)
    assert late_of(worker)[0] == 2


def test_a_commit_does_not_wait_for_somebody_who_edits_weights(worker: Worker) -> None:
    """Nor does a forward inside the block wait for the commit."""
    manager = flextensor.get_offload_manager("worker-0")
    name = manager._weights[0].name
    proposal = worker.propose(1, 0.9, None, None)
    inside, commit_done, done = threading.Event(), threading.Event(), threading.Event()

    def edit() -> None:
        with manager.edit_weights(name):
            inside.set()
            commit_done.wait(120)
            sys.modules["tiny_task"].answer(worker._task.models[""], {"id": "a"}, 1)  # type: ignore[union-attr]
        done.set()

    worker.prepare(1, 2, proposal.plans, 0.9, 1.0)
    thread = threading.Thread(target=edit)
    thread.start()
    assert inside.wait(60)
    committing = threading.Thread(target=lambda: (worker.commit(1), commit_done.set()))
    committing.start()
    assert commit_done.wait(60), "the commit waits for the block"
    assert done.wait(60)
    thread.join(60)
    committing.join(60)
    assert manager.epoch == 2
