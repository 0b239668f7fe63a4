"""Ray's memory monitor: what is known of a cluster's nodes, and when it is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import memory_monitor
from cluster.memory_monitor import NodeMemory, memory_of_nodes, read_node, warn_where_it_kills, warning

GIB = 1 << 30
NODE = NodeMemory("10.0.0.7", refresh_ms=250, threshold=0.95, total=200 * GIB, used=40 * GIB, tmpfs=160 * GIB)


def test_a_tmpfs_that_holds_more_than_the_monitor_allows_is_told_with_the_remedy() -> None:
    text = warning(NODE)
    assert "node 10.0.0.7" in text and "95% of 200.0 GiB" in text
    assert "150.0 GiB more than now" in text and "takes 160.0 GiB" in text
    assert "RAY_memory_monitor_refresh_ms=0" in text


@pytest.mark.parametrize(
    "harmless",
    [
        replace(NODE, refresh_ms=0),
        replace(NODE, tmpfs=100 * GIB),
        replace(NODE, threshold=1.0, tmpfs=160 * GIB),
        replace(NODE, tmpfs=0),
    ],
)
def test_what_cannot_kill_is_not_told(harmless: NodeMemory) -> None:
    assert warning(harmless) == ""


def test_settings_of_the_cluster_win_over_the_nodes_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_memory_monitor_refresh_ms", raising=False)
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    found = read_node("here", str(tmp_path), {})
    assert (found.refresh_ms, found.threshold) == (250, 0.95)
    assert 0 < found.used < found.total and found.tmpfs > 0
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.9")
    assert read_node("here", str(tmp_path), {}).refresh_ms == 0
    found = read_node("here", str(tmp_path), {"memory_monitor_refresh_ms": 100})
    assert (found.refresh_ms, found.threshold) == (100, 0.9)
    assert read_node("here", str(tmp_path / "none"), {}).tmpfs == 0


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_ray_that_we_started_has_no_monitor_and_each_node_says_so(
    local_ray: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_monitor, "ANSWER_TIMEOUT", 120.0)
    (found,) = memory_of_nodes()
    assert found.refresh_ms == 0 and found.node == "127.0.0.1"
    assert found.total > GIB and found.tmpfs > 0
    assert warn_where_it_kills() == []


ATTACHING = """
import logging, sys
from ray._private import state
from cluster import memory_monitor
from cluster.session import attach
memory_monitor.ANSWER_TIMEOUT = 120.0
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
state.GlobalState.get_system_config = lambda self: {"memory_monitor_refresh_ms": 250, "memory_usage_threshold": 0.01}
print(attach(sys.argv[1], namespace="attaching"))
"""


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_who_attaches_to_a_ray_whose_monitor_can_kill_is_told_so_once_a_node(local_ray: str) -> None:
    """A Ray that says of itself that its monitor is on, and kills beyond 1% of memory, which is in use already."""
    done = subprocess.run([sys.executable, "-c", ATTACHING, local_ray], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, f"{local_ray}\n"), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "memory monitor" in line]
    assert line.startswith("cluster.memory_monitor: Ray's memory monitor is on at node 127.0.0.1 (every 250 ms)")
    assert "kills workers beyond 1% of" in line and "which is 0.0 GiB more than now" in line
