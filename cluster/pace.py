"""What steps take, beside what the plan in force says of the very same steps. Pure Python. Seconds.

A run's steps are of several kinds (a prefill, a decode), in a mix that changes, and a host is busy at times. So each
kind is compared with the prediction for that kind, the kinds are mixed as they ran, and what is told of a kind is not
one figure but the range that half of its steps are in.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.states import Pace
from flextensor.planner.plan import Prediction
from flextensor.profile import RECENT_SAMPLES

if TYPE_CHECKING:
    from flextensor.runtime.timing import StepTimes

FEWEST_SAMPLES = 8
"""A kind with fewer timed steps under the plan is left out."""


def pace_of(steps: Sequence[StepTimes], prediction: Prediction) -> Pace | None:
    """The pace of ``steps``, all timed under the plan with this prediction; None while too few were."""
    taken: dict[str, list[float]] = {}
    for step in steps:
        if step.kind in prediction.by_kind and step.end:
            taken.setdefault(step.kind, []).append(step.end[-1] + step.outside)
    settled = {kind: seconds for kind, seconds in taken.items() if len(seconds) >= FEWEST_SAMPLES}
    count = sum(map(len, settled.values()))
    if not count:
        return None
    predicted = quick = slow = 0.0
    for kind, seconds in settled.items():
        share = len(seconds) / count
        lower, _, upper = statistics.quantiles(seconds[-RECENT_SAMPLES:], n=4, method="inclusive")
        predicted += share * prediction.by_kind[kind]
        quick += share * lower
        slow += share * upper
    return Pace(predicted, quick, slow)
