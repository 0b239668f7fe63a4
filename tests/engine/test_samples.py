"""What timed steps are made into: a row a visit of least, median and most, and a mix of step kinds."""

from __future__ import annotations

from collections import Counter

import pytest

from flextensor.measure import kinds_from_live
from flextensor.profile import StepKind
from flextensor.runtime.timing import CopySpan, StepTimes, format_offload_timing_table, summarise

MS = 1e-3


def copied(visit: int, nbytes: int, seconds: float) -> CopySpan:
    return CopySpan(visit, nbytes, 2 * MS, 2 * MS + seconds)


def step(
    waits: tuple[float, float],
    computes: tuple[float, float],
    *,
    kind: str = "step",
    copies: tuple[CopySpan, ...] = (),
    host: tuple[float, float] = (0.0, 0.0),
    gap: float = 0.0,
) -> StepTimes:
    """Two visits, one behind the other, ``gap`` between them and as much outside them."""
    first = waits[0] + computes[0]
    arrive = (0.0, first + gap)
    start = (waits[0], first + gap + waits[1])
    end = (first, first + gap + waits[1] + computes[1])
    return StepTimes(kind, arrive, start, end, host, copies, outside=gap)


def test_a_visits_row_has_the_least_the_median_and_the_most_of_each_time() -> None:
    """Of samples whose mean is another number than their median."""
    steps = [
        step((0.0, 2 * MS), (1 * MS, 5 * MS), copies=(copied(1, 100, 3 * MS), copied(1, 50, 1 * MS))),
        step((1 * MS, 0.0), (9 * MS, 4 * MS), copies=(copied(1, 150, 1 * MS),)),
        step((8 * MS, 3 * MS), (2 * MS, 30 * MS), copies=(copied(1, 150, 20 * MS), copied(0, 70, 6 * MS))),
    ]
    first, second = summarise(steps, ["layers.0", "layers.1"])
    assert (first.unit, second.unit) == ("layers.0", "layers.1")
    assert first.wait == pytest.approx((0.0, 1 * MS, 8 * MS))
    assert first.compute == pytest.approx((1 * MS, 2 * MS, 9 * MS))
    assert first.transfer == pytest.approx((0.0, 0.0, 6 * MS)), "a step without a copy for it is a sample too"
    assert second.wait == pytest.approx((0.0, 2 * MS, 3 * MS))
    assert second.compute == pytest.approx((4 * MS, 5 * MS, 30 * MS))
    assert second.transfer == pytest.approx((1 * MS, 4 * MS, 20 * MS)), "copies for one visit count together"
    assert (first.streamed_bytes, second.streamed_bytes) == (70, 150)
    table = format_offload_timing_table([first, second]).splitlines()
    assert table[0].split("  ")[0] == "unit" and len(table) == 3
    assert "1.000 / 4.000 / 20.000" in table[2] and "4.000 / 5.000 / 30.000" in table[2]
    assert "0.000 / 2.000 / 3.000" in table[2] and "0.000 / 0.000 / 6.000" in table[1]


def test_without_samples_there_is_a_row_of_zeros_a_visit() -> None:
    (row,) = summarise([], ["layers.0"])
    assert row.transfer == row.compute == row.wait == (0.0, 0.0, 0.0) and row.streamed_bytes == 0


def test_live_samples_become_kinds_weighed_by_how_often_each_ran() -> None:
    """Of four kinds: one profiled and sampled, one only profiled, one only sampled, one that no longer runs."""
    known = [
        StepKind("prefill", (9 * MS, 9 * MS), (0.0, 0.0), (7 * MS, 7 * MS), weight=0.5),
        StepKind("decode", (2 * MS, 3 * MS), (0.0, 0.0), (1 * MS, 1 * MS), weight=0.3),
        StepKind("gone", (1 * MS, 1 * MS), (0.0, 0.0), (1 * MS, 1 * MS), weight=0.2),
    ]
    steps = [
        step((0.0, 0.0), (compute, 5 * MS), kind="prefill", host=(80 * MS, 80 * MS), gap=gap)
        for compute, gap in ((4 * MS, 1 * MS), (6 * MS, 2 * MS), (50 * MS, 9 * MS))
    ]
    steps.append(step((0.0, 0.0), (11 * MS, 12 * MS), kind="wide", host=(3 * MS, 4 * MS)))
    counts = Counter({"prefill": 3, "decode": 60, "wide": 1})
    prefill, decode, wide = kinds_from_live(steps, counts, known)
    assert (prefill.name, prefill.weight) == ("prefill", 3 / 64)
    assert prefill.compute == pytest.approx((6 * MS, 5 * MS)) and prefill.gap == pytest.approx((2 * MS, 2 * MS))
    assert prefill.host == (7 * MS, 7 * MS), "a host that waits for the device has not worked for longer"
    assert decode.compute == known[1].compute and (decode.name, decode.weight) == ("decode", 60 / 64)
    assert wide.compute == pytest.approx((11 * MS, 12 * MS)) and wide.host == (3 * MS, 4 * MS)
    assert (wide.name, wide.weight) == ("wide", 1 / 64)


def test_without_counts_the_known_mix_stays() -> None:
    known = (StepKind("a", (MS,), (0.0,), (0.0,), weight=0.25), StepKind("b", (MS,), (0.0,), (0.0,), weight=0.75))
    assert kinds_from_live([], Counter(), known) == known
    assert kinds_from_live([], Counter({"neither": 5}), known) == known
