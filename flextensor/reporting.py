"""The report of one offloaded model: everything about it as plain, JSON-able data. Bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from flextensor.compile.census import CompileCensus, CompileReport
from flextensor.compile.detect import is_compiled
from flextensor.measured import Measured
from flextensor.modules import UnitHandle
from flextensor.planner.plan import Plan
from flextensor.units import Unit


def build_report(manager: Reported) -> dict[str, Any]:
    """What is resident, streamed, left out and why; predicted and measured; memory, store, compilation."""
    plan, hosting, expected = manager.plan_in_force, manager.hosting, manager.expectation()
    other = hosting.other_bytes
    kept = [w for w in (*hosting.managed, *hosting.unstored) if w.resident_reason]
    least = manager.config.resident_below_bytes
    return {
        "name": manager.name,
        "phase": manager.phase,
        "epoch": manager.epoch,
        "device": manager.device.name,
        "units": len(manager.units),
        "offload_units": len(manager.offload_units()),
        "visits": len(plan.visits),
        "weights_bytes": sum(w.nbytes for w in hosting.managed) + other,
        "resident_bytes": plan.resident_bytes + other,
        "arena_bytes": plan.arena_bytes,
        "device_weight_bytes": manager.get_gpu_memory_usage()["weights"] + other,
        "streamed_bytes_a_step": plan.streamed_bytes,
        "budget_bytes": None if plan.budget_bytes is None else plan.budget_bytes + other,
        "unmatched": {w.name: w.nbytes for w in hosting.unmatched},
        "kept_resident": {w.name: w.resident_reason for w in kept if w.nbytes >= least},
        "prediction": None if expected is None else _plain(asdict(expected.prediction)),
        "prediction_measured": None if expected is None else expected.measured,
        "prediction_when_planned": None if plan.prediction is None else _plain(asdict(plan.prediction)),
        "live": asdict(manager.live()),
        "step_kinds": manager.step_kinds,
        "memory": manager.get_gpu_memory_usage(),
        "store": _plain(asdict(hosting.store.report())),
        "compile": asdict(manager.compile_report()),
        "refusal": manager.refusal,
    }


def _plain(value: Any) -> Any:
    """``value`` with what JSON does not know made text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class Reported(Measured):
    """The part of a manager that says how things are."""

    epoch: int
    refusal: str
    units: list[Unit]
    _census: CompileCensus
    _handles: list[UnitHandle]
    _traced: set[int]

    @property
    def plan_in_force(self) -> Plan:
        """The plan that the loader executes: ``plan``, or before there is one, that of fetching on demand."""
        return self._execution.loader.plan

    @property
    def step_kinds(self) -> dict[str, int]:
        """Steps so far, by kind."""
        return dict(self._kind_counts)

    def offload_units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the units that stream under the plan in force: what to compile, one graph each. What
        ``compile_fn`` is applied to are these and ``resident_units()``: a replan moves units from one to the other."""
        streamed = {id(self._weights[tensor]) for tensor in self._execution.loader.plan.offsets}
        reads = {id(self._weights[t]) for row in self._reads for t in row}
        return [
            (unit.name, unit.module)
            for unit in self.units
            if any(id(weight) in streamed and id(weight) in reads for weight in unit.weights)
        ]

    def resident_units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the units whose weights all stay on the device."""
        streaming = {name for name, _ in self.offload_units()}
        return [(unit.name, unit.module) for unit in self.units if unit.name not in streaming]

    def compile_report(self) -> CompileReport:
        """How many units made a graph, share one, run eagerly."""
        return self._census.report([self._is_compiled(at) for at in range(len(self._handles))])

    def _is_compiled(self, unit: int) -> bool:
        in_place = self._handles[unit].compiled is not None or is_compiled(self._pieces[unit].module)
        return in_place or unit in self._traced

    def get_gpu_memory_usage(self) -> dict[str, int]:
        """Bytes on the device: weights of the plan, other weights, all tensors now and at their peak, free, total."""
        return {
            "weights": self._execution.memory.nbytes,
            "other_weights": self.hosting.other_bytes,
            "allocated": self.device.allocated_bytes(),
            "peak": self.device.peak_bytes(),
            "free": self.device.free_bytes(),
            "total": self.device.total_bytes(),
        }

    def report(self) -> dict[str, Any]:
        """Everything about the offload, JSON-able."""
        return build_report(self)
