"""A worker that takes part in rounds and does nothing else. Imports no torch: 32 of them fit a small machine.

Its step gate is the real one. What it sends has the fields that the coordinator looks at.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from cluster.gate import StepGate


class LightWorker:
    """step_seconds: how long each of its steps lasts; 0: it runs none (a bare round)."""

    def __init__(self, rank: int, step_seconds: float = 0.0) -> None:
        self._rank = rank
        self._gate = StepGate()
        self._epoch = 1
        self._prepared: tuple[int, int] | None = None
        self._stop = threading.Event()
        if step_seconds > 0:
            threading.Thread(target=self._steps, args=(step_seconds,), daemon=True).start()

    def _steps(self, seconds: float) -> None:
        self._gate.enter()
        while not self._stop.is_set():
            self._gate.boundary()
            time.sleep(seconds)

    def state(self) -> Any:
        """The fields of WorkerState that a round needs."""
        return SimpleNamespace(
            rank=self._rank,
            epoch=self._epoch,
            refusal="",
            steps=self._gate.steps,
            step_seconds=0.0,
            incarnation=1,
            longest_busy_seconds=self._gate.longest_busy_seconds,
            slowest_step_seconds=0.0,
            weight_bytes=0,
            streamed_bytes=0,
            gpu=None,
            engines=(),
        )

    def propose(self, number: int, budget: Any, plans: Any, transfer: Any, wait: float) -> Any:
        """A plan of no bytes."""
        empty = SimpleNamespace(weight_bytes=0, resident_bytes=0, streamed_bytes=0, prediction=None)
        plans = {f"worker-{self._rank}": empty}
        return SimpleNamespace(
            rank=self._rank, plans=plans, plan=empty, other_bytes=0, before_step_seconds=0.0, moved_bytes=0
        )

    def prepare(self, number: int, epoch: int, plans: Any, budget: Any, timeout: float, stands_at: int | None) -> None:
        """Come to a step boundary."""
        assert stands_at is None, "light workers are in no lockstep group"
        self._gate.pass_boundary(number, timeout)
        self._prepared = (number, epoch)

    def commit(self, number: int) -> float:
        """Go on with the new epoch; the seconds that the steps stood: none."""
        assert self._prepared is not None and self._prepared[0] == number
        self._epoch = self._prepared[1]
        return 0.0

    def abort(self, number: int) -> None:
        """Go on with the old epoch."""
        self._gate.open(number)
