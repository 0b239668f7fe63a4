"""The specification of compiled offload, sentence by sentence. Each equality also asserts that bytes were streamed."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.compiled_offload import bump_dynamo_limits_for_compiled_offload
from flextensor.offload_manager import get_offload_manager
from tests.integration.L0_torch_compile.models import (
    Block,
    IndexedBlock,
    Int8Block,
    LabelledBlock,
    MyModel,
    TwoOutputs,
    inputs,
    pair,
    streaming,
)


def graphs() -> int:
    """Graphs that Dynamo has made since the test began."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled_twin(twin: MyModel, device: torch.device, backend: str = "aot_eager") -> MyModel:
    """The un-offloaded model on the device, compiled block by block."""
    twin = twin.to(device)
    for layer in twin.layers:
        layer.compile(fullgraph=True, backend=backend)
    return twin


def assert_equal_while_streaming(model: nn.Module, twin: nn.Module, device: torch.device, calls: int = 3) -> None:
    manager = get_offload_manager()
    before = manager.live().copied_bytes_total
    for _ in range(calls):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert manager.plan is not None
    assert manager.plan.streamed_bytes > 0
    assert manager.live().copied_bytes_total - before >= manager.plan.streamed_bytes
    assert manager.plan.weight_bytes <= (manager.plan.budget_bytes or 0)


# ---- offload first, then compile


def wrap_root(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def wrap_layer(model: nn.Module) -> nn.Module:
    model.layers[1] = torch.compile(model.layers[1])  # type: ignore[index, operator]
    return model


def compile_layer_in_place(model: nn.Module) -> nn.Module:
    model.layers[2].compile()  # type: ignore[index, union-attr]
    return model


@pytest.mark.parametrize("spoil", [wrap_root, wrap_layer, compile_layer_in_place])
def test_offload_of_a_compiled_model_is_refused_with_the_remedy(spoil) -> None:
    model, _ = pair()
    with pytest.raises(ft.OffloadError, match=r"compiled already.*compile_fn"):
        ft.offload(spoil(model), streaming(model))


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


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_every_mode_gives_the_compiled_resident_models_numbers(device, mode) -> None:
    model, twin = pair(Block(), Block(), Block(), Block())
    ft.offload(model, streaming(model, 0.8), compile_fn=lambda m: torch.compile(m, fullgraph=True, mode=mode))
    om = ft.get_offload_manager()
    x = inputs(device)
    for _ in range(om.iters_before_inference):
        model(x)
    twin = twin.to(device)
    for layer in twin.layers:
        layer.compile(fullgraph=True, mode=mode)
    for _ in range(4):
        x = inputs(device)
        assert torch.equal(model(x).clone(), twin(x).clone())
    made = graphs()
    om.replan(0.7)
    x = inputs(device)
    assert torch.equal(model(x).clone(), twin(x).clone())
    assert graphs() == made


def test_identity_compile_fn_activates_compiled_offload_without_a_compiler(device) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model), compile_fn=lambda m: m)
    om = ft.get_offload_manager()
    assert_equal_while_streaming_from_start(model, twin.to(device), device)
    assert graphs() == 0
    assert om.report()["compile"]["eager"] == 0


def assert_equal_while_streaming_from_start(model: nn.Module, twin: nn.Module, device: torch.device) -> None:
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert_equal_while_streaming(model, twin, device)


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


def test_external_compile_can_be_set_by_the_environment(device, monkeypatch) -> None:
    monkeypatch.setenv("FT_EXTERNAL_COMPILE", "1")
    assert ft.load_config(include_patterns=["layers.*"]).external_compile is True


def external(device: torch.device, backend: str = "aot_eager", **settings: object) -> tuple[MyModel, MyModel]:
    """A model at INFERENCE whose units were compiled by the caller, and its compiled twin."""
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=True, **settings))
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    for _, module in [*om.offload_units(), *om.resident_units()]:
        module.compile(fullgraph=True, backend=backend)
    return model, compiled_twin(twin, device, backend)


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


def test_a_successful_replan_can_be_followed_by_another_and_recompiles_nothing(device) -> None:
    model, twin = external(device)
    om = get_offload_manager()
    model(inputs(device)), twin(inputs(device))
    made = graphs()
    for round_ in range(3):
        epoch = om.epoch
        for _ in range(om.request_strategy_replan()):
            x = inputs(device)
            assert torch.equal(model(x), twin(x))
        assert om.strategy_replan_status.applied is True, round_
        assert om.epoch == epoch + 1
    assert_equal_while_streaming(model, twin, device)
    assert graphs() == made


def test_reading_the_status_neither_arms_nor_advances_the_tail(device) -> None:
    model, _ = external(device)
    om = get_offload_manager()
    assert [om.strategy_replan_status.state for _ in range(5)] == ["idle"] * 5
    steps = om.request_strategy_replan()
    for _ in range(50):
        assert om.strategy_replan_status.state == "in_progress"
        assert om.external_compile_active
    for _ in range(steps - 1):
        model(inputs(device))
        assert om.strategy_replan_status.state == "in_progress"
    model(inputs(device))
    assert om.strategy_replan_status.state == "done"


def warns_and_returns_zero(om: ft.OffloadManager, caplog: pytest.LogCaptureFixture, **options: bool) -> str:
    before = om.strategy_replan_status
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert om.request_strategy_replan(**options) == 0
    assert "no strategy replan" in caplog.text
    assert om.strategy_replan_status == before
    return caplog.text


def test_a_request_that_cannot_be_met_warns_returns_0_and_disturbs_nothing(device, caplog) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=True))
    om = get_offload_manager()
    assert "discovery" in warns_and_returns_zero(om, caplog)
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    steps = om.request_strategy_replan()
    assert "in progress" in warns_and_returns_zero(om, caplog)
    for _ in range(steps):
        model(inputs(device))
    assert om.strategy_replan_status.applied is True
    assert_equal_while_streaming(model, twin.to(device), device)
    ft.release()

    plain, _ = pair()
    ft.offload(plain, streaming(plain))
    for _ in range(get_offload_manager().iters_before_inference):
        plain(inputs(device))
    assert not get_offload_manager().external_compile_active
    assert "external_compile" in warns_and_returns_zero(get_offload_manager(), caplog)


def test_a_replan_without_timings_is_refused_and_can_be_retried(device) -> None:
    model, twin = external(device)
    om = get_offload_manager()
    epoch = om.epoch
    broken = model.layers[3].forward
    for _ in range(om.request_strategy_replan()):
        # A step that leaves out its last visits is no sample.
        x = inputs(device)
        layers, model.layers = model.layers, nn.ModuleList(list(model.layers)[:3])
        model(x)
        model.layers = layers
    assert broken is not None
    status = om.strategy_replan_status
    assert (status.state, status.applied, status.can_request) == ("done", False, True)
    assert om.epoch == epoch
    assert_equal_while_streaming(model, twin, device)
    for _ in range(om.request_strategy_replan()):
        model(inputs(device))
    assert om.strategy_replan_status.applied is True
    assert_equal_while_streaming(model, twin, device)


def test_a_tail_that_breaks_is_failed_and_terminal(device, caplog, monkeypatch) -> None:
    model, twin = external(device)
    om = get_offload_manager()
    steps = om.request_strategy_replan()
    for _ in range(steps - 1):
        model(inputs(device))
    monkeypatch.setattr("flextensor.planning.search", _raise)
    with pytest.raises(ZeroDivisionError):
        model(inputs(device))
    assert om.strategy_replan_status.state == "failed"
    assert om.strategy_replan_status.can_request is False
    assert "restart" in warns_and_returns_zero(om, caplog)
    assert_equal_while_streaming(model, twin, device)


def _raise(*_: object, **__: object) -> None:
    raise ZeroDivisionError


# ---- CUDA graphs: what can be checked without one


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"offload_timing": "eager", "external_compile": True}, "cuda_graph"), ({"offload_timing": "off"}, "external")],
)
def test_manual_replan_needs_its_prerequisites(device, caplog, settings, named) -> None:
    model, _ = pair()
    ft.offload(model, streaming(model, **settings))
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    assert named in warns_and_returns_zero(om, caplog, manual_update_state=True)
    ft.update_state()  # nothing is armed: no effect
    assert om.epoch == 1


# ---- granularity and limits


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


@pytest.mark.parametrize(("block", "expected"), [(LabelledBlock, 1), (IndexedBlock, 40)])
def test_forty_blocks_with_an_index_attribute_never_fall_back_to_eager(device, block, expected) -> None:
    model, twin = pair(*(block(i) for i in range(40)))
    ft.offload(model, streaming(model, 0.5), compile_fn=lambda m: torch.compile(m, backend="aot_eager"))
    om = ft.get_offload_manager()
    for _ in range(om.iters_before_inference):
        model(inputs(device))
    assert graphs() == expected
    report = om.compile_report()
    assert report.eager == 0 and report.compiled == expected and report.shared == 40 - expected
    twin = twin.to(device)
    x = inputs(device)
    assert torch.equal(model(x), twin(x))
    om.replan(0.6)
    assert torch.equal(model(x), twin(x))
    assert graphs() == expected


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


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_whole_offloaded_model_given_to_torch_compile_is_one_clear_error(device, fullgraph) -> None:
    model, twin = external(device)
    whole = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(Exception, match=r"offload_units\(\)"):
        whole(inputs(device))
    assert_equal_while_streaming(model, twin, device)


def test_two_units_in_one_graph_are_one_clear_error(device) -> None:
    model, twin = external(device)
    first, second = model.layers[0], model.layers[1]
    both = torch.compile(lambda x: second(first(x)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"offload_units\(\)"):
        both(inputs(device))
    assert_equal_while_streaming(model, twin, device)


def test_compiling_during_discovery_is_a_clear_error(device) -> None:
    model, _ = pair()
    ft.offload(model, streaming(model, external_compile=True))
    model.layers[0].compile(fullgraph=True, backend="aot_eager")
    with pytest.raises(ft.OffloadError, match="during discovery"):
        model(inputs(device))


def test_compiling_before_the_phase_changes_works(device) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=True))
    om = get_offload_manager()
    twin = compiled_twin(twin, device)
    model(inputs(device))
    assert om.phase == "profiling"
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(om.iters_before_inference):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert_equal_while_streaming(model, twin, device)


# ---- the boundary ops, when a unit is traced into somebody's graph


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
    from flextensor.runtime import ops

    ops.register_boundary(_Silent())
    for name in ("pre_compute", "post_compute"):
        schema = getattr(torch.ops.flextensor, name).default._schema
        assert schema.arguments[0].alias_info.is_write
        assert schema.arguments[1].alias_info is None


class _Silent:
    def enter_traced(self, weights: list[torch.Tensor]) -> None: ...

    def exit_traced(self) -> None: ...


def test_release_leaves_plain_modules_that_compile(device) -> None:
    model, twin = external(device)
    model(inputs(device))
    ft.release()
    assert type(model.layers[0]) is Block
    x = torch.randn(2, 16, 64)
    assert torch.equal(model(x), copy.deepcopy(twin).to("cpu")(x)) or torch.cuda.is_available()
    assert torch.compile(model, backend="aot_eager")(x).shape == (2, 16, 8)
