"""The main job as people run it: commands in processes of their own, on a Ray that the tests started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.messages import ReplanRequest
from flextensor.store.inventory import list_stores
from tests.launch.conftest import Job, end_of, start_command

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray_launch")]

SLOW = {"task_options": {"max_new_tokens": 20}, "offload": {"host_link_bytes_per_second": "30MB/s"}}
"""Some two seconds a batch, so that there is time to do something in the middle: few steps, which wait for the link."""


def wait_for(condition: Callable[[], bool], *, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def coordinator_of(namespace: str) -> Any:
    """The coordinator of a run that is being started."""
    found: list[Any] = []

    def is_there() -> bool:
        with contextlib.suppress(ValueError):
            found.append(ray.get_actor("coordinator", namespace=namespace))
        return bool(found)

    wait_for(is_there)
    return found[0]


def pause(coordinator: Any, on: bool) -> None:
    ray.get(coordinator.pause.remote(on), timeout=120)


def leases(coordinator: Any) -> int:
    """Workers that have one."""
    workers = ray.get(coordinator.status.remote(), timeout=120).workers
    return sum(worker.lease is not None for worker in workers)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def report_of(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(job.report.read_text())
    return report


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "launch-tests" in name]


def test_two_workers_with_a_replan_in_the_middle_beside_a_second_run(
    local_ray: str, make_job: Callable[..., Job]
) -> None:
    bad = ["{not json", '{"id": "no-prompt"}']
    patient = {f"{what}_timeout": 240 for what in ("measure", "prepare", "commit")}
    slower = {"offload": {"host_link_bytes_per_second": "10MB/s"}}  # while little is streamed, too
    replanned = make_job(items=48, lines=bad, verify=24, coordinator=patient, **(SLOW | slower))
    quiet = make_job(items=48, workers=1, verify=3, **SLOW)
    where = ("--address", local_ray, "--namespace")
    first = replanned.start(*where, "first")
    second = quiet.start(*where, "second")
    coordinator, other = coordinator_of("first"), coordinator_of("second")
    # What a worker's start and each command take on a busy machine is not known: no work is done meanwhile.
    pause(coordinator, True)
    pause(other, True)
    wait_for(lambda: leases(coordinator) == 2 and leases(other) == 1)
    pause(coordinator, False)
    pause(other, False)
    wait_for(lambda: lines_in(replanned.output) >= 2 + 3)
    asked = coordinator.replan.remote(ReplanRequest(budget=0.9))  # beside the steps, until half of the items are done
    while not ray.wait([asked], timeout=0.2)[0] and lines_in(replanned.output) < 2 + 24:
        pass
    pause(coordinator, True)
    outcome = ray.get(asked, timeout=300)
    assert outcome.committed, outcome.reason

    def told(*command: str) -> str:
        code, out, err = end_of(start_command(*command, *where, "first"))
        assert code == 0, out + err
        return out

    told("pause")
    what_if = told("replan", "--budget", "70%", "--workers", "1", "--dry-run", "--no-measure")
    told("replan", "--budget", "80%")
    status = json.loads(told("status", "--json"))
    watcher = start_command("status", "--watch", "--json", *where, "first")
    assert watcher.stdout is not None
    watched = [json.loads(watcher.stdout.readline())]
    told("resume")
    wait_for(lambda: lines_in(replanned.output) > 2 + watched[0]["job"]["done"])
    pause(coordinator, True)
    while watched[-1]["job"]["done"] == watched[0]["job"]["done"]:
        watched.append(json.loads(watcher.stdout.readline()))
    pause(coordinator, False)
    watched += [json.loads(line) for line in watcher.stdout]
    for process in (first, second, watcher):
        code, out, err = end_of(process)
        assert code == 0, out + err

    assert "dry run, nothing changed" in what_if and "all workers move" not in what_if
    rows = [line.split()[:6] for line in what_if.splitlines() if " -> " in line]
    assert [row[0] for row in rows] == ["0", "1"], "rank, weights before, unit, arrow, weights after, unit"
    weights = [float(row[4]) for row in rows]
    assert weights[1] < weights[0], "worker 0 would keep the plan of epoch 2"
    assert len(watched) > 1 and watched[0]["epoch"] == 3
    assert watched[0]["job"]["done"] < watched[-1]["job"]["done"]

    answers = replanned.answers()
    assert set(answers) == {*replanned.ids, "line-4", "no-prompt"}
    assert "line 4: not JSON" in answers["line-4"]["error"] and "line 5" in answers["no-prompt"]["error"]
    without = quiet.answers()
    assert {key: answers[key]["tokens"] for key in quiet.ids} == {key: without[key]["tokens"] for key in quiet.ids}

    report = report_of(replanned)
    assert report["verify"] == {"checked": 24, "identical": 24, "different": []}
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2, 3]
    assert status["epoch"] == 3 and status["paused"] and {worker["rank"] for worker in status["workers"]} == {0, 1}
    for worker, detail in zip(report["workers"], report["details"], strict=True):
        engine = detail["engine"]
        assert worker["epoch"] == 3
        assert 0 < engine["device_weight_bytes"] <= 0.8 * engine["weights_bytes"]
        assert 0 < worker["streamed_bytes"] < worker["copied_bytes_total"]
        assert worker["step_seconds"] > 0 and worker["predicted"]["floor_seconds"] > 0
    # Two runs, three processes: one store, filled by one of them.
    details = report["details"] + report_of(quiet)["details"]
    assert len({detail["engine"]["store"]["path"] for detail in details}) == 1
    assert sum(detail["engine"]["store"]["created_by_us"] for detail in details) <= 1
    assert 0 < report["weights_copies_in_host_memory"] < 1.1
    wait_for(lambda: segments() == [])


@pytest.fixture
def stores() -> Iterator[Path]:
    """A folder of this test's own for stores: a start of any run removes what dead ones have left beside its own."""
    folder = Path(tempfile.mkdtemp(prefix="flextensor-tests-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_killed_job_resumes_with_every_item_once_from_the_store_that_it_left(
    local_ray: str, make_job: Callable[..., Job], stores: Path
) -> None:
    def left() -> list[str]:
        return [entry.state for entry in list_stores(str(stores))]

    job = make_job(items=90, **SLOW)
    ours = ("--address", local_ray, "--keep-store", "--set", f"offload.shm_dir={stores}", "--namespace")
    process = job.start(*ours, "killed", "--workers", "1")
    wait_for(lambda: lines_in(job.output) >= 3)
    process.kill()
    process.communicate()
    with open(job.output, "ab") as output:
        output.write(b'{"id": "item-1", "answer": "torn')
    kept = job.output.read_bytes().splitlines(keepends=True)[:3]
    wait_for(lambda: left() == ["dead"])
    quick = ("--set", "offload.host_link_bytes_per_second=300MB/s")  # no more need for time
    code, out, err = end_of(job.start(*ours, "resumed", *quick))
    assert code == 0, out + err
    assert {detail["engine"]["store"]["created_by_us"] for detail in report_of(job)["details"]} == {False}
    wait_for(lambda: left() == ["kept"])  # for a warm start: that is what --keep-store is for
    assert "are finished" in out
    assert set(job.answers()) == set(job.ids)
    assert job.output.read_bytes().splitlines(keepends=True)[:3] == kept
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "again"))
    assert code == 0 and "nothing left to do" in out


def test_a_budget_below_the_least_that_works_names_it(local_ray: str, make_job: Callable[..., Job]) -> None:
    job = make_job(budget=1000, workers=1)
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "poor"))
    assert code == 2, out + err
    assert len(err.strip().splitlines()) == 1 and "bytes are needed" in err
    wait_for(lambda: segments() == [])


def test_sigterm_stops_the_workers_and_leaves_whole_lines(local_ray: str, make_job: Callable[..., Job]) -> None:
    job = make_job(items=600, **SLOW)
    process = job.start("--address", local_ray, "--namespace", "terminated")
    wait_for(lambda: lines_in(job.output) >= 3)
    process.terminate()
    code, out, err = end_of(process)
    assert code == 143, out + err
    assert 3 <= len(job.answers()) < len(job.ids)
    assert "Traceback" not in err
    wait_for(lambda: segments() == [])


def test_ctrl_c_with_a_ray_of_its_own(make_job: Callable[..., Job]) -> None:
    job = make_job(items=600, workers=1, **SLOW)
    process = job.start()
    wait_for(lambda: lines_in(job.output) >= 3)
    code, out, err = end_of(start_command("status"))
    assert code == 0, err
    assert "epoch 1" in out and "host" in out
    process.send_signal(signal.SIGINT)
    code, out, err = end_of(process)
    assert code == 130, out + err
    assert 3 <= len(job.answers()) < len(job.ids)
    assert "Traceback" not in err
    assert segments() == []
    code, out, err = end_of(start_command("status"))
    assert code == 2 and "no run" in err
