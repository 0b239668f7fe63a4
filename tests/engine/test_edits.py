"""Weights that change while the model is offloaded: in force at the next call, or refused; never the old value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.conftest import MakePair
from tests.engine.harness import Pair, noise
from tests.engine.models import Blocks, TiedLM


def lora(one: Pair, names: Sequence[str], scale: float) -> dict[str, torch.Tensor]:
    """A low-rank change a weight, on the host."""
    generator = torch.Generator().manual_seed(7)
    result = {}
    for name in names:
        rows, columns = one.reference.get_parameter(name).shape
        left = torch.randn(rows, 2, generator=generator)
        result[name] = (left @ torch.randn(2, columns, generator=generator)) * scale
    return result


def merge(one: Pair, deltas: dict[str, torch.Tensor], sign: int) -> None:
    """Add the change to both models, the offloaded one in the documented way."""
    with one.manager.edit_weights(*deltas) as tensors:
        for name, delta in deltas.items():
            tensors[name] += sign * delta
    for name, delta in deltas.items():
        parameter = one.reference.get_parameter(name)
        parameter.copy_((parameter.cpu() + sign * delta).to(one.device))


NAMES = [f"layers.{at}.{part}.weight" for at in range(6) for part in ("up", "down")]


@pytest.mark.parametrize("phase_calls", [0, 1, 3], ids=["discovery", "profiling", "inference"])
def test_lora_merged_and_undone(pair: MakePair, phase_calls: int) -> None:
    one = pair(Blocks(), noise(2, 48), resident_below_bytes=8192)
    one.run(phase_calls)
    deltas = lora(one, NAMES, 0.1)
    merge(one, deltas, +1)
    one.run(3)
    merge(one, deltas, -1)
    one.run(3)
    one.same_state()
    one.streams(3)
    one.replan(one.least())
    merge(one, deltas, +1)
    one.replan(one.budget)
    one.replan(1.0)
    one.same_state()


def test_restored_weights_are_the_stores_bit_for_bit(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    for _ in range(2):
        merge(one, lora(one, NAMES, 0.3), +1)
        one.run(2)
    report = one.manager.report()["store"]
    assert set(report["edited"]) == set(NAMES) and report["private_bytes"] > 0
    one.manager.restore_weights(*NAMES)
    for name in NAMES:
        one.reference.get_parameter(name).copy_(before[name].to(one.device))
    one.run(3)
    one.same_state()
    assert one.manager.report()["store"]["private_bytes"] == 0


def test_an_exception_while_editing_keeps_host_and_device_together(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    with pytest.raises(RuntimeError, match="half-way"), one.manager.edit_weights(*NAMES[:2]) as tensors:
        tensors[NAMES[0]].mul_(1.5)
        raise RuntimeError("half-way")
    one.reference.get_parameter(NAMES[0]).mul_(1.5)
    one.run(3)
    one.same_state()


def test_edits_of_an_unknown_name_or_inside_a_forward_are_refused(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    with pytest.raises(ft.OffloadError, match="nowhere"), one.manager.edit_weights("layers.0.nowhere"):
        pass

    def edit(*_: object) -> None:
        with one.manager.edit_weights(NAMES[0]) as tensors:
            tensors[NAMES[0]].zero_()

    hook = one.model.layers[2].register_forward_pre_hook(edit)
    with pytest.raises(ft.OffloadError, match="between two calls"):
        one.call()
    hook.remove()
    one.run(4)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("layers.0.up", 0), ("layers.3.down", 1), ("layers.5.up", 3), ("layers.3.down", 6), ("layers.0.up", 6)],
)
def test_a_parameter_replaced_by_one_of_the_same_shape(pair: MakePair, name: str, calls: int) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.run(calls)
    for where in (one.device, torch.device("cpu")):
        old = one.reference.get_submodule(name).weight
        new = torch.randn(old.shape)
        one.model.get_submodule(name).weight = nn.Parameter(new.to(where))
        one.reference.get_submodule(name).weight = nn.Parameter(new.to(one.device))
        one.run(2)
    one.run(4)
    one.streams(2)
    one.same_state()
    one.replan(one.least())


def test_a_parameter_replaced_by_one_of_another_stride(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    old = one.reference.layers[1].up.weight
    new = torch.randn(old.shape[1], old.shape[0]).t()
    one.model.layers[1].up.weight = nn.Parameter(new)
    # The plan's place keeps its stride; the same stride picks the same kernel in the reference.
    one.reference.layers[1].up.weight = nn.Parameter(new.to(one.device).contiguous())
    one.run(4)


@pytest.mark.parametrize(
    "change", [lambda p: nn.Parameter(p.new_zeros(131, 49)), lambda p: nn.Parameter(p.detach().half()), lambda p: None]
)
def test_a_parameter_replaced_by_one_of_another_form_is_refused(
    pair: MakePair, change: Callable[[torch.Tensor], nn.Parameter | None]
) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    kept = one.model.layers[4].up.weight
    one.model.layers[4].up.weight = change(one.reference.layers[4].up.weight)
    for _ in range(2):
        with pytest.raises(ft.OffloadError, match=r"layers\.4\.up\.weight.*release"):
            one.model(*one.arguments())
    one.model.layers[4].up.weight = kept
    one.run(3)


def test_a_streamed_weight_written_in_place_is_refused_and_spoils_nobody_elses_slot(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    one.run(2)
    manager = one.manager
    for tensor in list(manager.plan.offsets):
        manager._weights[tensor].tensor.fill_(float("nan"))
        with pytest.raises(ft.OffloadError, match="edit_weights"):
            one.model(*one.arguments())
        one.run(1)
    one.run(2)
    one.same_state()


def test_several_changes_at_once_one_of_them_refused(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    for name in ("layers.0.up", "layers.5.down"):
        new = torch.randn(one.reference.get_submodule(name).weight.shape)
        one.model.get_submodule(name).weight = nn.Parameter(new)
        one.reference.get_submodule(name).weight = nn.Parameter(new.to(one.device))
    at = next(iter(one.manager.plan.offsets))
    one.manager._weights[at].tensor.add_(1)
    while True:
        try:
            one.call()
            break
        except ft.OffloadError as error:
            assert "written in place" in str(error)
    one.run(3)
    one.same_state()


def test_a_resident_weight_written_in_place_is_used_and_survives_replans(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), budget=0.7)
    one.to_inference()
    manager = one.manager
    at = max(manager.plan.resident, key=lambda tensor: manager._weights[tensor].nbytes)
    name = manager._weights[at].name
    one.model.get_parameter(name).mul_(-1.25)
    one.reference.get_parameter(name).mul_(-1.25)
    one.run(2)
    one.replan(one.least())
    one.same_state()


def test_a_write_is_kept_by_a_plan_that_comes_at_the_last_moment(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may stage a plan at any moment until the step takes it."""
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    one.replan(1.0)
    manager, apply_staged = one.manager, one.manager._apply_staged
    plan = manager.solve(one.least())
    assert not manager.plan.offsets, "all weights are to be resident"
    name = NAMES[0]
    for model in (one.model, one.reference):
        model.get_parameter(name).mul_(1.5)

    def staged_meanwhile() -> None:
        monkeypatch.undo()
        manager.stage(plan)
        apply_staged()

    monkeypatch.setattr(manager, "_apply_staged", staged_meanwhile)
    one.run(3)
    assert manager.plan is plan
    one.same_state()


def test_a_weight_of_no_unit_may_be_changed_at_will(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    for model in (one.model, one.reference):
        model.head.weight.mul_(2)
        model.head.bias = nn.Parameter(torch.ones(10, device=one.device))
    one.streams(3)
    one.same_state()


PATTERNS = ("embed", "layers.*", "head")


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 300, (2, 7))


def test_tied_weights_have_one_host_copy_and_both_names(pair: MakePair) -> None:
    model = TiedLM()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    keys = list(model.state_dict())
    one = pair(model, tokens, patterns=PATTERNS, budget=0.8)
    one.through_everything()
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert model.head.weight is model.embed.weight and list(model.state_dict()) == keys
    assert one.manager.report()["store"]["weight_bytes"] == one.model_bytes


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_an_edit_through_one_name_of_a_tied_weight_is_seen_by_the_other(pair: MakePair, name: str) -> None:
    one = pair(TiedLM(), tokens, patterns=PATTERNS, budget=0.8)
    one.to_inference()
    with one.manager.edit_weights(name) as tensors:
        tensors[name].mul_(-0.5)
    one.reference.embed.weight.mul_(-0.5)
    one.run(3)
    one.same_state()
    new = nn.Parameter(torch.randn(300, 32))
    one.model.embed.weight = one.model.head.weight = new
    one.reference.embed.weight = one.reference.head.weight = nn.Parameter(new.detach().clone().to(one.device))
    one.run(3)
    one.same_state()


def test_untying_a_weight_is_refused(pair: MakePair) -> None:
    one = pair(TiedLM(), tokens, patterns=PATTERNS, budget=0.8)
    one.to_inference()
    kept = one.model.head.weight
    one.model.head.weight = nn.Parameter(torch.randn(300, 32))
    with pytest.raises(ft.OffloadError, match="unties"):
        one.model(*one.arguments())
    one.model.head.weight = kept
    one.run(2)


def test_one_weight_under_two_names_in_one_unit(pair: MakePair) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(40, 40)
            self.b = nn.Linear(40, 40)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Twice() for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    keys = list(model.state_dict())
    assert {"layers.2.a.weight", "layers.2.b.weight"} <= set(names) & set(keys)
    one = pair(model, noise(2, 40))
    one.to_inference()
    for at, name in ((2, "layers.2.b.weight"), (3, "layers.3.a.weight"), (2, "layers.2.a.weight")):
        with one.manager.edit_weights(name) as tensors:
            tensors[name].mul_(0.5)
        one.reference.layers[at].a.weight.mul_(0.5)
        one.streams(3)
        one.same_state()
    assert one.manager.report()["store"]["weight_bytes"] == one.model_bytes == 5 * (40 * 40 + 2 * 40) * 4
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert list(model.state_dict()) == keys
    assert all(layer.a.weight is layer.b.weight for layer in model.layers)
    one.replan(one.least())


def test_a_ctrl_c_while_an_edit_is_put_in_force_loses_nothing(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    one.replan(1.0)
    manager, quiesce = one.manager, one.manager._execution.quiesce
    assert not manager.plan.offsets, "all weights are to be resident"
    name = NAMES[0]

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), manager.edit_weights(name) as tensors:
        tensors[name].mul_(1.5)
        monkeypatch.setattr(manager._execution, "quiesce", interrupted)
    assert manager._execution.quiesce == quiesce
    one.reference.get_parameter(name).mul_(1.5)
    one.run(3)
    one.replan(one.least())
    one.same_state()


def test_a_parameter_replaced_in_inference_mode(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    with torch.inference_mode():
        new = torch.randn(one.reference.get_parameter(NAMES[0]).shape, generator=torch.Generator().manual_seed(3))
        one.model.get_submodule(NAMES[0].removesuffix(".weight")).weight = nn.Parameter(new, requires_grad=False)
    one.reference.get_parameter(NAMES[0]).copy_(new.clone())
    one.run(3)
    one.replan(1.0)
    one.replan(one.least())
    one.same_state()


def test_a_step_that_could_not_take_up_a_parameter_leaves_it_to_the_next(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    new = one.reference.get_parameter(NAMES[0]).detach() * 2
    one.model.get_submodule(NAMES[0].removesuffix(".weight")).weight = nn.Parameter(new.clone(), requires_grad=False)
    one.reference.get_parameter(NAMES[0]).copy_(new)

    def no_room(name: str) -> torch.Tensor:
        monkeypatch.undo()
        raise MemoryError(f"no host memory for {name}")

    monkeypatch.setattr(one.manager.hosting.store, "make_private", no_room)
    with pytest.raises(MemoryError):
        one.model(*one.arguments())
    one.run(3)
    one.replan(1.0)
    one.replan(one.least())
    one.same_state()
