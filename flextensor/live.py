"""What recent steps say: figures for people and for the next plan. Seconds and bytes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flextensor import measure
from flextensor.planner.plan import Plan, Prediction
from flextensor.planner.simulate import predict
from flextensor.profile import Profile
from flextensor.runtime.timing import StepTimes

SETTLED_SAMPLES = 4
"""So many timed steps under a plan say more about it than the profile does (32 steps, with one in eight timed)."""


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


@dataclass(frozen=True)
class Expectation:
    """What is expected of a step under the plan in force, and whether its compute and copies are those of the
    ``profile`` or were seen ``live`` under this plan."""

    prediction: Prediction
    measured: str


def expect(plan: Plan, profile: Profile, steps: Sequence[StepTimes], counts: Counter[str]) -> Expectation | None:
    """The plan's own prediction until ``SETTLED_SAMPLES`` steps under it were timed, then one from those.

    A profile is taken while the GPU mostly waits for weights, and its clocks are then higher than under steady load
    (by 14% on an H200), so that only the steady state itself says how long its compute takes.
    """
    steps = [step for step in steps if len(step.end) == len(plan.visits)]
    if plan.prediction is not None and len(steps) < SETTLED_SAMPLES:
        return Expectation(plan.prediction, "profile")
    if not steps or not plan.visits:
        return None
    return Expectation(predict(plan, live_profile(profile, steps, counts)), "live")


def live_profile(profile: Profile, steps: Sequence[StepTimes], counts: Counter[str]) -> Profile:
    """``profile`` with compute, gaps, the mix of kinds and the link's pace as these steps had them."""
    factor = measure.live_factor(steps[-16:], profile.transfer) if len(steps) >= SETTLED_SAMPLES else None
    return replace(
        profile,
        kinds=measure.kinds_from_live(steps, counts, profile.kinds),
        transfer=profile.transfer if factor is None else profile.transfer.scaled(factor),
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
