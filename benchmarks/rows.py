"""One row of the engine benchmark: a contender at a setting. Bytes and seconds; None where it does not apply."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """See the benchmark's text for how each is measured.

    contender, tokens, target: what ran; target is ``"6"`` (GiB of weights), ``"50%"``, ``"latency"``, ``"peak:6.45"``
        (GiB of the whole forward) or ``""``.
    status: ``ok``, or why there are no figures.
    step_seconds: a forward, back to back, the median of ``step_samples`` (one a repeat).
    resident_seconds: the un-offloaded twin in the same process, the blocks before and after.
    peak_bytes: GPU memory of the whole forward. device_weight_bytes: what of it is weights.
    floor_seconds: max(resident, streamed / link). ideal_seconds: max(resident, (total - target) / link): the floor of
        an engine that had no slots.
    identical: the output equals the twin's, bit for bit.
    sm_clock_hz, resident_sm_clock_hz: the GPU's clock at the end of a timed block, and of the twin's after it.
    host_seconds_a_unit: host time of everything that offloading adds to a unit's call; loader_seconds_a_unit: of the
        loader alone, within the model's own steps. copies_a_visit: what it queues.
    """

    contender: str
    tokens: int
    target: str = ""
    status: str = "ok"
    version: str | None = None
    step_seconds: float | None = None
    step_samples: tuple[float, ...] = ()
    resident_seconds: float | None = None
    peak_bytes: int | None = None
    total_weight_bytes: int | None = None
    device_weight_bytes: int | None = None
    budget_bytes: int | None = None
    streamed_bytes: int | None = None
    link_bytes_per_second: float | None = None
    floor_seconds: float | None = None
    ratio: float | None = None
    ideal_seconds: float | None = None
    ratio_to_ideal: float | None = None
    predicted_seconds: float | None = None
    prediction_error: float | None = None
    predicted_transfer_seconds: float | None = None
    predicted_stall_seconds: float | None = None
    predicted_live_seconds: float | None = None
    prediction_live_error: float | None = None
    compute_seconds: float | None = None
    stall_seconds: float | None = None
    transfer_seconds: float | None = None
    setup_seconds: float | None = None
    replan_seconds: float | None = None
    identical: bool | None = None
    largest_difference: float | None = None
    unforeseen_visits: int | None = None
    host_seconds_a_unit: float | None = None
    loader_seconds_a_unit: float | None = None
    copies_a_visit: float | None = None
    sm_clock_hz: float | None = None
    resident_sm_clock_hz: float | None = None

    def as_json(self) -> dict[str, Any]:
        """A plain dictionary with every key."""
        return {**asdict(self), "step_samples": list(self.step_samples)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Row:
        """What ``as_json`` gave."""
        return Row(**{**data, "step_samples": tuple(data["step_samples"])})


KEYS = tuple(field.name for field in fields(Row))


def merge_rounds(rows: Sequence[Row]) -> list[Row]:
    """One row a contender and setting: of several rounds the one with the median step time, all samples in it."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.contender, row.tokens, row.target), []).append(row)
    merged = []
    for group in groups.values():
        timed = sorted((row for row in group if row.step_seconds is not None), key=lambda row: row.step_seconds or 0.0)
        if not timed:
            merged.append(group[0])
            continue
        middle = timed[(len(timed) - 1) // 2]
        samples = tuple(sample for row in timed for sample in row.step_samples)
        differing = [row for row in timed if row.identical is False]
        merged.append(
            Row(**{**asdict(middle), "step_samples": samples, "identical": False if differing else middle.identical})
        )
    return merged


def target_words(target: str) -> str:
    """``6 GiB``, ``latency``, ``peak 6.45 GiB``, or a dash."""
    if target.startswith("peak:"):
        return f"peak {target.removeprefix('peak:')} GiB"
    if not target:
        return "-"
    return f"{target} GiB" if target.replace(".", "", 1).isdigit() else target


def median(values: Sequence[float]) -> float:
    """The median."""
    return float(statistics.median(values))
