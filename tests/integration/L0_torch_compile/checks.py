"""What the tests of compiled offload check, and how they get a model to where they look at it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.offload_manager import get_offload_manager
from tests.integration.L0_torch_compile.models import MyModel, inputs, pair, streaming

on_the_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)
"""Of tests whose subject is the same on every device."""


def graphs() -> int:
    """Graphs that Dynamo has made since the test began."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def slow_backend(seconds: float) -> Callable[..., Any]:
    """A torch.compile backend whose code takes ``seconds`` more than eager code."""

    def compile_slow(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(seconds)
            return graph.forward(*args)

        return run

    return compile_slow


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


def assert_equal_while_streaming_from_start(model: nn.Module, twin: nn.Module, device: torch.device) -> None:
    om = get_offload_manager()
    for _ in range(om.iters_before_inference):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert_equal_while_streaming(model, twin, device)


def to_inference(model: nn.Module, device: torch.device) -> ft.OffloadManager:
    """Run the model until it has its first plan."""
    manager = get_offload_manager()
    for _ in range(manager.iters_before_inference):
        model(inputs(device))
    assert manager.phase == "inference"
    return manager


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


def replan_through_tail(model: nn.Module, twin: nn.Module, device: torch.device) -> None:
    """Request a replan and take its steps, each compared."""
    manager = get_offload_manager()
    steps = manager.request_strategy_replan()
    assert steps > 0
    for _ in range(steps):
        x = inputs(device)
        assert torch.equal(model(x), twin(x))
    assert (manager.strategy_replan_status.state, manager.strategy_replan_status.applied) == ("done", True)


def warns_and_returns_zero(
    om: ft.OffloadManager, caplog: pytest.LogCaptureFixture, *, can: bool = False, **options: bool
) -> str:
    """The request does nothing but say why. can: whether another kind of request would be met."""
    before = om.strategy_replan_status
    assert before.can_request is can
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert om.request_strategy_replan(**options) == 0
    assert "no strategy replan" in caplog.text
    assert om.strategy_replan_status == before
    return caplog.text
