"""The number of items a step, chosen together with what is resident: one pass moves the same weights however many
items share it, but each item's cache takes memory that weights could have.

Each worker runs the beginning of a batch of each size (all at the same time: they share the link), the planner solves
for what that size leaves of the memory, and the size with the most tokens a second over the whole job is taken by all.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.messages import BatchPoint, Item
from cluster.task import Rehearsal, TaskError
from flextensor.planner.plan import BudgetError, Plan
from flextensor.profile import Profile, StepKind

logger = logging.getLogger(__name__)

LARGEST = 256
NEAR = 0.98
"""Sizes whose rate is this share of the best one's are as good: the smallest is taken. Less is lost with a worker."""


@dataclass(frozen=True)
class TrialRequest:
    """Sizes in rising order. longest, typical: items by length, at least as many as the largest size has."""

    sizes: tuple[int, ...]
    longest: tuple[Item, ...]
    typical: tuple[Item, ...]


@dataclass(frozen=True)
class CurvePoint:
    """One size over all workers: rates summed, the slowest worker's step, the most bytes on a device.

    job_tokens_per_second: of the whole job, the last round with idle workers included.
    """

    batch_size: int
    tokens_per_second: float
    job_tokens_per_second: float
    step_seconds: float
    measured_step_seconds: float
    resident_bytes: int
    weight_bytes: int
    streamed_bytes: int
    beside_bytes: int
    peak_bytes: int
    refused: str


@dataclass(frozen=True)
class BatchChoice:
    """The size that was taken, and the curve that it was taken from. kept: from an earlier run of this job."""

    batch_size: int
    curve: tuple[CurvePoint, ...]
    kept: bool = False


def sizes_to_try(items: int, workers: int, largest: int = LARGEST) -> tuple[int, ...]:
    """Powers of two up to a share of the items for each worker, and that share itself where it is not too many."""
    share = -(-items // workers)
    doubled = [1 << power for power in range(share.bit_length()) if 1 << power <= min(share, largest)]
    return tuple(sorted({*doubled, *([share] if share <= largest else [])}))


def request_for(items: Sequence[Item], sizes: Sequence[int]) -> TrialRequest:
    """``items`` longest first: memory is measured with the longest, time with those in the middle."""
    most = max(sizes)
    middle = max(0, (len(items) - most) // 2)
    return TrialRequest(tuple(sizes), tuple(items[:most]), tuple(items[middle : middle + most]))


def choose(points: Mapping[int, Sequence[BatchPoint]], *, items: int) -> BatchChoice:
    """From each worker's points (by rank) the size with the most tokens a second over the job.

    Raises TaskError when no size works on all workers, with the reason.
    """
    tried = sorted(set.intersection(*({point.batch_size for point in row} for row in points.values())))
    curve = [
        _joined([next(p for p in row if p.batch_size == size) for row in points.values()], items) for size in tried
    ]
    usable = [point for point in curve if not point.refused]
    if not usable:
        why = next((point.refused for point in curve), "no size was tried on all workers")
        raise TaskError(f"batch_size auto: no size works: {why}")
    best = max(point.job_tokens_per_second for point in usable)
    size = next(point.batch_size for point in usable if point.job_tokens_per_second >= NEAR * best)
    return BatchChoice(size, tuple(curve))


def _joined(row: Sequence[BatchPoint], items: int) -> CurvePoint:
    size = row[0].batch_size
    slowest = max(row, key=lambda point: point.batch_seconds)
    rounds = math.ceil(math.ceil(items / size) / len(row))
    took = rounds * slowest.batch_seconds
    return CurvePoint(
        batch_size=size,
        tokens_per_second=sum(point.tokens_per_second for point in row),
        job_tokens_per_second=slowest.tokens / size * items / took if took > 0 else 0.0,
        step_seconds=slowest.step_seconds,
        measured_step_seconds=slowest.measured_step_seconds,
        resident_bytes=min(point.resident_bytes for point in row),
        weight_bytes=max(point.weight_bytes for point in row),
        streamed_bytes=max(point.streamed_bytes for point in row),
        beside_bytes=max(point.beside_bytes for point in row),
        peak_bytes=max(point.weight_bytes + point.beside_bytes for point in row),
        refused=next((point.refused for point in row if point.refused), ""),
    )


class BatchTrial:
    """In the worker: tries sizes, and knows the plan for each. ``task`` has ``rehearse``."""

    def __init__(self, task: Any, manager: Any) -> None:
        self._task, self._manager = task, manager
        self._solved: dict[int, tuple[Plan, Profile]] = {}

    def run(self, request: TrialRequest, say: Callable[[str], None]) -> tuple[BatchPoint, ...]:
        """A point a size, until memory does not suffice or the rate falls twice. Takes no plan."""
        points: list[BatchPoint] = []
        for size in request.sizes:
            say(f"trying batches of {size}")
            points.append(self._try(size, request))
            best = max(point.tokens_per_second for point in points)
            falling = [point.tokens_per_second < NEAR * best for point in points[-2:]]
            if points[-1].refused or (len(falling) == 2 and all(falling)):
                break
        return tuple(points)

    def _try(self, size: int, request: TrialRequest) -> BatchPoint:
        import torch

        manager = self._manager
        try:
            # Twice: at the first step of a new kind the manager begins to measure the peak anew.
            self._rehearse(request.longest[:size], brief=True)
            beside = self._beside(self._rehearse(request.longest[:size], brief=True))
            with manager.every_step_timed():
                rehearsed = self._rehearse(request.typical[:size], brief=False)
            beside = max(beside, self._beside(rehearsed))
            profile = self._profile(rehearsed, beside)
            plan = self._manager.solve_configured(profile)
        except torch.OutOfMemoryError as error:
            return BatchPoint(size, refused=f"out of memory: {str(error).splitlines()[0]}")
        except BudgetError as error:
            return BatchPoint(size, beside_bytes=beside, refused=str(error))
        self._solved[size] = plan, profile
        predicted = plan.prediction
        assert predicted is not None, "search predicts every plan"
        measured = [step.end[-1] for step in manager.sampled_steps()]
        return BatchPoint(
            batch_size=size,
            tokens=rehearsed.tokens,
            steps=rehearsed.leading + rehearsed.repeats,
            step_seconds=predicted.step_seconds,
            measured_step_seconds=sum(measured) / len(measured),
            resident_bytes=plan.resident_bytes + profile.other_bytes,
            weight_bytes=plan.weight_bytes + profile.other_bytes,
            streamed_bytes=plan.streamed_bytes,
            beside_bytes=beside,
        )

    def _rehearse(self, items: Sequence[Item], *, brief: bool) -> Rehearsal:
        self._manager.device.reset_peak()
        rehearsed: Rehearsal = self._task.rehearse(items, brief=brief)
        return rehearsed

    def _beside(self, rehearsed: Rehearsal) -> int:
        """Bytes of caches and activations at the end of the whole batch. A device that does not see activations (the
        host device) is given the caches' size."""
        used = self._manager.get_gpu_memory_usage()
        seen = max(used["peak"] - used["weights"] - used["other_weights"], 0)
        return max(int(seen + rehearsed.cache_bytes - rehearsed.cached_bytes), rehearsed.cache_bytes)

    def _profile(self, rehearsed: Rehearsal, beside: int) -> Profile:
        manager = self._manager
        known: Profile = manager.profile
        steps = [step for step in manager.sampled_steps() if len(step.end) == len(known.visits)]
        if not steps:
            raise TaskError("batch_size auto: no step of the rehearsal was timed; set batch_size to a number")
        kinds = kinds_of_batch(steps, rehearsed)
        return replace(known, kinds=kinds, transfer=manager.measure_transfer(), activation_bytes=beside)

    def settle(self, size: int) -> Plan:
        """Put the plan for this size in force at the next step; what was measured of other sizes is forgotten."""
        plan, profile = self._solved[size]
        self._manager.reset_offload_timing()
        self._manager.profile = profile
        self._manager.stage(plan)
        return plan


def kinds_of_batch(steps: Sequence[Any], rehearsed: Rehearsal) -> tuple[StepKind, ...]:
    """The measured kinds, weighted as the whole batch runs them. ``steps``: StepTimes in the order of the steps."""
    from flextensor.measure import kinds_from_live

    counts: Counter[str] = Counter()
    leading, rest = steps[: rehearsed.leading], steps[rehearsed.leading :]
    scale = 1000  # whole numbers with fractions of a step in them
    for step in leading:
        counts[step.kind] += scale
    for step in rest:
        counts[step.kind] += max(1, round(scale * rehearsed.repeats / len(rest)))
    return kinds_from_live(steps, counts, ())
