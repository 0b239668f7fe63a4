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
    to_inference,
)
from tests.integration.L0_torch_compile.models import MyModel, inputs, pair, streaming


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_whole_offloaded_model_given_to_torch_compile_is_one_clear_error(device, fullgraph) -> None:
    model, twin = external(device)
    whole = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(Exception, match=r"offload_units\(\)"):
        whole(inputs(device))
    assert_equal_while_streaming(model, twin, device)


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


def in_place(model: MyModel) -> None:
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")


def by_wrapping(model: MyModel) -> None:
    for at, layer in enumerate(model.layers):
        model.layers[at] = torch.compile(layer, fullgraph=True, backend="eager")  # type: ignore[assignment]


def by_forward(model: MyModel) -> None:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]


def inside(model: MyModel) -> None:
    for layer in model.layers:
        layer.up.compile(backend="aot_eager")  # type: ignore[union-attr, operator]


Compile = Callable[[MyModel], None]
WAYS = [in_place, by_wrapping, by_forward, inside]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("external_compile", [True, False])
def test_compiling_during_discovery_is_a_clear_error(device, way: Compile, external_compile: bool) -> None:
    model, _ = pair()
    ft.offload(model, streaming(model, external_compile=external_compile))
    way(model)
    for _ in range(2):
        with pytest.raises(ft.OffloadError, match=r"layers\.0'.* compiled during discovery.*compile after 3 calls"):
            model(inputs(device))


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_compiling_across_phase_changes_works(device, way: Compile, calls: int) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=True))
    om = get_offload_manager()
    twin = twin.to(device)
    for call in range(om.iters_before_inference + 1):
        if call == calls:
            way(model)
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert_equal_while_streaming(model, twin, device)
    if way is not inside:
        report = om.compile_report()
        assert (report.eager, report.pending) == (0, 0)


def test_a_unit_wrapped_for_a_backend_that_would_copy_its_weights_is_refused_with_the_way_that_works(device) -> None:
    model, twin = external(device)
    layer = model.layers[2]
    model.layers[2] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"in place \(`module.compile\(\)`\)"):
        model(inputs(device))
    model.layers[2] = layer
    assert_equal_while_streaming(model, twin, device)
