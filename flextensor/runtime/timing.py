"""Transfer, compute and wait of each visit, read from events without making anybody wait.

A ``Recorder`` hands the loader a ``StepTrace`` for each step that is to be timed; once all its events are done it
becomes ``StepTimes`` (plain numbers). Seconds everywhere.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flextensor.runtime.device import Device, Event, Stream

KEPT_STEPS = 256


@dataclass(frozen=True)
class CopySpan:
    """One batch of copies for one visit, on the copy stream; seconds after the step's first arrival."""

    visit: int
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True)
class StepTimes:
    """One step as it happened. Tuples have one entry a visit; times are seconds after the first visit's arrival.

    arrive: the compute stream reached the visit. start: its weights were there. end: it was done.
    host: seconds that the host took to issue it. outside: seconds on the compute stream of the model's own call before
    the first visit and after the last.
    """

    kind: str
    arrive: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    host: tuple[float, ...]
    copies: tuple[CopySpan, ...]
    outside: float = 0.0

    @property
    def compute(self) -> tuple[float, ...]:
        """Device seconds of each visit."""
        return tuple(e - s for s, e in zip(self.start, self.end, strict=True))

    @property
    def wait(self) -> tuple[float, ...]:
        """Seconds that each visit stalled for its weights."""
        return tuple(s - a for a, s in zip(self.arrive, self.start, strict=True))


class StepTrace:
    """The events of one step while it is under way."""

    def __init__(self, recorder: Recorder, visits: int) -> None:
        self._recorder = recorder
        self.kind = ""
        self._arrive: list[Event | None] = [None] * visits
        self._start: list[Event | None] = [None] * visits
        self._end: list[Event | None] = [None] * visits
        self._host_start = [0.0] * visits
        self._host = [0.0] * visits
        self._copies: list[tuple[int, int, Event, Event]] = []
        self._begin: Event | None = None
        self._close: Event | None = None

    def begin(self, stream: Stream) -> None:
        """The model's call starts."""
        self._begin = self._mark(stream)

    def close(self, stream: Stream) -> None:
        """The model's call is over."""
        self._close = self._mark(stream)

    def arrive(self, visit: int, stream: Stream) -> None:
        self._arrive[visit] = self._mark(stream)

    def start(self, visit: int, stream: Stream) -> None:
        self._start[visit] = self._mark(stream)
        self._host_start[visit] = time.perf_counter()

    def end(self, visit: int, stream: Stream) -> None:
        self._host[visit] = time.perf_counter() - self._host_start[visit]
        self._end[visit] = self._mark(stream)

    def copy_begin(self, stream: Stream) -> Event:
        return self._mark(stream)

    def copy_end(self, visit: int, nbytes: int, begin: Event, stream: Stream) -> None:
        self._copies.append((visit, nbytes, begin, self._mark(stream)))

    def _mark(self, stream: Stream) -> Event:
        event = self._recorder.take_event()
        stream.record(event)
        return event

    @property
    def complete(self) -> bool:
        """Every visit was seen from arrival to end."""
        return None not in self._end and None not in self._arrive

    def events(self) -> list[Event]:
        spans = [event for _, _, begin, end in self._copies for event in (begin, end)]
        marks = (*self._arrive, *self._start, *self._end, self._begin, self._close)
        return [e for e in marks if e is not None] + spans

    def times(self) -> StepTimes:
        """The numbers; every event must be done."""
        first = self._arrive[0]
        assert first is not None

        def at(events: Sequence[Event | None]) -> tuple[float, ...]:
            return tuple(first.elapsed_seconds(event) for event in events)

        copies = tuple(
            CopySpan(visit, nbytes, first.elapsed_seconds(begin), first.elapsed_seconds(end))
            for visit, nbytes, begin, end in self._copies
        )
        arrive, start, end = at(self._arrive), at(self._start), at(self._end)
        outside = 0.0
        if self._begin is not None and self._close is not None:
            outside = max(self._begin.elapsed_seconds(self._close) - end[-1], 0.0)
        return StepTimes(self.kind, arrive, start, end, tuple(self._host), copies, outside)


class Recorder:
    """Takes samples of steps. ``every``: 1 times each step, n each n-th, 0 none."""

    def __init__(self, device: Device, *, every: int) -> None:
        self.every = every
        self.steps: deque[StepTimes] = deque(maxlen=KEPT_STEPS)
        self._device = device
        self._free: list[Event] = []
        self._pending: deque[StepTrace] = deque()
        self._boundaries: deque[Event] = deque()
        self.step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._count = 0
        self._captured: StepTrace | None = None
        self._in_graphs: list[StepTrace] = []
        """Every step captured under the plan in force: graphs that may be replayed record their events."""
        self._unclosed: StepTrace | None = None
        self.capture_events = False
        """Time captured steps with external events (``offload_timing="cuda_graph"``)."""

    def take_event(self) -> Event:
        return self._free.pop() if self._free else self._device.new_event(timed=True)

    def begin_step(self, visits: int, kind: str, stream: Stream, *, capturing: bool = False) -> StepTrace | None:
        """Called at each step's start; a trace when this step is to be timed."""
        self._unclosed = None
        if capturing:
            self._captured = None
            if not self.capture_events:
                return None
            trace = self._captured = StepTrace(self, visits)
            trace.kind = kind
            trace.begin(stream)
            self._in_graphs.append(trace)
            return trace
        self.harvest()
        if self.every == 0:
            return None
        boundary = self.take_event()
        stream.record(boundary)
        self._boundaries.append(boundary)
        self._count += 1
        if self._count % self.every or len(self._pending) > 8:
            return None
        trace = StepTrace(self, visits)
        trace.kind = kind
        trace.begin(stream)
        return trace

    def end_step(self, trace: StepTrace) -> None:
        """The step's last visit has been issued."""
        if trace.complete:
            self._unclosed = trace
            if trace is not self._captured:
                self._pending.append(trace)

    def close_step(self, stream: Stream) -> None:
        """The model's call is over: what it did after its last visit counts too."""
        if self._unclosed is not None:
            self._unclosed.close(stream)
            self._unclosed = None

    def harvest(self, *, wait: bool = False) -> None:
        """Turn what is done into numbers; with ``wait``, everything that was recorded."""
        while self._pending:
            trace = self._pending[0]
            events = trace.events()
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(event.query() for event in events):
                break
            self._pending.popleft()
            self.steps.append(trace.times())
            self._free.extend(events)
        while len(self._boundaries) > 1 and self._boundaries[1].query():
            start = self._boundaries.popleft()
            self.step_seconds.append(start.elapsed_seconds(self._boundaries[0]))
            self._free.append(start)

    def read_replay(self) -> bool:
        """After a replay of the captured step: take its times; waits for the replay. False when none was captured."""
        if self._captured is None or not self._captured.complete:
            return False
        for event in self._captured.events():
            event.synchronize()
        self.steps.append(self._captured.times())
        return True

    def forget_capture(self) -> None:
        """Captured steps are stale (another plan is in force)."""
        self._captured = None
        self._in_graphs.clear()

    def break_sequence(self) -> None:
        """What follows is no continuation of the last step (a replan, a pause): its duration means nothing."""
        self._boundaries.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self.steps.clear()
        self.step_seconds.clear()
        self._pending.clear()
        self._boundaries.clear()
        self._unclosed = None


@dataclass(frozen=True)
class VisitSummary:
    """Seconds of one visit over the sampled steps: (min, median, max)."""

    unit: str
    transfer: tuple[float, float, float]
    compute: tuple[float, float, float]
    wait: tuple[float, float, float]
    streamed_bytes: int


def summarise(steps: Sequence[StepTimes], unit_names: Sequence[str]) -> list[VisitSummary]:
    """One row a visit. ``unit_names``: the unit of each visit."""

    def spread(values: Sequence[float]) -> tuple[float, float, float]:
        return (min(values), statistics.median(values), max(values)) if values else (0.0, 0.0, 0.0)

    rows = []
    for visit, unit in enumerate(unit_names):
        spans = [[span for span in step.copies if span.visit == visit] for step in steps]
        rows.append(
            VisitSummary(
                unit,
                spread([sum(span.end - span.start for span in some) for some in spans]),
                spread([step.compute[visit] for step in steps]),
                spread([step.wait[visit] for step in steps]),
                max((sum(span.nbytes for span in some) for some in spans), default=0),
            )
        )
    return rows


def format_offload_timing_table(rows: Sequence[VisitSummary]) -> str:
    """A plain-text table: transfer, compute and wait a visit, milliseconds, min / median / max."""

    def cell(values: tuple[float, float, float]) -> str:
        return " / ".join(f"{value * 1e3:.3f}" for value in values)

    lines = [("unit", "streamed MB", "transfer ms", "compute ms", "wait ms")]
    lines += [
        (row.unit, f"{row.streamed_bytes / 1e6:.2f}", cell(row.transfer), cell(row.compute), cell(row.wait))
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
