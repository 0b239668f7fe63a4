"""Host time of the loader a visit: ``enter`` and ``exit`` in the steady state, with device calls that do nothing.

    python -m benchmarks.loader_host [--visits 96] [--steps 2000]

Prints microseconds of CPU time of the calling thread, so that what else runs on the machine, or in this process, does
not count. What a device adds (on CUDA: an event record, two stream waits and a copy a visit) is not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import flextensor
from flextensor.runtime.host import HostDevice
from flextensor.runtime.loader import Loader
from flextensor.runtime.memory import DeviceWeights
from flextensor.runtime.timing import Recorder

ROUNDS = 5


class IdleStream:
    """A stream on which nothing ever runs."""

    def __init__(self, key: int) -> None:
        self.key = key

    def record(self, event: Any) -> None:
        """Nothing."""

    def wait(self, event: Any) -> None:
        """Nothing."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Nothing."""

    def copier(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, together: bool = False
    ) -> Callable[[], None]:
        """What does nothing."""
        return lambda: None

    def synchronize(self) -> None:
        """Nothing to wait for."""


class IdleDevice(HostDevice):
    """The host device's memory, and streams that do nothing."""

    def __init__(self) -> None:
        super().__init__(memory_bytes=1 << 30, link_bytes_per_second=1e12)
        self._idle = IdleStream(0)

    def compute_stream(self) -> Any:
        return self._idle


def measure(visits: int, steps: int) -> dict[str, float]:
    """Microseconds a visit: of the loader alone, of all that offloading adds to a unit's call, and of that where the
    caller has not turned gradients off."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(visits))).requires_grad_(False)
    config = flextensor.OffloadConfig(
        include_patterns=("*",), gpu_device="host", resident_below_bytes=0, budget_bytes=visits * 64 * 64 * 2
    )
    flextensor.offload(model, config, name="loader-host")
    manager = flextensor.get_offload_manager("loader-host")
    x = torch.randn(1, 64)
    try:
        with torch.no_grad():
            for _ in range(manager.iters_before_inference + 1):
                model(x)
        device, stream = IdleDevice(), IdleStream(1)
        memory = DeviceWeights(manager._execution.table, device, stream)
        memory.apply(manager.plan_in_force)
        loader = Loader(manager.plan_in_force, manager._reads, memory, stream, Recorder(device, every=0))
        loader.start()
        order = manager.plan_in_force.visits

        def bare() -> None:
            loader.begin_step("")
            for unit in order:
                loader.enter(unit)
                loader.exit(unit)

        manager._execution.loader = loader
        handles = [manager._handles[unit] for unit in order]

        def whole() -> None:
            manager._begin_step()
            for handle in handles:
                handle._enter((x,), {})
                handle._leave()

        with torch.no_grad():
            manager._in_root = True
            best = _seconds({"loader": bare, "whole": whole, "whole_grad": torch.enable_grad()(whole)}, steps)
            manager._in_root = False
        found = {f"{name}_us": seconds / visits * 1e6 for name, seconds in best.items()}
        return found | {"copies": float(len(manager.plan_in_force.copies))}
    finally:
        manager.release()


def _seconds(runs: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """CPU seconds a step of each, the best of five: in turns, so that a core whose pace changes changes it for all."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.thread_time()
            for _ in range(steps // ROUNDS):
                run()
            best[name] = min(best[name], (time.thread_time() - start) / (steps // ROUNDS))
    return best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=int, default=96)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    print(json.dumps(measure(given.visits, given.steps)))


if __name__ == "__main__":
    main()
