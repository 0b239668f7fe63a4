"""The step gate: who stands when, and that nobody stands for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cluster.gate import GateTimeout, StepGate, StepStopped


def await_that(what: Callable[[], bool]) -> None:
    """Machines of tests are busy: a thread may get its turn seconds late."""
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


class ModelThread:
    """Runs leases of ``steps`` steps through a gate and counts the steps that it began. ``let_step_end``: the first
    step lasts until it is set (None: as long as any)."""

    def __init__(
        self,
        gate: StepGate,
        steps: int = 10**6,
        step_seconds: float = 0.001,
        let_step_end: threading.Event | None = None,
    ) -> None:
        self.begun = 0
        self.error: BaseException | None = None
        self._gate, self._steps, self._seconds, self._let_step_end = gate, steps, step_seconds, let_step_end
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._gate.enter()
        try:
            for step in range(self._steps):
                self._gate.boundary(step)
                self.begun += 1
                if step == 0 and self._let_step_end is not None:
                    self._let_step_end.wait(120)
                time.sleep(self._seconds)
        except StepStopped as stopped:
            self.error = stopped
        finally:
            self._gate.leave()

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


def test_no_step_begins_while_the_gate_is_closed() -> None:
    gate = StepGate()
    thread = ModelThread(gate)
    for number in range(1, 6):
        gate.close(number, timeout=30)
        assert gate.is_closed_by(number)
        begun = thread.begun
        time.sleep(0.02)
        assert thread.begun == begun
        gate.open(number)
        await_that(lambda begun=begun: thread.begun > begun)  # type: ignore[misc]
    gate.stop()
    thread.join()


def test_an_idle_thread_counts_as_standing_and_parks_at_its_first_step() -> None:
    gate = StepGate()
    gate.close(1, timeout=120)
    thread = ModelThread(gate, steps=3)
    await_that(lambda: gate.parked)
    assert thread.begun == 0
    gate.open(1)
    thread.join()
    assert thread.begun == 3


def test_a_lease_that_begins_while_the_gate_is_closed_still_keeps_to_it() -> None:
    """Between the start of a lease and its first step there is work of the task's own (texts to tokens)."""
    gate = StepGate()
    gate.close(1, timeout=0.1)
    gate.enter()
    assert gate.busy and not gate.parked and gate.is_closed_by(1)
    gate.leave()


def test_close_gives_up_on_a_step_that_does_not_end_and_leaves_the_gate_open() -> None:
    gate, ends = StepGate(), threading.Event()
    thread = ModelThread(gate, steps=1, let_step_end=ends)
    await_that(lambda: thread.begun == 1)
    with pytest.raises(GateTimeout, match=r"0\.1 s"):
        gate.close(1, timeout=0.1)
    assert not gate.is_closed_by(1)
    ends.set()
    thread.join()
    assert thread.begun == 1


def test_a_closer_that_vanished_costs_patience_only() -> None:
    gate = StepGate(patience=0.1)
    gate.close(1, timeout=0.1)
    thread = ModelThread(gate, steps=3)
    thread.join()
    assert thread.begun == 3
    assert not gate.is_closed_by(1), "a late commit must see that nobody stands any more"


def test_pause_outlasts_patience_and_a_round_in_the_middle() -> None:
    gate = StepGate(patience=0.05)
    thread = ModelThread(gate)
    gate.pause()
    await_that(lambda: gate.parked)
    time.sleep(0.2)
    begun = thread.begun
    assert gate.parked
    gate.close(1, timeout=0.1)
    gate.open(1)
    time.sleep(0.05)
    assert thread.begun == begun
    gate.resume()
    await_that(lambda: thread.begun > begun)
    gate.stop()
    thread.join()
    assert thread.error is not None


def test_opening_an_older_round_does_not_open_a_newer_one() -> None:
    gate = StepGate()
    gate.close(5, timeout=0.1)
    gate.open(4)
    assert gate.is_closed_by(5)


def test_a_hang_shows_as_busy_seconds_and_standing_does_not() -> None:
    gate, ends = StepGate(), threading.Event()
    thread = ModelThread(gate, steps=2, let_step_end=ends)
    await_that(lambda: thread.begun == 1)
    time.sleep(0.15)
    assert gate.busy_seconds() > 0.1
    gate.pause()
    ends.set()
    await_that(lambda: gate.parked)
    assert gate.busy_seconds() == 0
    gate.resume()
    thread.join()
    assert gate.busy_seconds() == 0


def test_held_threads_run_on_to_the_largest_step_and_no_further() -> None:
    gates, ends = [StepGate(), StepGate()], threading.Event()
    threads = [ModelThread(gates[0]), ModelThread(gates[1], let_step_end=ends)]
    await_that(lambda: gates[0].index > 40 and threads[1].begun == 1)
    held = [gate.hold(1) for gate in gates]
    assert held[0] > held[1] + 30, "one is far behind"
    with pytest.raises(GateTimeout, match="no step boundary"):
        gates[1].close(1, timeout=0.03, stands_at=max(held))
    assert [gate.hold(2) for gate in gates] == held
    ends.set()
    await_that(lambda: gates[1].parked and [thread.begun for thread in threads] == held)
    time.sleep(0.05)
    assert [thread.begun for thread in threads] == held, "none begins a step while it is held"
    for gate in reversed(gates):
        gate.close(2, timeout=120, stands_at=max(held))
    assert [gate.index for gate in gates] == [max(held)] * 2 and all(gate.parked for gate in gates)
    for gate in gates:
        gate.open(2)
        gate.stop()
    for thread in threads:
        thread.join()


def test_a_hold_that_nobody_follows_up_costs_patience_only() -> None:
    gate = StepGate(patience=0.1)
    thread = ModelThread(gate, steps=20)
    gate.hold(1)
    thread.join()
    assert thread.begun == 20 and gate.index == 20


def test_steps_are_numbered_anew_where_a_group_is_joined() -> None:
    gate = StepGate()
    gate.align(100)
    ModelThread(gate, steps=3).join()
    assert gate.index == 103 and gate.steps == 3
    assert 0 < gate.longest_busy_seconds < 30


def test_who_waits_for_a_boundary_stops_nobody() -> None:
    gate = StepGate()
    gate.pass_boundary(1, timeout=0.0)  # idle: it is at one
    thread = ModelThread(gate, step_seconds=0.2, steps=4)
    await_that(lambda: gate.busy)
    began = gate.steps
    gate.pass_boundary(2, timeout=120)
    assert gate.steps > began or not gate.busy
    thread.join()
    assert thread.begun == 4 and gate.parked_seconds() == 0


def test_a_boundary_that_does_not_come_in_time_is_said_and_an_ended_round_waits_no_longer() -> None:
    gate, ends = StepGate(), threading.Event()
    thread = ModelThread(gate, steps=2, let_step_end=ends)
    await_that(lambda: thread.begun == 1)
    with pytest.raises(GateTimeout, match=r"no step boundary within 0\.1 s"):
        gate.pass_boundary(3, timeout=0.1)
    told: list[str] = []

    def of_a_round_that_is_ended() -> None:
        with pytest.raises(GateTimeout, match="round 4 was ended") as error:
            gate.pass_boundary(4, timeout=120)
        told.append(str(error.value))

    waiting = threading.Thread(target=of_a_round_that_is_ended)
    waiting.start()
    await_that(lambda: gate._awaited_by == 4)
    with pytest.raises(GateTimeout, match="round 2 is over"):
        gate.pass_boundary(2, timeout=120)
    gate.open(4)
    waiting.join(120)
    assert told
    ends.set()
    gate.stop()
    thread.join()
