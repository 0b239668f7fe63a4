"""What cannot be done is refused by name, with the value and the remedy, and leaves the model as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.runtime.cuda import CudaDevice
from tests.engine.conftest import MakePair
from tests.engine.harness import noise
from tests.engine.models import Block, Blocks


def config(device: str, **settings: Any) -> ft.OffloadConfig:
    return ft.OffloadConfig(
        **{"include_patterns": ("layers.*",), "gpu_device": device, "resident_below_bytes": 256, **settings}
    )


def refused(model: nn.Module, match: str, error: type[BaseException] = ft.OffloadError, **settings: Any) -> None:
    """``offload`` refuses; the model is plain, has its weights and runs."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(error, match=match):
        ft.offload(model, config(**settings), name="refused")
    assert "refused" not in ft.registry.names()
    assert [type(module) for module in model.modules()] == kinds
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(torch.randn(2, 48))


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("layres.*", "layers"),
        ("name:layers.0.upp", "layers.0.up"),
        ("nothing.like.it", "head.weight"),
        ("class:Blok", "Block"),
        ("class:LayerNrm*", "LayerNorm"),
        ("class:tests.engine.models.Blok", "tests.engine.models.Block"),
    ],
)
def test_patterns_that_match_nothing_name_the_nearest(device: str, pattern: str, nearest: str) -> None:
    said = rf"include_patterns: {re.escape(repr(pattern))} matches nothing.*nearest names: {re.escape(nearest)}\b"
    refused(Blocks(), said, device=device, include_patterns=("layers.*", pattern))
    refused(Blocks(), said.replace("include", "exclude"), device=device, exclude_patterns=("layers.1", pattern))


def test_a_pattern_may_exclude_what_is_never_streamed(pair: MakePair) -> None:
    """A buffer, a module without weights, or one outside every unit: that it matches is enough."""

    class Beside(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(48))
            self.act = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(super().forward(x + self.shift))

    one = pair(Beside(), noise(2, 48), exclude_patterns=("shift", "act", "head", "class:LayerNorm"), budget=0.6)
    one.to_inference()
    one.streams(2)


def test_no_patterns_and_patterns_for_modules_without_weights(device: str) -> None:
    model: nn.Module = Blocks()
    ft.offload(model, config(device, include_patterns=()), name="empty")
    with pytest.raises(ft.OffloadError, match=r"include_patterns is empty.*offload_block"):
        model(torch.randn(2, 48, device="cpu" if device == "host" else device))
    ft.release("empty")
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh())
    refused(model, "names no module with weights", device=device, include_patterns=("1",))


def test_patterns_by_class_by_list_and_by_parameter(pair: MakePair) -> None:
    for patterns, units in (
        (("class:Block",), 6),
        (("class:tests.engine.models.Block",), 6),
        (("layers",), 6),
        (("name:layers.[0-2]",), 3),
        (("layers.*.up.weight",), 6),
    ):
        one = pair(Blocks(), noise(2, 48), patterns=patterns, budget=None, resident_below_bytes=8192)
        assert len(one.manager.units) == units, patterns
        one.to_inference()
        one.replan(one.least())


def test_excluded_modules_and_parameters_stay_resident_and_say_why(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), exclude_patterns=("layers.1.up", "layers.*.down.weight"), budget=None)
    one.to_inference()
    one.replan(one.least())
    reasons = one.manager.report()["kept_resident"]
    assert reasons["layers.1.up.weight"] == "excluded" == reasons["layers.4.down.weight"]
    names = {one.manager._weights[at].name for at in one.manager.plan.offsets}
    assert "layers.0.up.weight" in names and not any("down.weight" in name for name in names)


def test_a_misspelt_setting_and_a_bad_device() -> None:
    with pytest.raises(ft.ConfigError, match="did you mean 'budget_bytes'"):
        ft.OffloadConfig(budget_byte=3)
    for bad in ("gpu", "cuda:x", "cuda:99", 99):
        with pytest.raises(ft.ConfigError, match="gpu_device"):
            ft.make_device(ft.OffloadConfig(gpu_device=bad))


def test_a_compiled_model_is_refused(device: str) -> None:
    model = Blocks()
    model.layers[1].compile(backend="eager")
    with pytest.raises(ft.OffloadError, match=r"layers\.1 is compiled"):
        ft.offload(model, config(device), name="refused")


def test_a_compile_fn_that_raises_leaves_a_plain_model(device: str) -> None:
    def fails(module: nn.Module) -> nn.Module:
        raise ValueError("no compiler here")

    model = Blocks()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="no compiler here"):
        ft.offload(model, config(device, skip_discovery=True, profile_mode="view"), fails, name="refused")
    assert "refused" not in ft.registry.names()
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    model.load_state_dict(before)
    model(torch.randn(2, 48))


def test_a_compile_fn_that_raises_does_so_at_every_call_until_it_works(pair: MakePair) -> None:
    broken = [True]

    def compiles(module: nn.Module) -> nn.Module:
        if broken:
            raise ValueError("no compiler yet")
        return module

    one = pair(Blocks(), noise(2, 48), compile_fn=compiles, profile_mode="getter")
    one.run(2)
    for _ in range(2):
        with pytest.raises(ValueError, match="no compiler yet"):
            one.call()
    broken.clear()
    one.call()
    assert one.manager.phase == "inference"
    one.streams(3)


def test_a_budget_below_the_least_names_it_and_the_model_goes_on(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), budget=1000, under_model=True)
    one.run(2)
    with pytest.raises(ft.BudgetError, match="at least") as caught:
        one.model(*one.arguments())
    one.run(2)
    with pytest.raises(ft.BudgetError):
        one.manager.replan(caught.value.needed - 1)
    one.budget = caught.value.needed
    one.replan(caught.value.needed)
    one.streams(3)
    assert one.manager.report()["device_weight_bytes"] <= caught.value.needed


@pytest.mark.parametrize("units", [1, 2])
def test_fetching_on_demand_goes_on_right_after_the_link_was_measured_in_its_slots(pair: MakePair, units: int) -> None:
    """With one unit, its weights are still in their slots when the next call comes; the measurement wrote over them."""
    one = pair(Blocks(count=units), noise(2, 48), budget=1000, under_model=False)
    one.run(2)
    with pytest.raises(ft.BudgetError, match="at least"):
        one.model(*one.arguments())
    one.run(3)


def test_a_device_too_small_for_one_unit_or_for_the_rest_is_refused_before_the_first_call() -> None:
    unit = 4 * (2 * 48 * 131 + 48 + 131 + 96)
    refused(Blocks(), "no room for the largest unit", ft.BudgetError, device="host", host_memory_bytes=unit // 2)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(48, 8)])
            self.head = nn.Linear(48, 4000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](x))

    refused(Wide(), "weights of no unit take", ft.BudgetError, device="host", host_memory_bytes=100_000)


class Quota(CudaDevice):
    """A GPU of which the program may take so many bytes from now on, as when others have taken the rest."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.before = nbytes, self.allocated_bytes()

    def free_bytes(self) -> int:
        return self.nbytes - (self.allocated_bytes() - self.before)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.free_bytes():
            raise torch.OutOfMemoryError(f"{nbytes} bytes asked for, {self.free_bytes()} free")
        return super().allocate(nbytes)


@pytest.mark.parametrize(
    "asked",
    [{"budget": None}, {"budget": 0.9}, {"budget": 1 << 40}, {"budget": None, "budget_fraction": 0.95}],
    ids=["latency", "bytes", "terabyte", "fraction"],
)
def test_budgets_are_capped_by_what_is_free(
    pair: MakePair,
    device: str,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = 200_000
    if device != "host":
        monkeypatch.setattr("flextensor.api.make_device", lambda config: Quota(room))
    one = pair(Blocks(), noise(2, 48), host_memory_bytes=room, resident_below_bytes=8192, **asked)
    assert one.model_bytes > 1.5 * room
    one.to_inference()
    assert "find no room" not in caplog.text, "a plan beyond what is free was tried"
    one.streams(3)
    opened = one.manager.device
    opened.reset_peak()
    for _ in range(3):
        one.model(*one.arguments())
    rounded = 0 if device == "host" else 8192  # torch gives a multiple of 512 bytes to each tensor
    assert opened.peak_bytes() - getattr(opened, "before", 0) <= room + rounded
    held = one.manager.report()["device_weight_bytes"]
    assert held <= room
    if asked != {"budget": None} and device == "host":  # what torch keeps on a GPU beside is of the same size
        assert held >= 0.7 * room, "what is free is used"


def test_a_share_of_the_device_is_a_budget(pair: MakePair, device: str) -> None:
    if device != "host":
        pytest.skip("the host device's memory can be set exactly")
    one = pair(Blocks(), noise(2, 48), budget=None, max_gpu_mem_fraction=0.5, host_memory_bytes=400_000)
    one.to_inference()
    one.streams(3)
    assert one.manager.report()["device_weight_bytes"] <= 200_000


def test_a_model_that_never_calls_its_units_keeps_working(pair: MakePair) -> None:
    class Idle(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    one = pair(Idle(), noise(2, 48))
    one.run(5)
    assert one.manager.phase == "profiling" and one.copied < one.model_bytes
