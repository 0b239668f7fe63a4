"""The boundary ops, when a unit is traced into somebody's graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._inductor import scheduler
from torch._inductor.virtualized import V

import flextensor as ft
from flextensor.offload_manager import get_offload_manager
from flextensor.runtime import ops
from tests.integration.L0_torch_compile.checks import assert_equal_while_streaming, on_the_host, to_inference
from tests.integration.L0_torch_compile.models import DIM, InPlace, Int8Block, TwoOutputs, inputs, pair, streaming


@pytest.mark.parametrize("block", [Int8Block, TwoOutputs, InPlace])
def test_weight_reads_stay_between_the_ops(device, block) -> None:
    model, twin = pair(*(block() for _ in range(4)))
    ft.offload(model, streaming(model, 0.7, resident_below_bytes=512, host_link_bytes_per_second=2e8))
    om = to_inference(model, device)
    assert om.plan is not None and om.plan.streamed_bytes > 0
    twin = twin.to(device)
    regions = [_region(layer, "inductor") for layer in model.layers]
    expected = [_region(layer, "inductor") for layer in twin.layers]
    x = inputs(device)
    with reads_outside_the_ops(x.shape) as outside:
        regions[0](x)
    assert outside == []
    before = om.live()
    for call in range(12):
        at, x = (call + 1) % 4, inputs(device)
        for one, other in zip(regions[at](x), expected[at](x), strict=True):
            # Where ours has an op, the twin's kernel goes on: on a GPU a product and a sum may become one rounding.
            torch.testing.assert_close(one, other, rtol=1e-5 if x.is_cuda else 0, atol=1e-5 if x.is_cuda else 0)
    assert om.live().copied_bytes_total - before.copied_bytes_total >= om.plan.streamed_bytes
    assert om.live().unforeseen_visits == 0
    for _ in range(3):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))


@on_the_host
@pytest.mark.parametrize(("what", "right"), [("weights", True), ("activation", False)])
def test_only_mutated_weights_keep_their_reads_behind_the_first_op(device, what, right) -> None:
    layer, unit = Int8Block().to(device), ops.register_boundary(_silent)

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
def test_only_all_outputs_keep_weight_reads_before_the_last_op(device) -> None:
    layer, unit = TwoOutputs().to(device), ops.register_boundary(_silent)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops.flextensor.pre_compute(list(layer.parameters()), unit)
        first, last = layer(x * 0.5)
        torch.ops.flextensor.post_compute([first], unit)
        return first, last

    x = inputs(device)
    with reads_outside_the_ops(x.shape) as outside:
        torch.compile(region, fullgraph=True)(x)
    assert outside


@contextlib.contextmanager
def reads_outside_the_ops(activation: torch.Size) -> Iterator[list[str]]:
    """Which operations of the one graph that is compiled within the block read a weight (whatever is given to the graph
    and has not the activation's shape) and need not, as Inductor's scheduler sees it, come between the two ops."""
    found: list[str] = []
    codegen = scheduler.Scheduler.codegen

    def look_then_generate(self: scheduler.Scheduler) -> None:
        boundary = {}
        for node in self.nodes:
            overload = getattr(getattr(node, "node", None), "op_overload", None)
            if overload in (torch.ops.flextensor.pre_compute.default, torch.ops.flextensor.post_compute.default):
                boundary[overload] = node
        assert len(boundary) == 2, "an op was dropped from the graph"
        pre = boundary[torch.ops.flextensor.pre_compute.default]
        post = boundary[torch.ops.flextensor.post_compute.default]
        given = V.graph.graph_inputs
        weights = {name for name, value in given.items() if value.get_size() and tuple(value.get_size()) != activation}
        assert weights
        for node in self.nodes:
            reads = {self.mutation_real_name.get(dep.name, dep.name) for dep in node.read_writes.reads}
            if node in (pre, post) or not reads & weights:
                continue
            names = node.get_operation_names()
            if pre.get_name() not in node.ancestors or not names & post.ancestors:
                found.append(node.get_name())
        codegen(self)

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=False):
        patch.setattr(scheduler.Scheduler, "codegen", look_then_generate)
        yield found


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


def _region(layer: nn.Module, backend: str):
    """Somebody's graph around one unit: work before it and behind it."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        given = x * 0.5
        out = layer(given)
        out = given if out is None else out
        return [part + 1 for part in (out if isinstance(out, tuple) else (out,))]

    return torch.compile(run, fullgraph=True, backend=backend)


def test_the_ops_declare_weights_and_outputs_as_mutated() -> None:
    ops.register_boundary(_silent)
    for name in ("pre_compute", "post_compute"):
        schema = getattr(torch.ops.flextensor, name).default._schema
        assert schema.arguments[0].alias_info.is_write
        assert schema.arguments[1].alias_info is None


def test_inductor_cuts_its_cuda_graphs_at_the_ops() -> None:
    ops.register_boundary(_silent)
    for name in ("pre_compute", "post_compute"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.flextensor, name).default.tags


class _Silent:
    def enter_traced(self, weights: list[torch.Tensor]) -> None: ...

    def exit_traced(self) -> None: ...


_silent = _Silent()
