"""What ``flextensor status`` and a report tell: the link against its own rate, joules an item."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable

import pytest
import ray
from rich.console import Console

from cluster.messages import CoordinatorOptions, JobProgress, RunStatus, WorkerState
from cluster.session import SessionError, make_coordinator
from flextensor.planner.plan import Prediction
from launch.status import show_status, status_json, status_view


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


@pytest.mark.ray
@pytest.mark.xdist_group("ray_launch")
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_watching_shows_a_run_again_and_again_until_it_is_finished_or_gone(
    local_ray: str, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """Through the connection that this process has: it cannot make a second one."""
    coordinator = make_coordinator(CoordinatorOptions(namespace=f"watched-{as_json}", automatic=False))
    ray.get(coordinator.start.remote(), timeout=240)
    monkeypatch.setattr("launch.status.find_run", lambda **where: coordinator)
    monkeypatch.setattr("launch.status.WATCH_INTERVAL", 0.05)

    def watch(done: int, times: int, last: Callable[[], object]) -> str:
        """What is shown up to ``last``, which comes once so many items have been shown so many times."""
        text = io.StringIO()
        shows = f'"done": {done},' if as_json else f"{done}/9 items"

        def until_shown() -> None:
            end = time.monotonic() + 240
            while text.getvalue().count(shows) < times and time.monotonic() < end:
                time.sleep(0.01)
            last()

        at_last = threading.Thread(target=until_shown)
        at_last.start()
        console = Console(file=text, width=120, force_terminal=not as_json)
        show_status(address=None, namespace=None, watch=True, as_json=as_json, console=console)
        at_last.join()
        return text.getvalue()

    def finish() -> None:
        ray.get(coordinator.progress.remote(JobProgress(total=9, done=9, finished=True)))

    ray.get(coordinator.progress.remote(JobProgress(total=9, done=4)))
    text = watch(4, 4 if as_json else 2, finish)
    if as_json:
        jobs = [json.loads(line)["job"] for line in text.splitlines()]
        assert len(jobs) > 3 and [job["finished"] for job in jobs] == [False] * (len(jobs) - 1) + [True]
        assert jobs[0]["done"] == 4 and jobs[-1]["done"] == 9
    else:
        assert text.count("watched-False, epoch 0") > 2 and text.count("4/9 items") > 1
        assert text.rindex("9/9 items") > text.rindex("4/9 items")
    ray.get(coordinator.progress.remote(JobProgress(total=9, done=5)))
    assert ("5/9" if not as_json else '"done": 5') in watch(5, 1, lambda: ray.kill(coordinator))
    with pytest.raises(SessionError, match="the run has ended"):
        show_status(address=None, namespace=None, watch=True, as_json=as_json, console=Console(file=io.StringIO()))


def test_the_json_has_the_derived_figures() -> None:
    data = json.loads(json.dumps(status_json(status())))
    assert data["joules_an_item"] == 12.34 and data["workers"][0]["link_share"] == 0.75
    assert (
        data["workers"][0]["stall_share"] == pytest.approx(0.2)
        and data["workers"][0]["link_nominal_bytes_per_second"] == 2e9
    )
