"""One process of the store benchmark; ``benchmarks.store`` starts these and talks to them in lines of JSON.

It says "imported", waits for a line, gets the weights, says "ready" with its times, and holds them until its input
ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flextensor.store import HostStore, SafetensorsSource, UnitSpec, WeightSpec, private_store, shared_store
from flextensor.store.checkpoint import checkpoint_files


def units_of_checkpoint(directory: Path) -> tuple[UnitSpec, ...]:
    """A unit a file, from the headers alone."""
    units = []
    for file in checkpoint_files(directory):
        with safe_open(file, framework="pt") as opened:
            weights = []
            for key in sorted(opened.keys()):
                shape = torch.Size(opened.get_slice(key).get_shape())
                weights.append(WeightSpec.of(key, torch.empty(shape, dtype=torch.bfloat16, device="meta")))
        units.append(UnitSpec(file.stem, tuple(weights)))
    return tuple(units)


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
    units = units_of_checkpoint(checkpoint)
    if kind == "private":
        return private_store(units, LoadedLate(checkpoint))
    return shared_store(units, SafetensorsSource(checkpoint), namespace="benchmark", directory=directory)


def main() -> None:
    """See the module's text."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=("shared", "private"))
    options.add_argument("checkpoint", type=Path)
    options.add_argument("directory")
    options.add_argument("--pin", action="store_true")
    given = options.parse_args()
    tell(event="imported")
    sys.stdin.readline()
    started = time.perf_counter()
    store = get_store(given.kind, given.checkpoint, given.directory)
    ready = time.perf_counter() - started
    pin_seconds = store.pin(0).seconds if given.pin else None
    total = time.perf_counter() - started
    report = store.report()
    # Read every byte, so that every page is in this process's page table and counts in its PSS.
    for tensor in store.layout.tensors:
        store.source(tensor.name).view(torch.int16).max()
    tell(
        event="ready",
        seconds=ready,
        seconds_pinned=total,
        pin_seconds=pin_seconds,
        pinned_bytes=report.pinned_bytes,
        created=report.created_by_us,
        identity_seconds=report.identity_seconds,
        wait_seconds=report.wait_seconds,
        fill_seconds=report.fill_seconds,
        reserve_seconds=report.reserve_seconds,
    )
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
