"""A model and its un-offloaded copy, called with the same fresh inputs and compared bit for bit.

Every comparison also looks at the device: weights within the budget and under the model's size, bytes over the link.
A test that passes when nothing is offloaded proves nothing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import flextensor as ft
from flextensor.planner import align

_names = itertools.count()

Inputs = Callable[[int], Any]


class Pair:
    """``model`` offloaded to ``device`` within a budget, and a copy of it that is not.

    inputs(i): the i-th call's input (a tensor, or a tuple of arguments), fresh each time.
    budget: a share of the model's bytes, or bytes.
    under_model: weights on the device take less than the model (False: it is smaller than what it is rounded up to).
    exact: nothing but the manager changes what is on the device (False: the forward replaces buffers by its own).
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        device: str,
        patterns: Sequence[str] = ("layers.*",),
        budget: float | int | None = 0.5,
        link: float = 2e9,
        under_model: bool = True,
        exact: bool = True,
        **settings: Any,
    ) -> None:
        self.device = torch.device("cpu" if device == "host" else device)
        self.model = model.eval()
        self.reference = copy.deepcopy(model).to(self.device).eval()
        self.inputs = inputs
        self.calls = 0
        self.model_bytes = tensor_bytes(model)
        self.under_model = under_model
        self.exact = exact
        self.taken = 0
        """Device memory that the test itself has allocated."""
        self.name = settings.pop("name", None) or f"pair-{next(_names)}"
        offload_arguments = {key: settings.pop(key) for key in ("compile_fn",) if key in settings}
        self.budget: int | None = int(budget * self.model_bytes) if isinstance(budget, float) else budget
        self.config = ft.OffloadConfig(
            **{
                "include_patterns": tuple(patterns),
                "gpu_device": device,
                "budget_bytes": self.budget,
                "resident_below_bytes": 256,
                "host_link_bytes_per_second": link,
                **settings,
            }
        )
        ft.offload(model, self.config, name=self.name, **offload_arguments)
        self.kept = self.manager

    @property
    def manager(self) -> ft.OffloadManager:
        """Its manager."""
        return ft.get_offload_manager(self.name)

    @property
    def copied(self) -> int:
        """Bytes that went over the link so far."""
        return self.manager.live().copied_bytes_total

    def arguments(self) -> tuple[Any, ...]:
        """The next call's arguments, on the device."""
        given = self.inputs(self.calls)
        self.calls += 1
        given = given if isinstance(given, tuple) else (given,)
        return tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf, given)

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Call both, compare, look at memory; returns the output."""
        arguments = arguments or self.arguments()
        mine = self.model(*arguments, **options)
        theirs = self.reference(*arguments, **options)
        self.compare(mine, theirs)
        self.check_memory()
        return mine

    def compare(self, mine: Any, theirs: Any) -> None:
        """Equal bit for bit, and of this device."""
        ours, form = tree_flatten(mine)
        others, other_form = tree_flatten(theirs)
        where = f"call {self.calls}, phase {self.kept.phase}, epoch {self.kept.epoch}"
        assert form == other_form
        for a, b in zip(ours, others, strict=True):
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device, where
                assert not a.dtype.is_floating_point or bool(torch.isfinite(a).all()), where
                assert torch.equal(a, b), f"{where}: differs by {(a.double() - b.double()).abs().max().item()}"
            else:
                assert a == b, where

    def check_memory(self) -> None:
        """Device memory of weights within the budget in force, and under the model's size."""
        manager = self.manager
        usage = manager.get_gpu_memory_usage()
        weights = usage["weights"] + usage["other_weights"]
        plan = manager.plan
        if plan is not None and plan.budget_bytes is not None:
            assert weights <= plan.budget_bytes + usage["other_weights"]
        most = self.model_bytes
        if plan is not None and plan.budget_bytes is None:
            # It streams what costs no time, which may be less than rounding up takes.
            most = sum(align(weight.nbytes) for weight in manager._weights) + usage["other_weights"]
        if plan is None or plan.offsets:
            assert weights < most or not self.under_model, (weights, most)
        if self.device.type == "cpu":
            really = usage["allocated"] - self.taken
            assert really == weights if self.exact else really <= weights, usage

    def run(self, calls: int) -> None:
        """So many fresh inputs."""
        for _ in range(calls):
            self.call()

    def run_alone(self, calls: int) -> None:
        """So many calls of the offloaded model only (its copy may be gone); outputs are finite."""
        for _ in range(calls):
            assert torch.isfinite(self.model(*self.arguments())).all()
        self.check_memory()

    def to_inference(self) -> None:
        """Through discovery and profiling, every call compared; the plan streams and is within the budget."""
        before = self.copied
        self.run(self.manager.iters_before_inference)
        assert self.copied > before or not self.config.include_patterns
        assert self.manager.phase == "inference"
        report = self.manager.report()
        if self.budget is not None:
            assert report["device_weight_bytes"] <= self.budget

    def streams(self, calls: int = 3) -> None:
        """So many calls, in which bytes go over the link."""
        before = self.copied
        self.run(calls)
        assert self.copied > before, self.manager.report()

    def replan(self, budget: int | float | None, calls: int = 3) -> None:
        """A plan for another budget in force, and so many calls under it."""
        epoch = self.manager.epoch
        plan = self.manager.replan(budget)
        before = self.copied
        self.run(calls)
        assert self.manager.epoch == epoch + 1 and self.manager.plan is plan, self.manager.refusal
        if plan.streamed_bytes:
            assert self.copied > before

    def through_everything(self, *, calls: int = 4, other: float | int | None = None) -> None:
        """Discovery, profiling, inference, a replan to less, to everything, to what costs no time, and back."""
        self.to_inference()
        self.streams(calls)
        self.replan(self.least() if other is None else other)
        self.replan(1.0)
        self.replan(None)
        if self.budget is not None:
            self.replan(self.budget)
            self.streams(calls)

    def least(self) -> int:
        """The fewest bytes that a plan works with."""
        try:
            self.manager.solve(0)
        except ft.BudgetError as error:
            return error.needed
        return 0

    def same_state(self) -> None:
        """Every entry of both state dicts equal."""
        mine, theirs = self.model.state_dict(), self.reference.state_dict()
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            assert torch.equal(mine[key].cpu(), value.cpu()), key

    def release(self) -> None:
        """A plain module again, that computes the same; twice is free."""
        if self.name not in ft.registry.names():
            return
        manager = self.manager
        self.same_state()
        manager.release()
        manager.release()
        assert self.name not in ft.registry.names()


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, each once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def noise(*shape: int) -> Inputs:
    """Fresh normal inputs of a shape."""
    return lambda number: torch.randn(*shape)
