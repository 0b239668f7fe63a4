"""Rounds that go wrong in ways that real processes seldom do: real workers and a real coordinator in one process."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from cluster.coordinator import Coordinator
from cluster.messages import CoordinatorOptions, JobProgress, Lease, ReplanRequest, WorkerState
from cluster.roster import hang_after, longest_between_boundaries
from cluster.switching import NotSetUp, OutOfReach
from cluster.worker import Worker
from tests.cluster.local_handles import LocalHandle
from tests.cluster.test_worker import start_of


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    first = start_of()
    made = [Worker(first), Worker(start_of(rank=1, store_namespace=first.store_namespace))]
    for worker in made:
        worker.setup()
    yield made
    for worker in made:
        worker.close()
    sys.modules.pop("tiny_task", None)


class Bench:
    """A coordinator over the workers, its events in a file."""

    def __init__(self, workers: list[Worker], path: Path, **options: Any) -> None:
        self.workers, self.path = workers, path
        settings = {"poll": 0.05, "rollback_margin": None, "automatic": False} | options
        self.coordinator = Coordinator(CoordinatorOptions("unit", str(path), **settings))

    async def admit(self, before: dict[int, Callable[[str], None]] | None = None) -> None:
        for rank, worker in enumerate(self.workers):
            handle = LocalHandle(worker, (before or {}).get(rank, lambda method: None))
            await self.coordinator.enlist(rank, handle)
            await self.coordinator.admit(rank, handle)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for line in self.path.read_text().splitlines() if (e := json.loads(line))["event"] == name]

    async def until(self, what: Callable[[], bool], seconds: float = 120.0) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not what():
            assert asyncio.get_running_loop().time() < end, self.path.read_text()
            await asyncio.sleep(0.02)

    def end(self) -> None:
        for task in list(self.coordinator._background):
            task.cancel()


def run(bench: Bench, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        try:
            await work()
        finally:
            bench.end()

    asyncio.run(whole())


def step(worker: Worker, count: int = 1) -> None:
    worker.run(Lease(0, ({"id": "a", "steps": count},)))


@pytest.mark.parametrize("recovers", [True, False])
def test_a_live_worker_that_refuses_to_catch_up_is_not_taken_for_dead(
    pair: list[Worker], tmp_path: Path, recovers: bool
) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl")
    refused = 0

    def befalls(method: str) -> None:
        """It is not ready when the commit comes, and when it is asked to catch up for the first time(s)."""
        nonlocal refused
        if method == "commit" and not refused:
            pair[1]._phase = "loading"
        elif method == "join" and pair[1]._phase == "loading":
            refused += 1
            if recovers and refused == 2:
                pair[1]._phase = "ready"

    async def work() -> None:
        await bench.admit({1: befalls})
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        assert outcome.committed and len(bench.events("commit_unanswered")) == 1
        await bench.until(lambda: bool(bench.events("caught_up") or bench.events("catch_up_refused")))
        assert not bench.events("worker_lost"), "it refused, and lives"
        assert (await bench.coordinator.status()).missing == ()
        if not recovers:
            assert "is loading, not ready" in bench.events("catch_up_refused")[0]["error"]
            pair[1]._phase = "ready"
            await asyncio.to_thread(step, pair[1])
            assert pair[1].state().epoch == 1, "it goes on with its old plan"
        again = await bench.coordinator.replan(ReplanRequest(budget=0.8, measure=False))
        assert again.committed and {change.rank for change in again.changes} == {0, 1}, again.reason

    run(bench, work)
    for worker in pair:
        step(worker)
    assert [worker.state().epoch for worker in pair] == [3, 3]
    assert len({worker.state().weight_bytes for worker in pair}) == 1


def no_answer(method: str) -> None:
    raise ray.exceptions.ActorUnavailableError("no answer", None)


class Reach:
    """What befalls a worker's calls: none is answered while it is ``lost``."""

    def __init__(self, *, lost: bool = False) -> None:
        self.lost = lost

    def __call__(self, method: str) -> None:
        if self.lost:
            no_answer(method)


@pytest.mark.parametrize("gone", [True, False])
def test_a_worker_that_died_before_it_joined_is_to_be_set_up_again(
    pair: list[Worker], tmp_path: Path, gone: bool
) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl")

    def befalls(method: str) -> None:
        if method == "join" and gone:
            raise ray.exceptions.ActorDiedError
        if method == "join":  # Ray has started it again
            pair[1]._phase = "starting"

    async def work() -> None:
        await bench.admit()
        handle = LocalHandle(pair[1], befalls)
        await bench.coordinator.enlist(1, handle)
        with pytest.raises(NotSetUp, match="died before it joined"):
            await bench.coordinator.admit(1, handle)
        if gone:
            lost = LocalHandle(pair[1], no_answer)
            await bench.coordinator.enlist(1, lost)
            with pytest.raises(OutOfReach):
                await bench.coordinator.admit(1, lost)
        assert [e["rank"] for e in bench.events("worker_joined")] == [0, 1], "once each, before"

    run(bench, work)


def test_a_worker_out_of_reach_for_a_while_is_found_again_and_told_what_it_missed(
    pair: list[Worker], tmp_path: Path
) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl")
    reach = Reach()

    async def work() -> None:
        await bench.admit({1: reach})
        assert await bench.coordinator.pause(True) == 2
        reach.lost = True
        await bench.until(lambda: bool(bench.events("worker_lost")))
        assert await bench.coordinator.pause(False) == 1
        refused = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        assert not refused.committed and "worker 1 is away" in refused.reason
        reach.lost = False
        await bench.until(lambda: bool(bench.events("worker_found")))
        await bench.until(lambda: not pair[1].state().paused)
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        assert outcome.committed and {change.rank for change in outcome.changes} == {0, 1}, outcome.reason

    run(bench, work)


def test_a_worker_that_a_commit_did_not_reach_takes_the_plan_when_it_is_found(
    pair: list[Worker], tmp_path: Path
) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl")
    reach = Reach()

    def befalls(method: str) -> None:
        reach.lost = reach.lost or (method == "commit" and not bench.events("commit_unanswered"))
        reach(method)

    async def work() -> None:
        await bench.admit({1: befalls})
        assert (await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))).committed
        await bench.until(lambda: bool(bench.events("worker_lost")))
        reach.lost = False
        await bench.until(lambda: bool(bench.events("worker_found")))
        for worker in pair:
            await asyncio.to_thread(step, worker)
        assert [worker.state().epoch for worker in pair] == [2, 2]
        assert len({worker.state().weight_bytes for worker in pair}) == 1

    run(bench, work)


def test_a_worker_that_does_not_answer_in_time_joins_when_it_answers(pair: list[Worker], tmp_path: Path) -> None:
    bench, told = Bench(pair, tmp_path / "events.jsonl"), threading.Event()

    def befalls(method: str) -> None:
        if method == "join" and not told.is_set():
            told.wait(120)
            no_answer(method)  # nobody waits for it any more

    async def work() -> None:
        coordinator, roster = bench.coordinator, bench.coordinator._roster
        first, second = LocalHandle(pair[0]), LocalHandle(pair[1], befalls)
        await coordinator.enlist(0, first)
        await coordinator.admit(0, first)
        await coordinator.enlist(1, second)
        patient, roster._options = roster._options, replace(roster._options, commit_timeout=0.5)
        with pytest.raises(TimeoutError):
            await coordinator.admit(1, second)
        roster._options = patient
        told.set()
        assert [event["rank"] for event in bench.events("worker_joined")] == [0]
        await bench.until(lambda: bool(bench.events("worker_found")))
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        assert outcome.committed and {change.rank for change in outcome.changes} == {0, 1}, outcome.reason

    run(bench, work)


def test_a_worker_that_is_found_keeps_its_own_plan_and_its_count_of_steps(pair: list[Worker], tmp_path: Path) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", lockstep=((0, 1),))
    reach = Reach()

    async def work() -> None:
        await bench.admit({1: reach})
        assert (await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))).committed
        for worker, steps in zip(pair, (3, 5), strict=True):  # the second is in the midst of a step, so to say
            await asyncio.to_thread(step, worker, steps)
        full = pair[1].state().weight_bytes
        reach.lost = True
        await bench.until(lambda: bool(bench.events("worker_lost")))
        pair[1]._manager._give_way()
        await asyncio.to_thread(step, pair[1])
        reach.lost = False
        await bench.until(lambda: bool(bench.events("worker_found")))
        await asyncio.to_thread(step, pair[1])
        assert pair[1].state().weight_bytes < full and pair[1].state().step_index == 7
        assert [event["rank"] for event in bench.events("gave_way")] == [1]

    run(bench, work)


def test_a_worker_that_ran_out_of_memory_keeps_to_what_it_could_hold(pair: list[Worker], tmp_path: Path) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl")
    short = [True]

    def run_out(module: torch.nn.Module, inputs: Any) -> None:
        if short.pop():
            raise torch.OutOfMemoryError("no room for activations")

    async def work() -> None:
        await bench.admit()
        assert (await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))).committed
        for worker in pair:
            await asyncio.to_thread(step, worker)
        full = pair[1].state().weight_bytes
        hook = pair[1]._task._model.blocks[2].register_forward_pre_hook(run_out)
        with pytest.raises(torch.OutOfMemoryError):
            await asyncio.to_thread(step, pair[1])
        hook.remove()
        await asyncio.to_thread(step, pair[1])
        less = pair[1].state()
        assert less.weight_bytes <= 0.75 * full + 1 and less.epoch == 2, "in the epoch that the run is in"
        await bench.until(lambda: bool(bench.events("gave_way")))
        told = bench.events("gave_way")[0]
        assert told["rank"] == 1 and told["budget"] == less.weight_bytes and "out of memory" in told["reason"]
        outcome = await bench.coordinator.replan(ReplanRequest(measure=False))
        assert outcome.committed, outcome.reason
        for worker in pair:
            await asyncio.to_thread(step, worker)
        assert [worker.state().epoch for worker in pair] == [3, 3]
        assert pair[1].state().weight_bytes <= less.weight_bytes
        assert (pair[0].state().budget, pair[1].state().budget) == (0.9, less.weight_bytes)
        handle = LocalHandle(pair[1])  # its process was started again: it joins on what was agreed
        await bench.coordinator.enlist(1, handle)
        await bench.coordinator.admit(1, handle)
        assert pair[1].state().budget == less.weight_bytes

    run(bench, work)


def test_a_lockstep_group_whose_member_has_no_work_stays_and_says_who_it_is(pair: list[Worker], tmp_path: Path) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", prepare_timeout=0.3, lockstep=((0, 1),))

    async def work() -> None:
        await bench.admit()
        await asyncio.to_thread(step, pair[0], 3)
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        assert not outcome.committed
        assert "worker 1" in outcome.reason and "stands before step 3" in outcome.reason
        assert "idle before step 0" in outcome.reason
        await asyncio.to_thread(step, pair[1], 3)
        again = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        assert again.committed and again.step_indexes == {0: 3, 1: 3}, again.reason

    run(bench, work)


def test_a_worker_that_comes_back_is_counted_on_with_its_group(pair: list[Worker], tmp_path: Path) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", lockstep=((0, 1),))

    async def work() -> None:
        await bench.admit()
        for worker in pair:
            await asyncio.to_thread(step, worker, 5)
        assert [worker.state().step_index for worker in pair] == [5, 5]
        pair[1]._gate.align(0)  # a new process counts from 0
        handle = LocalHandle(pair[1])
        await bench.coordinator.enlist(1, handle)
        await bench.coordinator.admit(1, handle)
        assert pair[1].state().step_index == 5

    run(bench, work)


def test_the_next_process_of_a_worker_found_at_work_is_not_taken_for_it(pair: list[Worker], tmp_path: Path) -> None:
    """A coordinator that starts again finds workers that were set up before it; once they have joined, they count as
    all others do: their next process joins when the driver has set it up."""
    bench = Bench(pair, tmp_path / "events.jsonl")

    async def work() -> None:
        await bench.admit()
        roster = bench.coordinator._roster
        member = roster.members[1]
        member.set_up, member.joined = True, False  # as it is found
        await bench.coordinator.admit(1, member.handle)
        state = pair[1].state()
        roster.mark_lost(member, "gone")
        roster._reconcile(member, replace(state, incarnation=state.incarnation + 1))
        assert not member.returning and member.lost
        roster._reconcile(member, state)
        assert member.returning
        await bench.until(lambda: not member.lost)

    run(bench, work)


def test_a_rollback_gives_a_worker_that_joined_since_the_old_budget(pair: list[Worker], tmp_path: Path) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl")

    async def work() -> None:
        coordinator = bench.coordinator
        handles = [LocalHandle(worker, lambda method: None) for worker in pair]
        await coordinator.enlist(0, handles[0])
        await coordinator.admit(0, handles[0])
        assert (await coordinator.replan(ReplanRequest(budget=0.7, measure=False))).committed
        await coordinator.enlist(1, handles[1])
        await coordinator.admit(1, handles[1])
        assert (await coordinator.rollback()).committed
        for worker in pair:
            await asyncio.to_thread(step, worker)
        first, second = (worker.state() for worker in pair)
        assert first.budget == second.budget == 0.5
        # Not equal: each has planned from times of its own, and of plans as quick the smaller one is taken.
        assert max(first.weight_bytes, second.weight_bytes) < 0.6 * second.total_bytes

    run(bench, work)


def test_an_abort_that_arrives_late_ends_its_own_round_alone(pair: list[Worker]) -> None:
    worker = pair[0]
    proposal = worker.propose(1, 0.9, None, None)
    worker.prepare(2, 2, proposal.plans, 0.9, 1.0)
    worker.abort(1)
    worker.commit(2)
    step(worker)
    assert worker.state().epoch == 2


@pytest.mark.parametrize("behind", [0, 1], ids=["this epoch's", "an earlier epoch's"])
def test_a_plan_is_rolled_back_for_its_own_refusal_alone(pair: list[Worker], tmp_path: Path, behind: int) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", rollback_steps=2)

    async def work() -> None:
        await bench.admit()
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))
        for worker in pair:
            await asyncio.to_thread(step, worker)
        manager = pair[1]._manager
        assert manager is not None and manager.epoch == outcome.epoch
        # As the model's thread says it of a plan that found no room, perhaps when the next one is staged already.
        manager.refused_epoch, manager.refusal = outcome.epoch - behind, "out of memory"
        if behind:
            for worker in pair:
                await asyncio.to_thread(step, worker, 3)
        await bench.until(lambda: bool(bench.events("measured") or bench.events("rolling_back")))
        assert [event["epoch"] for event in bench.events("rolling_back")] == ([] if behind else [outcome.epoch])

    run(bench, work)


def test_the_log_tells_a_run_from_its_start_to_its_end(pair: list[Worker], tmp_path: Path) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", rollback_steps=0)

    async def work() -> None:
        coordinator = bench.coordinator
        await bench.admit()
        await coordinator.progress(JobProgress(total=4, started=1.0))
        await coordinator.event("job_started", {"total": 4})
        await coordinator.replan(ReplanRequest(budget=0.9, reason="more"))
        await coordinator.replan(ReplanRequest(budget=0.8, dry_run=True))
        await coordinator.replan(ReplanRequest(budget=1000))
        await coordinator.pause(True)
        await coordinator.pause(False)
        await coordinator.rollback()
        await bench.until(lambda: bool(bench.events("measured")))
        await coordinator.lose(1, "gone")
        await coordinator.dismiss(1)
        await coordinator.event("job_finished", {"done": 4})

    run(bench, work)
    lines = [json.loads(line) for line in bench.path.read_text().splitlines()]
    assert all(line["time"] > 1.7e9 for line in lines)
    names = [line["event"] for line in lines]
    assert names[0] == "run_started" and lines[0]["options"]["poll"] == 0.05
    wanted = ["worker_enlisted", "worker_joined", "job_started", "replanned", "replan_tried", "replan_refused"]
    wanted += ["paused", "resumed", "replanned", "worker_lost", "worker_dismissed", "job_finished"]
    rest = iter(names)
    assert all(name in rest for name in wanted), names
    told = bench.events("replanned")[0]
    assert (
        told["reason"] == "more" and set(told["moved_bytes"]) == {"0", "1"} and told["budgets"] == {"0": 0.9, "1": 0.9}
    )


def test_waiting_for_a_boundary_follows_the_longest_time_between_two() -> None:
    video = WorkerState(0, 1, 1, "a", "GPU", "ready", step_seconds=200.0, longest_busy_seconds=290.0)
    quick = WorkerState(0, 1, 1, "a", "GPU", "ready", step_seconds=0.05, longest_busy_seconds=0.4)
    assert longest_between_boundaries(video) == 290.0
    assert hang_after(video, 600.0) == 4 * 290.0 and hang_after(quick, 600.0) == 600.0 == hang_after(None, 600.0)
    bench = Coordinator(CoordinatorOptions("unit"))
    bench._roster.members = {}
    assert bench._roster.boundary_timeout() == 30.0
