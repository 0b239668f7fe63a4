"""How many graphs there are: one for all units that are alike, none made by a replan, no unit left eager."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.compiled_offload import bump_dynamo_limits_for_compiled_offload
from tests.integration.L0_torch_compile.checks import (
    assert_equal_while_streaming,
    compiled_twin,
    external,
    graphs,
    on_the_host,
    time_a_few_kernels,
    to_inference,
)
from tests.integration.L0_torch_compile.models import Block, IndexedBlock, LabelledBlock, inputs, pair, streaming

MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
PATHS = ["compile_fn", "external"]
ON_A_GPU = [
    ("default", "external"),
    ("reduce-overhead", "compile_fn"),
    ("reduce-overhead", "external"),
    ("max-autotune-no-cudagraphs", "external"),
    ("max-autotune", "compile_fn"),
    ("max-autotune", "external"),
]
"""Not all: each search for kernels takes time there."""


@pytest.mark.parametrize(
    ("device", "mode", "path"),
    [
        *[("cpu", mode, path) for mode in MODES for path in PATHS],
        *[pytest.param("cuda", mode, path, marks=pytest.mark.gpu) for mode, path in ON_A_GPU],
    ],
    indirect=["device"],
)
def test_every_mode_gives_the_compiled_resident_models_numbers_and_a_replan_recompiles_nothing(
    device, mode, path, monkeypatch
) -> None:
    # Kernels that were found by timing may round differently from one search to the next. Through compile_fn the twin
    # runs the units' own graph (there is one, see below), and so whatever that search found. Of two graphs (external)
    # each has a search of its own: there Inductor's deterministic mode takes the library's kernel without one.
    if mode.startswith("max-autotune") and path == "compile_fn":
        time_a_few_kernels(monkeypatch)
    model, twin = pair(Block(), Block(), Block(), Block())

    def compile_fn(module: nn.Module) -> nn.Module:
        return torch.compile(module, fullgraph=True, mode=mode)  # type: ignore[return-value]

    if path == "compile_fn":
        ft.offload(model, streaming(model, 0.8), compile_fn=compile_fn)
    else:
        ft.offload(model, streaming(model, 0.8, external_compile=True))
    om = to_inference(model, device)
    if path == "external":
        for _, module in [*om.offload_units(), *om.resident_units()]:
            module.compile(fullgraph=True, mode=mode)
    twin = twin.to(device)
    for layer in twin.layers:
        layer.compile(fullgraph=True, mode=mode)

    def assert_same() -> None:
        x = inputs(device)
        assert torch.equal(model(x).clone(), twin(x).clone())

    for _ in range(4):
        assert_same()
    made = graphs()
    # In place, Dynamo sees an offloaded unit's own class; what compile_fn is given is of the twin's.
    assert made == (1 if path == "compile_fn" else 2), "one of four units, and one of the twin's four blocks"
    assert om.compile_report().graphs == 1
    for budget in (0.7, 0.9, 0.6):
        om.replan(budget)
        assert_same()
        assert om.plan is not None and om.plan.streamed_bytes > 0
    if path == "external":
        epoch = om.epoch
        for _ in range(om.request_strategy_replan()):
            assert_same()
        assert om.epoch == epoch + 1
    assert graphs() == made
    report = om.compile_report()
    assert (report.compiled, report.shared, report.eager, report.pending) == (1, 3, 0, 0)


def counting_backend(made: list[int]) -> Callable[..., Any]:
    """A backend that notes each graph it is given."""

    def compile_counted(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        made.append(len(graph.graph.nodes))
        return graph.forward

    return compile_counted


@on_the_host
@pytest.mark.parametrize(
    ("block", "path"),
    [
        (Block, "compile_fn"),
        (Block, "getter"),
        (Block, "external"),
        (IndexedBlock, "compile_fn"),
        (IndexedBlock, "external"),
    ],
)
def test_a_cold_start_compiles_what_the_model_compiled_per_block_does_and_no_more(device, block, path) -> None:
    units = 10
    model, twin = pair(*(block(at) if block is IndexedBlock else block() for at in range(units)))
    x = inputs(device)
    theirs: list[int] = []
    bump_dynamo_limits_for_compiled_offload(units)
    twin, backend = twin.to(device), counting_backend(theirs)
    for layer in twin.layers:
        layer.compile(fullgraph=True, backend=backend)
    expected = twin(x)
    torch._dynamo.reset()  # or the two would find each other's code

    ours: list[int] = []
    backend = counting_backend(ours)
    compile_fn = None if path == "external" else lambda m: torch.compile(m, fullgraph=True, backend=backend)
    profile_mode = "getter" if path == "getter" else "view"
    config = streaming(model, external_compile=path == "external", profile_mode=profile_mode)
    ft.offload(model, config, compile_fn=compile_fn)
    om = to_inference(model, device)
    assert bool(ours) is (path == "compile_fn")
    if path == "external":
        for _, module in [*om.offload_units(), *om.resident_units()]:
            module.compile(fullgraph=True, backend=backend)
    for _ in range(om.request_strategy_replan() if path != "compile_fn" else 1):
        assert torch.equal(model(x), expected)
    assert om.plan is not None and om.plan.streamed_bytes > 0
    assert ours == theirs
    assert len(ours) == (units if block is IndexedBlock else 1)


def test_twelve_identical_units_share_one_graph(device) -> None:
    model, twin = pair(*(Block() for _ in range(12)))
    ft.offload(model, streaming(model), compile_fn=lambda m: torch.compile(m, fullgraph=True, backend="aot_eager"))
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    model(inputs(device))
    assert graphs() == 1
    report = om.compile_report()
    assert (report.compiled, report.shared, report.eager, report.graphs) == (1, 11, 0, 1)
    for budget in (0.5, 0.9, 0.35):
        om.replan(budget)
        model(inputs(device))
    assert graphs() == 1
    assert_equal_while_streaming(model, compiled_twin(twin, device), device)


@on_the_host
@pytest.mark.parametrize(
    ("block", "blocks", "dynamic", "expected"),
    [(LabelledBlock, 40, False, 1), (IndexedBlock, 20, False, 20), (IndexedBlock, 40, True, 2)],
)
def test_blocks_with_an_index_attribute_share_where_they_can_and_never_fall_back_to_eager(
    device, block, blocks, dynamic, expected, caplog, monkeypatch
) -> None:
    torch._dynamo.config.recompile_limit = 8  # torch's own; what ran before in this process may have raised it
    assert blocks > 2 * torch._dynamo.config.recompile_limit
    monkeypatch.setattr(torch._dynamo.config, "allow_unspec_int_on_nn_module", dynamic)
    caplog.set_level(logging.INFO, "flextensor.compile.census")
    model, twin = pair(*(block(i) for i in range(blocks)))
    ft.offload(model, streaming(model, 0.5), compile_fn=lambda m: torch.compile(m, backend="eager"))
    om = to_inference(model, device)
    assert graphs() == expected
    report = om.compile_report()
    assert report.eager == 0 and report.compiled == expected and report.shared == blocks - expected
    assert ("allow_unspec_int_on_nn_module" in caplog.text) is (expected == blocks)
    twin = twin.to(device)
    x = inputs(device)
    assert torch.equal(model(x), twin(x))
    om.replan(0.6)
    assert torch.equal(model(x), twin(x))
    assert graphs() == expected


@on_the_host
def test_units_compiled_by_a_caller_who_raised_no_limit_do_not_fall_back_to_eager(device) -> None:
    units = torch._dynamo.config.recompile_limit + 4
    model, twin = pair(*(IndexedBlock(at) for at in range(units)))
    ft.offload(model, streaming(model, 0.5, external_compile=True))
    om = to_inference(model, device)
    for _, module in [*om.offload_units(), *om.resident_units()]:
        module.compile(backend="eager")  # without fullgraph Dynamo gives up silently
    twin = twin.to(device)
    for _ in range(2):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert graphs() == units
    assert (om.compile_report().compiled, om.compile_report().eager) == (units, 0)


@pytest.mark.parametrize("path", ["in_place", "compile_fn"])
def test_a_unit_that_runs_eagerly_at_dynamos_limit_is_reported_as_eager_and_told(device, path, caplog) -> None:
    def compile_fn(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend="eager")  # type: ignore[return-value]

    model, twin = pair(*(IndexedBlock(at // 2) for at in range(10)))
    if path == "compile_fn":
        ft.offload(model, streaming(model, 0.5, profile_mode="getter"), compile_fn=compile_fn)
    else:
        ft.offload(model, streaming(model, 0.5, external_compile=True))
    om = to_inference(model, device)
    for _, module in [*om.offload_units(), *om.resident_units()]:
        if path == "in_place":
            module.compile(backend="eager")
    torch._dynamo.config.recompile_limit = 3
    twin = twin.to(device)
    for call in range(3):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
        report = om.compile_report()
        # Of five indexes three have a graph, and two units each.
        assert (report.compiled, report.shared, report.eager, report.graphs) == (3, 3, 4, 3), call
        assert sys.getprofile() is None
    assert len([record for record in caplog.records if "runs eagerly" in record.getMessage()]) == 1
    assert "unit 'layers.7' is compiled but runs eagerly" in caplog.text and "recompile_limit = 3" in caplog.text
    torch._dynamo.reset()
    bump_dynamo_limits_for_compiled_offload(10)
    model(x)
    report = om.compile_report()
    assert (report.compiled, report.shared, report.eager, report.graphs) == (5, 5, 0, 8)


def test_a_unit_whose_later_shapes_run_eagerly_is_reported_as_eager(device, caplog) -> None:
    model, twin = pair(Block(), Block(), Block())
    ft.offload(model, streaming(model, 0.8, external_compile=True))
    om = to_inference(model, device)
    for _, module in [*om.offload_units(), *om.resident_units()]:
        module.compile(backend="eager", dynamic=False)
    model(inputs(device))
    assert om.compile_report().eager == 0
    torch._dynamo.config.recompile_limit = 1
    twin = twin.to(device)
    for rows in (24, 16, 24, 16):
        x = inputs(device, rows)
        assert torch.equal(model(x), twin(x))
    assert (om.compile_report().eager, om.compile_report().graphs) == (3, 1)
    assert "runs eagerly" in caplog.text


def test_bump_raises_limits_and_never_lowers_them() -> None:
    bump_dynamo_limits_for_compiled_offload(100)
    assert torch._dynamo.config.recompile_limit >= 100
    high = torch._dynamo.config.recompile_limit
    bump_dynamo_limits_for_compiled_offload(1)
    assert torch._dynamo.config.recompile_limit == high


def test_a_new_input_shape_recompiles_once_and_stays_right(device) -> None:
    model, twin = external(device)
    for rows in (16, 24, 32, 40):
        x = inputs(device, rows)
        assert torch.equal(model(x), twin(x))
    made = graphs()
    for rows in (16, 24, 32, 40):
        x = inputs(device, rows)
        assert torch.equal(model(x), twin(x))
    assert graphs() == made
