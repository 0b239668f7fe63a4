"""The shared store's settings, as a user gives them to ``offload``."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import flextensor
from flextensor.config import ConfigError
from flextensor.store import StoreCorruptError
from flextensor.store.inventory import list_stores, remove_store


def _offloaded(directory: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval()
    config = flextensor.OffloadConfig(
        gpu_device="host",
        include_patterns=("*",),
        budget_fraction=0.5,
        resident_below_bytes=1 << 12,
        shm_dir=directory,
        shm_namespace="settings",
        **settings,
    )
    return flextensor.offload(model, config)


def _run(model: nn.Module) -> torch.Tensor:
    manager = flextensor.get_offload_manager()
    with torch.no_grad():
        for _ in range(manager.iters_before_inference):
            model(torch.ones(2, 512))
        found: torch.Tensor = model(torch.ones(2, 512))
    assert manager.report()["streamed_bytes_a_step"] > 0
    return found


def test_a_kept_store_serves_the_next_run_and_is_checked_all_the_while(shm_dir: str) -> None:
    first = _run(_offloaded(shm_dir, shm_enabled=True, shm_keep=True))
    flextensor.release()
    (entry,) = list_stores(shm_dir)
    assert entry.state == "kept"
    model = _offloaded(shm_dir, shm_enabled=True, shm_scrub_share=0.1)
    try:
        assert torch.equal(_run(model), first)
        deadline = time.monotonic() + 30
        while not flextensor.get_offload_manager().report()["store"]["scrub"]["checked_bytes"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not flextensor.get_offload_manager().report()["store"]["created_by_us"]
        with open(entry.path, "r+b") as file:  # a wrong byte in the weights, which end before the last page does
            file.seek(-8192, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-8192, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        while not (corrupt := flextensor.get_offload_manager().report()["store"]["scrub"]["corrupt"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert corrupt == ["3.weight"]
        store = flextensor.get_offload_manager().hosting.store
        with pytest.raises(StoreCorruptError, match=r"3\.weight"):
            store.verify("3")
    finally:
        flextensor.release()
    (entry,) = list_stores(shm_dir)
    remove_store(entry)
    assert os.listdir(shm_dir) == []


def test_memory_without_a_file_does_the_same(shm_dir: str) -> None:
    wanted = _run(_offloaded(shm_dir, shm_enabled=True))
    flextensor.release()
    model = _offloaded(shm_dir, shm_enabled=True, shm_backing="memfd")
    try:
        assert torch.equal(_run(model), wanted)
        assert flextensor.get_offload_manager().report()["store"]["path"].startswith("memfd:")
    finally:
        flextensor.release()
    assert os.listdir(shm_dir) == []


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"shm_keep": True}, "shm_keep = True is of the shared store: set shm_enabled"),
        ({"shm_scrub_share": 0.01}, r"shm_scrub_share = 0\.01 is of the shared store"),
        ({"shm_enabled": True, "shm_keep": True, "shm_backing": "memfd"}, "goes with its last user"),
        ({"shm_enabled": True, "shm_scrub_share": 0.5}, "shm_scrub_share"),
        ({"shm_enabled": True, "shm_backing": "disk"}, "shm_backing"),
    ],
)
def test_settings_that_do_not_go_together_are_told(shm_dir: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _offloaded(shm_dir, **settings)
    assert os.listdir(shm_dir) == []
