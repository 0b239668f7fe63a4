"""What ``flextensor replan`` asks for, and what it tells of the answer."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.messages import ReplanOutcome, ReplanRequest, WorkerChange
from flextensor.config import ConfigError
from flextensor.planner.plan import Prediction
from launch.replan import _tell, request_of

MB = 10**6
CHANGE = WorkerChange(1, 9 * MB, 2 * MB, 0.05, 6 * MB, 5 * MB, 5 * MB, Prediction(0.06, 0.05, 0.01, 0.05, 0.05, {}), MB)


def test_the_command_line_as_a_request() -> None:
    assert request_of(None, None, measure=True, dry_run=False) == ReplanRequest()
    assert request_of("40%", "0,2", measure=False, dry_run=True) == ReplanRequest(
        budget=0.4, workers=(0, 2), measure=False, dry_run=True, reason="budget 40%"
    )
    assert request_of("6GiB", "3", measure=True, dry_run=False) == ReplanRequest(
        budget=6 << 30, workers=(3,), reason="budget 6GiB"
    )
    assert request_of("Latency ", None, measure=True, dry_run=False) == ReplanRequest(
        latency=True, reason="budget Latency "
    )
    with pytest.raises(ConfigError, match="--workers 'all': write ranks"):
        request_of(None, "all", measure=True, dry_run=False)


def told(outcome: ReplanOutcome) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=140)
    went = _tell(outcome, console)
    return went, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_dry_run_shows_what_would_change_and_that_nothing_did() -> None:
    went, text = told(ReplanOutcome(False, 4, "", dry_run=True, changes=(CHANGE,)))
    assert went and "dry run, nothing changed" in text and "move at their next step" not in text
    for figure in ("9.0 MB -> 6.0 MB", "2.0 MB -> 5.0 MB", "1.0 MB", "50.0 ms", "60.0 ms", "10.0 ms"):
        assert figure in text


def test_a_refusal_is_told_with_its_reason_and_the_epoch_that_stays() -> None:
    for dry_run in (False, True):
        went, text = told(ReplanOutcome(False, 4, "worker 1 is late", dry_run=dry_run))
        assert not went and "refused: worker 1 is late; all workers stay at epoch 4" in text


def test_a_replan_tells_how_long_it_took() -> None:
    went, text = told(ReplanOutcome(True, 5, "", changes=(CHANGE,), measure_seconds=0.2, round_seconds=0.01))
    assert went and "epoch 5" in text and "measured and solved in 200.0 ms, agreed in 10.0 ms" in text
    assert "stand" not in text
