"""Delays in the compute, then in the link, on any stream: nothing may change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flextensor.planner.build import build_plan
from tests.engine.conftest import MakePair, PaceLink
from tests.engine.harness import Pair, noise
from tests.engine.models import Slow, delay_compute


class SlowLinears(nn.Module):
    """Linear units, each busy for ``seconds`` before and after it reads its weight."""

    def __init__(self, count: int = 8, width: int = 64, seconds: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slow(nn.Linear(width, width, bias=False), seconds) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def delayed(self, seconds: float) -> None:
        for layer in self.layers:
            assert isinstance(layer, Slow)
            layer.seconds = seconds


@contextlib.contextmanager
def callers_stream(one: Pair, wanted: bool) -> Iterator[None]:
    """A stream of the caller's own where the device has any."""
    if one.device.type != "cuda" or not wanted:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def scratch(one: Pair) -> None:
    """What a caller does between calls: allocate, fill, forget. Freed device memory must be nobody's slot."""
    for size in (64 * 64 * 4, 2 * 64 * 64 * 4, 1 << 16):
        torch.empty(size, dtype=torch.uint8, device=one.device).fill_(0xFF)


@pytest.mark.parametrize("own_stream", [False, True], ids=["default-stream", "own-stream"])
@pytest.mark.parametrize(
    ("link", "compute"), [(2e9, 0.0), (2e9, 2e-3), (1e7, 0.0), (1e7, 1e-3)], ids=["fast", "compute", "link", "both"]
)
def test_eight_linears_in_memory_for_two(
    pair: MakePair, pace_link: PaceLink, link: float, compute: float, own_stream: bool
) -> None:
    weight = 64 * 64 * 4
    pace_link(link)
    one = pair(SlowLinears(seconds=compute), noise(2, 64), budget=2 * weight, link=link)
    with callers_stream(one, own_stream):
        for _ in range(one.manager.iters_before_inference):
            one.call()
            scratch(one)
        assert one.manager.phase == "inference"
        one.manager.device.synchronize()
        before, start = one.copied, time.perf_counter()
        for _ in range(4):
            one.call()
            scratch(one)
        one.manager.device.synchronize()
        assert one.copied - before >= 4 * 6 * weight
        # A GPU is busy for a number of clock cycles, so the delays are about right.
        late = max((one.copied - before) / link if link < 1e9 else 0.0, 4 * 16 * compute)
        assert time.perf_counter() - start >= 0.5 * late, "nothing was delayed"
        one.replan(3 * weight)


@pytest.mark.gpu
def test_streams_changed_between_calls() -> None:
    one = Pair(SlowLinears(seconds=1e-3), noise(2, 64), device="cuda", budget=2 * 64 * 64 * 4)
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    for call in range(16):
        stream = streams[call % 3]
        given = one.arguments()
        kept.append(given)  # memory of the default stream, read by another
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mine = one.model(*given)
        if call % 2:  # every other call overlaps the one before
            torch.cuda.current_stream().wait_stream(stream)
            one.compare(mine, one.reference(*given))
        if call == 9:
            one.manager.replan(3 * 64 * 64 * 4)
    torch.cuda.synchronize()
    one.release()


def test_compute_that_becomes_slow_after_profiling(pair: MakePair) -> None:
    model = SlowLinears()
    one = pair(model, noise(2, 64), budget=3 * 64 * 64 * 4)
    one.to_inference()
    for seconds in (1e-3, 0.0, 2e-3):
        model.delayed(seconds)
        one.streams(2)
    one.replan(2 * 64 * 64 * 4)


class Numbered(nn.Module):
    """A unit whose weight is its own index everywhere; ``rows`` makes sizes unequal."""

    def __init__(self, index: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, 64), float(index)))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        delay_compute(seen, 0 if seen.is_cuda else 2e-4)
        least, most = torch.aminmax(self.weight)
        return torch.cat([seen, torch.stack([least, most])])


class Numbers(nn.Module):
    """Returns what every visit read."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(index + 1, count) for index, count in enumerate(rows))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            seen = layer(seen)
        return seen


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_every_number_of_slots_reads_its_own_weight(pair: MakePair, count: int, unequal: bool) -> None:
    """3 units on 2 slots is the smallest trap: the slot of a visit then changes from step to step."""
    rows = [(7 * at) % 5 + 1 if unequal else 2 for at in range(count)]
    one = pair(
        Numbers(rows),
        lambda i: torch.full((2,), -float(i)),
        budget=None,
        link=2e7 if count < 4 else 2e8,
        under_model=False,
    )
    one.to_inference()
    manager = one.manager
    assert manager.profile is not None
    sizes = sorted((row * 256 for row in rows), reverse=True)
    for slots in range(1, count + 1):
        plan = build_plan(manager.profile, frozenset(), arena_bytes=sum(sizes[:slots]))
        manager.stage(plan)
        before = one.copied
        one.run(5)
        assert manager.plan is plan
        if slots < count:
            assert one.copied - before >= plan.streamed_bytes * 5 > 0
    assert manager.live().unforeseen_visits == 0


@pytest.mark.gpu
def test_no_host_synchronisation_in_the_steady_state() -> None:
    one = Pair(SlowLinears(), noise(2, 64), device="cuda", budget=3 * 64 * 64 * 4)
    one.to_inference()
    one.streams(3)
    given = [one.arguments() for _ in range(24)]
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [one.model(*x) for x in given]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for mine, x in zip(outputs, given, strict=True):
        one.compare(mine, one.reference(*x))
    one.release()
