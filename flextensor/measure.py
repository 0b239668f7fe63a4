"""From events to a Profile: compute a visit, gaps, host time, the transfer curve. Seconds and bytes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from flextensor.profile import StepKind, TransferCurve
from flextensor.runtime.device import Device, Event, Stream
from flextensor.runtime.timing import KEPT_STEPS, StepTimes

CURVE_SIZES = tuple(1 << k for k in range(16, 29, 2))
"""64 KiB to 256 MiB."""
QUEUED_BYTES = 256 << 20
"""About so much is queued to time one size."""


def kind_of(args: Iterable[object], kwargs: dict[str, object]) -> str:
    """The kind of a step from what its first unit is given: rows (tokens, pixels ...), to the next power of two.

    Whole numbers are indexes (token ids), each of which is a row.

    A decode step, a prefill and another batch size thus are different kinds; two prompts of nearly the same length
    are not.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            columns = value.shape[-1] if value.is_floating_point() else 1
            rows = value.numel() // max(columns, 1)
            return f"rows<={1 << max(rows - 1, 0).bit_length()}"
    return "step"


@dataclass
class _Visit:
    unit: int
    arrive: Event
    start: Event | None = None
    end: Event | None = None
    host_start: float = 0.0
    host: float = 0.0
    nested: bool = False


@dataclass
class WarmupStep:
    """One step of discovery or profiling, whatever its order. begin, close: the root's call starts and ends."""

    kind: str = "step"
    visits: list[_Visit] = field(default_factory=list)
    begin: Event | None = None
    close: Event | None = None

    def units(self) -> tuple[int, ...]:
        """The order in which units ran."""
        return tuple(visit.unit for visit in self.visits)


class WarmupRecorder:
    """Records every visit of the steps before the first plan."""

    def __init__(self, device: Device) -> None:
        self.steps: list[WarmupStep] = []
        self._device = device
        self._current = WarmupStep()
        self._open: list[_Visit] = []

    def begin_step(self) -> None:
        self._current = WarmupStep(begin=self._mark())
        self._open.clear()

    def name_step(self, kind: str) -> None:
        self._current.kind = kind

    def arrive(self, unit: int) -> None:
        visit = _Visit(unit, self._mark(), nested=bool(self._open))
        self._current.visits.append(visit)
        self._open.append(visit)

    def start(self) -> None:
        visit = self._open[-1]
        visit.start = self._mark()
        visit.host_start = time.perf_counter()

    def end(self) -> None:
        visit = self._open.pop()
        visit.host = time.perf_counter() - visit.host_start
        visit.end = self._mark()

    def _mark(self) -> Event:
        event = self._device.new_event(timed=True)
        self._device.compute_stream().record(event)
        return event

    def finish_step(self, *, keep: bool) -> WarmupStep:
        """The step is over; ``keep`` it as a sample unless a visit of it was aborted."""
        step = self._current
        if keep:
            step.close = self._mark()
        if keep and not self._open and all(visit.end is not None for visit in step.visits):
            self.steps.append(step)
        self._open.clear()
        return step


def kinds_from_warmup(
    steps: Sequence[WarmupStep], visits: tuple[int, ...], alike: Sequence[Hashable]
) -> tuple[StepKind, ...]:
    """One StepKind a kind seen; steps whose order is not ``visits`` are left out. The device is idle.

    alike: for each unit, what is equal for units that take the host the same time.
    """
    kinds = []
    counts = Counter(step.kind for step in steps if step.units() == visits)
    for name, count in counts.items():
        rows = [step for step in steps if step.kind == name and step.units() == visits]
        kinds.append(
            StepKind(
                name,
                compute=_least(_spans(step, "start", "end") for step in rows),
                gap=_least(_gaps(step) for step in rows),
                host=_least_of_alike(
                    _least([visit.host for visit in step.visits] for step in rows), [alike[unit] for unit in visits]
                ),
                weight=count / sum(counts.values()),
            )
        )
    return tuple(kinds)


def _least(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Element-wise minimum: what disturbs a measurement only ever adds to it."""
    return tuple(min(column) for column in zip(*rows, strict=True))


def _least_of_alike(values: Sequence[float], alike: Sequence[Hashable]) -> tuple[float, ...]:
    """For each value the least of those that are alike: a host that has run so far ahead that it must wait for room in
    the device's queue, as while weights are fetched on demand, has not worked for longer."""
    least: dict[Hashable, float] = {}
    for value, key in zip(values, alike, strict=True):
        least[key] = min(value, least.get(key, value))
    return tuple(least[key] for key in alike)


def _spans(step: WarmupStep, start: str, end: str) -> list[float]:
    return [getattr(visit, start).elapsed_seconds(getattr(visit, end)) for visit in step.visits]


def _gaps(step: WarmupStep) -> list[float]:
    """Between a visit's end and the arrival of the next; the first one: what the root does before and after them."""
    first, last = step.visits[0], step.visits[-1]
    outside = 0.0
    if step.begin is not None and step.close is not None and last.end is not None:
        outside = step.begin.elapsed_seconds(first.arrive) + last.end.elapsed_seconds(step.close)
    gaps = [max(outside, 0.0)]
    for before, after in zip(step.visits, step.visits[1:], strict=False):
        assert before.end is not None
        gaps.append(max(before.end.elapsed_seconds(after.arrive), 0.0))
    return gaps


def kinds_from_live(
    steps: Sequence[StepTimes], counts: Counter[str], known: Sequence[StepKind], *, recent: int = KEPT_STEPS
) -> tuple[StepKind, ...]:
    """Live samples over what was known: medians where a kind was sampled, the older figures where not.

    ``counts``: steps of each kind so far, the weights of the mix. ``recent``: so many last samples of a kind count.
    """
    by_name = {kind.name: kind for kind in known}
    for name in {step.kind for step in steps if step.kind}:
        rows = [step for step in steps if step.kind == name][-recent:]
        gaps = [
            [step.outside, *(max(step.arrive[at] - step.end[at - 1], 0.0) for at in range(1, len(step.end)))]
            for step in rows
        ]
        before = by_name.get(name)
        by_name[name] = StepKind(
            name,
            compute=_median([step.compute for step in rows]),
            gap=_median(gaps),
            host=_median([step.host for step in rows]) if before is None else before.host,
        )
    total = sum(counts[name] for name in by_name) or 1
    return tuple(
        replace(kind, weight=counts[kind.name] / total if counts else kind.weight)
        for kind in by_name.values()
        if counts[kind.name] or not counts
    ) or tuple(known)


def _median(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def measure_curve(
    device: Device,
    stream: Stream,
    source: Callable[[int], torch.Tensor],
    scratch: torch.Tensor,
    *,
    repeats: int = 3,
) -> TransferCurve:
    """Time copies of ``CURVE_SIZES`` up to the scratch's size. ``source(nbytes)``: host bytes to copy from."""
    points: list[tuple[int, float]] = []
    for size in CURVE_SIZES:
        if size > scratch.numel() and points:
            break
        size = min(size, scratch.numel())
        data = source(size)
        size = data.numel()
        if points and size <= points[-1][0]:
            break
        points.append((size, _time_copy(device, stream, scratch[:size], data, repeats)))
    return TransferCurve(tuple(points))


def _time_copy(device: Device, stream: Stream, destination: torch.Tensor, source: torch.Tensor, repeats: int) -> float:
    """Seconds a copy, several queued one behind the other as the loader queues them; the best of ``repeats``."""
    queued = max(2, min(8, QUEUED_BYTES // max(source.numel(), 1)))
    best = float("inf")
    for _ in range(repeats):
        start, end = device.new_event(timed=True), device.new_event(timed=True)
        stream.copy(destination, source)  # what starting up costs is not the link's
        stream.record(start)
        for _ in range(queued):
            stream.copy(destination, source)
        stream.record(end)
        stream.synchronize()
        best = min(best, start.elapsed_seconds(end) / queued)
    return best


def live_factor(steps: Iterable[StepTimes], curve: TransferCurve) -> float | None:
    """How many times as long as ``curve`` says the copies of recent steps took; None without copies."""
    ratios = [
        (span.end - span.start) / curve.seconds(span.nbytes) for step in steps for span in step.copies if span.nbytes
    ]
    return statistics.median(ratios) if ratios else None
