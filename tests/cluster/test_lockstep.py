"""Workers that run every step together: they change plans before the same step, or none of them does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.messages import ReplanOutcome
from tests.cluster.conftest import Run
from tests.cluster.test_batch_job import (
    answers_of,
    assert_answers_right,
    events_of,
    items_of,
    on_one_epoch,
    replan,
    run_with,
    status_with,
)

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def epochs_by_step(run: Run) -> dict[int, set[int]]:
    """For each step's number, the epochs of the plans that workers ran it under."""
    found: dict[int, set[int]] = {}
    for answer in answers_of(run).values():
        for number, epoch in answer["epochs"]:
            found.setdefault(number, set()).add(epoch)
    return found


def test_a_lockstep_group_changes_plans_before_the_same_step(start_run: Callable[..., Run], tmp_path: Path) -> None:
    """Rank 0 is always late within a step, so that rank 1 is within it, waiting for rank 0, when a replan comes."""
    folder = tmp_path / "meetings"
    folder.mkdir()
    run = start_run(
        items_of(4000, steps=6),
        batch=1,
        task="meeting_task:MeetingTask",
        task_options={"folder": str(folder), "parties": 2, "slow": 0.01},
        lockstep=((0, 1),),
    )
    outcomes: list[ReplanOutcome] = []

    def work() -> None:
        try:
            for budget in (0.9, 0.4, 0.7):
                outcomes.append(replan(run, budget=budget, measure=budget == 0.4))
                status_with(run, on_one_epoch)
        finally:
            (folder / "over").touch()

    run_with(run, work)
    assert_answers_right(run)
    assert [outcome.committed for outcome in outcomes] == [True] * 3, [outcome.reason for outcome in outcomes]
    for outcome in outcomes:
        assert outcome.step_indexes[0] == outcome.step_indexes[1] > 0
    seen = epochs_by_step(run)
    assert {epoch for epochs in seen.values() for epoch in epochs} == {1, 2, 3, 4}
    assert all(len(epochs) == 1 for epochs in seen.values()), "two plans within one step of the group"
    replanned = [event for event in events_of(run) if event["event"] == "replanned"]
    assert [set(event["step_indexes"].values()) for event in replanned] == [
        {outcome.step_indexes[0]} for outcome in outcomes
    ]
    for outcome, epoch in zip(outcomes, (2, 3, 4), strict=True):
        first = min(number for number, epochs in seen.items() if epochs == {epoch})
        assert outcome.step_indexes[0] == first
    assert status_with(run, on_one_epoch).epoch == 4
