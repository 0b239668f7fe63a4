"""Ray's memory monitor, on a cluster that others started: it counts the shared weights, pages of a tmpfs, as used, and
kills workers for them when a node's memory is used beyond its threshold."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray._common.utils import get_system_memory
from ray._private import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_REFRESH = "RAY_memory_monitor_refresh_ms"
_THRESHOLD = "RAY_memory_usage_threshold"
DEFAULT_REFRESH_MS = 250
DEFAULT_THRESHOLD = 0.95
"""Of Ray 2.60, where nothing is set."""
ANSWER_TIMEOUT = 10.0
MOST_NODES = 32
"""More are not asked: they were started alike."""


@dataclass(frozen=True)
class NodeMemory:
    """One node's monitor and what it looks at. Sizes are bytes; refresh_ms 0: it is off; tmpfs: free in ``shm_dir``."""

    node: str
    refresh_ms: int
    threshold: float
    total: int
    used: int
    tmpfs: int

    @property
    def room(self) -> int:
        """Bytes that can still be taken before the monitor kills."""
        return max(0, int(self.total * self.threshold) - self.used)


def read_node(node: str, shm_dir: str, settings: Mapping[str, Any]) -> NodeMemory:
    """This node, from the settings of its Ray: ``settings`` (the cluster's own) over the environment."""
    refresh = settings.get("memory_monitor_refresh_ms", os.environ.get(_REFRESH))
    threshold = settings.get("memory_usage_threshold", os.environ.get(_THRESHOLD))
    memory = psutil.virtual_memory()
    try:
        space = os.statvfs(shm_dir)
        free = space.f_bavail * space.f_frsize
    except OSError:
        free = 0
    return NodeMemory(
        node=node,
        refresh_ms=DEFAULT_REFRESH_MS if refresh is None else int(refresh),
        threshold=DEFAULT_THRESHOLD if threshold is None else float(threshold),
        total=int(get_system_memory()),
        used=int(memory.total - memory.available),
        tmpfs=free,
    )


def warning(found: NodeMemory) -> str:
    """What to tell of a node where a store that its tmpfs holds could bring the monitor to kill; else nothing."""
    if found.refresh_ms == 0 or found.tmpfs <= found.room:
        return ""
    gib = 1 << 30
    return (
        f"Ray's memory monitor is on at node {found.node} (every {found.refresh_ms} ms) and counts shared weights as "
        f"used memory: it kills workers beyond {found.threshold:.0%} of {found.total / gib:.1f} GiB, which is "
        f"{found.room / gib:.1f} GiB more than now, and the tmpfs there takes {found.tmpfs / gib:.1f} GiB; for a model "
        f"larger than that start Ray with {_REFRESH}=0, or a higher {_THRESHOLD}"
    )


def memory_of_nodes(shm_dir: str = "/dev/shm") -> list[NodeMemory]:
    """The nodes with GPUs (logical ones too) of the Ray that this process is attached to; those that do not answer
    within 10 s are left out."""
    settings = state.state.get_system_config() or {}
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
    task = ray.remote(num_cpus=0, max_retries=0)(read_node)
    asked = []
    for node in nodes[:MOST_NODES]:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(task.options(scheduling_strategy=there).remote(node["NodeManagerAddress"], shm_dir, settings))
    if not asked:
        return []
    answered, silent = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_TIMEOUT)
    for reference in silent:
        ray.cancel(reference, force=True)
    found = []
    for reference in answered:
        try:
            found.append(ray.get(reference))
        except ray.exceptions.RayError as error:  # its Python lacks this package: the workers will say so
            logger.debug("a node does not tell its memory: %s", error)
    return found


def warn_where_it_kills(shm_dir: str = "/dev/shm") -> list[str]:
    """Log a warning for each node where the monitor can kill workers for the shared weights; the warnings."""
    texts = [text for found in memory_of_nodes(shm_dir) if (text := warning(found))]
    for text in texts:
        logger.warning("%s", text)
    return texts
