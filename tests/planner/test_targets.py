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


@pytest.mark.parametrize(("units", "seconds"), [(100, 1.0), pytest.param(1000, 10.0, marks=pytest.mark.slow)])
def test_large_models_are_planned_in_time(units: int, seconds: float) -> None:
    """Seconds of one core; a factor of 2.5 for machines slower than the one measured on."""
    for alike in (True, False):
        profile = large(units, alike=alike)
        for share in (None, 0.3) if alike else (0.7, 0.1):
            start = time.process_time()
            plan = search(profile, budget_bytes=None if share is None else int(share * profile.total_bytes))
            spent = time.process_time() - start
            assert spent <= 2.5 * seconds, f"{units} units, budget {share}: {spent:.2f} s"
            assert plan.prediction is not None
            assert plan.prediction.step_seconds <= 1.02 * plan.prediction.floor_seconds


def test_checking_a_large_plan_is_cheap() -> None:
    profile = large(100, alike=True)
    plan = search(profile, budget_bytes=int(0.1 * profile.total_bytes))
    start = time.process_time()
    verify_plan(plan, profile)
    assert time.process_time() - start <= 0.2
