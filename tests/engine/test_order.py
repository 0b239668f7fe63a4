"""Units in another order than profiled, twice, nested or not at all; grad modes mixed between calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.conftest import MakePair
from tests.engine.harness import noise
from tests.engine.models import Block, Blocks, MixtureOfExperts, Routed


def test_every_unit_twice_in_one_forward(pair: MakePair) -> None:
    one = pair(Blocks(count=4, repeats=2), noise(2, 48), budget=0.6, resident_below_bytes=8192)
    one.through_everything()
    assert len(one.manager.plan.visits) == 8


def test_one_unit_run_twelve_times(pair: MakePair) -> None:
    one = pair(Blocks(count=2, repeats=12), noise(2, 48), budget=0.9)
    one.to_inference()
    assert len(one.manager.plan.visits) == 24
    one.streams(3)


def test_order_other_than_registered(pair: MakePair) -> None:
    one = pair(Routed(), lambda i: (torch.randn(2, 32), (3, 0, 5, 1, 4, 2)), resident_below_bytes=4096)
    one.through_everything()
    assert one.manager.plan.visits == (3, 0, 5, 1, 4, 2)
    assert one.manager.live().unforeseen_visits == 0


ORDERS = [
    (0, 1, 2, 3, 4, 5),
    (0, 1, 3, 4, 5),
    (0, 1, 2, 3, 4, 5),
    (5, 4, 3, 2, 1, 0),
    (0, 0, 1, 1, 2, 3, 4, 5),
    (2,),
    (),
    (0, 1, 2),
    (3, 4, 5),
    (0, 5),
    (4, 4, 4),
    (0, 1, 2, 3, 4, 5),
]


@pytest.mark.parametrize("shift", [0, 2, 5, 9])
def test_orders_that_change_from_call_to_call(pair: MakePair, shift: int) -> None:
    one = pair(Routed(), lambda i: (torch.randn(2, 32), ORDERS[(i + shift) % len(ORDERS)]))
    one.run(4)
    one.run(len(ORDERS))
    if one.manager.phase == "inference":
        one.replan(one.least(), calls=len(ORDERS))


def test_regular_again_after_irregular_steps(pair: MakePair) -> None:
    one = pair(Routed(), lambda i: (torch.randn(2, 32), ORDERS[i - 6] if 6 <= i < 18 else None))
    one.to_inference()
    one.run(3 + len(ORDERS))
    one.run(4)
    before = one.manager.live().unforeseen_visits
    assert before > 0
    one.streams(4)
    assert one.manager.live().unforeseen_visits == before


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_a_unit_skipped_on_some_inputs(pair: MakePair, skipped: int) -> None:
    full = tuple(range(6))
    one = pair(Routed(), lambda i: (torch.randn(2, 32), full if i % 2 == 0 else tuple(u for u in full if u != skipped)))
    one.to_inference()
    one.streams(8)
    one.replan(one.least(), calls=8)


def test_experts_as_one_unit_a_block(pair: MakePair) -> None:
    one = pair(MixtureOfExperts(), noise(3, 40))
    one.to_inference()
    one.streams(6)
    assert one.manager.live().unforeseen_visits == 0
    one.replan(one.least(), calls=6)


def test_a_unit_an_expert_and_only_the_chosen_ones_run(pair: MakePair) -> None:
    one = pair(MixtureOfExperts(), noise(3, 40), patterns=("layers.*.experts.*",), budget=0.6)
    assert len(one.manager.units) == 18
    one.to_inference()
    one.streams(8)
    one.replan(one.least(), calls=8)
    one.run(8)


def test_experts_nobody_profiled_are_fetched_when_they_are_chosen(pair: MakePair) -> None:
    """The gate sends the first inputs to one expert only, the later ones to all."""
    model = MixtureOfExperts(blocks=2)
    one = pair(
        model,
        lambda i: torch.randn(1, 40).expand(4, 40) if i < 4 else torch.randn(16, 40),
        patterns=("layers.*.experts.*",),
        budget=0.6,
    )
    one.to_inference()
    one.streams(6)


class Nesting(nn.Module):
    """A unit that calls another unit, which is registered elsewhere, between two reads of its own weight."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, 77) for _ in range(3))
        self.outer = nn.ModuleList(Outer(width, [self.layers[at]]) for at in range(2))

    def forward(self, x: torch.Tensor, nested: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.outer:
            x = layer(x, nested)
        return x


class Outer(nn.Module):
    def __init__(self, width: int, other: list[nn.Module]) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.other = other

    def forward(self, x: torch.Tensor, nested: bool) -> torch.Tensor:
        x = torch.tanh(self.lin(x))
        if nested:
            x = self.other[0](x)
        return torch.tanh(self.lin(x))


@pytest.mark.parametrize("pattern", [(True,), (False,), (False, False, False, False, False, True, True, False)])
def test_a_visit_inside_another_units_visit(pair: MakePair, pattern: tuple[bool, ...]) -> None:
    one = pair(
        Nesting(),
        lambda i: (torch.randn(2, 40), pattern[i % len(pattern)]),
        patterns=("layers.*", "outer.*"),
        budget=0.95,
    )
    one.to_inference()
    one.run(10)
    one.replan(one.least(), calls=10)


def test_grad_modes_mixed_between_calls(pair: MakePair) -> None:
    one = pair(Blocks().requires_grad_(False), noise(2, 48))
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad]
    for call in range(14):
        with modes[call % 3]():
            one.call()
        if call == 8:
            one.manager.replan(one.least())
    assert one.manager.epoch == 2
    for mode in modes:
        with mode():
            one.streams(3)
    with torch.inference_mode():
        one.release()
    with torch.enable_grad():
        x = torch.randn(2, 48, device="cpu", requires_grad=True)
        one.model.cpu()(x).sum().backward()  # weights are no inference tensors
        assert x.grad is not None


def test_offload_and_everything_else_in_inference_mode(pair: MakePair) -> None:
    with torch.inference_mode():
        one = pair(Blocks(), noise(2, 48), resident_below_bytes=8192)
        one.through_everything()
    one.run(2)


@pytest.mark.parametrize("phase", ["discovery", "profiling", "inference"])
def test_gradients_are_refused_in_every_phase(pair: MakePair, phase: str) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.run({"discovery": 0, "profiling": 1, "inference": 3}[phase])
    assert one.manager.phase == phase
    with torch.enable_grad(), pytest.raises(ft.OffloadError, match=r"layers\.0.*torch\.no_grad"):
        one.call()
    one.run(4)
    one.streams(3)


def test_gradients_that_come_with_an_input_are_refused(pair: MakePair) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Adds() for _ in range(3))

        def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, {"deep": [more]})
            return x

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(32, 65)

        def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return self.block(x + more["deep"][0])

    one = pair(Nested().requires_grad_(False), lambda i: (torch.randn(2, 32), torch.randn(32)), budget=0.7)
    one.to_inference()
    x, more = one.arguments()
    with torch.enable_grad(), pytest.raises(ft.OffloadError, match="an input requires"):
        one.model(x, more.requires_grad_(True))
    one.streams(3)
