"""The checker finds what would run wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flextensor.planner import Copy, Plan, PlanError, build_plan, verify_plan
from tests.planner.profiles import ByteMachine, make, random_profile

PROFILE = make([[1000], [1000], [1000]])
PLAN = build_plan(PROFILE, frozenset(), 2048)


def changed(copy: int, **fields: object) -> Plan:
    """PLAN with one copy changed."""
    copies = list(PLAN.copies)
    copies[copy] = replace(copies[copy], **fields)  # type: ignore[arg-type]
    return replace(PLAN, copies=tuple(copies))


def test_a_plan_that_is_right_passes() -> None:
    verify_plan(PLAN, PROFILE)


def test_a_copy_that_goes_before_the_last_reader_has_left_is_found() -> None:
    for index, copy in enumerate(PLAN.copies):
        position = copy.after - 1 - len(PLAN.visits) * copy.lag
        early = changed(index, after=position % 3, lag=0 if position >= 0 else 1)
        with pytest.raises(PlanError, match=r"still reads there|out of order|does not wait for"):
            verify_plan(early, PROFILE)


def test_a_missing_copy_is_found() -> None:
    for index in range(len(PLAN.copies)):
        copies = tuple(c for i, c in enumerate(PLAN.copies) if i != index)
        less = replace(PLAN, copies=copies, streamed_bytes=sum(c.nbytes for c in copies))
        with pytest.raises(PlanError, match="other bytes lie there"):
            verify_plan(less, PROFILE)


def test_missing_initial_bytes_are_found() -> None:
    assert PLAN.initial
    with pytest.raises(PlanError, match="other bytes lie there"):
        verify_plan(replace(PLAN, initial=()), PROFILE)


def test_a_copy_from_elsewhere_in_the_store_is_found() -> None:
    with pytest.raises(PlanError, match="does not hold tensor"):
        verify_plan(changed(0, source_offset=PLAN.copies[0].source_offset + 256), PROFILE)


def test_overlapping_places_of_one_unit_are_found() -> None:
    profile = make([[1000, 1000], [1000]])
    plan = build_plan(profile, frozenset(), 2048)
    moved = replace(plan, offsets={**plan.offsets, 1: plan.offsets[0]})
    with pytest.raises(PlanError):
        verify_plan(moved, profile)


def test_wrong_sums_and_budgets_are_found() -> None:
    with pytest.raises(PlanError, match="above its budget of 1000"):
        verify_plan(replace(PLAN, budget_bytes=1000), PROFILE)
    with pytest.raises(PlanError, match="in all"):
        verify_plan(replace(PLAN, weight_bytes=PLAN.weight_bytes - 1), PROFILE)
    with pytest.raises(PlanError, match="otherwise"):
        verify_plan(replace(PLAN, streamed_bytes=1), PROFILE)
    with pytest.raises(PlanError, match="neither resident nor placed"):
        verify_plan(replace(PLAN, offsets={0: 0}), PROFILE)


def test_a_plan_of_other_visits_is_refused() -> None:
    with pytest.raises(PlanError, match="not the profile's"):
        verify_plan(PLAN, make([[1000]] * 3, visits=(0, 2, 1)))


@settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), pick=st.integers(0, 10**6), back=st.integers(1, 3))
def test_what_the_checker_passes_runs_right_on_bytes(seed: int, pick: int, back: int) -> None:
    """Plans made wrong at random: if the checker lets one through, no timing may break it."""
    profile = random_profile(seed, most_units=5, most_tensors=2)
    plan = build_plan(profile, frozenset())
    if not plan.copies:
        return
    count, at = len(plan.visits), pick % len(plan.copies)
    copy: Copy = plan.copies[at]
    position = copy.after - copy.lag * count - back
    wrong = replace(copy, after=position % count, lag=0 if position >= 0 else 1)
    plan = replace(plan, copies=(*plan.copies[:at], wrong, *plan.copies[at + 1 :]))
    try:
        verify_plan(plan, profile)
    except PlanError:
        return
    for timing, patience in enumerate((0.0, 0.5, 1.0)):
        ByteMachine(plan, profile, timing).run(3, patience)
