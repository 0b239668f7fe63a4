"""The step boundary as a gate: control threads close it, the model's thread stands before it.

[Note: the gate] Taking a lock around each step starves the waiting side on a busy process; a flag that the model's
thread looks at once a step does not. ``pass_boundary`` waits until the thread has come to a boundary, and stops nobody.
``close`` sets the flag and waits until the thread is parked at a boundary, or idle between two leases: an idle thread
that starts a lease parks at its first boundary. Who closes must open; the model's thread opens by itself after
``patience`` seconds, so that a coordinator that died between prepare and commit costs a delay, never the job.

[Note: lockstep] Workers that run every step together must not be stopped at different steps: one that stands before
step 7 would keep another one waiting within step 7. ``hold`` freezes each where it is, without waiting: the step that
it is in may end, none begins, and its number is known. ``close`` then names the largest of those numbers, up to which
the others run on before they stand.
"""

from __future__ import annotations

import threading
import time


class GateTimeout(RuntimeError):
    """The model's thread did not come to a step boundary in time."""


class StepStopped(Exception):
    """Raised at a step boundary in the model's thread when the run is being stopped."""


class StepGate:
    """One model thread calls ``enter``, ``boundary`` and ``leave``; any other threads call the rest."""

    def __init__(self, patience: float = 60.0) -> None:
        self._condition = threading.Condition()
        self._patience = patience
        self._closed_by: int | None = None
        self._awaited_by: int | None = None
        self._closed_at = 0.0
        self._stands_at = 0
        """While closed: steps with a smaller number still begin."""
        self._index = 0
        self._stands_for = patience
        self._paused = False
        self._stopped = False
        self._parked = False
        self._busy = False
        self._progress_at = time.monotonic()
        self._longest = 0.0
        self._steps = 0
        self._parked_at = 0.0

    # the model's thread

    def enter(self) -> None:
        """A lease begins."""
        with self._condition:
            self._busy = True
            self._progress_at = time.monotonic()

    def boundary(self, step_index: int = 0) -> None:
        """A step is about to begin; stands here while the gate is closed or the run is paused.

        Raises StepStopped after ``stop``.
        """
        with self._condition:
            self._progressed()
            if self._must_stand():
                self._stand()
            if self._stopped:
                raise StepStopped("the run is being stopped")
            self._steps += 1
            self._index += 1
            if self._awaited_by is not None:
                self._condition.notify_all()

    def leave(self) -> None:
        """The lease is over, in whatever way; the thread is idle."""
        with self._condition:
            self._progressed()
            self._busy = False
            self._condition.notify_all()

    def _progressed(self) -> None:
        now = time.monotonic()
        if self._busy:
            self._longest = max(self._longest, now - self._progress_at)
        self._progress_at = now

    def _must_stand(self) -> bool:
        return self._paused or (self._closed_by is not None and self._index >= self._stands_at)

    def _stand(self) -> None:
        began = self._parked_at = time.monotonic()
        self._parked = True
        self._condition.notify_all()
        while self._must_stand() and not self._stopped:
            left = None if self._paused else max(began, self._closed_at) + self._stands_for - time.monotonic()
            if left is not None and left <= 0:
                self._closed_by = None
                break
            self._condition.wait(left)
        self._parked = False
        self._progress_at = time.monotonic()

    # any other thread

    def hold(self, number: int) -> int:
        """Close the gate for round ``number`` at once: the step under way may end, none begins.

        Returns the number of the next step. See the module's note on lockstep.
        """
        with self._condition:
            self._close(number, self._index)
            return self._index

    def pass_boundary(self, number: int, timeout: float) -> None:
        """Wait, for round ``number``, until the model's thread comes to its next step boundary or its lease's end; it
        goes on. One that is idle or stands is at a boundary.

        Raises GateTimeout when it has not come within ``timeout`` seconds, or the round was ended by ``open``.
        """
        with self._condition:
            if self._awaited_by is not None and self._awaited_by > number:
                raise GateTimeout(f"round {number} is over: round {self._awaited_by} waits for the step boundary")
            self._awaited_by, began = number, self._steps

            def came() -> bool:
                return self._steps != began or self._parked or not self._busy or self._awaited_by != number

            there = self._condition.wait_for(came, timeout)
            if self._awaited_by != number:
                raise GateTimeout(f"round {number} was ended while it waited for the step boundary")
            self._awaited_by = None
            if not there:
                raise GateTimeout(self._why_late(timeout))

    def close(self, number: int, timeout: float, *, stands_at: int | None = None, then: float = 0.0) -> float:
        """Close the gate for round ``number`` and wait for the model's thread; the seconds that this took.

        stands_at: the number of the step before which it stands, up to which it runs on (None: the next one). then:
        seconds that it stands at least, if nobody opens.

        Raises GateTimeout (and opens again) when it does not come within ``timeout`` seconds.
        """
        began = time.monotonic()
        with self._condition:
            self._close(number, 0 if stands_at is None else stands_at)
            self._stands_for = max(self._patience, timeout + then)
            self._condition.notify_all()
            there = self._condition.wait_for(lambda: self._is_there() or self._closed_by != number, timeout)
            if self._closed_by != number:
                raise GateTimeout(f"round {number} was ended while it waited for the step boundary")
            if not there:
                self._closed_by = None
                self._condition.notify_all()
                raise GateTimeout(self._why_late(timeout))
        return time.monotonic() - began

    def _close(self, number: int, stands_at: int) -> None:
        if self._closed_by != number:
            self._closed_by, self._closed_at = number, time.monotonic()
        self._stands_at = stands_at

    def _is_there(self) -> bool:
        return (self._parked or not self._busy) and self._index >= self._stands_at

    def _why_late(self, timeout: float) -> str:
        if self._parked or not self._busy:
            what = "paused" if self._parked else "idle"
            return (
                f"its lockstep group stands before step {self._stands_at}, and it is {what} before step {self._index} "
                f"for {timeout:.1f} s"
            )
        return f"no step boundary within {timeout:.1f} s"

    def align(self, index: int) -> None:
        """The next step has this number."""
        with self._condition:
            self._index = index

    def is_closed_by(self, number: int) -> bool:
        """True while the gate stands closed for round ``number``.

        Once ``close`` has returned, no step runs while that holds: a thread that was idle and has begun a lease since
        is on its way to its first boundary, where it parks.
        """
        with self._condition:
            return self._closed_by == number

    def open(self, number: int) -> None:
        """Let the model's thread go on, if the gate is closed for round ``number`` or an earlier one, and whoever waits
        for its boundary for that round."""
        with self._condition:
            if self._closed_by is not None and self._closed_by <= number:
                self._closed_by = None
            if self._awaited_by is not None and self._awaited_by <= number:
                self._awaited_by = None
            self._condition.notify_all()

    def pause(self) -> None:
        """The model's thread stands at its next boundary until ``resume``, however long that takes."""
        with self._condition:
            self._paused = True

    def resume(self) -> None:
        """End ``pause``."""
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    def stop(self) -> None:
        """The model's thread gets StepStopped at its next boundary."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def parked(self) -> bool:
        return self._parked

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def steps(self) -> int:
        """Steps begun so far."""
        return self._steps

    @property
    def index(self) -> int:
        """The number of the next step: ``steps``, unless it was set by ``align``."""
        return self._index

    @property
    def longest_busy_seconds(self) -> float:
        """The longest time within a lease between two signs of progress so far."""
        return self._longest

    def parked_seconds(self) -> float:
        """How long the model's thread has been standing for the round that has closed the gate (0 when it does not)."""
        with self._condition:
            return time.monotonic() - max(self._parked_at, self._closed_at) if self._parked else 0.0

    def busy_seconds(self) -> float:
        """Seconds since the last sign of progress of a lease (0 when idle or parked)."""
        with self._condition:
            if not self._busy or self._parked:
                return 0.0
            return time.monotonic() - self._progress_at
