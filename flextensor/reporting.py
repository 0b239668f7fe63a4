"""The report of one offloaded model: everything about it as plain, JSON-able data. Bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flextensor.manager import OffloadManager


def build_report(manager: OffloadManager) -> dict[str, Any]:
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
