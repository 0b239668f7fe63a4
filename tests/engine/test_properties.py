"""Random small models, budgets, call orders, exceptions and replans: always equal to the un-offloaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import flextensor as ft
from flextensor.planner.build import build_plan
from tests.engine.harness import Pair

WIDTH = 16


class Unit(nn.Module):
    """Raw matrices of given numbers of rows; every one of them is read. Raises when it is told to."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(count, WIDTH)) for count in rows)
        self.inner: list[nn.Module] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh((x @ weight.t()) @ weight / len(weight) + x)
        for inner in self.inner:
            x = inner(x)
        if self.fails:
            raise ArithmeticError("told to")
        for weight in self.weights:
            x = x + weight.sum(0) / 64
        return x


class Model(nn.Module):
    """Runs units in the order asked for."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unit(unit) for unit in rows)

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for at in order:
            x = self.layers[at](x)
        return x


@dataclass(frozen=True)
class Case:
    """A model: rows of each unit's matrices, pairs of units that share one, a pair of which one calls the other."""

    rows: tuple[tuple[int, ...], ...]
    tied: tuple[tuple[int, int], ...]
    nested: tuple[int, int] | None
    order: tuple[int, ...]

    def model(self) -> Model:
        torch.manual_seed(len(self.rows))
        model = Model(self.rows)
        for a, b in self.tied:
            model.layers[b].weights[0] = model.layers[a].weights[0]
        if self.nested is not None:
            outer, inner = self.nested
            model.layers[outer].inner = [model.layers[inner]]
        return model


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 9))
    sizes = st.lists(st.sampled_from([4, 5, 8, 20, 33, 100, 400]), min_size=1, max_size=3)
    rows = tuple(tuple(draw(sizes)) for _ in range(count))
    unit = st.integers(0, count - 1)
    pairs = st.tuples(unit, unit).filter(lambda pair: pair[0] < pair[1])
    tied = tuple(draw(st.lists(pairs, max_size=2, unique=True))) if count > 1 else ()
    nested = draw(st.none() | pairs) if count > 1 else None
    order = draw(st.permutations(range(count)) | st.lists(unit, min_size=1, max_size=2 * count))
    return Case(rows, tied, nested, tuple(order))


ACTIONS = ["call", "call", "call", "skip", "reverse", "twice", "random", "fail", "replan", "slots", "edit", "replace"]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors],
)
@given(case=cases(), data=st.data())
def test_equal_whatever_happens(device: str, case: Case, data: st.DataObject) -> None:
    one = Pair(
        case.model(),
        lambda i: torch.randn(2, WIDTH),
        device=device,
        budget=None,
        link=data.draw(st.sampled_from([5e7, 5e8, 4e9]), "link"),
        resident_below_bytes=data.draw(st.sampled_from([1, 600]), "threshold"),
        transfer_mode=data.draw(st.sampled_from(["allocation_block_transfer", "raw_block_transfer"]), "mode"),
        under_model=False,
    )
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
    try:
        for _ in range(data.draw(st.integers(6, 14), "actions")):
            stream = streams[data.draw(st.integers(0, 1), "stream")] if streams else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                act(one, case, data)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        one.same_state()
    finally:
        one.manager.release()


def act(one: Pair, case: Case, data: st.DataObject) -> None:
    """One thing that a caller may do; everything that is called is compared."""
    manager, count = one.manager, len(case.rows)
    action = data.draw(st.sampled_from(ACTIONS), "action")
    order = list(case.order)
    if action == "skip" and len(order) > 1:
        order.pop(data.draw(st.integers(0, len(order) - 1), "skipped"))
    elif action == "reverse":
        order.reverse()
    elif action == "twice":
        order.insert(0, order[0])
    elif action == "random":
        order = data.draw(st.lists(st.integers(0, count - 1), max_size=12), "order")
    elif action == "fail":
        fail(one, order, data.draw(st.integers(0, count - 1), "failing"))
    elif action in ("replan", "slots") and manager.phase == "inference":
        replan(one, action, data)
    elif action in ("edit", "replace"):
        change(one, data.draw(st.integers(0, count - 1), "edited"), replace=action == "replace")
    one.call(torch.randn(2, WIDTH, device=one.device), order)


def fail(one: Pair, order: Sequence[int], unit: int) -> None:
    """A call in which that unit raises."""
    for model in (one.model, one.reference):
        model.layers[unit].fails = True
    x = torch.randn(2, WIDTH, device=one.device)
    try:
        one.compare(one.model(x, order), one.reference(x, order))  # the unit may not be in the order
    except ArithmeticError:
        pass
    finally:
        for model in (one.model, one.reference):
            model.layers[unit].fails = False


def replan(one: Pair, action: str, data: st.DataObject) -> None:
    """A plan for a random budget, or of as many slots as there is room for."""
    manager = one.manager
    assert manager.profile is not None
    if action == "slots":
        try:
            manager.stage(build_plan(manager.profile, frozenset()))
        except ft.BudgetError as error:
            manager.stage(build_plan(manager.profile, frozenset(), arena_bytes=error.needed))
        return
    least, most = one.least(), 2 * one.model_bytes
    share = data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]), "share")
    manager.replan(int(least + share * max(most - least, 0)))


def change(one: Pair, unit: int, *, replace: bool) -> None:
    """Another value of a unit's first weight, in the documented way or as a new parameter (in all its places)."""
    name = f"layers.{unit}.weights.0"
    old = one.reference.get_parameter(name)
    new = torch.randn(old.shape)
    if not replace:
        with one.manager.edit_weights(name) as tensors:
            tensors[name].copy_(new)
        old.copy_(new.to(one.device))
        return
    for model in (one.model, one.reference):
        known = model.get_parameter(name)
        put = nn.Parameter(new.clone().to(one.device))
        for layer in model.layers:
            for at, weight in enumerate(layer.weights):
                if weight is known:
                    layer.weights[at] = put
