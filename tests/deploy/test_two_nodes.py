"""Two nodes: a store on each, one replan for the workers of both, and a node that dies in the middle."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.jobs import TOTAL_BYTES, deployment, wait_for, write_job
from tests.deploy.sandbox import Sandbox, beyond_loopback
from tests.deploy.two_nodes import SECOND

pytestmark = deployment()


class TwoNodes:
    """The cluster of ``two_nodes.py`` as the tests steer it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        script = str(Path(__file__).with_name("two_nodes.py"))
        self.commands = sandbox.folder / "commands"
        self.commands.touch()
        log, follow = sandbox.folder / "cluster.log", f"exec tail -n +1 -f {self.commands}"
        self._process = sandbox.start(
            "bash", "-c", f"({follow}) | {sys.executable} {script} > {log} 2>&1", RAY_AUTH_MODE="disabled"
        )
        wait_for("both nodes", lambda: '"address"' in log.read_text() if log.exists() else False)
        (line,) = (line for line in log.read_text().splitlines() if line.startswith('{"address"'))
        self.where = ("--address", json.loads(line)["address"])

    def tell(self, command: str) -> None:
        with open(self.commands, "a") as file:
            file.write(command + "\n")

    def flextensor(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "launch", *arguments, *self.where]

    def replan(self, namespace: str, budget: str) -> str:
        command = self.flextensor("replan", "--budget", budget, "--namespace", namespace)
        return self.sandbox.run(*command, RAY_AUTH_MODE="disabled")

    def status(self, namespace: str) -> dict[str, Any]:
        process = self.sandbox.start(
            *self.flextensor("status", "--json", "--namespace", namespace), RAY_AUTH_MODE="disabled"
        )
        code, output = self.sandbox.ended(process)
        assert code == 0, output
        status: dict[str, Any] = json.loads(output.splitlines()[-1])
        return status


@pytest.fixture
def two_nodes(sandbox: Sandbox) -> Iterator[TwoNodes]:
    yield TwoNodes(sandbox)


def stores_seen_by(pid: int, namespace: str, sandbox: Sandbox) -> list[str]:
    """The store's files in the /dev/shm of a process."""
    listed = sandbox.run("ls", str(Path("/proc", str(pid), "root", "dev", "shm"))).split()
    return [name for name in listed if namespace in name]


def test_one_store_a_node_one_replan_for_both_and_a_node_killed_in_the_middle(
    sandbox: Sandbox, two_nodes: TwoNodes
) -> None:
    job = write_job(sandbox.folder, "nodes")
    run = sandbox.start(*two_nodes.flextensor("generate", "--config", str(job.config)), RAY_AUTH_MODE="disabled")
    wait_for("both workers at work", lambda: len(job.pids) == 2 or run.poll() is not None)

    states = {state["node"]: state for state in two_nodes.status("nodes")["workers"]}
    assert len(states) == 2 and SECOND in states
    stores = [stores_seen_by(state["pid"], "nodes", sandbox) for state in states.values()]
    assert [len(found) for found in stores] == [1, 1], stores
    assert not beyond_loopback(sandbox.listeners())

    assert "all workers move at their next step" in two_nodes.replan("nodes", "80%")
    two_nodes.tell("kill")
    rank = states[SECOND]["rank"]

    def noticed() -> bool:
        """By the driver too: until then a round is refused, since one is away."""
        names = [event["event"] for event in job.events if event.get("rank") == rank]
        return "worker_lost" in names and "worker_enlisted" in names[names.index("worker_lost") :]

    wait_for("the loss is seen", lambda: noticed() or run.poll() is not None)
    assert "all workers move at their next step" in two_nodes.replan("nodes", "60%")
    assert run.poll() is None, "both replans came in the middle"
    job.hurry()

    code, output = sandbox.ended(run)
    assert code == 0, output
    job.assert_complete()
    assert job.pids == {state["pid"] for state in states.values()}, "the other one ran what the lost one had"
    both, alone = job.replans()
    assert len(both["weight_bytes"]) == 2 and len(alone["weight_bytes"]) == 1
    for moved, share in ((both, 0.8), (alone, 0.6)):
        assert all(0 < size <= share * TOTAL_BYTES for size in moved["weight_bytes"].values())
        assert all(size > 0 for size in moved["streamed_bytes"].values())
