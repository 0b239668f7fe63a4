"""A step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: lanes for compute, copy
and each slot; stalls on the compute lane."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flextensor.runtime.trace import SHORTEST_STALL, SlotLane, Timeline, slot_lanes

PROCESS = 1
COMPUTE_LANE, COPY_LANE, FIRST_SLOT_LANE = 1, 2, 10


def chrome_trace(step: Timeline, *, title: str = "offloaded step") -> dict[str, Any]:
    """The step in the Trace Event Format: lanes for compute, copy and each slot; stalls on the compute lane."""
    slots = slot_lanes(step)
    lanes = {COMPUTE_LANE: "compute", COPY_LANE: "copy (host to device)"}
    lanes |= {FIRST_SLOT_LANE + at: lane.name for at, lane in enumerate(slots)}
    events = [*_computing_events(step), *_copying_events(step)]
    for at, lane in enumerate(slots):
        events += _slot_events(lane, FIRST_SLOT_LANE + at)
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return {
        "traceEvents": [*_names(title, lanes), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "kind": step.kind,
            "step_seconds": step.period,
            "stall_seconds": step.stall_seconds,
            "streamed_bytes": step.streamed_bytes,
            "arena_bytes": step.arena_bytes,
        },
    }


def write_chrome_trace(step: Timeline, path: str | Path, *, title: str = "offloaded step") -> None:
    """``chrome_trace`` as a file; complete when it appears."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".part")
    beside.write_text(json.dumps(chrome_trace(step, title=title)))
    beside.replace(target)


def _names(title: str, lanes: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": title}}
    for lane, name in lanes.items():
        yield {"ph": "M", "pid": PROCESS, "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": PROCESS, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _event(
    lane: int, name: str, category: str, start: float, end: float, args: Mapping[str, Any] | None = None, **more: str
) -> dict[str, Any]:
    since, until = round(max(start, 0.0) * 1e6, 3), round(max(end, 0.0) * 1e6, 3)
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": lane,
        "name": name,
        "cat": category,
        "ts": since,
        "dur": max(round(until - since, 3), 0.0),
        "args": dict(args or {}),
        **more,
    }


def _computing_events(step: Timeline) -> Iterator[dict[str, Any]]:
    for span in step.computing:
        if span.stall > SHORTEST_STALL:
            yield _event(COMPUTE_LANE, f"stall: {span.unit}", "stall", span.arrive, span.start, cname="terrible")
        args = {"visit": span.visit, "stall_us": span.stall * 1e6}
        yield _event(COMPUTE_LANE, span.unit, "compute", span.start, span.end, args)


def _copying_events(step: Timeline) -> Iterator[dict[str, Any]]:
    for span in step.copying:
        seconds = span.end - span.start
        args = {
            "visit": span.visit,
            "bytes": span.nbytes,
            "source": span.source,
            "arena_offset": span.arena_offset,
            "tensors": list(span.tensors),
            "of_the_step_before": span.wrapped,
        }
        if seconds > 0 and not span.wrapped:
            args["gigabytes_a_second"] = span.nbytes / seconds / 1e9
        yield _event(COPY_LANE, span.unit, "copy", span.start, span.end, args)


def _slot_events(lane: SlotLane, number: int) -> Iterator[dict[str, Any]]:
    for tenant in lane.occupancies:
        args = {
            "visit": tenant.visit,
            "bytes": tenant.nbytes,
            "arena_offset": tenant.arena_offset,
            "tensors": list(tenant.tensors),
            "of_the_step_before": tenant.wrapped,
        }
        yield _event(number, tenant.unit, "slot", tenant.start, tenant.end, args)
        if tenant.filled > tenant.start:
            yield _event(number, "filled", "slot", tenant.start, tenant.filled)
        if tenant.end > max(tenant.read, tenant.filled):
            yield _event(number, "read", "slot", max(tenant.read, tenant.filled), tenant.end)
