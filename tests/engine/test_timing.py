"""Transfer, compute and wait of each visit; host time of the loader."""

from __future__ import annotations

import itertools
import logging
import statistics
import time

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.diagnostics import SETTLED_STEPS
from flextensor.live import SETTLED_SAMPLES
from flextensor.runtime.host import HostDevice
from flextensor.runtime.timing import Recorder
from tests.engine.conftest import MakePair
from tests.engine.harness import Pair, noise
from tests.engine.models import Blocks, Linears, delay_compute


class Sleepers(nn.Module):
    """Units with 64 KiB of weights and a compute time of one's choice."""

    def __init__(self, count: int = 5, seconds: float = 2e-3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(seconds) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.lin = nn.Linear(128, 128, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delay_compute(x, self.seconds)
        return self.lin(x)


def test_every_step_is_timed_on_request_and_forgotten_on_request(pair: MakePair) -> None:
    one = pair(Sleepers(), noise(1, 128), offload_timing="eager", budget=0.6, link=1e8)
    assert ft.collect_offload_timing(one.name) == []
    one.to_inference()
    ft.reset_offload_timing(one.name)
    one.run(6)
    rows = ft.collect_offload_timing(one.name)
    assert [row.unit for row in rows] == [f"layers.{at}" for at in range(5)]
    assert len(one.manager.sampled_steps()) == 6
    plan = one.manager.plan
    for visit, row in enumerate(rows):
        copies = [copy.nbytes for copy in plan.copies if copy.visit == visit]
        assert row.streamed_bytes == sum(copies)
        assert row.compute[0] <= row.compute[1] <= row.compute[2] and row.wait[0] >= 0
        assert row.compute[1] >= 1.5e-3
        if copies and one.device.type == "cpu":
            assert row.transfer[0] >= 0.9 * sum(copies) / 1e8
    table = ft.format_offload_timing_table(rows)
    assert len(table.splitlines()) == 6 and "layers.3" in table and "wait ms" in table
    ft.reset_offload_timing(one.name)
    assert one.manager.sampled_steps() == [] and not ft.update_offload_timing(one.name)
    one.run(3)
    assert len(one.manager.sampled_steps()) <= 3


def test_a_slow_link_shows_as_wait_and_not_as_compute(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("the host device's link can be set")
    link = 2e6  # so slow that what else happens between two steps on a busy machine does not count
    one = pair(Sleepers(seconds=0), noise(1, 128), offload_timing="eager", budget=0.45, link=link, num_blocks=1)
    one.to_inference()
    ft.reset_offload_timing(one.name)
    one.run(5)
    rows = ft.collect_offload_timing(one.name)
    waited, computed = sum(row.wait[1] for row in rows), sum(row.compute[1] for row in rows)
    floor = one.manager.plan.streamed_bytes / link
    assert waited > 0.8 * floor > computed
    live = one.manager.live()
    assert live.stall_seconds > 0.8 * floor and live.transfer_bytes == one.manager.plan.streamed_bytes
    copies = [(span.nbytes, span.end - span.start) for step in one.manager.sampled_steps() for span in step.copies]
    mean = sum(nbytes for nbytes, _ in copies) / sum(seconds for _, seconds in copies)
    assert live.link_bytes_per_second == pytest.approx(mean) and mean <= 1.05 * link
    assert statistics.median(nbytes / seconds for nbytes, seconds in copies) > 0.5 * link
    assert abs(live.step_seconds - floor) < 0.5 * floor
    prediction = one.manager.plan.prediction
    assert prediction is not None and 0.8 * floor < prediction.step_seconds < 1.3 * live.step_seconds


def test_one_step_in_eight_is_timed_by_itself(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    one.run(33)
    one.manager.collect_offload_timing()
    assert 3 <= len(one.manager.sampled_steps()) <= 5
    live = one.manager.live()
    assert live.steps == 36 and live.step_seconds > 0 and live.compute_seconds > 0


def test_samples_do_not_outlive_a_replan(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), offload_timing="eager")
    one.to_inference()
    one.run(5)
    one.replan(one.least(), calls=2)
    assert len(one.manager.sampled_steps()) <= 2
    assert len(one.manager.collect_offload_timing()) == 6


def test_the_expected_step_is_that_of_settled_steps_and_not_of_the_profile(pair: MakePair) -> None:
    """The profile saw quicker compute, as a GPU's clocks are higher while it waits for weights."""
    one = pair(Sleepers(seconds=1e-3), noise(1, 128), offload_timing="eager", budget=0.6, link=1e8)
    one.to_inference()
    manager = one.manager
    told = manager.report()
    assert told["prediction_measured"] == "profile" and told["prediction"] == told["prediction_when_planned"]
    for layer in one.model.layers:
        layer.seconds = 30e-3
    one.run(SETTLED_SAMPLES + 2)
    manager.collect_offload_timing()
    told, live = manager.report(), manager.live()
    assert told["prediction_measured"] == "live"
    assert told["prediction_when_planned"]["compute_seconds"] < 0.5 * told["prediction"]["compute_seconds"]
    steps = [step.compute for step in manager.sampled_steps()]
    visits = [statistics.median(seconds) for seconds in zip(*steps, strict=True)]
    assert told["prediction"]["compute_seconds"] == pytest.approx(sum(visits)) and sum(visits) > 5 * 25e-3
    assert live.compute_seconds == pytest.approx(statistics.median(map(sum, steps)))
    assert manager.replan("60%").budget_bytes == manager.replan(0.6).budget_bytes
    plan = manager.replan("latency")
    assert plan.prediction is not None and plan.prediction.compute_seconds > 5 * 25e-3
    one.run(1)
    assert manager.report()["prediction_measured"] == "profile", "samples of the plan before"


def test_units_alike_take_the_host_alike_whatever_it_waited_for(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("on the host device the host waits where a unit's forward sleeps")
    one = pair(Sleepers(count=4, seconds=1e-3), noise(1, 128), budget=0.6)
    one.model.layers[2].seconds = 0.2
    one.to_inference()
    kind = one.manager.profile.kinds[0]
    assert kind.compute[2] > 0.19 > 4 * kind.host[2] and len(set(kind.host)) == 1


def test_what_the_root_does_outside_its_units_is_part_of_the_step(pair: MakePair, device: str) -> None:
    class WithHead(Sleepers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            delay_compute(x, 5e-3)
            x = super().forward(x)
            delay_compute(x, 10e-3)
            return x

    one = pair(WithHead(seconds=1e-3), noise(1, 128), offload_timing="eager", budget=0.6, link=1e9)
    shortest = 1 if device == "host" else 0.8  # a GPU sleeps for clock cycles
    one.to_inference()
    planned = one.manager.plan.prediction
    assert planned is not None and planned.step_seconds > shortest * (5e-3 + 10e-3 + 5 * 1e-3)
    one.run(SETTLED_SAMPLES + 1)
    one.manager.collect_offload_timing()
    expected = one.manager.expectation()
    assert expected is not None and expected.measured == "live"
    assert expected.prediction.step_seconds > shortest * (5e-3 + 10e-3 + 5 * 1e-3)
    assert all(step.outside > shortest * 14e-3 for step in one.manager.sampled_steps())


def test_a_captured_step_counts_what_the_root_does_too() -> None:
    """The host device records no graphs; that one is recorded is all that the recorder is told."""
    device = HostDevice(memory_bytes=1 << 20, link_bytes_per_second=1e9)
    recorder, stream = Recorder(device, every=8), device.compute_stream()
    recorder.capture_events = True
    trace = recorder.begin_step(1, "step", stream, capturing=True)
    assert trace is not None
    time.sleep(5e-3)
    for mark in (trace.arrive, trace.start, trace.end):
        mark(0, stream)
    recorder.end_step(trace)
    time.sleep(10e-3)
    recorder.close_step(stream)
    recorder.harvest(wait=True)
    assert not recorder.steps, "a captured step has not run yet"
    assert recorder.read_replay() and recorder.steps[0].outside > 14e-3
    recorder.forget_capture()
    assert not recorder.read_replay()


def test_measured_transfer_follows_the_link(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("the host device's link can be set")
    one = pair(Sleepers(), noise(1, 128), offload_timing="eager", budget=0.6, link=8e6)
    one.to_inference()
    one.manager.device.link.bytes_per_second = 2e6  # 33 ms a weight: waking up late does not count
    one.run(4)
    one.manager.collect_offload_timing()
    curve = one.manager.measure_transfer()
    assert 1.2e6 < curve.bandwidth < 2.8e6
    one.replan(2 * one.model_bytes)
    one.manager.reset_offload_timing()
    assert 1.2e6 < one.manager.measure_transfer().bandwidth < 2.8e6


def test_the_transfer_curve_has_several_sizes_with_a_time_each(pair: MakePair, device: str) -> None:
    # The host device's is so slow that what its memory and waking up take does not count.
    link, width = (2e7, 512) if device == "host" else (2e9, 1024)
    one = pair(Linears([width] * 4, bias=False), noise(1, width), budget=0.7, link=link)
    one.to_inference()
    curve = one.manager.profile.transfer
    sizes, seconds = zip(*curve.points, strict=True)
    assert sizes == tuple(size for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20) if size <= 4 * width**2)
    if device == "cuda":  # the two smallest may take the host longer to queue than the link to carry
        assert seconds[-1] > 2 * seconds[0] and curve.bandwidth > 1e9
        return
    assert all(before < after for before, after in itertools.pairwise(seconds))
    for nbytes in (512 << 10, 1 << 20):
        assert 0.99 * nbytes / link < curve.seconds(nbytes) < 2 * nbytes / link


@pytest.mark.gpu
def test_the_loader_takes_twenty_microseconds_of_host_time_a_unit() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Nothing() for _ in range(100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    one = Pair(Many(), noise(1, 4), device="cuda", budget=0.5)
    one.to_inference()
    x = torch.randn(1, 4, device="cuda")
    seconds = [_step_seconds(one.model, x) for _ in range(20)]
    plain = [_step_seconds(one.reference, x) for _ in range(20)]
    a_unit = (min(seconds) - min(plain)) / 100
    one.release()
    assert a_unit <= 20e-6, f"{a_unit * 1e6:.1f} microseconds a unit"


def _step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    model(x)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent


def test_diagnostics_say_what_a_plan_does_and_what_its_steps_took(pair: MakePair, caplog) -> None:
    one = pair(Blocks(), noise(2, 48), enable_diagnostics=True)
    with caplog.at_level(logging.INFO, logger="flextensor.diagnostics"):
        one.to_inference()
        one.run(SETTLED_STEPS + 1)
        plan = one.manager.plan
        one.replan(one.least(), calls=2)
    lines = [record.getMessage() for record in caplog.records if record.name == "flextensor.diagnostics"]
    assert len(lines) == 3
    assert f"{plan.streamed_bytes} bytes streamed" in lines[0] and "epoch 2" in lines[2]
    assert "link" in lines[1] and "layers.3" in lines[1], "a row a visit"
    quiet = pair(Blocks(), noise(2, 48))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="flextensor.diagnostics"):
        quiet.to_inference()
        quiet.run(2)
    assert not [record for record in caplog.records if record.name == "flextensor.diagnostics"]
