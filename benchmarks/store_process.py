"""One process of the store benchmark; ``benchmarks.store`` starts these and talks to them in lines of JSON.

It says "imported", waits for a line, gets the weights, says "ready" with its times, and holds them until its input
ends. What it gets: ``shared`` the store, ``private`` a copy of its own, ``planned`` the offloaded model, which it runs
until the first step under a plan is done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import flextensor.api  # whose names flextensor looks up late: imports are timed apart
from benchmarks.model import make_input
from benchmarks.store_checkpoint import meta_stack, shape_of, units_of
from flextensor.store import HostStore, SafetensorsSource, StoreReport, private_store, shared_store
from flextensor.store.checkpoint import checkpoint_files

TOKENS = 8
"""A step's: few, so that the figures are the start's and not the model's."""
BUDGET = 0.5
"""Share of the weights on the device."""
NAMESPACE = "benchmark"


class LoadedLate(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors, each read when it is asked for: what a process does that keeps a copy of its own."""

    def __init__(self, directory: Path) -> None:
        self._opened = [safe_open(file, framework="pt") for file in checkpoint_files(directory)]
        self._where = {key: opened for opened in self._opened for key in opened.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def tell(**values: Any) -> None:
    """One line to the benchmark."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def get_store(kind: str, checkpoint: Path, directory: str) -> HostStore:
    """The weights, shared or a copy of this process's own."""
    source = SafetensorsSource(checkpoint)
    units = units_of(source)
    if kind == "private":
        return private_store(units, LoadedLate(checkpoint))
    return shared_store(units, source, namespace=NAMESPACE, directory=directory)


def _times(report: StoreReport) -> dict[str, Any]:
    return {
        "created": report.created_by_us,
        "identity_seconds": report.identity_seconds,
        "wait_seconds": report.wait_seconds,
        "fill_seconds": report.fill_seconds,
        "reserve_seconds": report.reserve_seconds,
        "pin_seconds": report.pin.seconds if report.pin else None,
        "pin_waited_seconds": report.pin.waited_seconds if report.pin else None,
        "pinned_bytes": report.pinned_bytes,
        "huge_pages": report.huge_pages,
    }


def hold_store(kind: str, checkpoint: Path, directory: str) -> None:
    """Get the weights and keep them."""
    started = time.perf_counter()
    store = get_store(kind, checkpoint, directory)
    ready = time.perf_counter() - started
    # Read every byte, so that every page is in this process's page table and counts in its PSS.
    for tensor in store.layout.tensors:
        store.source(tensor.name).view(torch.int16).max()
    tell(event="ready", seconds=ready, **_times(store.report()))
    sys.stdin.read()
    store.close()


def hold_model(checkpoint: Path, directory: str) -> None:
    """Offload the model, on the GPU where there is one, and run it to the end of its first planned step."""
    started = time.perf_counter()
    source = SafetensorsSource(checkpoint)
    shape = shape_of(sum(entry.nbytes for entry in source.entries.values()))
    device = "cuda" if torch.cuda.is_available() else "host"
    config = flextensor.OffloadConfig(
        include_patterns=("layers.*",),
        gpu_device=device,
        budget_fraction=BUDGET,
        resident_below_bytes=1 << 16,
        shm_enabled=True,
        shm_namespace=NAMESPACE,
        shm_dir=directory,
    )
    model = flextensor.offload(meta_stack(shape), config, source=source)
    offloaded = time.perf_counter() - started
    manager = flextensor.get_offload_manager()
    x = make_input(shape, TOKENS, "cpu" if device == "host" else device)
    steps = []
    for _ in range(manager.iters_before_inference + 1):
        begun = time.perf_counter()
        model(x)
        if device == "cuda":
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - begun)
    seconds = time.perf_counter() - started
    if manager.phase != "inference":
        raise RuntimeError(f"no plan after {len(steps)} steps; the engine is still in {manager.phase}")
    report = manager.hosting.store.report()
    tell(event="ready", seconds=seconds, offload_seconds=offloaded, step_seconds=steps, **_times(report))
    sys.stdin.read()
    flextensor.release()


def main() -> None:
    """See the module's text."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=("shared", "private", "planned"))
    options.add_argument("checkpoint", type=Path)
    options.add_argument("directory")
    given = options.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tell(event="imported")
    sys.stdin.readline()
    if given.kind == "planned":
        hold_model(given.checkpoint, given.directory)
    else:
        hold_store(given.kind, given.checkpoint, given.directory)


if __name__ == "__main__":
    main()
