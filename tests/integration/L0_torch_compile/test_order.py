"""A unit in somebody's graph that writes more than what it returns: all of it comes before the op that ends it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import flextensor as ft
from flextensor.offload_manager import get_offload_manager
from tests.integration.L0_torch_compile.checks import marked, on_the_host, reads_outside_the_ops, silent, without_order
from tests.integration.L0_torch_compile.models import (
    DIM,
    Cache,
    Keeps,
    Writes,
    WritesABuffer,
    WritesByIndex,
    WritesIntoAnObject,
    WritesRows,
    inputs,
    streaming,
)


@torch.library.custom_op("flextensor_test::put", mutates_args=("into",))
def put(into: torch.Tensor, rows: torch.Tensor) -> None:
    """A kernel that is not Inductor's."""
    into[:, : rows.shape[1]].copy_(rows)


class WritesThroughAnOp(Writes):
    """Somebody's kernel writes the cache."""

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        put(given, self.key(x)[:, :8] * self.scale)


class ReturnsItsRows(WritesRows):
    """As a decoder layer does: what it has made, and the cache."""

    def forward(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, cache, given), given


class ReturnsWhatItWrote(Writes):
    """Nothing else."""

    def forward(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> torch.Tensor:
        self.write(x, cache, given)
        return given


class ReturnsNothing(Writes):
    """All that it makes is written."""

    def forward(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        self.write(x, cache, given)


@dataclass
class Record:
    """No tensor for whoever does not know it."""

    made: torch.Tensor


class ReturnsARecord(Writes):
    """A product in it, to which somebody adds: one kernel, would Inductor have it."""

    def forward(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> Record:
        return Record(x.flatten(0, 1) @ self.key.weight.T)


class LeavesAProduct(Writes):
    """The same, left in an object."""

    def write(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> None:
        cache.keys = x.flatten(0, 1) @ self.key.weight.T


WRITERS = [Writes, WritesRows, WritesByIndex, WritesThroughAnOp, WritesIntoAnObject, WritesABuffer, Keeps]
PUT_OFF = [Writes, WritesIntoAnObject, Keeps]
"""What these write Inductor would compute behind the unit, in one kernel with what is there."""
USED_BEHIND = [WritesIntoAnObject, Keeps]
"""What these write is used once more."""

Region = Callable[[torch.Tensor, Cache, torch.Tensor], tuple[torch.Tensor, ...]]


class Spoiler:
    """A boundary of a unit whose weights are there between the ops alone."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.weights = [parameter.clone() for parameter in layer.parameters()]
        self.exit_traced()

    def enter_traced(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self.layer.parameters(), self.weights, strict=True):
            parameter.copy_(weight)

    def exit_traced(self) -> None:
        for parameter in self.layer.parameters():
            parameter.fill_(float("nan"))


def region(layer: Callable[..., torch.Tensor]) -> Region:
    """Somebody's code around one unit: work behind it, with what it leaves, and such as goes well with its writes."""

    def run(x: torch.Tensor, cache: Cache, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = layer(x, cache, given)
        return out + x, cache.keys * 2

    return run


def _first(layer: Callable[..., Any]) -> Region:
    return lambda x, cache, given: (layer(x, cache, given)[0] + x,)


def _only(layer: Callable[..., Any]) -> Region:
    return lambda x, cache, given: (layer(x, cache, given), x * 2)


def _beside(layer: Callable[..., Any]) -> Region:
    def run(x: torch.Tensor, cache: Cache, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer(x, cache, given)
        return (x * 2,)

    return run


def _added_to_a_record(layer: Callable[..., Any]) -> Region:
    return lambda x, cache, given: (layer(x, cache, given).made + x.flatten(0, 1),)


def _added_to_what_is_left(layer: Callable[..., Any]) -> Region:
    def run(x: torch.Tensor, cache: Cache, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = layer(x, cache, given)
        added, cache.keys = cache.keys + x.flatten(0, 1), x
        return out * 2, added

    return run


def _with_the_old(split: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> Callable[..., Region]:
    def around(layer: Callable[..., Any]) -> Region:
        def run(x: torch.Tensor, cache: Cache, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            old = split(given)[0] * 2
            return (layer(x, cache, given)[..., 0, :] + old,)

        return run

    return around


AROUND: list[tuple[type[Writes], Callable[..., Region]]] = [
    (ReturnsItsRows, _first),
    (ReturnsWhatItWrote, _only),
    (ReturnsWhatItWrote, _beside),
    (ReturnsNothing, _beside),
    (ReturnsARecord, _added_to_a_record),
    (LeavesAProduct, _added_to_what_is_left),
    (Writes, _with_the_old(lambda given: given.unbind(1))),
    (Writes, _with_the_old(lambda given: [part[:, 0] for part in given.split(4, 1)])),
]
"""Units and what somebody does around them: all that goes wrong where one of the order's rules is left out."""


def results(run: Region, layer: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """All that two calls return and leave."""
    torch.manual_seed(1)
    cache, given = Cache(device), torch.zeros(2, 16, DIM, device=device)
    left: list[torch.Tensor] = []
    for _ in range(2):
        left += run(inputs(device), cache, given)
    return [*left, given, cache.keys, *layer.buffers()]


def spoiled_and_not(
    writer: type[Writes], device: torch.device, region: Callable[..., Region] = region
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a region leaves whose unit's weights go at its end, and what one of the same kernels leaves."""
    torch.manual_seed(0)
    layer = writer().to(device).requires_grad_(False)
    twin = copy.deepcopy(layer)
    spoiler = Spoiler(layer)
    with torch._inductor.config.patch(fx_graph_cache=False):
        ours, theirs = (
            results(torch.compile(region(marked(one, boundary)), fullgraph=True), one, device)
            for one, boundary in ((layer, spoiler), (twin, silent))
        )
    eager = copy.deepcopy(twin)
    for one, other in zip(theirs, results(region(eager), eager, device), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return ours, theirs


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_that_go_at_a_units_end_are_in_all_that_it_returns_and_writes(device, writer) -> None:
    ours, theirs = spoiled_and_not(writer, device)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("writer", "around"), AROUND, ids=[f"{writer.__name__}-{at}" for at, (writer, _) in enumerate(AROUND)]
)
def test_whatever_somebody_does_around_a_unit_that_writes(device, writer, around) -> None:
    ours, theirs = spoiled_and_not(writer, device, around)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) and not one.isnan().any()


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_that_reads_a_weight_may_come_behind_the_end(device, writer) -> None:
    layer, x = writer().to(device).requires_grad_(False), inputs(device)
    with reads_outside_the_ops(x.shape) as outside:
        torch.compile(region(marked(layer, silent)), fullgraph=True)(x, Cache(device), torch.zeros_like(x))
    assert outside == []


@on_the_host
@pytest.mark.parametrize("writer", PUT_OFF)
def test_left_to_inductor_something_is_computed_from_weights_that_are_gone(device, writer, monkeypatch) -> None:
    without_order(monkeypatch)
    ours, _ = spoiled_and_not(writer, device)
    assert any(one.isnan().any() for one in ours)


@on_the_host
@pytest.mark.parametrize("writer", WRITERS)
def test_the_order_costs_a_kernel_where_one_went_on_behind_the_end_and_a_tensor_where_one_is_used_there(
    device, writer, monkeypatch
) -> None:
    def made() -> tuple[int, int]:
        torch._dynamo.reset()
        layer = writer().requires_grad_(False)
        run = torch.compile(region(marked(layer, silent)), fullgraph=True)
        with torch._inductor.config.patch(fx_graph_cache=False):
            _, (code,) = run_and_get_code(run, inputs(device), Cache(device), torch.zeros(2, 16, DIM))
        return len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)), code.count("= empty_strided")

    kernels, buffers = made()
    without_order(monkeypatch)
    kernels_without, buffers_without = made()
    assert buffers <= buffers_without + (writer in USED_BEHIND)
    assert kernels <= kernels_without + (writer in PUT_OFF)


class Model(nn.Module):
    """Four units that write."""

    def __init__(self, writer: type[Writes]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(writer() for _ in range(4))

    def forward(self, x: torch.Tensor, cache: Cache, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cache, given)
        return x


@pytest.mark.parametrize("writer", [Writes, WritesByIndex, WritesABuffer])
def test_streamed_units_in_somebodys_graph_write_what_resident_ones_do(device, writer) -> None:
    torch.manual_seed(0)
    model = Model(writer).eval().requires_grad_(False)
    twin = copy.deepcopy(model).to(device)
    ft.offload(model, streaming(model, 0.7, resident_below_bytes=1, host_link_bytes_per_second=2e8))
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device), Cache(device), torch.zeros(2, 16, DIM, device=device))
    assert om.plan is not None and om.plan.streamed_bytes > 0
    ours = [torch.compile(region(layer), fullgraph=True) for layer in model.layers]
    theirs = [torch.compile(region(marked(layer, silent)), fullgraph=True) for layer in twin.layers]
    caches, given = (Cache(device), Cache(device)), torch.zeros(2, 2, 16, DIM, device=device)
    before = om.live().copied_bytes_total
    for call in range(12):
        x = inputs(device)
        one = ours[call % 4](x, caches[0], given[0])
        other = theirs[call % 4](x, caches[1], given[1])
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
        assert torch.equal(given[0], given[1]) and torch.equal(caches[0].keys, caches[1].keys)
    assert all(torch.equal(mine, its) for mine, its in zip(model.buffers(), twin.buffers(), strict=True))
    assert om.live().copied_bytes_total - before >= om.plan.streamed_bytes
    assert om.live().unforeseen_visits == 0
