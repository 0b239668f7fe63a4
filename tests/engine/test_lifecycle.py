"""The life of a manager: phases, pauses, several at once, release two hundred times."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.planner.build import build_plan
from flextensor.runtime.device import Device
from tests.engine.conftest import MakePair, copy_threads
from tests.engine.harness import Pair, noise, tensor_bytes
from tests.engine.models import Blocks, TiedLM


def test_phases_follow_the_calls(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48), discovery_iters=2, profiling_iters=3)
    seen = []
    for _ in range(7):
        seen.append(one.manager.phase)
        one.call()
    assert seen == ["discovery"] * 2 + ["profiling"] * 3 + ["inference"] * 2
    assert one.manager.epoch == 1 and one.manager.report()["phase"] == "inference"


def test_suspended_profiling_does_not_advance_and_takes_no_samples(pair: MakePair) -> None:
    one = pair(Blocks(), lambda i: torch.randn(2 if i < 40 else 3, 48))
    with ft.suspend_profiling(one.name):
        one.run(4)
        assert one.manager.phase == "discovery"
    one.run(2)
    assert one.manager.phase == "profiling"
    ft.pause_profiling(one.name)
    one.run(3)
    assert one.manager.phase == "profiling"
    ft.resume_profiling(one.name)
    one.run(1)
    assert one.manager.phase == "inference"
    one.streams(3)


def test_profiling_is_resumed_when_a_suspended_block_raises(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    with pytest.raises(ValueError, match="mine"), ft.suspend_profiling(one.name):
        raise ValueError("mine")
    one.to_inference()


def test_cleared_durations_are_profiled_anew(pair: MakePair) -> None:
    one = pair(Blocks(), lambda i: torch.randn(2 if i < 2 else 64, 48), profiling_iters=2)
    one.run(2)
    ft.clear_profiling_durations(one.name)
    one.run(1)
    assert one.manager.phase == "profiling"
    one.run(1)
    assert one.manager.phase == "inference"
    assert [kind.name for kind in one.manager.profile.kinds] == ["rows<=64"]


def test_callbacks_hear_each_step_and_may_stage_a_plan_for_it(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    heard: list[int] = []
    plan = one.manager.solve(one.least())

    def at_boundary(step: int) -> None:
        heard.append(step)
        if len(heard) == 2:
            one.manager.stage(plan, epoch=7)

    remove = one.manager.on_step_boundary(at_boundary)
    one.run(2)
    assert one.manager.plan is plan and one.manager.epoch == 7
    remove()
    remove()
    one.run(1)
    assert heard == [3, 4]


def test_a_plan_staged_before_inference_is_refused_and_says_so(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    other = pair(Blocks(), noise(2, 48))
    other.to_inference()
    one.manager.stage(other.manager.plan)
    one.run(1)
    assert one.manager.refusal == "still in discovery" and one.manager.plan is None
    with pytest.raises(ft.OffloadError, match="profile"):
        one.manager.replan(0.5)


def test_replans_staged_from_another_thread(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.to_inference()
    least = one.least()
    plans = [one.manager.solve(least), one.manager.solve(one.budget), one.manager.solve(1.0)]
    stop = threading.Event()

    def stage() -> None:
        turn = 0
        while not stop.wait(0.004):
            one.manager.stage(plans[turn % 3])
            one.manager.live()
            one.manager.report()
            turn += 1

    thread = threading.Thread(target=stage)
    thread.start()
    try:
        until = time.monotonic() + 120
        while one.manager.epoch <= 6 and time.monotonic() < until:
            one.run(1)
    finally:
        stop.set()
        thread.join()
    assert one.manager.epoch > 6


def test_several_managers_at_once(pair: MakePair) -> None:
    ones = [
        pair(Blocks(), noise(2, 48)),
        pair(TiedLM(), lambda i: torch.randint(0, 300, (2, 6)), patterns=("embed", "layers.*", "head"), budget=0.8),
        pair(Blocks(count=9, inner=99), noise(1, 48), budget=0.3),
    ]
    for call in range(8):
        for one in ones:
            one.call()
        if call == 5:
            ones[1].manager.replan(ones[1].least())
    assert [one.manager.phase for one in ones] == ["inference"] * 3
    with pytest.raises(ft.OffloadError, match="'pair-"):
        ft.get_offload_manager("nobody")
    ones[0].release()
    ones[1].streams(3)
    ones[2].streams(3)


def test_an_offloaded_model_inside_another_that_is_not(pair: MakePair) -> None:
    one = pair(Blocks(), noise(2, 48))
    outer = nn.Sequential(one.model, nn.Tanh())
    for _ in range(5):
        x = torch.randn(2, 48, device=one.device)
        assert torch.equal(outer(x), torch.tanh(one.reference(x)))
    one.streams(2)


def test_disabled_offload_moves_the_model_and_makes_no_manager(device: str) -> None:
    model = ft.offload(Blocks(), ft.OffloadConfig(enabled=False, gpu_device=device), name="disabled")
    assert type(model) is Blocks and "disabled" not in ft.registry.names()
    assert {p.device.type for p in model.parameters()} == {"cpu" if device == "host" else "cuda"}


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_released_in_any_phase_the_module_is_plain(pair: MakePair, calls: int) -> None:
    one = pair(Blocks(), noise(2, 48))
    one.run(calls)
    manager = one.manager
    device = manager.device
    one.release()
    assert manager.phase == "released"
    if one.device.type == "cpu":
        gc.collect()
        assert device.allocated_bytes() == 0
    assert {p.device.type for p in one.model.parameters()} == {"cpu"}
    x = torch.randn(2, 48, device=one.device)
    one.compare(one.model.to(one.device)(x), one.reference(x))
    with pytest.raises(ft.OffloadError, match="no offload manager named"):
        ft.release(one.name)


@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
def test_release_two_hundred_times_leaves_no_memory(device: str, mode: str) -> None:
    """One model of 2 MiB; device memory goes back to zero each time, host memory and threads stay."""
    model = Blocks(count=3, width=128, inner=700)
    x = torch.randn(2, 128)
    expected = model(x)
    size = tensor_bytes(model)
    assert size > 2 << 20
    process = psutil.Process()
    resident: list[int] = []
    gc.collect()  # what tests before this one have left
    gc.freeze()  # so that a collection looks at what is new only
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        for turn in range(200):
            inner = offload_and_release(model, device, mode, calls=turn % 3, planned=turn % 10 == 1)
            gc.collect()
            if device == "host":
                assert inner.allocated_bytes() == 0, turn
            else:
                assert torch.cuda.memory_allocated() == before, turn
            resident.append(process.memory_info().rss)
    finally:
        gc.unfreeze()
    assert torch.equal(model(x), expected)
    grown = min(resident[100:]) - min(resident[:100])
    assert grown < 2 * size, f"host memory grew by {grown} bytes in 100 turns of a model of {size}"
    assert not copy_threads(at_most=0)
    assert len(os.listdir(f"/proc/{process.pid}/fd")) < 200


def offload_and_release(model: nn.Module, device: str, mode: str, *, calls: int, planned: bool) -> Device:
    """Offloaded, called, released; the device it was on. ``planned``: as far as a second plan."""
    settings = {"transfer_mode": mode, "resident_below_bytes": 8192}  # few tensors are planned soon
    one = Pair(model, lambda i: torch.randn(2, 128), device=device, budget=0.8, link=2e10, **settings)
    manager = one.manager
    if planned:
        one.to_inference()
        manager.stage(build_plan(manager.profile, frozenset()))
    one.run(calls)
    manager.release()
    return manager.device


def test_release_frees_what_a_failed_set_up_took(device: str, tmp_path: Path) -> None:
    model = Blocks()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = ft.OffloadConfig(include_patterns=("layers.*",), gpu_device=device, resident_below_bytes=256)
    with pytest.raises(ft.ProfileMismatch):
        (tmp_path / "no.json").write_text("{}")
        ft.offload_from_profile(model, tmp_path / "no.json", config, name="failed")
    assert type(model) is Blocks and "failed" not in ft.registry.names()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(torch.randn(2, 48))


def test_a_release_that_keeps_no_weights_copies_nothing_out_of_a_shared_store(tmp_path: Path) -> None:
    shared = {"gpu_device": "host", "shm_enabled": True, "shm_dir": str(tmp_path), "include_patterns": ("*",)}
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    want = blocks(torch.ones(1, 64))
    name = f"emptied-{os.getpid()}"
    ft.offload(blocks, ft.OffloadConfig(**shared, resident_below_bytes=0), name=name)
    assert torch.equal(blocks(torch.ones(1, 64)), want) and list(tmp_path.iterdir())
    ft.release(name=name, keep_weights=False)
    assert [block.weight.numel() for block in blocks] == [0] * 4
    assert not list(tmp_path.iterdir()), "the last user takes the store along"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
def test_a_store_is_pinned_before_the_first_step(mode: str) -> None:
    one = Pair(Blocks(count=6, width=1024, inner=8192), noise(2, 1024), device="cuda", budget=0.6, transfer_mode=mode)
    pin = one.manager.report()["store"]["pin"]
    assert pin["pinned"] == pin["wanted"] > 100 << 20, pin["reason"]
    one.to_inference()
    one.streams(3)
    one.release()


EAGER_LIFE = """
import sys, torch
import flextensor as ft
from tests.engine.models import Blocks
torch.set_grad_enabled(False)
model = Blocks()
ft.offload(model, ft.OffloadConfig(include_patterns=("layers.*",), gpu_device="host", resident_below_bytes=256))
for _ in range(5):
    model(torch.randn(2, 48))
manager = ft.get_offload_manager()
assert manager.phase == "inference" and manager.live().copied_bytes_total > 0
manager.replan(1.0)
model(torch.randn(2, 48))
manager.release()
print(sorted({"torch._dynamo", "torch._inductor", "ray"} & set(sys.modules)))
"""


def test_an_eager_model_does_not_wait_for_the_compiler_to_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER_LIFE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
