"""Speeds of the store benchmark: memcpy, filling from the page cache, and the link to a GPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.store_process import get_store
from flextensor.store.filling import thread_count
from flextensor.store.mapping import map_anonymous, map_file
from flextensor.store.reserving import reserve

logger = logging.getLogger(__name__)

PIECE = 8 << 20
MOST_COPIED = 1 << 30
ROUNDS = 7


def measure_speeds(checkpoint: Path, directory: str, weight_bytes: int) -> dict[str, list[float]]:
    """Bytes a second of each way to move bytes, once a round, all in turn: other load and memory that a virtual
    machine's host must find first then meet them alike."""
    threads = thread_count()
    size = min(MOST_COPIED, weight_bytes) // PIECE * PIECE
    source = map_anonymous(size).fill_(1)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "one": lambda: {"memcpy_one_thread": _into_touched(source, 1)},
        "all": lambda: {"memcpy_all_threads": _into_touched(source, threads)},
        "fresh": lambda: {"memcpy_fresh_pages": _into_fresh(source, threads, directory)},
        "reserved": lambda: {"memcpy_reserved_pages": _into_reserved(source, threads, directory)},
        "fill": lambda: _fill(checkpoint, directory),
    }
    found: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for way in ways.values():
            for name, rate in way().items():
                found.setdefault(name, []).append(rate)
        logger.info("round %d: %s", number + 1, {name: f"{rates[-1] / 1e9:.2f} GB/s" for name, rates in found.items()})
    return found


def _into_touched(source: torch.Tensor, threads: int) -> float:
    """memcpy into memory of this process that was written to before."""
    target = map_anonymous(source.numel()).fill_(2)
    return _copy(source, target.data_ptr(), threads)


def _into_fresh(source: torch.Tensor, threads: int, directory: str) -> float:
    """memcpy into a new file on the tmpfs: what a program reaches that maps it and copies."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, source.numel())
    area = mmap.mmap(fd, source.numel())
    os.close(fd)
    return _copy(source, torch.frombuffer(area, dtype=torch.uint8).data_ptr(), threads)


def _into_reserved(source: torch.Tensor, threads: int, directory: str) -> float:
    """The same with the file's pages got first, as a store's are; the time for that counts."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        started = time.perf_counter()
        os.ftruncate(fd, source.numel())
        target = map_file(fd, source.numel())
        reserve(fd, target, threads)
        reserving = time.perf_counter() - started
        return source.numel() / (reserving + source.numel() / _copy(source, target.data_ptr(), threads))
    finally:
        os.close(fd)


def _copy(source: torch.Tensor, target: int, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(int, range(threads)))  # its threads exist
        started = time.perf_counter()
        list(
            pool.map(
                lambda at: ctypes.memmove(target + at, source.data_ptr() + at, PIECE), range(0, source.numel(), PIECE)
            )
        )
        return source.numel() / (time.perf_counter() - started)


def _fill(checkpoint: Path, directory: str) -> dict[str, float]:
    """A whole store from the page cache: with getting its pages and all checksums, and without the first."""
    with get_store("shared", checkpoint, directory) as store:
        times, size = store.times, store.layout.weight_bytes
        return {"fill": size / times.fill, "fill_after_reserving": size / (times.fill - times.reserve)}


def measure_link(checkpoint: Path, directory: str) -> dict[str, Any]:
    """Copies of a whole unit to the GPU, from the store and from torch's own pinned memory in turn."""
    with get_store("shared", checkpoint, directory) as store:
        units = list(store.layout.by_unit.values())
        runs = [(unit[0].offset, unit[-1].offset + unit[-1].nbytes - unit[0].offset) for unit in units]
        size = max(nbytes for _, nbytes in runs)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        pageable = _copy_seconds(store.bytes(*runs[0]), target)
        report = store.pin(0)
        if not report.complete:
            return {"reason": report.reason, "pageable": runs[0][1] / pageable}
        own = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        ours, theirs = [], []
        for turn in range(60):
            offset, nbytes = runs[turn % len(runs)]
            ours.append(nbytes / _copy_seconds(store.bytes(offset, nbytes), target))
            theirs.append(nbytes / _copy_seconds(own[:nbytes], target))
        return {
            "copy_bytes": size,
            "store": statistics.median(ours),
            "torch_pinned": statistics.median(theirs),
            "ratio": statistics.median(ours) / statistics.median(theirs),
            "pageable": runs[0][1] / pageable,
            "pin_seconds": report.seconds,
            "pin_chunks": report.chunks,
            "pinned_bytes": report.pinned,
        }


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target[: source.numel()].copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
