"""The specification of compiled offload: order, ``compile_fn``, external compile. Each equality also asserts that bytes
were streamed. The page's code blocks run as they stand there, with a small model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.compiled_offload import bump_dynamo_limits_for_compiled_offload
from flextensor.offload_manager import get_offload_manager
from tests.integration.L0_torch_compile.checks import (
    assert_equal_while_streaming,
    assert_equal_while_streaming_from_start,
    compiled_twin,
    external,
    graphs,
    on_the_host,
    replan_through_tail,
    slow_backend,
    to_inference,
)
from tests.integration.L0_torch_compile.models import Block, Int8Block, TwoOutputs, inputs, pair, streaming

# ---- offload first, then compile


def wrap_root(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def wrap_layer(model: nn.Module) -> nn.Module:
    model.layers[1] = torch.compile(model.layers[1])  # type: ignore[index, operator]
    return model


def compile_layer_in_place(model: nn.Module) -> nn.Module:
    model.layers[2].compile()  # type: ignore[index, union-attr]
    return model


def compile_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    return model


class Decorated(Block):
    """Compiled by a decorator on its class's forward."""

    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class DecoratedTwice(Block):
    """The same, behind another decorator."""

    @torch.no_grad()
    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def layer_of_a_decorated_class(model: nn.Module) -> nn.Module:
    model.layers[3] = Decorated()  # type: ignore[index, operator]
    return model


def layer_of_a_class_decorated_twice(model: nn.Module) -> nn.Module:
    model.layers[3] = DecoratedTwice()  # type: ignore[index, operator]
    return model


@pytest.mark.parametrize(
    "spoil",
    [
        wrap_root,
        wrap_layer,
        compile_layer_in_place,
        compile_forward,
        layer_of_a_decorated_class,
        layer_of_a_class_decorated_twice,
    ],
)
def test_offload_of_a_compiled_model_is_refused_with_the_remedy(spoil) -> None:
    model, _ = pair()
    with pytest.raises(ft.OffloadError, match=r"compiled already.*compile_fn"):
        ft.offload(spoil(model), streaming(model))


class Uncompiled(Block):
    """Kept from the compiler by a decorator."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@on_the_host
def test_a_forward_kept_from_the_compiler_is_no_compiled_one(device) -> None:
    model, twin = pair()
    model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)  # type: ignore[method-assign]
    model.layers[2].__class__ = Uncompiled
    ft.offload(model, streaming(model))
    assert_equal_while_streaming_from_start(model, twin.to(device), device)


# ---- compile_fn


def test_the_compile_fn_example_runs_as_written(device) -> None:
    model, twin = pair()
    config = streaming(model)
    x = inputs(device)
    model = model.to("cpu")

    def compile_fn(module: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(module, fullgraph=True)

    model = ft.offload(model, config, compile_fn=compile_fn)
    om = ft.get_offload_manager()

    # discovery + compiled view-profile → INFERENCE (compile_fn applied)
    for _ in range(om.iters_before_inference):
        model(x)

    assert om.phase == "inference"
    assert_equal_while_streaming(model, compiled_twin(twin, device, "inductor"), device)


def test_identity_compile_fn_activates_compiled_offload_without_a_compiler(device) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model), compile_fn=lambda m: m)
    om = ft.get_offload_manager()
    assert_equal_while_streaming_from_start(model, twin.to(device), device)
    assert graphs() == 0
    assert om.report()["compile"]["eager"] == 0


@on_the_host
def test_a_custom_tuner_sees_the_plain_module(device) -> None:
    model, twin = pair()
    seen: list[type] = []

    def tuner(module: nn.Module) -> nn.Module:
        seen.append(type(module))
        assert isinstance(module, Block) and isinstance(module.up, nn.Linear)
        return torch.compile(module, backend="aot_eager")

    ft.offload(model, streaming(model), compile_fn=tuner)
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    assert seen == [Block] * 6
    assert_equal_while_streaming(model, compiled_twin(twin, device), device)


@on_the_host
def test_compile_fn_is_applied_to_exactly_the_units(device) -> None:
    model, _ = pair()
    given: list[int] = []
    ft.offload(model, streaming(model), compile_fn=lambda m: given.append(id(m.up.weight)) or m)
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    units = [*om.offload_units(), *om.resident_units()]
    assert sorted(given) == sorted(id(module.up.weight) for _, module in units)
    assert {name for name, _ in units} == {f"layers.{i}" for i in range(6)}


def test_offloading_breaks_no_graph(device) -> None:
    model, twin = pair()
    breaks = torch._dynamo.utils.counters["graph_break"]
    ft.offload(model, streaming(model), compile_fn=lambda m: torch.compile(m, backend="aot_eager"))  # no fullgraph
    assert_equal_while_streaming_from_start(model, compiled_twin(twin, device), device)
    assert not breaks


@on_the_host
def test_view_profile_is_compiled_and_getter_profile_is_eager(device) -> None:
    for mode, during_profiling in (("view", True), ("getter", False)):
        model, _ = pair()
        compiled: list[str] = []
        ft.offload(
            model, streaming(model, profile_mode=mode), compile_fn=lambda m, seen=compiled: seen.append("unit") or m
        )
        om = ft.get_offload_manager()
        for _ in range(om.iters_before_inference - 1):
            model(inputs(device))
        assert om.phase == "profiling"
        assert bool(compiled) is during_profiling
        model(inputs(device))
        assert om.phase == "inference" and len(compiled) == 6
        assert om.strategy_replan_status.can_request is (mode == "getter")
        if mode == "getter":
            for _ in range(om.request_strategy_replan()):
                model(inputs(device))
            assert om.strategy_replan_status.applied is True
        ft.release()


@pytest.mark.parametrize("mode", ["view", "getter"])
def test_the_profile_has_the_compiled_units_times_or_the_eager_ones_until_a_replan(device, mode) -> None:
    model, _ = pair()
    backend = slow_backend(0.02)
    ft.offload(model, streaming(model, profile_mode=mode), compile_fn=lambda m: torch.compile(m, backend=backend))
    om = to_inference(model, device)
    assert om.profile is not None
    if mode == "getter":
        assert min(om.profile.kinds[0].compute) < 0.5 * 0.02
        for _ in range(om.request_strategy_replan()):
            model(inputs(device))
    # A GPU's events are early by what is queued before them.
    assert min(om.profile.kinds[0].compute) >= 0.9 * 0.02
    assert om.plan is not None and om.plan.prediction is not None
    assert om.plan.prediction.step_seconds >= 0.9 * 6 * 0.02


# ---- external compile


def test_the_external_compile_example_runs_as_written(device) -> None:
    model, twin = pair()
    x = inputs(device)

    config = streaming(model, external_compile=True)
    model = ft.offload(model, config)
    om = get_offload_manager()

    for _ in range(om.iters_before_inference):
        model(x)  # discovery + profiling → INFERENCE (eager)

    units = om.offload_units()
    bump_dynamo_limits_for_compiled_offload(len(units))
    for _name, module in units:
        module.compile(fullgraph=True)  # in-place; do not guess model.layers

    for _name, module in om.resident_units():
        module.compile(fullgraph=True)  # GPU-resident; no replan required

    for _ in range(om.request_strategy_replan()):
        model(x)  # warm→measure→replan tail

    status = om.strategy_replan_status
    assert (status.state, status.applied) == ("done", True)
    assert_equal_while_streaming(model, compiled_twin(twin, device, "inductor"), device)


@on_the_host
@pytest.mark.parametrize("loaded", [True, False])
def test_external_compile_can_be_set_by_the_environment(device, monkeypatch, loaded) -> None:
    monkeypatch.setenv("FT_EXTERNAL_COMPILE", "1")
    model, twin = pair()
    config = streaming(model)
    if loaded:
        config = ft.load_config(**config.model_dump(exclude={"external_compile"}))
    ft.offload(model, config)
    om = to_inference(model, device)
    assert om.external_compile_active and om.strategy_replan_status.can_request
    for _, module in [*om.offload_units(), *om.resident_units()]:
        module.compile(fullgraph=True, backend="aot_eager")
    twin = compiled_twin(twin, device)
    replan_through_tail(model, twin, device)
    assert_equal_while_streaming(model, twin, device)


def test_what_a_configuration_says_wins_over_the_environment_and_what_is_not_used_is_told(monkeypatch, caplog) -> None:
    monkeypatch.setenv("FT_EXTERNAL_COMPILE", "1")
    monkeypatch.setenv("FT_NUM_BLOCKS", "3")
    monkeypatch.setenv("FT_PROFILING_ITERS", "4")
    model, _ = pair()
    ft.offload(model, streaming(model, external_compile=False, profiling_iters=1))
    om = get_offload_manager()
    assert not om.external_compile_active and om.config.num_blocks is None
    assert "FT_NUM_BLOCKS=3; make that with flextensor.load_config" in caplog.text
    assert "PROFILING_ITERS" not in caplog.text and "EXTERNAL_COMPILE" not in caplog.text


def test_offload_units_and_resident_units_are_all_units_once(device) -> None:
    # Whatever is timed: no tensor of the small units is worth a copy, and the large ones' do not fit.
    layers = [Block(), Int8Block(), Block(), Int8Block(), Block(), Block()]
    model, twin = external(device, layers=layers, budget_bytes=None, budget_fraction=0.7, resident_below_bytes="8KiB")
    om = get_offload_manager()
    streamed, resident = om.offload_units(), om.resident_units()
    assert streamed and {name for name, _ in resident} >= {"layers.1", "layers.3"}
    names = [name for name, _ in (*streamed, *resident)]
    assert sorted(names) == [f"layers.{at}" for at in range(6)]
    assert all(module is model.get_submodule(name) for name, module in (*streamed, *resident))
    for _, module in resident:
        assert not any(parameter.data_ptr() in _arena(om) for parameter in module.parameters())
    replan_through_tail(model, twin, device)
    report = om.compile_report()
    assert (report.compiled + report.shared, report.eager, report.pending) == (6, 0, 0)


def _arena(om: ft.OffloadManager) -> range:
    arena = om._execution.memory._arena
    assert arena is not None
    return range(arena.data_ptr(), arena.data_ptr() + arena.numel())


def test_the_preflight_example_runs_as_written(device) -> None:
    model, twin = external(device)
    om = get_offload_manager()
    x = inputs(device)

    if not om.external_compile_active:
        raise RuntimeError("FlexTensor must use external_compile=True without compile_fn")

    if not om.strategy_replan_status.can_request:
        raise RuntimeError("FlexTensor strategy replan is not available")

    for _ in range(om.request_strategy_replan()):
        model(x)

    status = om.strategy_replan_status
    if status.state == "failed" or status.applied is not True:
        raise RuntimeError("FlexTensor did not apply the new strategy")

    assert_equal_while_streaming(model, twin, device)


@pytest.mark.parametrize("path", ["compile_fn", "external"])
def test_units_that_dequantise_first_or_return_two_tensors_are_right_on_both_paths(device, path) -> None:
    model, twin = pair(Int8Block(), TwoOutputs(), Int8Block(), TwoOutputs())
    settings = {"resident_below_bytes": 512, "host_link_bytes_per_second": 2e8}

    def compile_fn(module: nn.Module) -> nn.Module:
        return torch.compile(module, fullgraph=True)  # type: ignore[return-value]

    if path == "compile_fn":
        ft.offload(model, streaming(model, 0.7, **settings), compile_fn=compile_fn)
        om = to_inference(model, device)
    else:
        ft.offload(model, streaming(model, 0.7, external_compile=True, **settings))
        om = to_inference(model, device)
        for _, module in [*om.offload_units(), *om.resident_units()]:
            module.compile(fullgraph=True)
    twin = compiled_twin(twin, device, "inductor")
    assert_equal_while_streaming(model, twin, device, calls=6)
    om.replan(0.8)
    assert_equal_while_streaming(model, twin, device)
    assert om.compile_report().graphs == 2


@on_the_host
def test_release_leaves_plain_modules_that_compile(device) -> None:
    model, twin = external(device)
    model(inputs(device))
    ft.release()
    assert type(model.layers[0]) is Block
    x = torch.randn(2, 16, 64)
    assert torch.equal(model(x), copy.deepcopy(twin)(x))
    assert torch.compile(model, backend="aot_eager")(x).shape == (2, 16, 8)
