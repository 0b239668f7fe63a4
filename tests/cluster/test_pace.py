"""Steps of a mix of kinds beside the prediction for the same mix."""

from __future__ import annotations

import pytest

from cluster.pace import FEWEST_SAMPLES, pace_of
from flextensor.planner.plan import Prediction
from flextensor.profile import RECENT_SAMPLES
from flextensor.runtime.timing import StepTimes

PREDICTION = Prediction(0.2, 0.2, 0.0, 0.1, 0.2, {"prefill": 1.0, "decode": 0.1})


def steps(kind: str, *seconds: float) -> list[StepTimes]:
    """Two visits each; a tenth of the time is the model's own, outside of them."""
    return [StepTimes(kind, (0.0, 0.5 * s), (0.0, 0.5 * s), (0.5 * s, 0.9 * s), (0, 0), (), 0.1 * s) for s in seconds]


def test_each_kind_is_compared_with_its_own_prediction_in_the_mix_that_ran() -> None:
    pace = pace_of(steps("decode", *[0.1] * 24) + steps("prefill", *[1.0] * 8), PREDICTION)
    assert pace is not None
    assert pace.predicted == pytest.approx(0.75 * 0.1 + 0.25 * 1.0)
    assert pace.quick == pytest.approx(pace.predicted) and pace.slow == pytest.approx(pace.predicted)


def test_kinds_that_have_not_settled_or_have_no_prediction_are_left_out_on_both_sides() -> None:
    few = steps("prefill", *[9.0] * (FEWEST_SAMPLES - 1))
    unknown = steps("another", *[5.0] * 50)
    pace = pace_of(few + unknown + steps("decode", *[0.2] * FEWEST_SAMPLES), PREDICTION)
    assert pace is not None
    assert (pace.predicted, pace.quick, pace.slow) == pytest.approx((0.1, 0.2, 0.2))
    assert pace_of(few + unknown, PREDICTION) is None
    assert pace_of([], PREDICTION) is None


def test_disturbed_steps_move_the_slow_end_alone() -> None:
    pace = pace_of(steps("decode", *[0.1, 0.9] * 8), PREDICTION)
    assert pace is not None
    assert pace.quick == pytest.approx(0.1) and pace.slow == pytest.approx(0.9)


def test_only_recent_steps_count() -> None:
    pace = pace_of(steps("decode", *[0.1] * 100, *[0.3] * RECENT_SAMPLES), PREDICTION)
    assert pace is not None
    assert pace.quick == pytest.approx(0.3)
