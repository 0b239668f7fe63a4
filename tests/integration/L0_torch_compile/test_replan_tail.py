"""The replan tail: asked for, refused, retried, repeated; by calls of the model or by ``update_state``."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor import planning
from flextensor.compile.tail import MEASURED_STEPS
from flextensor.offload_manager import get_offload_manager
from flextensor.planner import search as planner_search
from tests.integration.L0_torch_compile.checks import (
    assert_equal_while_streaming,
    external,
    graphs,
    on_the_host,
    slow_backend,
    to_inference,
    warns_and_returns_zero,
)
from tests.integration.L0_torch_compile.models import Block, IndexedBlock, inputs, pair, streaming


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


@on_the_host
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


@on_the_host
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


@on_the_host
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


def test_the_new_plan_knows_the_compiled_units_times_and_the_link_as_it_is_now(device) -> None:
    takes = 0.06
    model, _ = external(device, slow_backend(takes), [Block() for _ in range(3)])  # type: ignore[arg-type]
    om = get_offload_manager()
    assert om.profile is not None and om.plan is not None
    before, size = om.profile, 1 << 16
    if device.type == "cpu":
        om.device.link.bytes_per_second = 1e6  # type: ignore[attr-defined]
    for _ in range(om.request_strategy_replan()):
        model(inputs(device))
    after = om.profile
    assert statistics.median(before.kinds[0].compute) < takes <= min(after.kinds[0].compute)
    if device.type == "cpu":
        assert after.transfer.seconds(size) > 10 * before.transfer.seconds(size)


@on_the_host
def test_what_compiling_takes_in_the_tails_first_steps_is_no_compute_time(device) -> None:
    model, _ = pair(*[IndexedBlock(at) for at in range(6)])  # compiled one by one
    ft.offload(model, streaming(model, external_compile=True, offload_timing="eager"))  # each step is a sample
    om = to_inference(model, device)
    compiled = 0

    def compile_slowly(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal compiled
        compiled += 1
        time.sleep(0.3)
        return graph.forward

    for layer in model.layers:
        layer.compile(backend=compile_slowly)
    for _ in range(om.request_strategy_replan() - 1):
        model(inputs(device))
    om.collect_offload_timing()
    assert len(om.sampled_steps()) == MEASURED_STEPS - 1
    assert compiled == len(model.layers)
    assert all(min(step.compute) < 0.3 for step in om.sampled_steps()), "a step that compiles does so in each unit"


# ---- by update_state: what can be checked without a CUDA graph


def replayable(device: torch.device, **settings: object) -> tuple[nn.Module, nn.Module, ft.OffloadManager]:
    model, twin = pair()
    ft.offload(model, streaming(model, **{"external_compile": True, "offload_timing": "cuda_graph", **settings}))
    return model, twin.to(device), get_offload_manager()


@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
def test_the_manual_tail_counts_update_state_and_not_calls(device, mode) -> None:
    model, twin, om = replayable(device, transfer_mode=mode)
    to_inference(model, device)
    epoch = om.epoch
    iters = ft.request_strategy_replan(manual_update_state=True)
    assert iters > 0
    for done in range(iters):
        assert om.strategy_replan_status.state == "in_progress" and om.epoch == epoch
        for _ in range(1 + done % 2):
            x = inputs(device)
            assert torch.equal(model(x), twin(x))
        ft.update_state()  # last call applies compute budgets + rebuilds
    assert (om.strategy_replan_status.applied, om.epoch) == (True, epoch + 1)
    assert_equal_while_streaming(model, twin, device)


@on_the_host
def test_arming_the_manual_tail_forgets_what_was_measured_before(device) -> None:
    model, _, om = replayable(device)
    to_inference(model, device)
    for _ in range(20):
        model(inputs(device))
    om.collect_offload_timing()
    assert om.sampled_steps()
    ft.request_strategy_replan(manual_update_state=True)
    assert not om.sampled_steps()


@on_the_host
def test_a_manual_tail_without_a_timed_step_is_refused_and_can_be_retried(device, caplog) -> None:
    model, twin, om = replayable(device)
    to_inference(model, device)
    epoch = om.epoch
    for _ in range(ft.request_strategy_replan(manual_update_state=True)):
        ft.update_state()
    status = om.strategy_replan_status
    assert (status.state, status.applied, status.can_request, om.epoch) == ("done", False, True, epoch)
    assert "no step of the model was timed" in status.reason and "no step of the model was timed" in caplog.text
    for _ in range(ft.request_strategy_replan(manual_update_state=True)):
        model(inputs(device))
        ft.update_state()
    assert om.strategy_replan_status.applied is True
    assert_equal_while_streaming(model, twin, device)


@on_the_host
def test_manual_requests_warn_and_disturb_nothing_before_inference_in_a_tail_and_after_a_failed_one(
    device, caplog, monkeypatch
) -> None:
    model, twin, om = replayable(device)
    assert "discovery" in warns_and_returns_zero(om, caplog, manual_update_state=True)
    to_inference(model, device)
    steps = om.request_strategy_replan(manual_update_state=True)
    for manual in (True, False):
        assert "in progress" in warns_and_returns_zero(om, caplog, manual_update_state=manual)
    monkeypatch.setattr("flextensor.planning.search", _raise)
    for at in range(steps):
        model(inputs(device))
        if at < steps - 1:
            ft.update_state()
    with pytest.raises(ZeroDivisionError):
        ft.update_state()
    for manual in (True, False):
        assert "restart" in warns_and_returns_zero(om, caplog, manual_update_state=manual)
    assert om.strategy_replan_status.state == "failed"
    assert_equal_while_streaming(model, twin, device)


@on_the_host
@pytest.mark.parametrize(
    ("settings", "missing", "can"),
    [
        ({"offload_timing": "off"}, "external_compile=True", False),
        ({"offload_timing": "cuda_graph"}, "external_compile=True", False),
        ({"offload_timing": "off", "external_compile": True}, "needs offload_timing='cuda_graph'", True),
        ({"offload_timing": "eager", "external_compile": True}, "needs offload_timing='cuda_graph'", True),
        ({"offload_timing": "cuda_graph", "profile_mode": "getter"}, "needs external_compile=True", True),
    ],
)
def test_manual_replan_needs_its_prerequisites(device, caplog, settings, missing, can) -> None:
    model, _ = pair()
    ft.offload(model, streaming(model, **settings), compile_fn=(lambda m: m) if "profile_mode" in settings else None)
    om = to_inference(model, device)
    assert missing in warns_and_returns_zero(om, caplog, can=can, manual_update_state=True)
    ft.update_state()  # nothing is armed: no effect
    assert om.epoch == 1
    if can:  # what is missing is for replays alone
        assert om.request_strategy_replan() > 0


def test_a_transfer_mode_that_moves_no_blocks_is_no_setting() -> None:
    with pytest.raises(ft.ConfigError, match=r"transfer_mode = 'tensor_transfer'.*allocation_block_transfer"):
        ft.OffloadConfig(transfer_mode="tensor_transfer")


@on_the_host
@pytest.mark.parametrize("external_compile", [True, False])
def test_a_request_can_be_met_from_inference_on_and_not_while_a_tail_is_in_flight(device, external_compile) -> None:
    model, _ = pair()
    ft.offload(model, streaming(model, external_compile=external_compile))
    om = get_offload_manager()
    seen = [(om.phase, om.strategy_replan_status.can_request)]
    for _ in range(om.iters_before_inference):
        model(inputs(device))
        seen.append((om.phase, om.strategy_replan_status.can_request))
    assert seen == [("discovery", False), ("profiling", False), ("profiling", False), ("inference", external_compile)]
    for left in range(om.request_strategy_replan(), 0, -1):
        assert om.strategy_replan_status.can_request is False, left
        model(inputs(device))
    assert om.strategy_replan_status.can_request is external_compile


@on_the_host
def test_the_plan_of_eager_times_is_looked_for_briefly_and_the_one_that_lasts_at_length(
    device, tmp_path, monkeypatch
) -> None:
    efforts: list[float] = []

    def search(*arguments, effort, **limits):
        efforts.append(effort)
        return planner_search(*arguments, effort=effort, **limits)

    monkeypatch.setattr(planning, "search", search)
    model, _ = external(device)
    assert efforts == [planning.PROVISIONAL_EFFORT]
    for _ in range(ft.request_strategy_replan()):
        model(inputs(device))
    assert efforts == [planning.PROVISIONAL_EFFORT, 1.0]
    ft.save_profile(tmp_path / "profile.json")
    ft.release()
    again, _ = pair()
    ft.offload_from_profile(again, tmp_path / "profile.json", streaming(again, external_compile=True))
    assert efforts[2:] == [1.0]
