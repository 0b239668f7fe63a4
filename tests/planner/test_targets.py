"""What the planner is held to on the 24-block model, and how long it may take."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from flextensor.planner import predict, search, verify_plan
from flextensor.profile import Profile, TransferCurve
from tests.planner.profiles import GIB, H200, h200_model, make

BANDWIDTH = 55.3e9
RESIDENT = 24 * 3.6e-3


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("gib", [8.0, 6.0, 4.2, 2.0, 1.0])
def test_memory_mode_reaches_the_floor(gib: float, pieces: bool) -> None:
    profile = h200_model(pieces=pieces)
    plan = search(profile, budget_bytes=int(gib * GIB))
    assert plan.weight_bytes <= gib * GIB and plan.prediction is not None
    assert plan.prediction.step_seconds <= 1.003 * plan.prediction.floor_seconds
    # The curve of single copies costs up to 3% over the link's best at these sizes.
    assert plan.prediction.step_seconds <= 1.03 * max(RESIDENT, plan.streamed_bytes / BANDWIDTH)
    assert plan.arena_bytes <= 0.8 * GIB


def test_pieces_at_one_gib_are_within_four_percent_of_the_link() -> None:
    """On a link whose copies of 100 MB reach its best bandwidth, as queued copies do."""
    profile = h200_model(pieces=True, transfer=TransferCurve.from_bandwidth(BANDWIDTH, 10e-6))
    plan = search(profile, budget_bytes=GIB)
    assert plan.prediction is not None
    assert plan.prediction.step_seconds <= 1.04 * (profile.total_bytes - GIB) / BANDWIDTH


def test_latency_mode_takes_at_most_7_9_gib_and_no_time() -> None:
    for pieces in (False, True):
        plan = search(h200_model(pieces=pieces))
        assert plan.prediction is not None
        assert plan.weight_bytes <= (7.1 if pieces else 7.3) * GIB
        assert plan.prediction.step_seconds <= 1.003 * RESIDENT


def test_latency_mode_keeps_its_time_on_a_link_two_percent_slower() -> None:
    profile = h200_model()
    plan = search(profile, link_margin=0.02)
    slower = replace(profile, transfer=profile.transfer.scaled(1.02))
    assert predict(plan, slower).step_seconds <= 1.004 * RESIDENT


def large(units: int, *, alike: bool) -> Profile:
    """``units`` of 12 tensors of 1 to 100 MiB."""
    rng = random.Random(units)
    first = [rng.randint(1 << 20, 100 << 20) for _ in range(12)]
    sizes = [first if alike else [rng.randint(1 << 20, 100 << 20) for _ in range(12)] for _ in range(units)]
    compute = [5e-3 if alike else rng.uniform(1e-3, 1e-2) for _ in range(units)]
    return make(sizes, compute=compute, transfer=H200)


USUAL_PACE = 0.25
"""Seconds that ``pace`` takes on a core of the machine that the targets were measured on."""


def pace() -> float:
    """Seconds that this core takes now for a piece of Python like the planner's."""
    start = time.process_time()
    for _ in range(10):
        table = {at: [at % 7, -at] for at in range(20_000)}
        rows = sorted(table.items(), key=lambda row: (row[1][0], row[1][1]))
        sum(len(row[1]) for row in rows)
    return time.process_time() - start


def planned_within(seconds: float, profile: Profile, share: float | None) -> None:
    """Planned well, in so many seconds of one core; longer where the core is slower just now (its other thread, its
    clock, what shares the machine): the best of up to three tries counts."""
    spent: list[float] = []
    while not spent or (min(spent) > seconds and len(spent) < 3):
        before, start = pace(), time.process_time()
        plan = search(profile, budget_bytes=None if share is None else int(share * profile.total_bytes))
        took = time.process_time() - start
        spent.append(took / max(1.0, (before + pace()) / (2 * USUAL_PACE)))
    assert min(spent) <= seconds, f"{len(profile.units)} units, budget {share}: {spent} s"
    assert plan.prediction is not None
    assert plan.prediction.step_seconds <= 1.02 * plan.prediction.floor_seconds


@pytest.mark.parametrize(("alike", "share"), [(True, None), (True, 0.3), (False, 0.7), (False, 0.1)])
def test_a_hundred_units_of_twelve_tensors_are_planned_in_a_second(alike: bool, share: float | None) -> None:
    planned_within(1.0, large(100, alike=alike), share)


SLOW = pytest.mark.slow
THOUSANDS = [(False, 0.3), *(pytest.param(True, share, marks=SLOW) for share in (None, 0.3))]
THOUSANDS += [pytest.param(False, share, marks=SLOW) for share in (None, 0.7, 0.1)]


@pytest.mark.parametrize(("alike", "share"), THOUSANDS)
def test_a_thousand_units_of_twelve_tensors_are_planned_in_ten_seconds(alike: bool, share: float | None) -> None:
    """Of all these the one that takes longest is not marked as slow."""
    planned_within(10.0, large(1000, alike=alike), share)


def test_checking_a_large_plan_is_cheap() -> None:
    profile = large(100, alike=True)
    plan = search(profile, budget_bytes=int(0.1 * profile.total_bytes))
    start = time.process_time()
    verify_plan(plan, profile)
    assert time.process_time() - start <= 0.2
