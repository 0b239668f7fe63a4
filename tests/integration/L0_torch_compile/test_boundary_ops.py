"""The boundary ops, when a unit is traced into somebody's graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.offload_manager import get_offload_manager
from flextensor.runtime import ops
from tests.integration.L0_torch_compile.checks import assert_equal_while_streaming
from tests.integration.L0_torch_compile.models import Int8Block, TwoOutputs, inputs, pair, streaming


@pytest.mark.parametrize("block", [Int8Block, TwoOutputs])
def test_weight_reads_stay_between_the_ops(device, block) -> None:
    model, twin = pair(*(block() for _ in range(5)))
    ft.offload(model, streaming(model, 0.7, resident_below_bytes=512, host_link_bytes_per_second=2e8))
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    assert om.plan is not None and om.plan.streamed_bytes > 0
    twin = twin.to(device)
    regions = [_region(layer, "inductor") for layer in model.layers]
    expected = [_region(layer, "inductor") for layer in twin.layers]
    for _ in range(4):
        x = inputs(device)
        for region, reference in zip(regions, expected, strict=True):
            ours, theirs = region(x), reference(x)
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one, other)


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
        out = layer(x * 0.5)
        return [part + 1 for part in (out if isinstance(out, tuple) else (out,))]

    return torch.compile(run, fullgraph=True, backend=backend)


def test_the_ops_declare_weights_and_outputs_as_mutated() -> None:
    ops.register_boundary(_Silent())
    for name in ("pre_compute", "post_compute"):
        schema = getattr(torch.ops.flextensor, name).default._schema
        assert schema.arguments[0].alias_info.is_write
        assert schema.arguments[1].alias_info is None


def test_inductor_cuts_its_cuda_graphs_at_the_ops() -> None:
    ops.register_boundary(_Silent())
    for name in ("pre_compute", "post_compute"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.flextensor, name).default.tags


class _Silent:
    def enter_traced(self, weights: list[torch.Tensor]) -> None: ...

    def exit_traced(self) -> None: ...
