"""The search: near the best there is, within the budget, the same each time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flextensor.planner import BudgetError, Plan, align, build_plan, predict, search, verify_plan
from flextensor.planner.gaps import place_apart
from flextensor.planner.layout import place_ring
from flextensor.profile import Profile, StepKind, TensorInfo, TransferCurve, UnitInfo
from tests.planner.profiles import ByteMachine, make, random_profile

pytestmark = pytest.mark.whole_search

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def comparable_profile(seed: int, tensors: int) -> Profile:
    """Sizes, copies and compute of the same order: where choices matter most."""
    rng = random.Random(seed)
    units: list[list[int]] = []
    left = tensors
    while left:
        count = min(left, rng.choice([1, 1, 2]))
        units.append([rng.choice([200_000, 400_000, rng.randint(100_000, 1_000_000)]) for _ in range(count)])
        left -= count
    visits = [*range(len(units)), *([rng.randrange(len(units))] if rng.random() < 0.2 else [])]
    busy = rng.choice([0.2, 0.5, 1, 2]) * 1e-4
    compute = [rng.random() * 2 * busy for _ in visits]
    link = TransferCurve.from_bandwidth(5e9, 1e-5)
    return make(units, compute=compute, visits=visits, host=[1e-5] * len(visits), transfer=link)


def every_plan(profile: Profile) -> list[Plan]:
    """All resident subsets, each in arenas of all sums of tensors, placed in both ways."""
    tensors = range(len(profile.tensors))
    size = [align(t.nbytes) for t in profile.tensors]
    sums = sorted(
        {sum(size[t] for t in c) for n in range(len(tensors) + 1) for c in itertools.combinations(tensors, n)}
    )
    if len(sums) > 16:
        sums = [sums[i * (len(sums) - 1) // 15] for i in range(16)]
    found = []
    for n in range(len(tensors) + 1):
        for resident in itertools.combinations(tensors, n):
            held = sum(size) - sum(size[t] for t in resident)
            for arena in sums:
                for placement in (place_ring, place_apart):
                    try:
                        found.append(build_plan(profile, frozenset(resident), arena, placement=placement))
                    except BudgetError:
                        continue
                if arena >= held:
                    break
    return found


def worst_ratio(profile: Profile, shares: Sequence[float]) -> float:
    """The search's step time over the best of every plan, the worst of these budgets."""
    plans = [(plan.weight_bytes, predict(plan, profile).step_seconds) for plan in every_plan(profile)]
    worst = 0.0
    for share in shares:
        budget = int(share * profile.total_bytes)
        fits = [seconds for nbytes, seconds in plans if nbytes <= budget]
        try:
            found = search(profile, budget_bytes=budget)
        except BudgetError as error:
            assert not fits and error.needed > budget
            continue
        assert found.prediction is not None and found.weight_bytes <= budget
        worst = max(worst, found.prediction.step_seconds / min(fits))
    return worst


@pytest.mark.parametrize("seed", range(12))
def test_memory_mode_is_within_one_percent_of_exhaustive_search(seed: int) -> None:
    assert worst_ratio(comparable_profile(seed, tensors=4 + seed % 3), (0.9, 0.7, 0.5, 0.35)) <= 1.01


@REPEATABLE
@given(seed=st.integers(0, 10**6), tensors=st.integers(2, 6), share=st.floats(0.2, 0.95))
def test_any_small_model_is_within_one_percent_of_exhaustive_search(seed: int, tensors: int, share: float) -> None:
    assert worst_ratio(comparable_profile(seed, tensors), (share,)) <= 1.01


@pytest.mark.parametrize(
    ("seed", "tensors", "share"),
    [
        pytest.param(79, 5, 0.5, id="an arena of two tensors, no unit's sum"),
        pytest.param(168, 4, 0.7, id="an arena of two tensors, one of them of a larger unit"),
        pytest.param(224, 6, 0.7, id="an arena beyond the room, of which less is used"),
        pytest.param(5007, 8, 0.9, id="half of the tensors resident"),
        pytest.param(5017, 8, 0.5, id="tensors of different units side by side"),
        pytest.param(5018, 9, 0.5, id="nine tensors", marks=pytest.mark.slow),
    ],
)
def test_models_that_a_search_of_units_sums_missed(seed: int, tensors: int, share: float) -> None:
    assert worst_ratio(comparable_profile(seed, tensors), (share,)) <= 1.01


@pytest.mark.parametrize("seed", range(100, 106))
def test_latency_mode_is_within_one_percent_of_exhaustive_search(seed: int) -> None:
    profile = comparable_profile(seed, tensors=5)
    found = search(profile, link_margin=0.0)
    resident = predict(build_plan(profile, frozenset(range(len(profile.tensors)))), profile).step_seconds
    plans = [(predict(plan, profile), plan.weight_bytes) for plan in every_plan(profile)]
    limit = 1.003 * resident
    assert found.prediction is not None and found.prediction.step_seconds <= limit * (1 + 1e-9)
    least = min(n for p, n in plans if p.step_seconds <= limit and p.transfer_seconds <= limit)
    assert found.weight_bytes <= 1.01 * least


@REPEATABLE
@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 1.0))
def test_never_over_budget_and_right_on_bytes(seed: int, share: float) -> None:
    profile = random_profile(seed, most_units=6, most_tensors=3)
    total = sum(align(t.nbytes) for t in profile.tensors)
    budget = int(share * total)
    try:
        plan = search(profile, budget_bytes=budget)
    except BudgetError as error:
        budget = error.needed
        plan = search(profile, budget_bytes=budget)
        with pytest.raises(BudgetError):
            search(profile, budget_bytes=budget - 1)
    assert plan.weight_bytes <= budget == plan.budget_bytes
    verify_plan(plan, profile)
    ByteMachine(plan, profile, seed).run(2, 0.5)


def test_the_same_input_gives_the_same_plan() -> None:
    for seed in range(4):
        profile = random_profile(seed)
        assert search(profile) == search(profile)
        budget = sum(align(t.nbytes) for t in profile.tensors) * 4 // 5
        try:
            first = search(profile, budget_bytes=budget)
        except BudgetError:
            continue
        assert first == search(profile, budget_bytes=budget)


def test_a_budget_for_everything_keeps_everything_resident() -> None:
    profile = make([[1000, 2000]] * 5)
    plan = search(profile, budget_bytes=5 * (1024 + 2048))
    assert plan.resident == frozenset(range(10)) and plan.copies == () and plan.arena_bytes == 0


def test_too_small_a_budget_says_what_is_needed() -> None:
    profile = make([[1000], [5000], [700]])
    with pytest.raises(BudgetError, match="at least 5120 bytes") as refused:
        search(profile, budget_bytes=5000)
    assert refused.value.needed == 5120
    assert search(profile, budget_bytes=5120).arena_bytes <= 5120


def test_what_must_be_resident_is_counted_first() -> None:
    tensors = (
        TensorInfo("a", 4000, 0, True, "changed by forward"),
        TensorInfo("b", 1000, 4096),
        TensorInfo("c", 1000, 5120),
    )
    kind = StepKind("step", (1e-3, 1e-3), (0.0, 0.0), (0.0, 0.0))
    units = (UnitInfo("u", (0, 1)), UnitInfo("v", (2,)))
    profile = Profile(tensors, units, (0, 1), (kind,), TransferCurve.from_bandwidth(1e9))
    with pytest.raises(BudgetError) as refused:
        search(profile, budget_bytes=4096)
    assert refused.value.needed == 4096 + 1024
    assert search(profile, budget_bytes=refused.value.needed).resident == frozenset({0})


def test_num_blocks_and_min_blocks_bound_the_arena() -> None:
    profile = make([[100_000]] * 12, compute=[1e-4] * 12)
    one = search(profile, budget_bytes=800_000, num_blocks=1)
    assert one.arena_bytes == align(100_000)
    four = search(profile, budget_bytes=800_000, min_blocks=4)
    assert four.arena_bytes >= 4 * align(100_000)
    assert one.prediction is not None and four.prediction is not None
    assert four.streamed_bytes > one.streamed_bytes


def test_transfer_budget_scale_bounds_the_copies_in_latency_mode() -> None:
    profile = make([[100_000]] * 24, compute=[2e-4] * 24)
    whole, half = search(profile), search(profile, transfer_budget_scale=0.25)
    assert whole.prediction is not None and half.prediction is not None
    assert half.prediction.transfer_seconds <= 0.25 * 1.003 * half.prediction.compute_seconds
    assert half.weight_bytes > whole.weight_bytes
    slower = search(profile, transfer_budget_scale=2.0)
    assert slower.weight_bytes <= whole.weight_bytes


def test_a_plan_for_prefill_and_decode_is_best_for_their_mix() -> None:
    sizes = [[100_000]] * 8
    prefill = (4e-4,) * 4 + (0.0,) * 4
    decode = (0.0,) * 4 + (4e-4,) * 4
    zeros = (0.0,) * 8
    profile = make(sizes, compute=prefill, transfer=TransferCurve.from_bandwidth(1e9, 1e-6))
    mixed = profile.with_kinds([StepKind("p", prefill, zeros, zeros, 0.5), StepKind("d", decode, zeros, zeros, 0.5)])
    alone, both = search(profile, budget_bytes=500_000), search(mixed, budget_bytes=500_000)
    assert both.prediction is not None
    assert both.prediction.step_seconds <= predict(alone, mixed).step_seconds * (1 + 1e-9)
    assert set(both.prediction.by_kind) == {"p", "d"}


def test_without_any_measurement_there_is_a_plan_that_fits() -> None:
    profile = make([[10_000, 3000]] * 6).with_kinds([])
    plan = search(profile, budget_bytes=40_000)
    assert plan.weight_bytes <= 40_000 and plan.streamed_bytes > 0


def test_units_that_no_visit_runs_are_streamed_at_no_cost() -> None:
    profile = make([[10_000], [10_000], [10_000]], visits=(0, 1), compute=(1e-3, 1e-3))
    plan = search(profile)
    assert 2 in plan.offsets and all(2 not in copy.tensors for copy in plan.copies)
