"""``flextensor trace`` and what it is made of: one step, joined with its plan, as JSON and as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import flextensor
from benchmarks.model import TINY, build, make_input
from flextensor import OffloadError
from flextensor.planner.plan import HOST, Copy, Plan
from flextensor.profile import TensorInfo, UnitInfo
from flextensor.runtime.chrome import COMPUTE_LANE, COPY_LANE, FIRST_SLOT_LANE, chrome_trace
from flextensor.runtime.timing import CopySpan, StepTimes
from flextensor.runtime.trace import Timeline, slot_lanes, timeline
from launch.trace import newest_step, trace, write_step

PNG = b"\x89PNG\r\n\x1a\n"


# ---- a step by hand: three units take turns in two slots, in seconds that are easy to follow


def three_units() -> tuple[StepTimes, Plan, list[UnitInfo], list[TensorInfo]]:
    tensors = [TensorInfo(f"w{at}", 1000, at * 1024) for at in range(3)]
    units = [UnitInfo(f"layers.{at}", (at,)) for at in range(3)]
    copies = (
        Copy(visit=0, source=HOST, source_offset=0, arena_offset=0, nbytes=1000, tensors=(0,), after=2, lag=1),
        Copy(visit=1, source=HOST, source_offset=1024, arena_offset=1024, nbytes=1000, tensors=(1,), after=2, lag=1),
        Copy(visit=2, source=HOST, source_offset=2048, arena_offset=0, nbytes=1000, tensors=(2,), after=0, lag=0),
    )
    plan = Plan(
        visits=(0, 1, 2),
        resident=frozenset(),
        offsets={0: 0, 1: 1024, 2: 0},
        arena_bytes=2048,
        copies=copies,
        resident_bytes=0,
        weight_bytes=2048,
        streamed_bytes=3000,
    )
    times = StepTimes(
        kind="rows<=1",
        arrive=(0.0, 1.0, 2.0),
        start=(0.0, 1.5, 3.0),
        end=(1.0, 2.0, 4.0),
        host=(0.0, 0.0, 0.0),
        copies=(
            CopySpan(visit=2, nbytes=1000, start=1.0, end=2.5),
            CopySpan(visit=0, nbytes=1000, start=4.0, end=4.5),
            CopySpan(visit=1, nbytes=1000, start=4.5, end=5.5),
        ),
    )
    return times, plan, units, tensors


def test_stalls_copies_and_slots_of_a_step_are_where_they_were() -> None:
    step = timeline(*three_units(), period=5.0)
    assert [span.stall for span in step.computing] == [0.0, 0.5, 1.0]
    assert (step.period, step.stall_seconds, step.streamed_bytes) == (5.0, 1.5, 3000)
    found = {(o.unit, o.wrapped): (o.start, o.filled, o.read, o.end) for o in step.occupancies}
    assert found[("layers.2", False)] == (1.0, 2.5, 3.0, 4.0)
    # Filled at the end of this step, read at the start of the next: both ends are drawn.
    assert found[("layers.0", False)] == (4.0, 4.5, 5.0, 5.0)
    assert found[("layers.0", True)] == (0.0, 0.0, 0.0, 1.0)
    assert found[("layers.1", False)] == (4.5, 5.0, 5.0, 5.0)
    assert found[("layers.1", True)] == (0.0, 0.5, 1.5, 2.0)
    (wrapped,) = [span for span in step.copying if span.wrapped]
    assert (wrapped.unit, wrapped.start, wrapped.end) == ("layers.1", 0.0, 0.5)


def test_a_slots_lane_holds_its_tenants_one_after_the_other() -> None:
    lanes = slot_lanes(timeline(*three_units(), period=5.0))
    assert [[tenant.unit for tenant in lane.occupancies] for lane in lanes] == [
        ["layers.0", "layers.2", "layers.0"],
        ["layers.1", "layers.1"],
    ]


def test_a_tensor_that_two_visits_read_stays_until_the_second() -> None:
    times, plan, units, tensors = three_units()
    units[2] = UnitInfo("layers.2", (2, 1))  # layers.1's weight is read again at the end
    step = timeline(times, plan, units, tensors, period=5.0)
    (tenant,) = [o for o in step.occupancies if o.unit == "layers.1" and o.wrapped]
    assert tenant.end == 4.0


def test_a_tensor_that_never_leaves_its_slot_fills_the_step() -> None:
    times, plan, units, tensors = three_units()
    tensors.append(TensorInfo("w3", 500, 3072))
    units[1] = UnitInfo("layers.1", (1, 3))
    plan = Plan(**{**plan.__dict__, "offsets": {**plan.offsets, 3: 2048}, "arena_bytes": 2560})
    (stays,) = [o for o in timeline(times, plan, units, tensors).occupancies if o.tensors == ("w3",)]
    assert (stays.start, stays.end, stays.arena_offset) == (0.0, times.end[-1], 2048)


@pytest.mark.parametrize("what", ["visits", "copies"])
def test_times_of_another_plan_are_refused(what: str) -> None:
    times, plan, units, tensors = three_units()
    if what == "visits":
        plan = Plan(**{**plan.__dict__, "visits": (0, 1)})
    else:
        plan = Plan(**{**plan.__dict__, "copies": plan.copies[:2]})
    with pytest.raises(ValueError, match="another plan"):
        timeline(times, plan, units, tensors)


# ---- a real model on the host device


@pytest.fixture(params=["unit", "piece"])
def real_step(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Timeline, Plan, Path]:
    config = flextensor.OffloadConfig(
        include_patterns=("layers.*",),
        gpu_device="host",
        offload_timing="eager",
        resident_below_bytes=4096,
        host_link_bytes_per_second=2e8,
        stream_granularity=request.param,
    )
    model, twin = build(TINY), build(TINY)
    x = make_input(TINY, 8, "cpu")
    with torch.no_grad():
        flextensor.offload(model, config, name="traced")
        manager = flextensor.get_offload_manager("traced")
        try:
            with pytest.raises(OffloadError, match="no step was timed"):
                newest_step(manager)
            for _ in range(manager.iters_before_inference):
                model(x)
            manager.replan(0.4)
            for _ in range(3):
                assert torch.equal(model(x), twin(x))
            step, plan = newest_step(manager), manager.plan
            assert plan is not None and plan.streamed_bytes > 0
            with pytest.raises(OffloadError, match=r"none of kind 'rows<=4096'; seen: rows<="):
                newest_step(manager, kind="rows<=4096")
            write_step(manager, tmp_path / "step", title="a step")
        finally:
            manager.release()
    return step, plan, tmp_path / "step"


def test_a_real_steps_timeline_says_what_its_plan_says(real_step: tuple[Timeline, Plan, Path]) -> None:
    step, plan, _ = real_step
    assert step.streamed_bytes == plan.streamed_bytes
    assert len(step.computing) == len(plan.visits)
    placed = {t for tenant in step.occupancies for t in tenant.tensors}
    assert len(placed) == len(plan.offsets)  # those that keep their place without a copy, too
    assert {t for span in step.copying for t in span.tensors} <= placed
    # The link is far too slow for these budgets: the step waits.
    assert step.stall_seconds > 0
    for tenant in step.occupancies:
        assert 0 <= tenant.start <= tenant.filled <= tenant.end <= step.period + 1e-12
        assert tenant.arena_offset >= 0 and tenant.arena_offset + tenant.nbytes <= plan.arena_bytes


def test_no_two_tenants_share_bytes_at_the_same_time(real_step: tuple[Timeline, Plan, Path]) -> None:
    """The picture of the law that a slot is rewritten only after its last user."""
    step, _, _ = real_step
    tenants = step.occupancies
    for at, one in enumerate(tenants):
        for other in tenants[at + 1 :]:
            apart = (
                one.arena_offset + one.nbytes <= other.arena_offset
                or other.arena_offset + other.nbytes <= one.arena_offset
            )
            assert apart or min(one.end, other.end) <= max(one.start, other.start) + 1e-9, (one, other)


def complete_events(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in data["traceEvents"] if event["ph"] == "X"]


def test_the_chrome_trace_is_one_that_viewers_take(real_step: tuple[Timeline, Plan, Path]) -> None:
    step, plan, stem = real_step
    data = json.loads(stem.with_name("step.json").read_text())
    assert data == json.loads(json.dumps(chrome_trace(step, title="a step")))
    events = complete_events(data)
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events)
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert names[COMPUTE_LANE] == "compute" and names[COPY_LANE].startswith("copy")
    assert all(name.startswith("arena ") for lane, name in names.items() if lane >= FIRST_SLOT_LANE)
    assert {e["tid"] for e in events} == set(names) and max(names) >= FIRST_SLOT_LANE
    assert sum(e["cat"] == "compute" for e in events) == len(plan.visits)
    stalls = [e for e in events if e["cat"] == "stall"]
    assert stalls and all(e["tid"] == COMPUTE_LANE for e in stalls)
    by_lane = defaultdict(list)
    for event in events:
        by_lane[event["tid"]].append(event)
    for lane in by_lane.values():
        _assert_nested(lane)


def _assert_nested(events: list[dict[str, Any]]) -> None:
    """Slices of one lane lie apart or within each other, to the nanosecond that the format keeps."""
    open_until: list[float] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + 2e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 2e-3, event
        open_until.append(end)


def test_the_picture_is_written(real_step: tuple[Timeline, Plan, Path]) -> None:
    _, _, stem = real_step
    assert stem.with_name("step.png").read_bytes().startswith(PNG)


# ---- the command


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(trace)
    return app


def test_the_command_traces_the_demo_and_leaves_no_manager_behind(tmp_path: Path) -> None:
    output = tmp_path / "out" / "trace"
    result = CliRunner().invoke(
        command(), ["--demo", "--device", "host", "--tokens", "16", "--budget", "40%", "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    assert "step of kind 'rows<=16'" in result.output and "streamed" in result.output
    data = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert data["otherData"]["streamed_bytes"] > 0
    assert (tmp_path / "out" / "trace.png").read_bytes().startswith(PNG)
    with pytest.raises(OffloadError, match="trace"):
        flextensor.get_offload_manager("trace")


def test_the_command_traces_a_model_directory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.launch.tiny_causal_lm import llama_config, save_model

    model = save_model(tmp_path / "model", llama_config())
    output = tmp_path / "trace"
    arguments = ["--model", str(model), "--device", "host", "--steps", "6", "--output", str(output), "--no-picture"]
    result = CliRunner().invoke(command(), [*arguments, "--set", "offload.resident_below_bytes=1024"])
    assert result.exit_code == 0, result.output
    assert "kinds seen" in result.output  # prefill and decode
    data = json.loads((tmp_path / "trace.json").read_text())
    units = {e["name"] for e in complete_events(data) if e["cat"] == "compute"}
    assert units == {f"model.layers.{at}" for at in range(4)}
    assert not (tmp_path / "trace.png").exists()


@pytest.mark.parametrize("arguments", [[], ["--demo", "--model", "somewhere"]])
def test_a_command_that_names_no_model_or_two_says_what_to_name(arguments: list[str]) -> None:
    result = CliRunner().invoke(command(), arguments)
    assert result.exit_code == 2
    assert "--config FILE, --model DIRECTORY, or --demo" in result.output
