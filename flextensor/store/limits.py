"""How much memory this process may take: the system, its control group, its locked-memory limit. Bytes."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimits:
    """total, available: memory of the system or of the control group, whichever is less; ``source`` says which."""

    total: int
    available: int
    source: str


def memory_limits() -> MemoryLimits:
    """The least of what the system and the control groups of this process allow."""
    info = _fields(Path("/proc/meminfo"), scale=1024)
    limits = [MemoryLimits(info["MemTotal"], info["MemAvailable"], "system memory")]
    limits += _cgroup_limits()
    return MemoryLimits(
        total=min(limit.total for limit in limits),
        available=min(limit.available for limit in limits),
        source=min(limits, key=lambda limit: limit.available).source,
    )


def locked_memory_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_limits() -> list[MemoryLimits]:
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found: list[MemoryLimits] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current", "active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
        else:
            continue
        group = root / path.strip("/")
        # A container often sees its own group mounted at the root whatever /proc/self/cgroup says.
        for folder in {group, *group.parents, root}:
            if folder == root or root in folder.parents:
                found += _read_group(folder, *names)
    return found


def _read_group(folder: Path, limit: str, usage: str, active: str, inactive: str) -> list[MemoryLimits]:
    try:
        total = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = _fields(folder / "memory.stat")
    except (OSError, ValueError):  # no such group here, or its limit reads "max"
        return []
    if total >= _UNLIMITED:
        return []
    reclaimable = stat.get(active, 0) + stat.get(inactive, 0)
    return [MemoryLimits(total, max(0, total - used + reclaimable), f"control group {folder}")]


def _fields(path: Path, scale: int = 1) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in path.read_text().splitlines():
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and parts[1].isdigit():
            values[parts[0]] = int(parts[1]) * scale
    return values
