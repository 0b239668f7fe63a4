"""What ``flextensor status`` and a report tell: the link against its own rate, joules an item."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from cluster.messages import JobProgress, RunStatus, WorkerState
from flextensor.planner.plan import Prediction
from launch.status import status_json, status_view


def status(own_reason: str = "", **more: object) -> RunStatus:
    state = WorkerState(
        own_reason=own_reason,
        rank=0,
        incarnation=1,
        pid=1,
        node="n",
        device="host",
        phase="ready",
        step_seconds=0.1,
        stall_seconds=0.02,
        link_bytes_per_second=1.5e9,
        link_nominal_bytes_per_second=2e9,
        predicted=Prediction(0.1, 0.08, 0.02, 0.05, 0.1, {}),
    )
    settings = {"joules_an_item": 12.34, "job": JobProgress(total=4, done=2)} | more
    return RunStatus("run", 3, False, (state,), epochs=(), **settings)  # type: ignore[arg-type]


def shown(told: RunStatus) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(status_view(told))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_tells_the_link_against_its_own_rate_and_joules_an_item() -> None:
    text = shown(status())
    assert "1.50/2" in text and "12.3 J an item" in text
    assert "J an item" not in shown(status(joules_an_item=None)), "where no counter is, nothing is made up"


def test_a_plan_that_nobody_asked_for_is_told_with_its_reason() -> None:
    assert "worker 0 planned by itself: out of memory in a step" in shown(status("out of memory in a step"))
    assert "planned by itself" not in shown(status())


def test_the_json_has_the_derived_figures() -> None:
    data = json.loads(json.dumps(status_json(status())))
    assert data["joules_an_item"] == 12.34 and data["workers"][0]["link_share"] == 0.75
    assert (
        data["workers"][0]["stall_share"] == pytest.approx(0.2)
        and data["workers"][0]["link_nominal_bytes_per_second"] == 2e9
    )
