"""What leaves an offloaded model holds real weights, or is a clear error: never what lies in a slot."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.conftest import MakePair
from tests.engine.harness import Pair, noise
from tests.engine.models import Blocks, Counters

PHASES = {"discovery": 0, "profiling": 1, "inference": 4}


@pytest.fixture(params=PHASES)
def one(request: pytest.FixtureRequest, pair: MakePair) -> Pair:
    """Blocks in each phase."""
    made = pair(Blocks(), noise(2, 48))
    made.run(PHASES[request.param])
    assert made.manager.phase == request.param
    return made


def test_state_dict_has_the_weights_and_copies_them(one: Pair, tmp_path: Path) -> None:
    one.same_state()
    state = one.model.state_dict()
    torch.save(state, tmp_path / "state.pt")
    plain = Blocks()
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    x = torch.randn(2, 48)
    assert torch.equal(plain(x), copy.deepcopy(one.reference).cpu()(x))
    for key, value in state.items():
        if key.startswith("layers."):
            value.zero_()
    for name in ("layers.2", "layers.2.up"):
        inner = one.model.get_submodule(name).state_dict()
        theirs = one.reference.get_submodule(name).state_dict()
        assert all(torch.equal(inner[key].cpu(), value.cpu()) for key, value in theirs.items())
    one.run(4)


def test_load_state_dict_is_refused_with_the_remedy(one: Pair) -> None:
    state = {key: torch.zeros_like(value) for key, value in one.reference.state_dict().items()}
    for module, given in ((one.model, state), (one.model.layers[1], one.reference.layers[2].state_dict())):
        with pytest.raises(ft.OffloadError, match="edit_weights"):
            module.load_state_dict(given)
    # What lies on the device for good can be loaded; the root's own head was, before a unit was reached or after.
    one.reference.head.load_state_dict(one.model.head.state_dict())
    one.run(4)
    one.same_state()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to(dtype)": lambda module: module.to(torch.float64),
    "to(device)": lambda module: module.to("cpu"),
    "half": lambda module: module.half(),
    "cuda": lambda module: module.cuda(),
    "cpu": lambda module: module.cpu(),
    "bfloat16": lambda module: module.bfloat16(),
    "share_memory": lambda module: module.share_memory(),
    "to_empty": lambda module: module.to_empty(device="meta"),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
}


def test_moving_copying_and_saving_whole_are_refused(one: Pair) -> None:
    for where in ("", "layers", "layers.1", "layers.1.up"):
        module = one.model.get_submodule(where)
        for what, move in MOVES.items():
            with pytest.raises(ft.OffloadError, match="offloaded"):
                move(module)
                raise AssertionError(f"{what} of {where or 'the root'} was not refused")
    one.run(4)
    one.same_state()


def test_everything_is_allowed_again_after_release(one: Pair) -> None:
    one.release()
    model = one.model
    assert type(model) is Blocks and model.layers[0].__class__.__name__ == "Block"
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model).double().float()))
    x = torch.randn(2, 48)
    assert torch.equal(twin(x), model.cpu()(x))
    model.load_state_dict(one.reference.state_dict())
    assert not [name for module in model.modules() for name in vars(module) if "offload" in name or name == "_apply"]


def test_offload_twice_is_refused_and_changes_nothing(one: Pair) -> None:
    for target in (one.model, one.model.layers[0], nn.Sequential(one.model)):
        with pytest.raises(ft.OffloadError, match="already"):
            ft.offload(target, one.config, name="again")
    with pytest.raises(ft.OffloadError, match="named"):
        ft.offload(Blocks(), one.config, name=one.name)
    assert "again" not in ft.registry.names()
    one.run(4)


def test_a_model_that_shares_a_weight_with_an_offloaded_one_is_refused(one: Pair) -> None:
    for shared in (one.model.layers[1].up.weight, one.model.head.weight):
        other = Blocks()
        if shared.shape == other.head.weight.shape:
            other.head.weight = shared
        else:
            other.layers[2].up.weight = shared
        before = other.state_dict()
        with pytest.raises(ft.OffloadError, match=f"offloaded as '{one.name}'"):
            ft.offload(other, one.config, name="other")
        for key, value in other.state_dict().items():  # bits: a slot may hold what is no number
            assert torch.equal(value.view(torch.int32), before[key].view(torch.int32)), key
    one.run(4)


@pytest.mark.parametrize("threshold", [1, 8000, 10000], ids=["all-managed", "average-managed", "none-managed"])
def test_buffers_of_every_kind_and_state_that_forward_updates(pair: MakePair, threshold: int) -> None:
    model = Counters()
    one = pair(model, noise(2, 64), resident_below_bytes=threshold, budget=None, under_model=False, exact=False)
    one.run(2)
    seen: list[torch.device] = []
    hook = model.layers[1].register_forward_pre_hook(
        lambda module, _: seen.extend(buffer.device for buffer in module.buffers())
    )
    one.to_inference()
    one.run(3)
    one.replan(one.least())
    one.streams(3)
    usage = one.manager.get_gpu_memory_usage()
    assert usage["weights"] + usage["other_weights"] < one.model_bytes
    one.replan(None)
    hook.remove()
    assert {device.type for device in seen} == {one.device.type}
    one.same_state()
    for layer in model.layers:
        assert int(layer.calls) == one.calls and layer.nothing.shape == (0, 3) and layer.missing is None
    one.release()
    for mine, theirs in zip(model.layers, one.reference.layers, strict=True):
        assert int(mine.calls) == one.calls and torch.equal(mine.average.cpu(), theirs.average.cpu())
        assert torch.equal(mine.offsets.cpu(), theirs.offsets.cpu()) and mine.average.device.type == "cpu"


def test_state_of_forward_survives_an_edit_of_it_and_a_refused_replan(pair: MakePair, device: str) -> None:
    one = pair(
        Counters(),
        noise(2, 64),
        resident_below_bytes=1,
        budget=0.95,
        under_model=False,
        exact=False,
        host_memory_bytes=4 << 20,
    )
    one.to_inference()
    one.run(3)
    name = "layers.2.average"
    with one.manager.edit_weights(name) as tensors:
        tensors[name].add_(1)
    one.reference.layers[2].average.add_(1)
    one.run(3)
    one.same_state()
    if device == "host":
        everything = one.manager.solve(1.0)
        taken = one.manager.device.allocate(one.manager.device.free_bytes() - 256)
        one.taken = taken.numel()
        one.manager.stage(everything)
        one.run(2)
        assert "out of memory" in one.manager.refusal
        del taken
        one.taken = 0
    one.run(2)
    one.same_state()


def test_state_of_forward_survives_a_replan_that_is_interrupted_before_it_is_saved(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair(Counters(), noise(2, 64), resident_below_bytes=1, budget=0.95, under_model=False, exact=False)
    one.to_inference()
    one.run(3)
    plan = one.manager.solve(1.0)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.manager._execution, "quiesce", interrupted)
        one.manager.stage(plan)
        with pytest.raises(KeyboardInterrupt):
            one.model(*one.arguments())
    one.same_state()
    one.run(2)
    assert one.manager.plan is plan
    one.same_state()


def test_a_resident_weight_written_just_before_a_replan_keeps_what_was_written(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), budget=1.0)
    one.to_inference()
    one.replan(1.0)
    one.manager.stage(one.manager.solve(one.least()))
    for model in (one.model, one.reference):
        model.layers[1].up.weight.add_(0.25)  # resident until the next step begins
    one.run(3)
    one.same_state()


@pytest.mark.parametrize("first", ["bind", "_keep_residents", "_fill"])
def test_state_of_forward_survives_a_replan_and_its_undoing_both_interrupted(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    one = pair(Counters(), noise(2, 64), resident_below_bytes=1, budget=0.95, under_model=False, exact=False)
    one.to_inference()
    one.replan(1.0)
    one.run(3)
    execution = one.manager._execution
    hits: list[str] = []

    def interrupted(*arguments: object) -> None:
        hits.append(first)
        monkeypatch.setattr(one.manager.device, "synchronize", again)
        raise KeyboardInterrupt

    def again() -> None:
        hits.append("synchronize")
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(execution.memory, first, interrupted)
    plan = one.manager.solve(one.least())
    one.manager.stage(plan)
    with pytest.raises(KeyboardInterrupt):
        one.model(*one.arguments())
    assert hits == [first, "synchronize"]
    one.same_state()
    one.run(2)
    assert one.manager.plan is plan
    one.same_state()


class Replacing(nn.Module):
    """Its forward puts a new tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(48, 48)
        self.register_buffer("state", torch.zeros(48, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + 1
        return torch.tanh(self.lin(x) + self.state[0])


def test_a_buffer_replaced_in_inference_mode(pair: MakePair) -> None:
    layers = nn.Sequential(*(Replacing() for _ in range(6)))
    one = pair(nn.Sequential(OrderedDict(layers=layers)), noise(4, 48), budget=0.9, exact=False)
    with torch.inference_mode():
        one.run(6)
    one.run(2)
