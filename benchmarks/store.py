"""The host store benchmark: memory of many processes, starts, filling against memcpy, and the link from the store.

A start is that of an offloaded model, from the call to the end of its first planned step: weights, warm-up, plan.

    python -m benchmarks.store                     # a 1 GiB model
    python -m benchmarks.store --size 10.9GiB      # the model of the engine benchmark
    python -m benchmarks.store --crash-rounds 100  # and so many rounds of random deaths

With a GPU it adds pinning and the link's speed from the store and from torch's own pinned memory. Checkpoint and
results of hashing lie in a temporary folder; the checkpoint is read from the page cache, where writing it left it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, ROOT, environment, write_results
from benchmarks.store_checkpoint import shape_of, write_checkpoint
from benchmarks.store_speed import measure_link, measure_speeds
from benchmarks.store_table import markdown, picture
from flextensor.config import parse_bytes
from flextensor.store.filling import thread_count
from flextensor.store.limits import memory_limits

logger = logging.getLogger(__name__)

START_ROUNDS = 2
KINDS = ("shared", "private")
SAMPLE_SECONDS = 0.02
PROCESS_SECONDS = 300.0
TINY = 256 << 20
"""Bytes of weights; results of less have a name of their own."""


@dataclass
class Results:
    """All that was measured; bytes, seconds, bytes a second, copies of the weights. None where it does not apply.

    speeds: one value a round. starts: one mapping a round. load: the machine's one-minute load, before and after.
    """

    weight_bytes: int
    memory: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    speeds: dict[str, list[float]] = field(default_factory=dict)
    link: dict[str, Any] | None = None
    crashes: dict[str, Any] | None = None
    load: list[float] = field(default_factory=list)


class Process:
    """One ``benchmarks.store_process``."""

    def __init__(self, kind: str, checkpoint: Path, directory: str) -> None:
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.store_process", kind, str(checkpoint), directory],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def imported(self) -> float:
        """Wait for it; seconds from its start."""
        self._line("imported")
        return time.perf_counter() - self._started

    def go(self) -> None:
        """Let it get the weights."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def ready(self) -> dict[str, Any]:
        """Wait until it has them; its times."""
        return self._line("ready")

    def end(self, number: int | None = None) -> None:
        """Let it close the store, or end it by a signal."""
        assert self._process.stdin is not None
        if number is not None:
            self._process.send_signal(number)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(PROCESS_SECONDS)

    def _line(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"process {self.pid} ended with {self._process.wait()} before it was {event}")
        values: dict[str, Any] = json.loads(text)
        assert values["event"] == event, values
        return values


def memory_of(pids: list[int], fields: tuple[str, ...] = ("Pss_Anon:", "Pss_Shmem:")) -> int:
    """Anonymous and shared memory of processes, proportionally: what they take together beside page cache."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(fields):
                    total += int(line.split()[1]) * 1024
    return total


def memory_at_once(pids: list[int], directory: str) -> int:
    """The same while processes map more and more of the store: what the tmpfs takes, and their own anonymous memory.

    Shares of shared pages change between the looks at two processes, so that their sum is none at any moment.
    """
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize + memory_of(pids, ("Pss_Anon:",))


def measure_memory(kind: str, count: int, checkpoint: Path, directory: str, weight_bytes: int) -> dict[str, Any]:
    """``count`` processes that start at once: copies of the weights in host memory, when all have them and before."""
    processes = [Process(kind, checkpoint, directory) for _ in range(count)]
    pids = [process.pid for process in processes]
    try:
        for process in processes:
            process.imported()
        before, empty = memory_of(pids), memory_at_once(pids, directory)
        most = 0
        with ThreadPoolExecutor(1) as pool:
            for process in processes:
                process.go()
            ready = pool.submit(lambda: [process.ready() for process in processes])
            while not ready.done():
                most = max(most, memory_at_once(pids, directory) - empty)
                time.sleep(SAMPLE_SECONDS)
            seconds = [result["seconds"] for result in ready.result()]
        held = memory_of(pids) - before
    finally:
        for process in processes:
            process.end()
    row = {
        "kind": kind,
        "processes": count,
        "copies": held / weight_bytes,
        "copies_while_filling": max(most, held) / weight_bytes,
        "seconds": max(seconds),
    }
    logger.info("%s", row)
    return row


def measure_starts(checkpoint: Path, directory: str, hashes: Path) -> dict[str, dict[str, Any]]:
    """Seconds to the end of the first planned step, imports apart: of the first process (nothing known), of a second
    one, of one that replaces a killed one, and of one that finds a complete store after all were killed."""
    found: dict[str, dict[str, Any]] = {}

    def start(name: str) -> Process:
        process = Process("planned", checkpoint, directory)
        imports = process.imported()
        process.go()
        found[name] = {"import_seconds": imports, **process.ready()}
        logger.info("%s: %s", name, found[name])
        return process

    shutil.rmtree(hashes, ignore_errors=True)
    first = start("first process")
    second = start("second process")
    first.end(signal.SIGKILL)
    restarted = start("restarted after SIGKILL")
    second.end(signal.SIGKILL)
    restarted.end(signal.SIGKILL)
    taken_over = start("after SIGKILL of all")
    taken_over.end()
    again = start("filled again, hashes known")
    again.end()
    return found


def run(
    size: int,
    counts: list[int],
    crash_rounds: int,
    start_rounds: int = START_ROUNDS,
    kinds: Sequence[str] = KINDS,
) -> Results:
    """Everything, in temporary folders that are removed."""
    with (
        tempfile.TemporaryDirectory(prefix="flextensor-benchmark-") as temporary,
        tempfile.TemporaryDirectory(prefix="flextensor-benchmark-", dir="/dev/shm") as directory,
    ):
        os.environ["XDG_CACHE_HOME"] = f"{temporary}/cache"
        checkpoint = Path(temporary) / "model"
        checkpoint.mkdir()
        results = Results(weight_bytes=write_checkpoint(checkpoint, shape_of(size)), load=[os.getloadavg()[0]])
        logger.info("checkpoint of %d bytes written", results.weight_bytes)
        results.speeds = measure_speeds(checkpoint, directory, results.weight_bytes)
        results.starts = [measure_starts(checkpoint, directory, Path(temporary) / "cache") for _ in range(start_rounds)]
        for kind in kinds:
            for count in counts:
                copies = 1 if kind == "shared" else count
                if copies * results.weight_bytes * 1.1 > memory_limits().available:
                    results.memory.append({"kind": kind, "processes": count, "copies": None})
                    continue
                row = measure_memory(kind, count, checkpoint, directory, results.weight_bytes)
                results.memory.append(row)
        if torch.cuda.is_available():
            results.link = measure_link(checkpoint, directory)
        if crash_rounds:
            results.crashes = {"rounds": crash_rounds, **_crashes(directory, crash_rounds)}
        results.load.append(os.getloadavg()[0])
        left = os.listdir(directory)
        if left:
            raise RuntimeError(f"stores were left behind: {left}")
    return results


def _crashes(directory: str, rounds: int) -> dict[str, Any]:
    from tests.store.test_crash_matrix import run_rounds

    return {**run_rounds(directory, rounds, seed=0), "wrong": 0, "stuck": 0, "leaked": 0}


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    options.add_argument("--size", type=parse_bytes, default="1GiB", help="of the model's weights")
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--crash-rounds", type=int, default=0)
    options.add_argument("--start-rounds", type=int, default=START_ROUNDS)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of store, for memory")
    options.add_argument("--output", "--out", dest="out", type=Path, default=RESULTS)
    options.add_argument("--name", help="of the result files; default: store, without a GPU store-cpu")
    options.add_argument("--note", default="", help="said on the page: what else the machine did")
    given = options.parse_args()
    if given.crash_rounds and importlib.util.find_spec("pytest") is None:
        options.error("--crash-rounds runs the tests' rounds, which need pytest: make test installs it")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d %(message)s", stream=sys.stderr)
    found = environment()
    results = run(given.size, given.processes, given.crash_rounds, given.start_rounds, given.kinds)
    name = given.name or ("store" if found["gpu"] else "store-cpu") + ("-tiny" if given.size < TINY else "")
    data = {"environment": found, "note": given.note, "threads": thread_count(), **asdict(results)}
    json_path, text_path = write_results(given.out, name, data, lambda: markdown(data))
    logger.info("wrote %s and %s", json_path, text_path)
    try:
        picture(data, given.out / f"{name}.png")
    except ModuleNotFoundError as error:
        logger.warning("no picture: %s", error)


if __name__ == "__main__":
    main()
