"""What every benchmark records beside its figures, and how results are written: JSON and Markdown, side by side."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMIT_VARIABLE = "FLEXTENSOR_BENCH_COMMIT"
"""Names the commit where the tree that runs has no ``.git``."""


def environment() -> dict[str, Any]:
    """Date, hardware, versions and commit of this run."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "gpu_count": torch.cuda.device_count() if cuda else 0,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "driver": _driver() if cuda else None,
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def commit() -> str:
    """The commit that runs, ``+`` behind it where tracked files differ; ``unknown`` without git and variable."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # the driver's version is a nicety; NVML may be missing, or refuse in a container
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_results(directory: Path, name: str, data: dict[str, Any], text: Callable[[], str]) -> tuple[Path, Path]:
    """``NAME.json`` and ``NAME.md`` in ``directory``; complete when they appear. Returns both paths.

    ``text`` is asked when the figures are on disk: no mistake in a page loses what was measured.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / f"{name}.json", directory / f"{name}.md"
    for path, content in zip(paths, (lambda: json.dumps(data, indent=1) + "\n", text), strict=True):
        beside = path.with_name(path.name + ".part")
        beside.write_text(content())
        beside.replace(path)
    return paths


def environment_lines(found: dict[str, Any]) -> list[str]:
    """The environment as Markdown, for a result's head."""
    machine = found["gpu"] or f"no GPU (host device), {found['cpu']}"
    memory = f"{found['host_memory_bytes'] / 2**30:.0f} GiB"
    versions = f"Python {found['python']}, torch {found['torch']}" + (f", CUDA {found['cuda']}" if found["gpu"] else "")
    return [
        f"{found['date']}, commit `{found['commit']}`.",
        f"{machine}; {found['cpu_count']} CPU cores, {memory} of host memory; {versions}"
        + (f", driver {found['driver']}" if found["driver"] else "")
        + ".",
    ]
