"""A coordinator that is started again beside workers that it must find: real workers, two coordinators one after the
other, in one process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.messages import Budget, ReplanRequest
from cluster.worker import Worker
from tests.cluster.local_handles import LocalHandle
from tests.cluster.test_rounds import Bench, Reach, no_answer, pair, run, step
from tests.cluster.test_worker import start_of

__all__ = ["pair"]


class Restart:
    """A coordinator before, and one started again after it. ``silent``: workers that do not answer until ``answer``."""

    def __init__(self, workers: list[Worker], path: Path, monkeypatch: pytest.MonkeyPatch, *, silent: str = "") -> None:
        self.workers, self._path, self._silent = workers, path, silent
        self._answers = threading.Event()
        self.befalls: dict[int, Callable[[str], None]] = {}
        self.handles = {
            f"worker-{rank}": LocalHandle(worker, self._before(rank, str(rank) in silent))
            for rank, worker in enumerate(workers)
        }
        named = [{"name": name, "namespace": "unit"} for name in [*self.handles, "worker-9"]]
        monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: named)
        monkeypatch.setattr(ray, "get_actor", self._get_actor)

    def _get_actor(self, name: str, namespace: str) -> LocalHandle:
        if name not in self.handles:
            raise ValueError(f"no actor {name}")
        return self.handles[name]

    def _before(self, rank: int, silent: bool) -> Callable[[str], None]:
        def before(method: str) -> None:
            assert not silent or self._answers.wait(120)
            self.befalls.get(rank, lambda method: None)(method)

        return before

    def answer(self) -> None:
        self._answers.set()

    def first(self, work: Callable[[Bench], Any]) -> None:
        """A coordinator admits the workers, moves them to epoch 2 with a budget of 0.9, and does ``work``."""
        bench = Bench(self.workers, self._path / "events-before.jsonl", automatic=False)

        async def whole() -> None:
            await bench.admit()
            assert (await bench.coordinator.replan(ReplanRequest(budget=0.9, measure=False))).epoch == 2
            await work(bench)

        run(bench, whole)

    def again(self, work: Callable[[Bench], Any]) -> Bench:
        """Another one, started again."""
        timeout = 3.0 if self._silent else 120.0
        bench = Bench(self.workers, self._path / "events.jsonl", automatic=False, learn_timeout=timeout)
        bench.coordinator._recover = True

        async def whole() -> None:
            try:
                await work(bench)
            finally:
                self.answer()  # no thread waits for it any more

        run(bench, whole)
        return bench

    def decide(
        self, *budgets: Budget, prepared: tuple[int, ...] | None = None, told: tuple[int, ...], ahead: int = 0
    ) -> None:
        """The next round: its commit reaches those that are ``told``, and the coordinator dies. budgets: one for all,
        or each one's. prepared: None: all. ahead: milliseconds of its node's clock."""
        number, epoch = int(time.time() * 1000) + ahead, self.workers[told[0]].state().agreed.epoch + 1
        for rank in range(len(self.workers)) if prepared is None else prepared:
            worker, budget = self.workers[rank], budgets[rank % len(budgets)]
            worker.prepare(number, epoch, worker._engines.solve(budget, None), budget, 5.0, None)
        for rank in told:
            self.workers[rank].commit(number)

    def agreed(self) -> list[tuple[int, Budget]]:
        return [(worker.state().agreed.epoch, worker.state().budget) for worker in self.workers]


async def nothing(bench: Bench) -> None:
    pass


def test_it_keeps_a_pause_and_learns_of_a_late_worker_later(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart, late = Restart(pair, tmp_path, monkeypatch), Reach(lost=True)
    restart.befalls[1] = late

    async def pause(bench: Bench) -> None:
        late.lost = False
        assert await bench.coordinator.pause(True) == 2
        late.lost = True

    async def work(bench: Bench) -> None:
        coordinator = bench.coordinator
        pair[1].pause(False)  # it was told otherwise, and then the coordinator died
        assert (await coordinator.status()).paused
        await asyncio.sleep(0.3)  # some looks at the workers
        assert pair[0].state().paused and (await coordinator.status()).paused
        late.lost = False
        await bench.until(lambda: bool(bench.events("worker_found")))
        await bench.until(lambda: pair[1].state().paused)
        assert await coordinator.pause(False) == 2
        outcome = await coordinator.replan(ReplanRequest(budget=0.8, measure=False))
        assert outcome.committed and {change.rank for change in outcome.changes} == {0, 1}, outcome.reason
        assert outcome.epoch == 3

    restart.first(pause)
    restart.again(work)


def test_it_completes_a_commit_that_reached_one_worker(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(pair, tmp_path, monkeypatch)
    restart.first(nothing)
    restart.decide(0.7, told=(1,))
    assert restart.agreed() == [(2, 0.9), (3, 0.7)]

    async def work(bench: Bench) -> None:
        assert (await bench.coordinator.status()).epoch == 3
        await bench.until(lambda: bool(bench.events("commit_completed")))
        assert restart.agreed() == [(3, 0.7), (3, 0.7)]
        for worker in pair:
            await asyncio.to_thread(step, worker)
        assert [worker.state().epoch for worker in pair] == [3, 3]
        assert all(state.weight_bytes <= 0.7 * state.total_bytes for state in (worker.state() for worker in pair))
        assert (await bench.coordinator.rollback()).reason == "there is no earlier plan to go back to"

    bench = restart.again(work)
    assert not bench.events("replanned")


@pytest.mark.parametrize("stale", [False, True])
def test_a_round_puts_all_on_one_epoch_where_a_commit_cannot_be_completed(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    restart = Restart(pair, tmp_path, monkeypatch)
    restart.first(nothing)
    if stale:  # worker 0 is prepared for an earlier round than the one that was decided, and did not hear of its end
        prepare(pair[0], 0.5)
    restart.decide(0.7, prepared=(1,), told=(1,))

    async def work(bench: Bench) -> None:
        assert (await bench.coordinator.status()).epoch == 3
        await bench.until(lambda: bool(bench.events("replanned")))
        assert bench.events("replanned")[0]["reason"] == "workers disagreed on the epoch"
        assert restart.agreed() == [(4, 0.9), (4, 0.7)], "each on its own budget"

    bench = restart.again(work)
    assert not bench.events("commit_completed")


def prepare(worker: Worker, budget: Budget) -> None:
    """For a round of which nothing else is heard."""
    worker.prepare(int(time.time() * 1000) - 1, 3, worker._engines.solve(budget, None), budget, 5.0, None)


def test_it_waits_for_nobody_and_takes_up_the_later_epoch_of_one_that_was_silent(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(pair, tmp_path, monkeypatch, silent="1")
    restart.first(nothing)
    restart.decide(0.7, told=(1,))
    failures = ["join"]

    def no_answer_once(method: str) -> None:
        if method in failures:
            failures.remove(method)
            no_answer(method)

    restart.befalls[1] = no_answer_once

    async def work(bench: Bench) -> None:
        began = time.monotonic()
        status = await bench.coordinator.status()
        assert time.monotonic() - began < 25, "below commit_timeout"
        assert status.epoch == 2 and "no answer within 3.0 s" in status.missing[0]
        restart.answer()
        await bench.until(lambda: bool(bench.events("commit_completed")))
        assert restart.agreed() == [(3, 0.7), (3, 0.7)] and not failures
        status = await bench.coordinator.status()
        assert status.epoch == 3 and not status.missing
        assert (await bench.coordinator.replan(ReplanRequest(measure=False))).epoch == 4

    restart.again(work)


def test_a_silent_worker_that_is_behind_takes_the_budget_of_the_epoch(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(pair, tmp_path, monkeypatch, silent="1")
    restart.first(nothing)
    restart.decide(0.7, prepared=(0,), told=(0,))

    async def work(bench: Bench) -> None:
        assert (await bench.coordinator.status()).epoch == 3
        restart.answer()
        await bench.until(lambda: bool(bench.events("worker_found")))
        assert restart.agreed() == [(3, 0.7), (3, 0.7)]
        for worker in pair:
            await asyncio.to_thread(step, worker)
        assert all(state.weight_bytes <= 0.7 * state.total_bytes for state in (worker.state() for worker in pair))

    restart.again(work)


def test_a_pause_and_the_epoch_are_kept_when_nobody_answers_in_time(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(pair, tmp_path, monkeypatch, silent="01")

    async def pause(bench: Bench) -> None:
        assert await bench.coordinator.pause(True) == 2

    async def work(bench: Bench) -> None:
        assert (await bench.coordinator.status()).epoch == 0
        restart.answer()
        await bench.until(lambda: len(bench.events("worker_found")) == 2)
        status = await bench.coordinator.status()
        assert status.epoch == 2 and status.paused
        assert all(worker.state().paused for worker in pair)
        assert (await bench.coordinator.replan(ReplanRequest(budget=0.8, measure=False))).epoch == 3

    restart.first(pause)
    restart.again(work)


def test_a_clock_that_is_behind_and_a_worker_that_the_driver_brings_back_stop_no_round(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(pair, tmp_path, monkeypatch, silent="1")
    restart.first(nothing)
    restart.decide(0.7, told=(1,), ahead=300_000)
    pair[0]._switching._round = 0  # as a new process has it
    pair[0]._switching._prepared = None

    async def work(bench: Bench) -> None:
        assert (await bench.coordinator.status()).epoch == 2
        handle = LocalHandle(pair[1])
        await bench.coordinator.enlist(1, handle)
        await bench.coordinator.admit(1, handle)
        await bench.until(lambda: bool(bench.events("replanned")))
        assert [epoch for epoch, _ in restart.agreed()] == [4, 4]
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.8, measure=False))
        assert outcome.committed and outcome.epoch == 5, outcome.reason

    restart.again(work)


def test_a_worker_that_is_out_of_reach_for_a_moment_in_a_round_brings_no_second_one(
    pair: list[Worker], tmp_path: Path
) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", automatic=False)
    short: list[str] = []

    def befalls(method: str) -> None:
        if method == "propose":
            short.append("state")
            time.sleep(0.5)
        elif method in short:
            short.remove(method)
            no_answer(method)

    async def work() -> None:
        await bench.admit({1: befalls})
        outcome = await bench.coordinator.replan(ReplanRequest(budget=0.8, measure=False))
        assert outcome.committed and outcome.epoch == 2
        await bench.until(lambda: bool(bench.events("worker_found")))
        await asyncio.sleep(0.3)
        assert [worker.state().agreed.epoch for worker in pair] == [2, 2]
        assert len(bench.events("replanned")) == 1

    run(bench, work)


@pytest.mark.parametrize("away", [1, 0])
def test_a_decision_is_completed_also_when_one_that_has_heard_of_it_or_has_not_is_out_of_reach_for_a_moment(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    restart, reach = Restart(pair, tmp_path, monkeypatch), Reach(lost=False)
    restart.befalls[away] = reach
    restart.first(nothing)
    restart.decide(0.7, told=(1,))

    async def work(bench: Bench) -> None:
        agree = bench.coordinator._recovery.agree
        bench.coordinator._recovery.agree = lambda: None  # type: ignore[method-assign]
        await bench.coordinator.start()
        reach.lost = True
        await bench.until(lambda: bool(bench.events("worker_lost")))
        bench.coordinator._recovery.agree = agree  # type: ignore[method-assign]
        agree()
        await asyncio.sleep(0.4)  # some tries
        assert bench.coordinator._replans.apart and restart.agreed()[0] == (2, 0.9)
        reach.lost = False
        await bench.until(lambda: bool(bench.events("worker_found")))
        await bench.until(lambda: bool(bench.events("commit_completed")))
        await bench.until(lambda: not bench.coordinator._replans.apart)
        assert restart.agreed() == [(3, 0.7), (3, 0.7)]

    bench = restart.again(work)
    assert not bench.events("replanned")


def test_workers_that_were_silent_keep_each_its_own_budget_of_the_epoch(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = Worker(start_of(rank=2, store_namespace=pair[0]._start.store_namespace))
    third.setup()
    try:
        restart = Restart([*pair, third], tmp_path, monkeypatch, silent="12")
        restart.first(nothing)
        restart.decide(0.9, 0.7, 0.8, told=(1, 2))

        async def work(bench: Bench) -> None:
            assert (await bench.coordinator.status()).epoch == 2
            restart.answer()
            await bench.until(lambda: len(bench.events("worker_found")) == 2)
            await bench.until(lambda: not bench.coordinator._replans.apart)
            assert restart.agreed() == [(3, 0.9), (3, 0.7), (3, 0.8)]

        restart.again(work)
    finally:
        third.close()


@pytest.mark.parametrize("first", [True, False])
def test_a_worker_that_gave_way_before_it_joined_changes_nothing_for_the_others(
    pair: list[Worker], tmp_path: Path, first: bool
) -> None:
    bench = Bench(pair, tmp_path / "events.jsonl", automatic=False)
    gave_way = pair[0 if first else 1]
    before = [worker.state().weight_bytes for worker in pair]
    assert gave_way._manager is not None
    gave_way._manager._give_way()
    step(gave_way)
    assert gave_way.state().epoch == 2 and gave_way.state().agreed.epoch == 0

    async def work() -> None:
        await bench.admit()
        await asyncio.sleep(0.3)
        for worker in pair:
            await asyncio.to_thread(step, worker)
        assert [worker.state().agreed.epoch for worker in pair] == ([2, 2] if first else [1, 1])
        after = [worker.state().weight_bytes for worker in pair]
        other = 1 if first else 0
        assert after[other] == before[other] and pair[other].state().budget == 0.5
        assert after[1 - other] < before[1 - other]
        assert not bench.events("replanned")

    run(bench, work)
