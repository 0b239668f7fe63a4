"""Compiled offload along its life: without discovery, from a saved profile, through errors and other replans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import flextensor as ft
from flextensor.compiled_offload import correction_outcome
from flextensor.offload_manager import get_offload_manager
from tests.integration.L0_torch_compile.checks import (
    assert_equal_while_streaming,
    assert_equal_while_streaming_from_start,
    compiled_twin,
    external,
    graphs,
    on_the_host,
    replan_through_tail,
    to_inference,
)
from tests.integration.L0_torch_compile.models import inputs, pair, streaming


def compile_unit(module: nn.Module) -> nn.Module:
    return torch.compile(module, fullgraph=True, backend="aot_eager")  # type: ignore[return-value]


def compile_all(om: ft.OffloadManager) -> None:
    for _, module in [*om.offload_units(), *om.resident_units()]:
        module.compile(fullgraph=True, backend="aot_eager")


@on_the_host
@pytest.mark.parametrize("path", ["compile_fn", "external"])
def test_without_discovery_the_first_call_is_profiling(device, path) -> None:
    model, twin = pair()
    config = streaming(model, skip_discovery=True, external_compile=path == "external")
    ft.offload(model, config, compile_fn=compile_unit if path == "compile_fn" else None)
    om = get_offload_manager()
    assert om.phase == "profiling" and om.iters_before_inference == config.profiling_iters
    assert correction_outcome() == "applied"
    twin = compiled_twin(twin, device)
    assert_equal_while_streaming_from_start(model, twin, device)
    if path == "external":
        compile_all(om)
        replan_through_tail(model, twin, device)
    assert_equal_while_streaming(model, twin, device)
    assert om.compile_report().eager == 0


@pytest.mark.parametrize("path", ["compile_fn", "external"])
def test_from_a_saved_profile_the_first_call_is_planned_and_right(device, path, tmp_path: Path) -> None:
    compile_fn = compile_unit if path == "compile_fn" else None
    model, twin = pair()
    config = streaming(model, external_compile=path == "external")
    ft.offload(model, config, compile_fn=compile_fn)
    om = to_inference(model, device)
    twin = compiled_twin(twin, device)
    if path == "external":
        compile_all(om)
        replan_through_tail(model, twin, device)
    om.save_profile(tmp_path / "profile.json")
    ft.release()
    again, _ = pair()
    ft.offload(again, config, compile_fn=compile_fn)
    ft.load_profile(tmp_path / "profile.json")
    om = get_offload_manager()
    assert om.phase == "inference" and om.iters_before_inference == 0
    if path == "external":
        compile_all(om)
    assert_equal_while_streaming(again, twin, device)
    report = om.compile_report()
    assert (report.compiled + report.shared, report.eager, report.pending) == (6, 0, 0)


@on_the_host
def test_a_step_that_raises_does_not_count_in_the_tail(device) -> None:
    model, twin = external(device)
    om = get_offload_manager()
    steps = om.request_strategy_replan()
    for done in range(steps):
        if done == 1:
            with pytest.raises(RuntimeError):
                model(torch.randn(2, 16, 7).to(device))
        assert om.strategy_replan_status.state == "in_progress"
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert om.strategy_replan_status.applied is True
    assert_equal_while_streaming(model, twin, device)


def test_another_budget_in_the_midst_of_a_tail_recompiles_nothing_and_the_tail_ends(device) -> None:
    model, twin = external(device)
    om = get_offload_manager()
    model(inputs(device)), twin(inputs(device))
    made = graphs()
    for done in range(om.request_strategy_replan()):
        if done == 2:
            om.replan(0.8)
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert (om.strategy_replan_status.state, om.strategy_replan_status.applied) == ("done", True)
    assert_equal_while_streaming(model, twin, device)
    assert graphs() == made


def test_release_in_the_midst_of_a_tail_leaves_a_plain_model(device) -> None:
    model, twin = pair()
    ft.offload(model, streaming(model, external_compile=True))
    om = to_inference(model, device)
    compile_all(om)
    om.request_strategy_replan()
    model(inputs(device))
    ft.release()
    x = torch.randn(2, 16, 64)
    assert torch.equal(model(x), twin(x))
    assert all(layer._compiled_call_impl is None for layer in model.layers)


@on_the_host
def test_the_modules_functions_are_the_managers(device) -> None:
    model, twin = external(device)
    om = ft.get_offload_manager()
    assert om is get_offload_manager()
    assert ft.offload_units() == om.offload_units() and ft.resident_units() == om.resident_units()
    twin = twin.to(device)
    steps = ft.request_strategy_replan()
    assert om.strategy_replan_status.state == "in_progress"
    for _ in range(steps):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert om.strategy_replan_status.applied is True


METHODS = [
    *("offload_block", "release", "offload_units", "resident_units", "request_strategy_replan", "update_state"),
    *("reset_offload_timing", "update_offload_timing", "collect_offload_timing", "format_offload_timing_table"),
    *("save_profile", "load_profile", "suspend_profiling", "resume_profiling", "pause_profiling"),
    *("clear_profiling_durations", "get_gpu_memory_usage"),
]
OTHERS = ["offload", "init", "get_offload_manager", "offload_from_profile"]
OTHERS += ["load_config", "load_config_from_env", "load_config_from_file"]
"""They make or find a manager, or its configuration."""


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_each_function_that_users_type_is_there_and_is_a_method_too_where_it_asks_a_manager(name) -> None:
    assert callable(getattr(ft, name)) and name in dir(ft)
    assert callable(getattr(ft.OffloadManager, name, None)) is (name in METHODS)


class Marked(nn.Module):
    """Its second half is a manual region, marked by the manager's own method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with get_offload_manager().offload_block("second half"):
            return self.second(x)


def test_the_managers_own_block_and_timing_table_are_the_modules(device) -> None:
    model = Marked().eval().requires_grad_(False)
    om = ft.init(model, streaming(model, include_patterns=[], budget_bytes=None, offload_timing="eager"))
    for _ in range(om.iters_before_inference + 2):
        model(inputs(device))
    table = om.format_offload_timing_table()
    assert "second half" in table and table == ft.format_offload_timing_table(om.collect_offload_timing())
    assert om.format_offload_timing_table([]) == ft.format_offload_timing_table([])


def test_compile_fn_and_external_compile_exclude_each_other() -> None:
    model, _ = pair()
    with pytest.raises(ft.ConfigError, match=r"external_compile = True and compile_fn exclude each other"):
        ft.offload(model, streaming(model, external_compile=True), compile_fn=compile_unit)


def test_whatever_is_compiled_second_is_configured_as_the_first(device) -> None:
    """Of this folder's tests themselves: where Inductor's choices differ, so do the last bits of what is compared."""
    if not hasattr(inductor_config, "deterministic"):
        pytest.skip("torch before 2.10")
    model, twin = external(device)
    x = inputs(device)
    assert torch.equal(model(x), twin(x)) and graphs() > 0
    assert inductor_config.deterministic is True
