"""What recent steps say: figures for people and for the next plan. Seconds and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flextensor.runtime.timing import StepTimes


@dataclass(frozen=True)
class LiveTiming:
    """Recent steps, medians. Seconds and bytes; zeros where nothing was sampled yet."""

    step_seconds: float
    compute_seconds: float
    stall_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    link_bytes_per_second: float
    steps: int
    unforeseen_visits: int
    copied_bytes_total: int


def live_timing(
    steps: Sequence[StepTimes],
    durations: Sequence[float],
    *,
    count: int,
    unforeseen: int,
    copied: int,
) -> LiveTiming:
    """``steps``: the sampled ones. ``durations``: seconds between the starts of steps."""
    seconds = [sum(span.end - span.start for span in step.copies) for step in steps]
    nbytes = [sum(span.nbytes for span in step.copies) for step in steps]
    total = sum(seconds)
    return LiveTiming(
        step_seconds=_median(durations),
        compute_seconds=_median([sum(step.compute) for step in steps]),
        stall_seconds=_median([sum(step.wait) for step in steps]),
        transfer_seconds=_median(seconds),
        transfer_bytes=int(_median(nbytes)),
        link_bytes_per_second=sum(nbytes) / total if total > 0 else 0.0,
        steps=count,
        unforeseen_visits=unforeseen,
        copied_bytes_total=copied,
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
