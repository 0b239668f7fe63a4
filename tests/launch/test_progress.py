"""What people see while a job starts and runs."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from cluster.messages import JobProgress, RunStatus
from cluster.worker import Worker
from launch import progress
from launch.progress import ProgressView
from tests.cluster.conftest import TINY_BYTES, TINY_OPTIONS
from tests.cluster.test_worker import start_of

FILLING = "host store: filling"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_shows_how_far_its_store_is_filled_and_then_its_steps(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cluster"))
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    worker = Worker(start_of(task_options=TINY_OPTIONS | {"fill_seconds": 0.02}, threads=1))
    console = Console(file=io.StringIO(), width=150, force_terminal=terminal)
    setting_up = threading.Thread(target=worker.setup)
    job = JobProgress(total=5)
    say = worker._say

    def say_until_shown(note: str) -> None:
        """A filling is over before it is drawn: it waits."""
        say(note)
        end = time.monotonic() + 120
        while note.startswith(FILLING) and FILLING not in text() and time.monotonic() < end:
            time.sleep(0.01)

    def text() -> str:
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(worker, "_say", say_until_shown)
    try:
        with ProgressView(console, 5) as view:
            setting_up.start()
            while setting_up.is_alive():
                view.update(job, RunStatus("run", 0, False, (worker.state(),), job))
                time.sleep(0.05 if terminal else 0.01)
            assert worker.state().phase == "ready"
            view.update(job, RunStatus("run", 0, False, (worker.state(),), job))
    finally:
        setting_up.join()
        worker.close()
        sys.modules.pop("tiny_task", None)
    shown = re.findall(r"worker 0:? +host store: filling, ([0-9.]+) of ([0-9.]+) GiB", text())
    assert shown and {total for _, total in shown} == {f"{TINY_BYTES / 2**30:.2f}"}
    assert text().rindex(FILLING) < text().rindex(" ms a step, stall ")
