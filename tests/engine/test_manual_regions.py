"""Manual regions: ``with offload_block(name)`` inside a forward, without patterns."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import flextensor as ft

DIM = 128
Region = Callable[[str], contextlib.AbstractContextManager[None]]


class Regions(nn.Module):
    """Two regions, one of which reads a raw parameter; a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, 4 * DIM)
        self.b = nn.Linear(4 * DIM, DIM)
        self.between = nn.Linear(DIM, DIM)
        self.raw = nn.Parameter(torch.randn(DIM, DIM) / 12)
        self.c = nn.Linear(DIM, 4 * DIM)
        self.d = nn.Linear(4 * DIM, DIM)
        self.region: Region = lambda name: contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region("one"):
            x = torch.relu(self.b(torch.relu(self.a(x))))
        x = self.between(x)
        with self.region("two"):
            return self.d(torch.relu(self.c(x @ self.raw)))


def pair(device: str, **settings: object) -> tuple[Regions, Regions, ft.OffloadManager]:
    model = Regions().requires_grad_(False)
    twin = copy.deepcopy(model)
    model.region = ft.offload_block
    config = ft.OffloadConfig(
        **{
            "gpu_device": device,
            "resident_below_bytes": 4096,
            "budget_bytes": 750_000,
            "host_link_bytes_per_second": 1e9,
            **settings,
        }
    )
    manager = ft.init(model, config)
    return model, twin.to(manager.device.torch_device), manager


def test_a_region_is_a_unit_of_what_it_reads(device) -> None:
    model, twin, manager = pair(device)
    where = manager.device.torch_device
    for _ in range(manager.iters_before_inference + 6):
        x = torch.randn(4, DIM, device=where)
        assert torch.equal(model(x), twin(x))
    assert manager.phase == "inference"
    assert {name for name, _ in manager.offload_units()} <= {"one", "two"}
    assert manager.plan is not None and manager.plan.streamed_bytes > 0
    assert manager.live().copied_bytes_total >= 6 * manager.plan.streamed_bytes
    assert manager.get_gpu_memory_usage()["weights"] <= 750_000
    assert manager.report()["kept_resident"] == {"between.weight": "read outside every unit"}
    assert {"a.weight", "b.weight"} == {
        w.name for w in manager.units[0].weights if w.nbytes >= manager.config.resident_below_bytes
    }
    epoch = manager.epoch
    manager.replan(1.0)
    x = torch.randn(4, DIM, device=where)
    assert torch.equal(model(x), twin(x))
    assert manager.epoch == epoch + 1
    ft.release()
    assert torch.equal(model.raw, twin.raw.cpu())


def test_an_exception_in_a_region_leaves_the_next_call_right(device) -> None:
    model, twin, manager = pair(device)
    where = manager.device.torch_device
    for call in range(manager.iters_before_inference + 4):
        with pytest.raises(RuntimeError):
            model(torch.randn(4, DIM + 1, device=where))
        x = torch.randn(4, DIM, device=where)
        assert torch.equal(model(x), twin(x)), call
    ft.release()


def test_a_region_after_discovery_is_refused_by_name(device) -> None:
    model, _, manager = pair(device)
    where = manager.device.torch_device
    for _ in range(manager.iters_before_inference):
        model(torch.randn(4, DIM, device=where))
    with pytest.raises(ft.OffloadError, match=r"'three'.*known regions: 'one', 'two'"), ft.offload_block("three"):
        pass
    ft.release()


def test_a_model_without_regions_or_patterns_is_an_error(device) -> None:
    model, _, manager = pair(device)
    model.region = lambda name: contextlib.nullcontext()
    with pytest.raises(ft.OffloadError, match="no offload_block"):
        model(torch.randn(4, DIM, device=manager.device.torch_device))
    ft.release()


def test_regions_and_patterns_exclude_each_other(device) -> None:
    with pytest.raises(ft.ConfigError, match="offload"):
        ft.init(Regions(), ft.OffloadConfig(gpu_device=device, include_patterns=["a"]))
