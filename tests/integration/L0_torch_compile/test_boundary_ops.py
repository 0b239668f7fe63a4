"""The boundary ops, when a unit is traced into somebody's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.compile.order import order_reads_before_the_end
from flextensor.offload_manager import get_offload_manager
from flextensor.runtime import ops
from tests.integration.L0_torch_compile.checks import (
    assert_equal_while_streaming,
    marked,
    on_the_host,
    reads_outside_the_ops,
    silent,
    to_inference,
    without_order,
)
from tests.integration.L0_torch_compile.models import DIM, InPlace, Int8Block, TwoOutputs, inputs, pair, streaming


@pytest.mark.parametrize("block", [Int8Block, TwoOutputs, InPlace])
def test_weight_reads_stay_between_the_ops(device, block) -> None:
    model, twin = pair(*(block() for _ in range(4)))
    ft.offload(model, streaming(model, 0.7, resident_below_bytes=512, host_link_bytes_per_second=2e8))
    om = to_inference(model, device)
    assert om.plan is not None and om.plan.streamed_bytes > 0
    twin = twin.to(device)
    regions = [_region(layer, "inductor") for layer in model.layers]
    expected = [_region(marked(layer, silent), "inductor") for layer in twin.layers]
    unmarked = [_region(layer, "inductor") for layer in twin.layers]
    x = inputs(device)
    with reads_outside_the_ops(x.shape) as outside:
        regions[0](x)
    assert outside == []
    before = om.live()
    for call in range(12):
        at, x = (call + 1) % 4, inputs(device)
        for one, same, other in zip(regions[at](x), expected[at](x), unmarked[at](x), strict=True):
            assert torch.equal(one, same)
            # Where ours has an op, this one's kernel goes on: on a GPU a product and a sum may become one rounding.
            torch.testing.assert_close(one, other, rtol=1e-5 if x.is_cuda else 0, atol=1e-5 if x.is_cuda else 0)
    assert om.live().copied_bytes_total - before.copied_bytes_total >= om.plan.streamed_bytes
    assert om.live().unforeseen_visits == 0
    for _ in range(3):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))


@on_the_host
@pytest.mark.parametrize(("what", "right"), [("weights", True), ("activation", False)])
def test_only_mutated_weights_keep_their_reads_behind_the_first_op(device, what, right) -> None:
    layer, unit = Int8Block().to(device), ops.register_boundary(silent)

    def region(x: torch.Tensor) -> torch.Tensor:
        x = x * 0.5
        torch.ops.flextensor.pre_compute(list(layer.parameters()) if what == "weights" else [x], unit)
        out = layer(x)
        torch.ops.flextensor.post_compute([out], unit)
        return out + 1

    x = inputs(device)
    with reads_outside_the_ops(x.shape) as outside:
        torch.compile(region, fullgraph=True)(x)
    assert (outside == []) is right


@on_the_host
@pytest.mark.parametrize(("ordered", "named", "right"), [(False, 1, False), (False, 2, True), (True, 1, True)])
def test_all_outputs_or_the_order_keep_weight_reads_before_the_last_op(
    device, ordered, named, right, monkeypatch
) -> None:
    layer, unit = TwoOutputs().to(device), ops.register_boundary(silent)
    order_reads_before_the_end()
    if not ordered:
        without_order(monkeypatch)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops.flextensor.pre_compute(list(layer.parameters()), unit)
        first, last = layer(x * 0.5)
        torch.ops.flextensor.post_compute([first, last][:named], unit)
        return first, last

    x = inputs(device)
    with reads_outside_the_ops(x.shape) as outside:
        torch.compile(region, fullgraph=True)(x)
    assert (outside == []) is right


class Writer(nn.Module):
    """Neither takes a tensor nor returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.register_buffer("state", torch.zeros(DIM))

    def forward(self) -> None:
        self.state.copy_(self.lin(self.state))


@on_the_host
def test_a_unit_without_tensors_in_somebodys_graph_is_refused_with_the_way_that_works(device) -> None:
    model = nn.ModuleList(Writer() for _ in range(3)).eval().requires_grad_(False)
    ft.offload(model, streaming(model, include_patterns=["*"], resident_below_bytes=0))
    with pytest.raises(RuntimeError, match=r"in place \(`module.compile\(\)`\)"):
        torch.compile(lambda: model[0](), fullgraph=True, backend="eager")()


@on_the_host
def test_a_backend_that_copies_the_weights_of_a_traced_unit_is_refused(device) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model))
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    with pytest.raises(RuntimeError, match=r"offload_units\(\)"):
        _region(model.layers[0], "aot_eager")(inputs(device))
    assert_equal_while_streaming(model, twin.to(device), device)


def _region(layer: Callable[..., Any], backend: str):
    """Somebody's graph around one unit: work before it and behind it."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        given = x * 0.5
        out = layer(given)
        out = given if out is None else out
        return [part + 1 for part in (out if isinstance(out, tuple) else (out,))]

    return torch.compile(run, fullgraph=True, backend=backend)


def test_the_ops_declare_weights_and_outputs_as_mutated() -> None:
    ops.register_boundary(silent)
    for name in ("pre_compute", "post_compute"):
        schema = getattr(torch.ops.flextensor, name).default._schema
        assert schema.arguments[0].alias_info.is_write
        assert schema.arguments[1].alias_info is None


def test_inductor_cuts_its_cuda_graphs_at_the_ops() -> None:
    ops.register_boundary(silent)
    for name in ("pre_compute", "post_compute"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.flextensor, name).default.tags
