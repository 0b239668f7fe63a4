"""A whole offloaded forward in a CUDA graph: live streaming inside, the manual replan tail, stale graphs refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.compile.graphs import StaleGraphError
from flextensor.runtime import ops
from tests.integration.L0_torch_compile.checks import graphs
from tests.integration.L0_torch_compile.models import MyModel, inputs, pair, streaming

pytestmark = pytest.mark.gpu


def captured(model: nn.Module, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    return graph, out


def at_inference(**settings: object) -> tuple[MyModel, MyModel, torch.Tensor]:
    model, twin = pair()
    device = torch.device("cuda")
    ft.offload(model, streaming(model, external_compile=True, offload_timing="cuda_graph", **settings))
    x = inputs(device)
    for _ in range(ft.get_offload_manager().iters_before_inference):
        model(x)
    return model, twin.to(device), x


def assert_replays_equal(graph: torch.cuda.CUDAGraph, out: torch.Tensor, x: torch.Tensor, twin: nn.Module) -> None:
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, twin(x))


@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
def test_replays_with_new_inputs_are_right_and_stream(mode) -> None:
    model, twin, x = at_inference(transfer_mode=mode)
    om = ft.get_offload_manager()
    assert om.plan is not None and om.plan.streamed_bytes > 0
    graph, out = captured(model, x)
    assert_replays_equal(graph, out, x, twin)
    # Eager calls and replays may follow each other in any order.
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        assert torch.equal(model(x), twin(x))
        graph.replay()
        assert torch.equal(out, twin(x))


def test_a_plan_that_streams_nothing_is_captured_too() -> None:
    model, twin, x = at_inference(enable_diagnostics=True)
    om = ft.get_offload_manager()
    om.replan(1.0)
    for _ in range(7):  # diagnostics speak, and wait for the steps, after the eighth
        model(x)
    assert om.plan is not None and om.plan.streamed_bytes == 0
    graph, out = captured(model, x)
    assert_replays_equal(graph, out, x, twin)
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_manual_replan_example_runs_as_written(compiled) -> None:
    model, twin = pair()
    x = static_x = inputs(torch.device("cuda"))

    config = streaming(
        model,
        transfer_mode="allocation_block_transfer",
        external_compile=True,  # arms compiled replan; source weights survive first loader
        offload_timing="cuda_graph",  # external timing events for post-replay readback
    )
    model = ft.offload(model, config)
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(x)  # discovery + profiling → INFERENCE

    # Optional: compile per offloaded unit, then capture.
    twin = twin.to(static_x.device)
    if compiled:
        for _, module in [*om.offload_units(), *om.resident_units()]:
            module.compile(fullgraph=True)
        for layer in twin.layers:
            layer.compile(fullgraph=True)
        for _ in range(3):  # what compiles cannot be captured
            model(static_x)
    expected, made = twin(static_x), graphs()
    assert bool(made) is compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static_x)

    copied, epoch = om.live().copied_bytes_total, om.epoch
    iters = ft.request_strategy_replan(manual_update_state=True)
    for _ in range(iters):  # iters == 0 if any prerequisite above was missing
        graph.replay()
        ft.update_state()  # last call applies compute budgets + rebuilds

    assert iters > 0 and torch.equal(out, expected)
    assert om.strategy_replan_status.applied is True and om.epoch == epoch + 1
    assert om.plan is not None and om.plan.streamed_bytes > 0 and om.live().copied_bytes_total > copied
    with pytest.raises(StaleGraphError, match="capture it again"):
        graph.replay()

    # Loader changed — rebuild CUDA graphs before serving.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static_x)

    assert_replays_equal(graph, out, static_x, twin)
    assert graphs() == made


def test_serving_timings_are_collected_around_replays() -> None:
    model, _, x = at_inference()
    graph, _ = captured(model, x)
    ft.reset_offload_timing()
    for _ in range(4):
        graph.replay()
        assert ft.update_offload_timing()
    rows = ft.collect_offload_timing()
    assert len(rows) == 6
    assert all(row.compute[1] > 0 for row in rows)
    assert any(row.transfer[1] > 0 for row in rows)
    assert "layers.0" in ft.format_offload_timing_table(rows)


@pytest.mark.parametrize("change", ["replan", "edit", "release"])
def test_a_graph_from_before_a_change_is_refused(change) -> None:
    model, twin, x = at_inference()
    om = ft.get_offload_manager()
    graph, out = captured(model, x)
    assert_replays_equal(graph, out, x, twin)
    if change == "replan":
        om.replan(0.8)
        model(x)
    elif change == "edit":
        with om.edit_weights("layers.1.up.weight") as tensors:
            tensors["layers.1.up.weight"].add_(1)
    else:
        ft.release()
    with pytest.raises(StaleGraphError):
        graph.replay()


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_per_unit_cuda_graphs_of_inductor(mode) -> None:
    model, twin = pair()
    device = torch.device("cuda")
    ft.offload(model, streaming(model), compile_fn=lambda m: torch.compile(m, fullgraph=True, mode=mode))
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference + 3):
        model(inputs(device))
    # Before the twin runs: all that was captured are units. Inductor skips its graphs without a word.
    inductor = torch._dynamo.utils.counters["inductor"]
    assert inductor["cudagraph_skips"] == 0
    assert bool(inductor["cudagraph_recorded_non_static_inputs"]) is (mode == "reduce-overhead")
    twin = twin.to(device)
    for layer in twin.layers:
        layer.compile(fullgraph=True, mode=mode)
    made = None
    for share in (None, 0.5):
        if share is not None:
            om.replan(share)
        copied = om.live().copied_bytes_total
        for _ in range(6):
            x = inputs(device)
            ours = model(x).clone()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(ours, twin(x).clone())
        assert om.plan is not None and om.plan.streamed_bytes > 0
        assert om.live().copied_bytes_total - copied >= om.plan.streamed_bytes
        made = made or graphs()
    assert graphs() == made and inductor["cudagraph_skips"] == 0


def test_the_whole_compiled_forward_is_captured() -> None:
    model, twin, x = at_inference()
    om = ft.get_offload_manager()
    for _, module in [*om.offload_units(), *om.resident_units()]:
        module.compile(fullgraph=True)
    for layer in twin.layers:
        layer.compile(fullgraph=True)
    for _ in range(3):
        assert torch.equal(model(x), twin(x))
    graph, out = captured(model, x)
    assert_replays_equal(graph, out, x, twin)


def test_no_host_synchronisation_in_the_steady_state() -> None:
    model, twin, x = at_inference()
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [model(x) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = twin(x)
    assert all(torch.equal(out, expected) for out in outs)


class Silent:
    """A boundary at which nothing happens."""

    def enter_traced(self, weights: list[torch.Tensor]) -> None: ...

    def exit_traced(self) -> None: ...


def test_a_region_around_a_unit_with_inductors_cuda_graphs_fetches_at_each_replay() -> None:
    model, twin = pair()
    device = torch.device("cuda")
    ft.offload(model, streaming(model))
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    twin = twin.to(device)
    silent = Silent()
    unit = ops.register_boundary(silent)

    def marked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Cut where our graphs are cut, so that kernels are the same."""
        torch.ops.flextensor.pre_compute(list(layer.parameters()), unit)
        out: torch.Tensor = layer(x)
        torch.ops.flextensor.post_compute([out], unit)
        return out

    def region(layer: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.compile(lambda x: layer(x * 0.5) + 1, fullgraph=True, mode="reduce-overhead")

    ours = [region(layer) for layer in model.layers]
    theirs = [region(functools.partial(marked, layer)) for layer in twin.layers]
    for _ in range(6):
        before = om.live().copied_bytes_total
        for mine, reference in zip(ours, theirs, strict=True):
            x = inputs(device)
            torch.compiler.cudagraph_mark_step_begin()
            got = mine(x).clone()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(got, reference(x).clone())
        assert om.plan is not None and om.plan.streamed_bytes > 0
        # What the step before has fetched ahead is of the same size as what this one fetches for the next.
        assert om.live().copied_bytes_total - before >= om.plan.streamed_bytes / 2
    assert om.live().unforeseen_visits == 0
