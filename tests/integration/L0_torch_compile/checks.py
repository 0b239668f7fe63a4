"""What the tests of compiled offload check, and how they get a model to where they look at it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import scheduler
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

import flextensor as ft
from flextensor.compile import order
from flextensor.offload_manager import get_offload_manager
from flextensor.runtime import ops
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


def marked(layer: nn.Module, boundary: ops.Boundary) -> Callable[..., Any]:
    """A call of ``layer`` between the two ops, as an offloaded unit's is traced: a graph of the same partition, and so
    the same kernels, round a layer that is not offloaded. ``boundary`` is told; keep it."""
    unit = ops.register_boundary(boundary)

    def call(*args: Any) -> Any:
        ops.note_traced_unit()
        torch.ops.flextensor.pre_compute([*layer.parameters(), *layer.buffers()], unit)
        result = layer(*args)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        torch.ops.flextensor.post_compute(outputs or given, unit)
        return result

    return call


class Silent:
    """A boundary at which nothing happens."""

    def enter_traced(self, weights: list[torch.Tensor]) -> None: ...

    def exit_traced(self) -> None: ...


silent = Silent()


@contextlib.contextmanager
def reads_outside_the_ops(activation: torch.Size) -> Iterator[list[str]]:
    """Which operations of the one graph that is compiled within the block read a weight (whatever is given to the graph
    and has not the activation's shape) and need not, as Inductor's scheduler sees it, come between the two ops."""
    found: list[str] = []
    codegen = scheduler.Scheduler.codegen

    def look_then_generate(self: scheduler.Scheduler) -> None:
        boundary = {}
        for node in self.nodes:
            overload = getattr(getattr(node, "node", None), "op_overload", None)
            if overload in (torch.ops.flextensor.pre_compute.default, torch.ops.flextensor.post_compute.default):
                boundary[overload] = node
        assert len(boundary) == 2, "an op was dropped from the graph"
        pre = boundary[torch.ops.flextensor.pre_compute.default]
        post = boundary[torch.ops.flextensor.post_compute.default]
        given = V.graph.graph_inputs
        weights = {name for name, value in given.items() if value.get_size() and tuple(value.get_size()) != activation}
        assert weights
        for node in self.nodes:
            reads = {self.mutation_real_name.get(dep.name, dep.name) for dep in node.read_writes.reads}
            if node in (pre, post) or not reads & weights:
                continue
            names = node.get_operation_names()
            if pre.get_name() not in node.ancestors or not names & post.ancestors:
                found.append(node.get_name())
        codegen(self)

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=False):
        patch.setattr(scheduler.Scheduler, "codegen", look_then_generate)
        yield found


def without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor treats the two ops as any others."""
    monkeypatch.setattr(order, "_is_ours", lambda _: False)
    monkeypatch.setattr(order, "_gather", lambda *_: None)
    monkeypatch.setattr(order, "_move_writes", lambda *_: None)
    monkeypatch.setattr(order, "_used_behind", lambda *_: set())
    monkeypatch.setattr(order, "_wait_for_the_unit", lambda *_: None)


def time_a_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor picks kernels by timing them after all, among two templates a product and the library's own."""
    if not hasattr(inductor_config, "deterministic"):
        return
    monkeypatch.setattr(torch, "use_deterministic_algorithms", inspect.unwrap(torch.use_deterministic_algorithms))
    monkeypatch.setattr(inductor_config, "deterministic", False)
    monkeypatch.setattr(inductor_config.test_configs, "max_mm_configs", 2)


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


def external(
    device: torch.device, backend: str = "aot_eager", layers: Sequence[nn.Module] = (), **settings: object
) -> tuple[MyModel, MyModel]:
    """A model at INFERENCE whose units were compiled by the caller, and its compiled twin."""
    model, twin = pair(*layers)
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
