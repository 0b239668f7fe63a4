"""Strides, views, and what cannot be streamed: as before, resident and reported, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flextensor as ft
from tests.engine.conftest import MakePair
from tests.engine.harness import noise
from tests.engine.models import Block, Blocks, Convolutions

UNITS = ("channels_last", "transposed", "strided", "expanded", "empty", "plain")


@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
def test_strides_and_bits_are_as_before(pair: MakePair, mode: str) -> None:
    model = Convolutions()
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    one = pair(
        model,
        noise(2, 8, 5, 5),
        patterns=UNITS,
        resident_below_bytes=16,
        budget=None,
        transfer_mode=mode,
    )
    one.to_inference()
    one.replan(one.least())
    one.streams(3)
    streamed = {one.manager._weights[at].name for at in one.manager.plan.offsets}
    assert {"channels_last.weight", "transposed.weight", "plain.weight"} <= streamed
    assert {name: parameter.stride() for name, parameter in model.named_parameters()} == strides
    reported = one.manager.report()["kept_resident"]
    assert "holes" in reported["strided.weight"] and "overlap" in reported["expanded.weight"]
    assert one.model.empty.weight.device.type == one.device.type
    one.release()
    assert {name: parameter.stride() for name, parameter in model.named_parameters()} == strides


def test_weights_of_no_unit_are_on_the_device_and_listed_with_bytes(pair: MakePair) -> None:
    class Beside(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(48))
            self.register_buffer("shift", torch.randn(48), persistent=False)
            self.lone = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.lone(x * self.scale + self.shift))

    one = pair(Beside(), noise(2, 48), budget=0.7)
    one.through_everything()
    report = one.manager.report()
    sizes = {"scale": 192, "lone.weight": 48 * 48 * 4, "lone.bias": 192, "head.weight": 1920, "head.bias": 40}
    assert report["unmatched"] == sizes
    assert one.manager.get_gpu_memory_usage()["other_weights"] == sum(sizes.values()) + 192
    for tensor in (one.model.scale, one.model.shift, one.model.lone.weight):
        assert tensor.device.type == one.device.type


class Keeps(nn.Module):
    """Keeps a view of its weight, made at a time of its choice."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.lin = nn.Linear(48, 48)
        self.when = when
        self.v: torch.Tensor | None = None
        self.deep: dict[str, torch.Tensor] = {}
        if when == "init":
            self.v = self.lin.weight.view(48 * 48)
        if when == "init-deep":
            self.deep["view"] = self.lin.weight.detach()[3:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "forward" and self.v is None:
            self.v = self.lin.weight.t()
        if self.when == "clone" and self.v is None:
            self.v = self.lin.weight.t().clone()
        weight = self.lin.weight.t() if self.v is None else self.v.view(48, 48)
        return torch.tanh(x @ weight)


class Keepers(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeps(when) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("when", "attribute"), [("init", "'v'"), ("init-deep", "'deep'")])
def test_a_view_kept_at_set_up_is_refused_by_module_and_attribute(device: str, when: str, attribute: str) -> None:
    config = ft.OffloadConfig(include_patterns=("layers.*",), gpu_device=device, resident_below_bytes=256)
    model = Keepers(when)
    with pytest.raises(ft.OffloadError, match=rf"layers\.0.*{attribute}"):
        ft.offload(model, config)
    assert torch.isfinite(model(torch.randn(2, 48))).all() and type(model) is Keepers


@pytest.mark.parametrize("skip_discovery", [False, True])
def test_a_view_kept_by_the_first_forward_is_refused(pair: MakePair, skip_discovery: bool) -> None:
    model = Keepers("init")
    for layer in model.layers:
        layer.v, layer.when = None, "forward"
    one = pair(model, noise(2, 48), skip_discovery=skip_discovery)
    with pytest.raises(ft.OffloadError, match=r"layers\.0.*'v'"):
        for _ in range(3):
            one.model(*one.arguments())
    for layer in model.layers:
        layer.v, layer.when = None, "never"
        one.reference.get_submodule("layers")
    for layer in one.reference.layers:
        layer.v, layer.when = None, "never"
    one.run(4)


def test_a_clone_kept_by_the_first_forward_is_fine(pair: MakePair) -> None:
    model = Keepers("clone")
    one = pair(model, noise(2, 48))
    one.through_everything()


def test_a_view_made_in_forward_follows_the_weight(pair: MakePair) -> None:
    pair(Keepers("never"), noise(2, 48)).through_everything()


def test_two_parameters_in_one_storage_stay_together(pair: MakePair) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(48, 131) for _ in range(4))
            whole = torch.randn(96, 48)
            self.layers[1].extra = nn.Parameter(whole)
            self.layers[2].extra = nn.Parameter(torch.empty(0))
            self.layers[2].extra.data = whole[48:]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                if hasattr(layer, "extra"):
                    x = x + x @ layer.extra[:48]
            return x

    one = pair(Fused(), noise(2, 48), budget=0.8)
    one.through_everything()
    assert "shares memory" in one.manager.report()["kept_resident"]["layers.1.extra"]
    first, second = one.model.layers[1].extra, one.model.layers[2].extra
    assert second.data_ptr() == first.data_ptr() + 48 * 48 * 4


@pytest.mark.parametrize("how", ["weight", "T", "data", "linear"])
def test_a_weight_read_outside_its_unit_is_found_by_discovery(pair: MakePair, how: str) -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(48, 131) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            borrowed = self.layers[1].up.weight
            if how == "T":
                return x @ borrowed.T
            if how == "data":
                return x @ borrowed.data.t()
            return nn.functional.linear(x, borrowed) if how == "linear" else torch.matmul(x, borrowed.t())

    one = pair(Borrows(), noise(2, 48), budget=0.7)
    one.through_everything()
    assert "outside" in one.manager.report()["kept_resident"]["layers.1.up.weight"]


def test_a_weight_read_by_another_unit_joins_it(pair: MakePair) -> None:
    class Lends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Reader() for _ in range(5))
            for at in (2, 3):
                self.layers[at].other = [self.layers[0].block.up]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(48, 131)
            self.other: list[nn.Linear] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.block(x)
            for other in self.other:
                x = x + (x @ other.weight.T) @ other.weight
            return x

    one = pair(Lends(), noise(2, 48), budget=0.8)
    one.through_everything()
    reads = {unit.name: set(unit.tensors) for unit in one.manager.profile.units}
    shared = next(at for at, t in enumerate(one.manager.profile.tensors) if t.name == "layers.0.block.up.weight")
    assert all(shared in reads[f"layers.{at}"] for at in (0, 2, 3)) and shared not in reads["layers.1"]
