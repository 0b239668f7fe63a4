"""Weights that are changed while, or right before, a CUDA graph of an offloaded forward is captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.harness import Pair, noise
from tests.engine.models import Blocks

pytestmark = pytest.mark.gpu

NAME = "layers.3.up.weight"


@pytest.fixture
def one() -> Iterator[Pair]:
    """In inference, its steps in order."""
    pair = Pair(Blocks(), noise(2, 48), device="cuda")
    pair.to_inference()
    pair.run(6)
    yield pair
    pair.release()


def captured(one: Pair, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one.model(x)
    return graph, y


def test_an_edit_inside_a_capture_is_refused_and_the_capture_goes_on(one: Pair) -> None:
    x = torch.randn(2, 48, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ft.OffloadError, match=r"captured.*layers\.3\.up\.weight"), one.manager.edit_weights(NAME):
            pass
        with pytest.raises(ft.OffloadError, match="captured"):
            one.manager.restore_weights(NAME)
        y = one.model(x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, one.reference(x))
    one.streams(3)


def test_a_capture_right_after_a_weight_was_replaced_is_refused_until_a_call_has_seen_it(one: Pair) -> None:
    x = torch.randn(2, 48, device="cuda")
    new = torch.randn_like(one.reference.layers[3].up.weight) * 0.1
    for model in (one.model, one.reference):
        model.layers[3].up.weight = nn.Parameter(new.clone(), requires_grad=False)
    with pytest.raises(ft.OffloadError, match=r"layers\.3\.up\.weight.*changed since the last call"):
        captured(one, x)
    one.run(4)
    graph, y = captured(one, x)
    graph.replay()
    assert torch.equal(y, one.reference(x))
    one.streams(2)


def test_replays_stream_and_hold_no_more_of_the_model_than_the_plan() -> None:
    """All units' outputs are right while not all of their weights have room: each replay moves bytes."""
    one = Pair(Blocks(), noise(2, 48), device="cuda", budget=0.6, offload_timing="cuda_graph")
    one.to_inference()
    one.run(6)
    x = torch.randn(2, 48, device="cuda")
    graph, y = captured(one, x)
    plan = one.manager.plan
    one.manager.reset_offload_timing()
    held = torch.cuda.memory_allocated()
    for replay in range(5):
        x.copy_(torch.randn(2, 48))
        graph.replay()
        assert one.manager.update_offload_timing()
        assert torch.equal(y, one.reference(x)), replay
    for visit, row in enumerate(one.manager.collect_offload_timing()):
        assert row.streamed_bytes == sum(copy.nbytes for copy in plan.copies if copy.visit == visit)
        assert (row.transfer[2] > 0) == (row.streamed_bytes > 0) and row.compute[2] > 0
    assert torch.cuda.memory_allocated() == held
    usage = one.manager.get_gpu_memory_usage()
    assert usage["weights"] + usage["other_weights"] <= 0.6 * one.model_bytes
    assert plan.streamed_bytes > 0.4 * one.model_bytes
    one.release()
