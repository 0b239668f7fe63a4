"""Compiled-offload tests start with a clean Dynamo and leave no manager."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import flextensor as ft
from flextensor import registry
from tests.integration.L0_torch_compile import models


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    """No graphs from another test, no gradients, no manager left behind."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    with torch.no_grad():
        yield
    torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = limits
    for name in registry.names():
        ft.release(name)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def same_kernels_for_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Inductor picks a reduction's configuration by timing it; on a busy one two compilations of one graph
    would differ in the last bits."""
    if not hasattr(inductor_config, "deterministic"):  # torch 2.10 and later
        return
    restore = torch.use_deterministic_algorithms

    @functools.wraps(restore)
    def restore_and_keep(*args: Any, **kwargs: Any) -> None:
        """Dynamo restores torch's own setting after each frame, which ends Inductor's mode (pytorch issue 198563)."""
        restore(*args, **kwargs)
        inductor_config.deterministic = True

    monkeypatch.setattr(torch, "use_deterministic_algorithms", restore_and_keep)
    monkeypatch.setattr(inductor_config, "deterministic", True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the models run. What is the same on every device is ``checks.on_the_host`` alone."""
    monkeypatch.setattr(models, "GPU_DEVICE", "host" if request.param == "cpu" else request.param)
    return torch.device(request.param)
