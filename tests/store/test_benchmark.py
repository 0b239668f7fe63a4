"""The store benchmark, end to end on a small model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.record import environment
from benchmarks.store import run
from benchmarks.store_speed import ROUNDS
from benchmarks.store_table import markdown, picture


@pytest.mark.slow
def test_the_benchmark_measures_one_copy_and_right_orders_of_speed(tmp_path: Path) -> None:
    results = run(96 << 20, [1, 2], crash_rounds=0, start_rounds=1)
    memory = {(row["kind"], row["processes"]): row["copies"] for row in results.memory}
    assert 0.95 < memory["shared", 2] < 1.1 and 1.9 < memory["private", 2] < 2.2
    for starts in results.starts:
        assert starts["first process"]["created"] and starts["filled again, hashes known"]["created"]
        for name in ("second process", "restarted after SIGKILL", "after SIGKILL of all"):
            assert not starts[name]["created"] and starts[name]["fill_seconds"] == 0
        assert all(start["seconds"] > sum(start["step_seconds"]) > 0 for start in starts.values())
    assert all(len(rates) == ROUNDS and min(rates) > 1e6 for rates in results.speeds.values())
    assert max(results.speeds["fill"]) < max(results.speeds["fill_after_reserving"])
    data = json.loads(json.dumps({"environment": environment(), "threads": 2, **asdict(results)}))
    text = markdown(data)
    assert "| 2 | 1.0" in text and "restarted after SIGKILL" in text and "without getting the pages" in text
    picture(data, tmp_path / "store.png")
    assert (tmp_path / "store.png").read_bytes().startswith(b"\x89PNG")
