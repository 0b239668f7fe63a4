"""``ray job submit`` on a head with token authentication, and commands that reach only their own run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from subprocess import Popen
from typing import Any

import pytest

from tests.deploy.jobs import TOTAL_BYTES, Job, deployment, wait_for, write_job
from tests.deploy.sandbox import Sandbox, beyond_loopback

pytestmark = deployment()

PORT = 6380
ADDRESS = f"127.0.0.1:{PORT}"
DASHBOARD = "127.0.0.1:8265"


@pytest.fixture
def head(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A head with 4 logical GPUs that asks for the token."""
    sandbox.environment["RAY_AUTH_MODE"] = "token"
    sandbox.run("ray", "get-auth-token", "--generate")
    sandbox.start_ray(
        *("ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={PORT}", "--num-cpus=4", "--num-gpus=4"),
        *("--object-store-memory=80000000", "--disable-usage-stats"),
        RAY_memory_monitor_refresh_ms="0",
    )
    yield sandbox


def submit(head: Sandbox, job: Job) -> Popen[str]:
    """A job that runs ``python -m launch generate``; the command ends with it."""
    return head.start(
        *("ray", "job", "submit", "--address", f"http://{DASHBOARD}", "--"),
        *("python", "-m", "launch", "generate", "--config", str(job.config)),
    )


def await_workers(job: Job, submitted: Popen[str]) -> None:
    wait_for(f"both workers of {job.output.stem} at work", lambda: len(job.pids) == 2 or submitted.poll() is not None)


def assert_succeeded(head: Sandbox, job: Job, submitted: Popen[str]) -> None:
    """It was not over before, then ends well with every item answered."""
    assert submitted.poll() is None, "the commands came in the middle"
    job.hurry()
    code, output = head.ended(submitted)
    assert code == 0 and re.search(r"Job 'raysubmit_\w+' succeeded", output), output
    job.assert_complete()


def flextensor(head: Sandbox, *arguments: str, code: int = 0, **environment: str) -> str:
    """A command of ours, started on the head by hand; its output."""
    process = head.start(sys.executable, "-m", "launch", *arguments, "--address", ADDRESS, **environment)
    ended, output = head.ended(process)
    assert ended == code, f"{arguments} ended with {ended}:\n{output}"
    return output


def status(head: Sandbox, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(flextensor(head, "status", "--json", "--namespace", namespace).splitlines()[-1])
    return found


def test_a_submitted_job_with_a_token_is_replanned_and_nobody_reaches_it_without(head: Sandbox) -> None:
    job = write_job(head.folder, "submitted")
    submitted = submit(head, job)
    await_workers(job, submitted)
    listeners = head.listeners()
    assert {ADDRESS, DASHBOARD} <= listeners, listeners
    assert not beyond_loopback(listeners)

    stranger = flextensor(head, "status", "--namespace", "submitted", code=2, RAY_AUTH_MODE="disabled")
    assert "RAY_AUTH_MODE" in stranger
    told = flextensor(head, "replan", "--budget", "80%", "--namespace", "submitted")
    assert "all workers move at their next step" in told

    assert_succeeded(head, job, submitted)
    (moved,) = job.replans()
    assert all(0.5 * TOTAL_BYTES < size <= 0.8 * TOTAL_BYTES for size in moved["weight_bytes"].values())
    assert sorted(moved["streamed_bytes"]) == ["0", "1"] and all(size > 0 for size in moved["streamed_bytes"].values())


@pytest.mark.deploy_long
def test_commands_reach_one_of_two_submitted_jobs_and_not_the_other(head: Sandbox) -> None:
    jobs = {name: write_job(head.folder, name, items=800) for name in ("here", "there")}
    submitted = {name: submit(head, job) for name, job in jobs.items()}
    for name, job in jobs.items():
        await_workers(job, submitted[name])

    before = status(head, "there")
    unnamed = flextensor(head, "pause", code=2)
    assert "several runs are going on" in unnamed and "here" in unnamed and "there" in unnamed
    assert "all workers move at their next step" in flextensor(head, "replan", "--budget", "80%", "--namespace", "here")
    assert "all workers move at their next step" in flextensor(head, "rollback", "--namespace", "here")
    assert "2 workers stand" in flextensor(head, "pause", "--namespace", "here")
    after = status(head, "there")
    assert status(head, "here")["paused"] and not after["paused"]
    assert after["epoch"] == before["epoch"] and after["job"]["done"] > before["job"]["done"]
    assert [w["epoch"] for w in after["workers"]] == [w["epoch"] for w in before["workers"]]
    assert "no run in namespace 'elsewhere'" in flextensor(head, "pause", "--namespace", "elsewhere", code=2)
    assert "2 workers go on" in flextensor(head, "resume", "--namespace", "here")

    for name, job in jobs.items():
        assert_succeeded(head, job, submitted[name])
    replanned = jobs["here"].replans()
    assert len(replanned) == 2 and not jobs["there"].replans()
    assert all(0 < size <= 0.8 * TOTAL_BYTES for size in replanned[0]["weight_bytes"].values())
    assert all(size > 0 for size in replanned[0]["streamed_bytes"].values())


def test_a_run_of_its_own_listens_on_loopback_only(sandbox: Sandbox) -> None:
    job = write_job(sandbox.folder, "alone")
    run = sandbox.start(sys.executable, "-m", "launch", "generate", "--config", str(job.config))
    wait_for("both workers at work", lambda: len(job.pids) == 2 or run.poll() is not None)
    listeners = sandbox.listeners()
    assert len(listeners) > 3 and not beyond_loopback(listeners)
    assert (sandbox.home / ".ray" / "auth_token").exists(), "Ray of one's own asks for a token too"
    paused = sandbox.run(sys.executable, "-m", "launch", "pause")
    assert "2 workers stand" in paused, "found by the run file"
    sandbox.run(sys.executable, "-m", "launch", "resume")
    job.hurry()
    code, output = sandbox.ended(run)
    assert code == 0, output
    job.assert_complete()
    assert sandbox.run("ls", "/dev/shm") == ""
