"""Joules an item: what the GPUs' energy counters say over what the job has done."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.messages import JobProgress, WorkerState


class EnergyMeter:
    """Counts from the first look after the job's first lease went out. Workers on one GPU share its counter."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._spent = 0.0
        self._done_before: int | None = None
        self._known = False

    def look(self, states: Iterable[WorkerState], job: JobProgress) -> None:
        """Take the counters as the workers told them last. A counter that has gone back (the driver was loaded anew)
        counts from there."""
        if not job.started:
            return
        if self._done_before is None:
            self._done_before = job.done
        for state in states:
            if state.gpu is None or state.gpu.energy_joules is None:
                continue
            now = state.gpu.energy_joules
            if state.gpu.uuid in self._last:
                self._spent += max(now - self._last[state.gpu.uuid], 0.0)
                self._known = True
            self._last[state.gpu.uuid] = now

    def joules_an_item(self, job: JobProgress) -> float | None:
        """Of all GPUs together, over the items that were done since; None without a counter or an item."""
        done = job.done - (self._done_before or 0)
        return self._spent / done if self._known and done > 0 else None
