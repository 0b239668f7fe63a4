"""The simulation: cases solved by hand, and a long run of an independent event loop."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flextensor.planner import BudgetError, Plan, build_plan, predict, simulate
from flextensor.profile import Profile, StepKind, TransferCurve
from tests.planner.profiles import make, random_profile

MS = 1e-3
LINK = TransferCurve(((1000, 1 * MS), (2000, 2 * MS)))
"""One byte a microsecond, no latency from 1000 bytes on."""


def long_run(plan: Plan, profile: Profile, kind: StepKind, steps: int = 60) -> float:
    """Seconds a step, far from the start: each copy and visit starts when all that it needs has ended."""
    count = len(plan.visits)
    ready: dict[int, float] = {}
    exits: dict[int, float] = {}
    link = host = now = 0.0
    marks = []
    for position in range(steps * count):
        step, visit = divmod(position, count)
        for copy in plan.copies:
            if copy.visit == visit:
                free = exits.get((step - copy.lag) * count + copy.after, 0.0)
                link = max(link, free) + profile.transfer.seconds(copy.nbytes)
                ready[position] = link
        host += kind.host[visit]
        now = max(now + kind.gap[visit], host, ready.get(position, 0.0)) + kind.compute[visit]
        exits[position] = now
        if visit == count - 1:
            marks.append(now)
    half = steps // 2
    return (marks[-1] - marks[half - 1]) / (steps - half)


def test_one_slot_alternates_copy_and_compute() -> None:
    profile = make([[1000], [1000]], compute=(3 * MS, 3 * MS), transfer=LINK)
    run = simulate(build_plan(profile, frozenset(), 1024), profile)
    assert run.step_seconds == pytest.approx(8 * MS)
    assert run.stall_seconds == pytest.approx(2 * MS)
    assert run.floor_seconds == pytest.approx(6 * MS)


def test_three_units_on_two_slots_hide_copies_but_across_the_wrap() -> None:
    profile = make([[1000]] * 3, compute=(3 * MS,) * 3, transfer=LINK)
    run = simulate(build_plan(profile, frozenset(), 2048), profile)
    assert [round(span.stall / MS, 6) for span in run.visits] == [1.0, 0.0, 0.0]
    assert run.step_seconds == pytest.approx(10 * MS)


def test_four_units_on_two_slots_stall_nowhere_when_compute_is_longer() -> None:
    profile = make([[1000]] * 4, compute=(1.5 * MS,) * 4, transfer=LINK)
    run = simulate(build_plan(profile, frozenset(), 2048), profile)
    assert run.step_seconds == pytest.approx(6 * MS) and run.stall_seconds == pytest.approx(0)


def test_the_link_is_the_floor_when_copies_are_longer() -> None:
    profile = make([[2000]] * 4, compute=(1 * MS,) * 4, transfer=LINK)
    run = simulate(build_plan(profile, frozenset(), 2 * 2048), profile)
    assert run.step_seconds == pytest.approx(8 * MS) == run.floor_seconds == run.transfer_seconds
    assert run.stall_seconds == pytest.approx(4 * MS)


def test_gaps_hide_copies_and_a_slow_host_bounds_the_step() -> None:
    gaps = make([[1000], [1000]], compute=(1 * MS,) * 2, gap=(2 * MS, 0.0), transfer=LINK)
    assert simulate(build_plan(gaps, frozenset(), 1024), gaps).step_seconds == pytest.approx(5 * MS)
    slow = make([[1000], [1000]], compute=(1 * MS,) * 2, host=(4 * MS, 4 * MS), transfer=LINK)
    run = simulate(build_plan(slow, frozenset({0, 1})), slow)
    assert run.step_seconds == pytest.approx(8 * MS) and run.stall_seconds == 0


def test_spans_follow_each_other_and_add_up() -> None:
    profile = random_profile(11)
    plan = build_plan(profile, frozenset())
    run = simulate(plan, profile)
    assert [span.copy for span in run.copies] == list(range(len(plan.copies)))
    for before, after in zip(run.copies, run.copies[1:], strict=False):
        assert after.start >= before.end - 1e-12
    for first, second in zip(run.visits, run.visits[1:], strict=False):
        assert second.start >= first.end - 1e-12
    for span in run.copies:
        assert span.end <= run.visits[span.visit].start + 1e-12
    assert run.stall_seconds == pytest.approx(sum(span.stall for span in run.visits))


def test_the_mix_of_kinds_is_weighted() -> None:
    profile = make([[1000], [1000]], compute=(3 * MS, 3 * MS), transfer=LINK)
    slow, zeros = profile.kinds[0], (0.0, 0.0)
    fast = StepKind("decode", zeros, zeros, zeros, weight=3.0)
    profile = profile.with_kinds([slow, fast])
    plan = build_plan(profile, frozenset(), 1024)
    both = predict(plan, profile)
    assert both.by_kind == pytest.approx({"step": 8 * MS, "decode": 2 * MS})
    assert both.step_seconds == pytest.approx((8 * MS + 3 * 2 * MS) / 4)
    assert both.floor_seconds <= both.step_seconds
    assert simulate(plan, profile, kind="decode").step_seconds == pytest.approx(2 * MS)
    with pytest.raises(KeyError, match="no step kind 'train'"):
        simulate(plan, profile, kind="train")


def test_a_slower_link_is_a_scaled_curve() -> None:
    profile = make([[2000]] * 4, compute=(1 * MS,) * 4, transfer=LINK)
    plan = build_plan(profile, frozenset(), 2 * 2048)
    half = replace(profile, transfer=profile.transfer.scaled(2.0))
    assert predict(plan, half).step_seconds == pytest.approx(2 * predict(plan, profile).step_seconds)


@settings(derandomize=True, deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), share=st.floats(0.2, 1.0))
def test_the_steady_state_is_that_of_a_long_run(seed: int, share: float) -> None:
    profile = random_profile(seed, most_units=7, most_tensors=2)
    plan = build_plan(profile, frozenset())
    with contextlib.suppress(BudgetError):
        plan = build_plan(profile, frozenset(), int(share * plan.arena_bytes))
    for kind in profile.kinds:
        run = simulate(plan, profile, kind=kind)
        assert run.step_seconds == pytest.approx(long_run(plan, profile, kind), rel=2e-3)
        assert run.step_seconds >= run.floor_seconds * (1 - 1e-9)
