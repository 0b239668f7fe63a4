"""What a cold start costs: from a model in host memory to compiled steps under a plan. Seconds."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.stopwatch import synchronize

RESIDENT = "resident"


@dataclass
class Start:
    """One contender's start; every figure but the parts is counted from its beginning.

    planned_seconds: until the first compiled step under a plan that knows compiled times; of the resident model: until
        its second step. compile_seconds: what Dynamo and the backend took of it. parts: what each stage took.
    graphs: made until then; later_graphs: made by the replans and steps of the whole measurement after it.
    """

    contender: str
    workload: str
    first_output_seconds: float = 0.0
    compiled_output_seconds: float = 0.0
    planned_seconds: float = 0.0
    compile_seconds: float = 0.0
    graphs: int = 0
    later_graphs: int = 0
    compiled: int = 0
    shared: int = 0
    eager: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return dataclasses.asdict(self)


class StartClock:
    """Fills a ``Start`` as it goes."""

    def __init__(self, start: Start, device: torch.device) -> None:
        self.start = start
        self._device = device
        self._began = self._part = time.perf_counter()

    def step_done(self) -> None:
        """A step of the model has been called; waits for it."""
        synchronize(self._device)
        now = time.perf_counter() - self._began
        self.start.first_output_seconds = self.start.first_output_seconds or now
        if graphs_made():
            self.start.compiled_output_seconds = self.start.compiled_output_seconds or now

    def part_done(self, name: str) -> None:
        """What was done since the last part was ``name``."""
        now = time.perf_counter()
        self.start.parts[name] = now - self._part
        self._part = now

    def planned(self) -> float:
        """The start is over; seconds that it took."""
        self.start.planned_seconds = time.perf_counter() - self._began
        self.start.compile_seconds, self.start.graphs = compile_seconds(), graphs_made()
        return self.start.planned_seconds


def graphs_made() -> int:
    """Graphs that Dynamo made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_seconds() -> float:
    """Seconds that this process spent in Dynamo and what is under it."""
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))
