"""When a worker that dies is tried again, and when it is given up."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster import pool as pools
from cluster.pool import AT_ONCE, LIVES_WITHOUT_WORK, PATIENCE, NoWorkers, Slot, WorkerPool
from cluster.switching import NotSetUp, OutOfReach


class Handle:
    """Stands where a Ray actor's handle does; its calls go nowhere."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> object:
        return object()


class Lives:
    """One worker's slot under a clock of its own, which Ray's answers are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.made = 0
        monkeypatch.setattr(pools.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ray, "kill", lambda handle: None)
        monkeypatch.setattr(pools, "_processes", pools._known)
        self.pool = WorkerPool(self._make, workers=1, coordinator=Handle())

    def _make(self, rank: int) -> Handle:
        self.made += 1
        return Handle()

    @property
    def slot(self) -> Slot:
        return self.pool.slots[0]

    def fails(self, error: Exception, *, after: float) -> None:
        """The set-up's answer."""
        self.now += after
        self.slot.setup = None
        self.pool.lost(self.slot, error)  # type: ignore[arg-type]

    def dies(self, *, set_up_after: float = 20.0) -> None:
        """The worker is set up, works, and is killed."""
        self.now += set_up_after
        self.slot.setup, self.slot.phase = None, "ready"
        self.pool.lost(self.slot, unavailable())


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("The actor is temporarily unavailable", None)


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    return Lives(monkeypatch)


def test_calls_that_fail_while_ray_has_no_process_are_waited_out(lives: Lives) -> None:
    lives.dies()
    for _ in range(int(PATIENCE / 2.1)):
        lives.fails(unavailable(), after=2.1)
    assert lives.slot.phase == "starting" and lives.slot.deaths == 1 and lives.made == 1
    with pytest.raises(NoWorkers):
        lives.fails(unavailable(), after=3.0)


def test_a_first_process_that_ray_does_not_find_a_place_for_is_waited_for_too(lives: Lives) -> None:
    lives.fails(unavailable(), after=0.1)
    assert lives.slot.phase == "starting" and lives.slot.deaths == 0


def test_a_worker_that_dies_again_and_again_before_it_has_worked_is_given_up(lives: Lives) -> None:
    for _ in range(LIVES_WITHOUT_WORK - 1):
        lives.dies()
        lives.fails(unavailable(), after=1.5)
    with pytest.raises(NoWorkers):
        lives.dies()


def test_work_that_is_done_in_between_forgives_earlier_deaths(lives: Lives) -> None:
    for _ in range(3 * LIVES_WITHOUT_WORK):
        lives.dies()
        lives.pool.worked(lives.slot)
    assert lives.slot.phase == "starting"


def test_a_load_that_kills_its_process_counts_as_a_death(lives: Lives) -> None:
    for _ in range(LIVES_WITHOUT_WORK - 1):
        lives.fails(unavailable(), after=AT_ONCE + 20)
    with pytest.raises(NoWorkers):
        lives.fails(unavailable(), after=AT_ONCE + 20)


def test_an_actor_is_made_anew_only_where_ray_has_given_it_up(lives: Lives) -> None:
    lives.dies()
    lives.now += 20
    lives.slot.setup, lives.slot.phase = None, "joining"
    lives.pool.lost(lives.slot, NotSetUp("it died before it joined"))
    assert lives.made == 1
    lives.fails(ActorDiedError(), after=20)
    assert lives.made == 2


def test_the_end_waits_for_the_process_of_one_that_is_asked_again(lives: Lives) -> None:
    """It hangs: it does not answer, and its store is in use until it is gone."""
    hung = subprocess.Popen(["sleep", "1"])
    threading.Thread(target=hung.wait).start()  # else it would stay as a zombie
    lives.slot.setup, lives.slot.phase, lives.slot.process = None, "joining", psutil.Process(hung.pid)
    lives.pool.lost(lives.slot, OutOfReach("no answer"))
    assert lives.slot.phase == "starting" and psutil.pid_exists(hung.pid)
    lives.pool.close(timeout=0)
    assert not psutil.pid_exists(hung.pid)
