"""Compiled in another order, or around more than a unit: right numbers or one clear error, never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flextensor as ft
from flextensor.offload_manager import get_offload_manager
from tests.integration.L0_torch_compile.checks import (
    assert_equal_while_streaming,
    external,
    graphs,
    on_the_host,
    to_inference,
)
from tests.integration.L0_torch_compile.models import IndexedBlock, MyModel, inputs, pair, streaming


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_whole_offloaded_model_given_to_torch_compile_is_one_clear_error(device, fullgraph) -> None:
    model, twin = external(device)
    whole = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(Exception, match=r"offload_units\(\)"):
        whole(inputs(device))
    assert_equal_while_streaming(model, twin, device)


@on_the_host
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_whole_model_is_refused_in_every_phase_and_the_life_cycle_goes_on(device, calls) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model))
    om = get_offload_manager()
    for _ in range(calls):
        model(inputs(device))
    phase = om.phase
    assert phase == ("discovery" if calls == 0 else "profiling")
    with pytest.raises(Exception, match=r"offload_units\(\)"):
        torch.compile(model, backend="aot_eager")(inputs(device))
    assert om.phase == phase
    twin = twin.to(device)
    for _ in range(om.iters_before_inference - calls):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert_equal_while_streaming(model, twin, device)


def test_two_units_in_one_graph_are_one_clear_error(device) -> None:
    model, twin = external(device)
    first, second = model.layers[0], model.layers[1]
    both = torch.compile(lambda x: second(first(x)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"offload_units\(\)"):
        both(inputs(device))
    assert_equal_while_streaming(model, twin, device)


def in_place(model: MyModel, fullgraph: bool = True) -> None:
    for layer in model.layers:
        layer.compile(fullgraph=fullgraph, backend="aot_eager")


def by_wrapping(model: MyModel, fullgraph: bool = True) -> None:
    for at, layer in enumerate(model.layers):
        model.layers[at] = torch.compile(layer, fullgraph=fullgraph, backend="eager")  # type: ignore[assignment]


def by_forward(model: MyModel) -> None:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]


def inside(model: MyModel) -> None:
    for layer in model.layers:
        layer.up.compile(backend="aot_eager")  # type: ignore[union-attr, operator]


Compile = Callable[..., None]
WAYS = [in_place, by_wrapping, by_forward, inside]


@on_the_host
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("external_compile", [True, False])
def test_compiling_during_discovery_is_a_clear_error(device, way: Compile, external_compile: bool) -> None:
    model, _ = pair()
    ft.offload(model, streaming(model, external_compile=external_compile))
    way(model)
    for _ in range(2):
        with pytest.raises(ft.OffloadError, match=r"layers\.0'.* compiled during discovery.*compile after 3 calls"):
            model(inputs(device))


@on_the_host
def test_a_unit_that_is_plain_again_after_the_refusal_goes_on_to_right_numbers(device) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=True))
    in_place(model)
    with pytest.raises(ft.OffloadError, match="during discovery"):
        model(inputs(device))
    for layer in model.layers:
        layer._compiled_call_impl = None
    to_inference(model, device)
    assert_equal_while_streaming(model, twin.to(device), device)


@on_the_host
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("external_compile", [True, False])
def test_compiling_across_phase_changes_works(
    device, way: Compile, calls: int, external_compile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=external_compile))
    om = get_offload_manager()
    twin = twin.to(device)
    for call in range(om.iters_before_inference + 1):
        if call == calls:
            way(model)
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert_equal_while_streaming(model, twin, device)
    report = om.compile_report()
    if way in (in_place, by_forward):
        assert (report.compiled, report.shared, report.eager, report.pending, report.graphs) == (1, 5, 0, 0, 1)
        assert ("no strategy replan can be requested" in caplog.text) is not external_compile
    elif way is by_wrapping:  # the graphs are the caller's own
        assert (report.compiled, report.shared, report.eager, report.pending, report.graphs) == (0, 6, 0, 0, 0)
    else:
        assert report.eager == 6


@on_the_host
@pytest.mark.parametrize("way", [in_place, by_wrapping])
def test_units_compiled_by_hand_without_a_word_have_the_limits_raised_too(device, way: Compile) -> None:
    units = torch._dynamo.config.recompile_limit + 4
    model, twin = pair(*(IndexedBlock(at) for at in range(units)))
    ft.offload(model, streaming(model, 0.5))
    om = to_inference(model, device)
    way(model, fullgraph=False)
    twin = twin.to(device)
    for _ in range(2):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert graphs() == units and torch._dynamo.config.recompile_limit >= units
    report = om.compile_report()
    assert (report.compiled, report.shared) == ((units, 0) if way is in_place else (0, units))
    assert (report.eager, report.pending) == (0, 0)


def test_a_unit_wrapped_for_a_backend_that_would_copy_its_weights_is_refused_with_the_way_that_works(device) -> None:
    model, twin = external(device)
    layer = model.layers[2]
    model.layers[2] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"in place \(`module.compile\(\)`\)"):
        model(inputs(device))
    model.layers[2] = layer
    assert_equal_while_streaming(model, twin, device)
