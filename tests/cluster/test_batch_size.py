"""The batch size with the most tokens a second over the job, and what it leaves for weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch_size import NEAR, BatchChoice, choose, kinds_of_batch, request_for, sizes_to_try
from cluster.messages import BatchPoint
from cluster.task import Rehearsal, TaskError
from flextensor.runtime.timing import StepTimes


def point(size: int, *, fixed: float = 0.1, an_item: float = 0.001, tokens: int = 10, refused: str = "") -> BatchPoint:
    """A step takes what moving the weights takes, and a little for each item."""
    return BatchPoint(
        batch_size=size,
        tokens=size * tokens,
        steps=tokens,
        step_seconds=fixed + an_item * size,
        weight_bytes=1000 - size,
        beside_bytes=10 * size,
        refused=refused,
    )


def test_sizes_are_powers_of_two_and_a_workers_share() -> None:
    assert sizes_to_try(36, 2) == (1, 2, 4, 8, 16, 18)
    assert sizes_to_try(1, 4) == (1,)
    assert sizes_to_try(10_000, 2, largest=8) == (1, 2, 4, 8)
    assert sizes_to_try(16, 1) == (1, 2, 4, 8, 16)


def test_more_items_a_step_are_taken_while_the_weights_are_the_cost() -> None:
    row = [point(size) for size in (1, 2, 4, 8, 16, 32)]
    assert choose({0: row}, items=10_000).batch_size == 32
    compute_bound = [point(size, fixed=0.0) for size in (1, 2, 4, 8)]
    assert choose({0: compute_bound}, items=10_000).batch_size == 1, "no gain: the smallest"


def test_a_short_job_takes_a_size_that_leaves_no_worker_without_work() -> None:
    rows = {rank: [point(size) for size in (1, 2, 4, 8, 16, 18, 32)] for rank in (0, 1)}
    choice = choose(rows, items=36)
    assert choice.batch_size == 18
    by_size = {one.batch_size: one for one in choice.curve}
    assert by_size[32].tokens_per_second > by_size[18].tokens_per_second, "a batch after batch it would be faster"
    assert by_size[32].job_tokens_per_second < by_size[18].job_tokens_per_second


def test_a_size_that_does_not_fit_one_worker_is_nobodys() -> None:
    rows = {
        0: [point(1), point(2), point(4)],
        1: [point(1), point(2), point(4, refused="a budget of 5 bytes does not work")],
    }
    choice = choose(rows, items=100)
    assert choice.batch_size == 2
    assert choice.curve[2].refused == "a budget of 5 bytes does not work"
    with pytest.raises(TaskError, match="no size works: out of memory"):
        choose({0: [point(1, refused="out of memory")]}, items=3)


@settings(max_examples=100, deadline=None)
@given(
    items=st.integers(1, 300),
    fixed=st.floats(0, 1),
    an_item=st.floats(0.001, 0.1),
    workers=st.integers(1, 4),
)
def test_the_choice_is_as_quick_as_any_size(items: int, fixed: float, an_item: float, workers: int) -> None:
    sizes = sizes_to_try(items, workers)
    row = [point(size, fixed=fixed, an_item=an_item) for size in sizes]
    choice: BatchChoice = choose(dict.fromkeys(range(workers), row), items=items)

    def seconds(size: int) -> float:
        return math.ceil(math.ceil(items / size) / workers) * (fixed + an_item * size)

    assert seconds(choice.batch_size) <= min(map(seconds, sizes)) / NEAR + 1e-9


def test_memory_is_asked_of_the_longest_items_and_time_of_those_in_the_middle() -> None:
    items = [{"id": str(k), "prompt": "x" * (100 - k)} for k in range(20)]
    request = request_for(items, (1, 2, 4))
    assert [item["id"] for item in request.longest] == ["0", "1", "2", "3"]
    assert [item["id"] for item in request.typical] == ["8", "9", "10", "11"]
    assert len(request_for(items[:2], (1, 2)).typical) == 2


def test_prefill_and_decode_are_weighted_as_the_whole_batch_runs_them() -> None:
    step = StepTimes("decode", (0.0, 0.1), (0.0, 0.1), (0.1, 0.2), (0.0, 0.0), ())
    prefill = replace(step, kind="prefill", end=(0.5, 1.0))
    kinds = {kind.name: kind for kind in kinds_of_batch([prefill, step, step], Rehearsal(640, 1, 31))}
    assert kinds["prefill"].weight == pytest.approx(1 / 32) and kinds["decode"].weight == pytest.approx(31 / 32)
    assert kinds["decode"].compute == pytest.approx((0.1, 0.1))
