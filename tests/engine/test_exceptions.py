"""An exception, a Ctrl-C or an out-of-memory at any point, in any phase: the next call is right, nothing is leaked."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.conftest import MakePair, copy_threads
from tests.engine.harness import Pair, noise
from tests.engine.models import Block

PHASES = {"discovery": 0, "profiling": 1, "inference": 4}


class Waiting(nn.Module):
    """Blocks; the first call stands between the first and the second until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(32, 65) for _ in range(4))
        self.stands, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.stands.set()
        assert self.may_go.wait(120)
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def test_a_second_thread_is_refused_and_the_first_not_disturbed() -> None:
    plain = Waiting().eval()
    x = torch.randn(2, 32)
    wanted = plain(x)
    settings = {"include_patterns": ("layers.*",), "gpu_device": "host", "budget_bytes": None}
    model = ft.offload(plain, ft.OffloadConfig(**settings), name="threads")
    found: list[torch.Tensor] = []
    model.stands.clear()
    model.may_go.clear()

    def call() -> None:
        with torch.no_grad():
            found.append(model(x))

    first = threading.Thread(target=call)
    first.start()
    assert model.stands.wait(120)
    with pytest.raises(ft.OffloadError, match="two threads at once"):
        model(x)
    model.may_go.set()
    first.join(120)
    assert not first.is_alive()
    assert torch.equal(found[0], wanted) and torch.equal(model(x), wanted)
    ft.release("threads")


class Failing(nn.Module):
    """Blocks, one of which raises what it is told, before or after it has used its weights."""

    def __init__(self, count: int = 8, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FailingBlock(width) for _ in range(count))
        self.catch = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                x = layer(x)
            except BaseException:
                if not self.catch:
                    raise
                x = x * 2
        return x


class FailingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width, 65)
        self.early: BaseException | None = None
        self.late: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.early is not None:
            raise self.early
        x = self.block(x)
        if self.late is not None:
            raise self.late
        return x


def fail(one: Pair, unit: int, error: BaseException | None, *, late: bool = False) -> None:
    """From now on that unit raises, in both models."""
    for model in (one.model, one.reference):
        block = model.layers[unit]  # type: ignore[index]
        block.early, block.late = (None, error) if late else (error, None)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), torch.OutOfMemoryError("y")], ids=type)
@pytest.mark.parametrize("phase", PHASES)
def test_raised_in_unit_five(pair: MakePair, phase: str, error: BaseException, late: bool) -> None:
    one = pair(Failing(), noise(2, 32))
    one.run(PHASES[phase])
    assert one.manager.phase == phase
    fail(one, 5, error, late=late)
    for _ in range(2):
        with pytest.raises(type(error)):
            one.model(*one.arguments())
    fail(one, 5, None)
    one.run(6)
    assert one.manager.phase == "inference"
    assert_nothing_is_open(one)
    before = one.manager.live().unforeseen_visits
    one.streams(5)
    assert one.manager.live().unforeseen_visits == before, "not regular again"
    one.replan(one.least())


@pytest.mark.parametrize("phase", PHASES)
def test_raised_in_a_unit_and_caught_by_the_model(pair: MakePair, phase: str) -> None:
    one = pair(Failing(), noise(2, 32))
    one.run(PHASES[phase])
    for model in (one.model, one.reference):
        model.catch = True
    for unit in (5, 0, 7, 3):
        fail(one, unit, ValueError("caught"), late=unit == 0)
        one.run(2)
    for unit in (5, 0, 7, 3):
        fail(one, unit, None)
    one.run(6)
    assert one.manager.phase == "inference"
    one.streams(3)


def test_raised_in_the_root_outside_every_unit(pair: MakePair) -> None:
    one = pair(Failing(), noise(2, 32))
    for call in range(9):
        if call % 3 == 2:
            with pytest.raises(TypeError):
                one.model(None)
        else:
            one.run(1)
    one.run(3)
    one.streams(3)


def other_threads() -> Counter[str]:
    """How many threads there are of each name but the copy streams': perhaps of a Ray, which start and end."""
    return Counter(
        thread.name for thread in threading.enumerate() if thread.name != "offload-copy" and "ray" not in thread.name
    )


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), torch.OutOfMemoryError("y")], ids=type)
@pytest.mark.parametrize("phase", PHASES)
def test_exceptions_again_and_again_leave_no_events_and_no_memory(
    pair: MakePair, phase: str, error: BaseException
) -> None:
    one = pair(Failing(count=4), noise(1, 32), budget=0.7, offload_timing="eager")
    one.run(2 * PHASES[phase] if phase == "inference" else PHASES[phase])
    assert one.manager.phase == phase
    threads = 1 if one.device.type == "cpu" else 0  # its copy stream
    others = other_threads()
    fail(one, 2, error)
    raises(one, error, 8)  # what a first call takes is taken; after an out-of-memory weights have given way
    held, samples = beside_weights(one), samples_kept(one)
    often = {ValueError: 300, KeyboardInterrupt: 60}  # an out-of-memory looks for another plan each time
    raises(one, error, often.get(type(error), 8) if phase == "inference" else 40)
    assert beside_weights(one) - held <= (0 if one.device.type == "cpu" else 8192)
    assert samples_kept(one) <= samples
    recorder = one.manager._recorder
    assert len(recorder._pending) + len(recorder._boundaries) < 50 and len(recorder._free) < 500
    assert one.manager.phase == phase and len(copy_threads(at_most=threads)) == threads
    assert other_threads() <= others
    fail(one, 2, None)
    one.run(6)
    assert_nothing_is_open(one)
    assert one.manager.phase == "inference" and len(copy_threads(at_most=threads)) == threads
    assert other_threads() <= others
    assert beside_weights(one) - held <= (0 if one.device.type == "cpu" else 8192)
    one.streams(3)


def raises(one: Pair, error: BaseException, calls: int) -> None:
    """So many calls, each of which raises ``error``, which then is as if it had never been raised."""
    for _ in range(calls):
        with pytest.raises(type(error)):
            one.model(*one.arguments())
        error.with_traceback(None)  # its frames hold activations
        error.__context__ = None


def beside_weights(one: Pair) -> int:
    """Bytes that are allocated on the device for anything but weights."""
    gc.collect()
    usage = one.manager.get_gpu_memory_usage()
    return int(usage["allocated"]) - int(usage["weights"]) - int(usage["other_weights"])


def samples_kept(one: Pair) -> int:
    """Profiled steps so far."""
    return len(one.manager._warmup.recorder.steps) if one.manager._warmup is not None else 0


def test_out_of_memory_in_a_replan_keeps_the_plan_before(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("the host device's memory can be filled exactly")
    one = pair(Failing(), noise(2, 32), host_memory_bytes=1 << 20)
    one.to_inference()
    manager = one.manager
    plan, epoch = manager.plan, manager.epoch
    everything = manager.solve(1.0)
    taken = manager.device.allocate(manager.device.free_bytes() - 4096)
    one.taken = taken.numel()
    with pytest.raises(ft.BudgetError, match="available"):
        manager.replan(1.0)
    manager.stage(everything)
    one.run(3)
    assert "out of memory" in manager.refusal and manager.plan is plan and manager.epoch == epoch
    one.streams(3)
    del taken
    one.taken = 0
    manager.stage(everything)
    one.run(3)
    assert manager.plan is everything and not manager.refusal


def shrink(one: Pair, nbytes: int) -> None:
    """The device has only so many bytes for weights from now on: other processes have taken the rest."""
    device = one.manager.device
    device._memory_bytes = device.allocated_bytes() - one.manager.get_gpu_memory_usage()["weights"] + nbytes


def test_where_the_plan_before_has_no_room_either_units_are_fetched_on_demand(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("the host device's memory can be set exactly")
    one = pair(Failing(), noise(2, 32), host_memory_bytes=1 << 20, budget=0.8)
    one.to_inference()
    manager = one.manager
    plan, everything = manager.plan, manager.solve(1.0)
    shrink(one, one.least() + 4096)
    manager.stage(everything)
    one.run(2)
    assert "out of memory" in manager.refusal
    assert manager.plan is manager.plan_in_force is not plan and manager.plan.weight_bytes < plan.weight_bytes
    one.streams(3)
    shrink(one, 1 << 20)
    manager.stage(plan)
    one.run(3)
    assert manager.plan is plan and not manager.refusal


def test_where_nothing_has_room_each_call_says_so_and_the_first_with_room_is_right(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("the host device's memory can be set exactly")
    one = pair(Failing(), noise(2, 32), host_memory_bytes=1 << 20)
    one.to_inference()
    manager = one.manager
    plan = manager.plan
    shrink(one, 1000)
    manager.stage(manager.solve(1.0))
    for _ in range(3):
        with pytest.raises(ft.BudgetError, match="no room for the largest unit"):
            one.model(*one.arguments())
        one.same_state()
    assert manager.get_gpu_memory_usage()["weights"] == 0 and manager.report()["refusal"]
    with manager.edit_weights("layers.1.block.up.weight") as tensors:
        tensors["layers.1.block.up.weight"].mul_(2)
    one.reference.get_parameter("layers.1.block.up.weight").mul_(2)
    shrink(one, 1 << 20)
    one.run(3)
    assert manager.plan is plan
    one.streams(3)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in files of the engine, as a Ctrl-C may.

    Not at the end of a ``with`` over a lock, which Python reports as a line: a signal comes after the lock's release.
    """

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._line if "/flextensor/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if source.lstrip().startswith("with ") and "lock" in source:
                return self._line
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def interrupted_calls(one: Pair, before: Callable[[], object], *, lines: range) -> int:
    """Call with a Ctrl-C at each of these lines; the next calls are right. How many calls were interrupted."""
    count = 0
    for line in lines:
        before()
        given = one.arguments()
        interrupt = Interrupt(line)
        try:
            with interrupt:
                one.model(*given)
        except KeyboardInterrupt:
            count += 1
        try:
            one.run(2)
        except BaseException as error:
            raise AssertionError(f"after a Ctrl-C at {interrupt.where} (line {line})") from error
        assert_nothing_is_open(one)
    return count


def test_ctrl_c_at_any_line_of_the_engine_in_a_step(pair: MakePair) -> None:
    one = pair(Failing(count=4), noise(1, 32), budget=0.6, link=1e9)
    one.to_inference()
    one.run(12)
    assert interrupted_calls(one, lambda: None, lines=range(1, 400, 3)) > 50
    one.streams(20)
    before = one.manager.live().unforeseen_visits
    one.streams(3)
    assert one.manager.live().unforeseen_visits == before


def test_ctrl_c_at_any_line_of_the_engine_in_a_replan(pair: MakePair) -> None:
    one = pair(Failing(count=4), noise(1, 32), budget=0.6, link=4e9)
    one.to_inference()
    plans = [one.manager.solve(budget) for budget in (one.least(), one.budget)]
    turn = iter(range(10**6))
    assert interrupted_calls(one, lambda: one.manager.stage(plans[next(turn) % 2]), lines=range(1, 1800, 19)) > 60
    one.run(2)
    one.streams(3)


def test_ctrl_c_at_any_line_of_the_engine_before_inference(pair: MakePair) -> None:
    for line in range(5, 900, 100):
        one = pair(Failing(count=3), noise(1, 32), budget=0.8, link=4e9)
        assert interrupted_calls(one, lambda: None, lines=range(line, line + 180, 47))
        one.run(3)
        assert one.manager.phase == "inference"
        one.streams(2)
        one.release()


def assert_nothing_is_open(one: Pair) -> None:
    """No visit is under way, in the manager or in the loader."""
    manager = one.manager
    assert not manager._open_units and not manager._in_root and not manager._execution.loader._open
