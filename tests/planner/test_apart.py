"""The optimiser in a process of its own gives what it gives here."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from flextensor.planner import apart
from flextensor.planner.apart import search_apart
from flextensor.planner.plan import BudgetError
from flextensor.planner.search import search
from tests.planner.profiles import random_profile

pytestmark = pytest.mark.whole_search


@pytest.fixture(autouse=True)
def a_slow_machine_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit only ends a test that is stuck."""
    monkeypatch.setattr(apart, "LIMIT_SECONDS", 250.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_the_same_and_so_is_the_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(seed)
    expected = search(profile)
    monkeypatch.setattr(apart, "search", None)  # it is not made here
    assert search_apart(profile) == expected
    total = sum(tensor.nbytes for tensor in profile.tensors)
    with pytest.raises(BudgetError) as here:
        search(profile, budget_bytes=1)
    with pytest.raises(BudgetError) as there:
        search_apart(profile, budget_bytes=1)
    assert 0 < here.value.needed == there.value.needed <= 2 * total and str(here.value) == str(there.value)


def test_what_the_other_process_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = random_profile(1)
    expected = search(profile)
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'goodbye')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(apart, "search", None)
    assert search_apart(profile) == expected


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "LIMIT_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="planning took more than"):
        search_apart(random_profile(0))


def test_where_no_process_can_be_started_the_plan_is_made_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    profile = random_profile(0)
    expected = search(profile)
    for command in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", command)
        with caplog.at_level(logging.WARNING):
            assert search_apart(profile) == expected
        assert "planning in this process" in caplog.text
        caplog.clear()
