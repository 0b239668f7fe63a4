"""The shared store's settings, as a user gives them to ``offload``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(settings.pop("layers", 4)))).eval()
    config = flextensor.OffloadConfig(
        gpu_device="host",
        include_patterns=("*",),
        resident_below_bytes=1 << 12,
        shm_dir=directory,
        shm_namespace="settings",
        **({"budget_fraction": 0.5} | settings),
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
        _until(lambda: flextensor.get_offload_manager().report()["store"]["scrub"]["checked_bytes"])
        assert not flextensor.get_offload_manager().report()["store"]["created_by_us"]
        with open(entry.path, "r+b") as file:  # a wrong byte in the weights, which end before the last page does
            file.seek(-8192, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-8192, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        _until(lambda: flextensor.get_offload_manager().report()["store"]["scrub"]["corrupt"])
        assert flextensor.get_offload_manager().report()["store"]["scrub"]["corrupt"] == ["3.weight"]
        store = flextensor.get_offload_manager().hosting.store
        with pytest.raises(StoreCorruptError, match=r"3\.weight"):
            store.verify("3")
    finally:
        flextensor.release()
    (entry,) = list_stores(shm_dir)
    remove_store(entry)
    assert os.listdir(shm_dir) == []


def test_what_the_plan_in_force_streams_is_checked_and_nothing_else(shm_dir: str) -> None:
    # One slot and a slow link: each unit streamed costs so much that the others stay, whatever the machine does.
    slow = {"num_blocks": 1, "host_link_bytes_per_second": "200MB/s"}
    model = _offloaded(shm_dir, shm_enabled=True, shm_scrub_share=0.1, budget_fraction=0.8, layers=8, **slow)
    try:
        wanted = _run(model)
        manager = flextensor.get_offload_manager()
        layout, (path,) = manager.hosting.store.layout, [entry.path for entry in list_stores(shm_dir)]
        streamed, resident = _weights_of(manager)
        assert streamed and resident
        with open(path, "r+b") as file:  # a wrong byte in a weight that is on the device
            at = os.path.getsize(path) - layout.nbytes + layout.by_name[resident[0]].offset
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        rounds = manager.report()["store"]["scrub"]["rounds"]
        _until(lambda: manager.report()["store"]["scrub"]["rounds"] >= rounds + 3)
        assert manager.report()["store"]["scrub"]["corrupt"] == []
        with torch.no_grad():
            assert torch.equal(model(torch.ones(2, 512)), wanted), "it was copied to the device before"
        manager.replan(int(1.3 * (1 << 20)))
        with torch.no_grad():
            model(torch.ones(2, 512))
        assert resident[0] in _weights_of(manager)[0]
        _until(lambda: manager.report()["store"]["scrub"]["corrupt"])
        assert manager.report()["store"]["scrub"]["corrupt"] == [resident[0]]
    finally:
        flextensor.release()
    assert os.listdir(shm_dir) == []


def _weights_of(manager: Any) -> tuple[list[str], list[str]]:
    """Streamed by the plan in force, and resident; large ones."""
    names = {at: weight.name for at, weight in enumerate(manager.hosting.managed) if weight.nbytes > 1 << 12}
    return [names[at] for at in manager.plan.offsets], [names[at] for at in manager.plan.resident if at in names]


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
