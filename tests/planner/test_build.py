"""Places and copies: whatever the timing, each visit reads its own weights."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flextensor.planner import BudgetError, Plan, align, build_plan, verify_plan
from flextensor.planner.gaps import place_apart, place_largest_first
from flextensor.planner.layout import Placement, place_ring
from flextensor.profile import Profile
from tests.planner.profiles import ByteMachine, make, random_profile

PLACEMENTS = (place_ring, place_apart, place_largest_first)
REPEATABLE = settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def run_late(plan: Plan, profile: Profile, steps: int = 3) -> None:
    """The plan on bytes: with the link late, with compute late, and mixed."""
    verify_plan(plan, profile)
    for seed, patience in enumerate((0.0, 0.5, 1.0)):
        moved = ByteMachine(plan, profile, seed).run(steps, patience)
        assert moved == steps * plan.streamed_bytes


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("units", range(1, 10))
def test_every_number_of_units_and_slots_reads_its_own_weights(units: int, placement: Placement) -> None:
    for slots in range(1, units + 1):
        for sizes in ([1024] * units, [256 * (1 + (7 * u) % 5) for u in range(units)]):
            profile = make([[n] for n in sizes])
            plan = build_plan(profile, frozenset(), slots * max(sizes), placement=placement)
            assert plan.arena_bytes <= slots * max(sizes)
            run_late(plan, profile)
            if plan.arena_bytes < sum(sizes):
                assert plan.streamed_bytes > 0


def test_three_units_on_two_slots_never_share_across_the_wrap_without_waiting() -> None:
    profile = make([[1000]] * 3)
    plan = build_plan(profile, frozenset(), 2048)
    run_late(plan, profile, steps=5)
    shared = [copy for copy in plan.copies if copy.visit == 0]
    assert shared and shared[0].lag == 1 and shared[0].after == 2


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_unit_a_hundred_times_larger_than_the_others_shares_the_arena(placement: Placement) -> None:
    profile = make([[300], [30_000], [300], [200, 100], [300]])
    plan = build_plan(profile, frozenset(), 30_208, placement=placement)
    run_late(plan, profile)
    assert plan.arena_bytes == 30_208


def test_tensors_side_by_side_in_store_and_arena_travel_in_one_copy() -> None:
    profile = make([[1000, 500, 700]] * 4)
    plan = build_plan(profile, frozenset(), 2 * 2560)
    assert [copy.tensors for copy in plan.copies if copy.visit == 0] == [(0, 1, 2)]
    assert all(copy.nbytes == 1024 + 512 + 700 for copy in plan.copies)


def test_what_no_one_overwrites_is_fetched_once() -> None:
    profile = make([[1000], [500], [700]])
    plan = build_plan(profile, frozenset({1, 2}))
    assert plan.copies == () and plan.streamed_bytes == 0
    assert [copy.tensors for copy in plan.initial] == [(0,)]
    run_late(plan, profile)


def test_a_unit_run_again_before_its_bytes_are_taken_is_not_fetched_again() -> None:
    profile = make([[1000], [1000], [1000]], visits=(0, 0, 1, 2))
    plan = build_plan(profile, frozenset(), 1024)
    assert [copy.visit for copy in plan.copies] == [0, 2, 3]
    run_late(plan, profile)


def test_a_tied_tensor_has_one_place_for_all_its_units() -> None:
    profile = make([[1000], [900], [800]])
    tied = Profile(
        profile.tensors,
        tuple(u if i != 2 else type(u)(u.name, (2, 0)) for i, u in enumerate(profile.units)),
        profile.visits,
        profile.kinds,
        profile.transfer,
    )
    plan = build_plan(tied, frozenset(), 2048)
    run_late(plan, tied)
    assert len(plan.offsets) == 3


def test_an_arena_that_one_unit_does_not_fit_is_refused_with_what_is_enough() -> None:
    profile = make([[1000, 1000], [500]])
    with pytest.raises(BudgetError) as refused:
        build_plan(profile, frozenset(), 1024)
    assert refused.value.needed == 2048
    run_late(build_plan(profile, frozenset(), refused.value.needed), profile)


def test_resident_bytes_above_the_budget_are_refused() -> None:
    profile = make([[1000], [500]])
    with pytest.raises(BudgetError, match="above the budget of 512"):
        build_plan(profile, frozenset({0}), budget_bytes=512)


@REPEATABLE
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1.3), keep=st.sampled_from([0.0, 0.3, 0.6]))
def test_random_models_residency_and_arenas_read_their_own_weights(seed: int, share: float, keep: float) -> None:
    profile = random_profile(seed)
    rng = random.Random(seed)
    resident = frozenset(t for t in range(len(profile.tensors)) if rng.random() < keep)
    whole = build_plan(profile, resident)
    for placement in PLACEMENTS:
        try:
            plan = build_plan(profile, resident, int(whole.arena_bytes * share), placement=placement)
        except BudgetError as error:
            plan = build_plan(profile, resident, error.needed, placement=placement)
        assert plan.weight_bytes == plan.resident_bytes + plan.arena_bytes
        assert plan.resident_bytes == sum(align(profile.tensors[t].nbytes) for t in plan.resident)
        run_late(plan, profile)
