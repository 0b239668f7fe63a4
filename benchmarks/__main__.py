"""Every benchmark that this machine can run, one after another, each in a process of its own.

    python -m benchmarks                   # on a GPU about 20 minutes, on a CPU about 5
    python -m benchmarks --only engine store --output out
    python -m benchmarks --tiny            # small models, a few minutes anywhere

What one writes is on disk before the next begins; one that fails or runs past its limit ends alone. The exit code is 1
then. Each has settings of its own: ``python -m benchmarks.engine --help``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.record import RESULTS, ROOT

GRACE = 20.0
"""Seconds between asking a benchmark to end and killing it."""


@dataclass(frozen=True)
class Run:
    """One benchmark: its module, arguments, seconds that it may take, and the fewest GPUs that it needs."""

    name: str
    arguments: tuple[str, ...]
    limit: float
    gpus: int = 0


def runs(gpus: int, *, tiny: bool) -> list[Run]:
    """What a machine with so many GPUs can run, those that matter most first."""
    if tiny or gpus == 0:
        small = ("--tiny",) if tiny else ()
        # Without a GPU the engine's and the video model's real sizes would take hours.
        return [
            Run("engine", ("--tiny",), 300),
            Run("store", ("--size", "64MiB", "--processes", "1", "2") if tiny else (), 600),
            Run("wan", ("--tiny",), 300),
            Run("cluster", ("--device", "host", *small), 600),
        ]
    several = (
        ("--device", "cuda", "--workers", str(gpus))
        if gpus > 1
        else ("--device", "cuda", "--workers", "2", "--num-gpus", "0.5")
    )
    return [
        Run("engine", (), 480, 1),
        Run("store", ("--size", "10.9GiB"), 300, 1),
        Run("wan", (), 360, 1),
        Run("cluster", several, 300, 1),
        Run("peer", () if gpus > 1 else ("--one-gpu",), 120, 1),
    ]


def command(run: Run, output: Path) -> list[str]:
    """How it is started; results go to ``output``."""
    return [sys.executable, "-m", f"benchmarks.{run.name}", *run.arguments, "--output", str(output)]


def finish(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait; how it ended in words, "" when well. One that runs past ``limit`` seconds ends with all that it started."""
    try:
        code = process.wait(limit)
        return "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        for number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE)
                break
            except subprocess.TimeoutExpired:
                continue
        return f"ran past {limit:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these: engine store wan cluster peer")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="small models on the host device")
    options = parser.parse_args(arguments)
    planned = runs(torch.cuda.device_count(), tiny=options.tiny)
    unknown = sorted(set(options.only or ()) - {run.name for run in planned})
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r} here; there are: {', '.join(run.name for run in planned)}")
    # A shell's background job ignores it, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    for run in planned:
        if options.only and run.name not in options.only:
            continue
        began = time.monotonic()
        print(f"== benchmarks.{run.name} {' '.join(run.arguments)}", flush=True)
        process = subprocess.Popen(command(run, options.output), cwd=ROOT, start_new_session=True)
        try:
            problem = finish(process, run.limit)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            return 130
        failed += bool(problem)
        print(f"== benchmarks.{run.name}: {problem or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
