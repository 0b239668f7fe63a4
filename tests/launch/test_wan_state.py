"""A video whose denoising was broken off goes on at the state that was kept, and ends with the same bits."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flextensor
from cluster.checkpoints import ItemCheckpoints
from flextensor import registry
from tests.launch.wan import ITEMS, SIZES, context, managers

pytest.importorskip("diffusers")

from launch.wan_state import DenoisingState, restore_scheduler, scheduler_state
from launch.wan_t2v import WanT2VTask


@pytest.fixture(autouse=True)
def managers_end() -> Iterator[None]:
    yield
    for name in registry.names():
        flextensor.release(name)


class Killed(BaseException):
    """The process dies here, as far as one can have it in a test."""


def ready(output: Path, kept: Path) -> WanT2VTask:
    task = WanT2VTask({"tiny": True, **SIZES, "steps": 6, "output_dir": str(output)})
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    task.load(replace(context(namespace), checkpoints=ItemCheckpoints(kept, 0.0)))
    task.warm_up(ITEMS)
    return task


def test_a_broken_off_video_goes_on_at_its_step_in_either_stage(tmp_path: Path) -> None:
    kept, steps = tmp_path / "kept", 4  # ``tiny`` cuts six steps down to four
    task = ready(tmp_path / "whole", kept)
    (whole,) = task.run(ITEMS[:1])
    assert not kept.exists()
    each = task._ready().steps_of_each(steps)
    assert all(each), "both transformers have a part"
    first, second, _ = managers("w0", "w0-2", "w0-text")
    broken = ready_again(task, tmp_path / "broken")
    for dies_in in (2, 4):  # in the first stage, and in the second
        calls: list[int] = []

        def die(_: int, calls: list[int] = calls, most: int = 2 * (dies_in - 1)) -> None:
            calls.append(1)
            if len(calls) > most:
                raise Killed

        removers = [manager.on_step_boundary(die) for manager in (first, second)]
        with pytest.raises(Killed):
            broken.run(ITEMS[:1])
        for remove in removers:
            remove()
        (file,) = kept.iterdir()
        state = DenoisingState.from_bytes(ItemCheckpoints(kept, 0.0).of(broken._key(broken._request(ITEMS[0]))).load())
        assert state is not None and state.steps == dies_in - 1 and file.exists()
        later: list[int] = []
        removers = [manager.on_step_boundary(later.append) for manager in (first, second)]
        (again,) = broken.run(ITEMS[:1])
        for remove in removers:
            remove()
        assert len(later) == 2 * (steps - state.steps), "only the rest was run"
        assert {key: again[key] for key in ("latents_sha256", "frames_sha256")} == {
            key: whole[key] for key in ("latents_sha256", "frames_sha256")
        }
        assert not kept.exists()


def ready_again(task: WanT2VTask, output: Path) -> WanT2VTask:
    """The same loaded task with another folder for its videos."""
    task.output = output
    return task


def test_a_state_goes_to_bytes_and_back_and_a_spoilt_one_is_not_used() -> None:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.set_timesteps(5)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 2, 3, generator=generator)
    for t in scheduler.timesteps[:3]:
        latents = scheduler.step(latents * 0.3, t, latents, return_dict=False)[0]
    kept = DenoisingState.of(3, latents, scheduler, generator).to_bytes()
    unbroken = latents
    for t in scheduler.timesteps[3:]:
        unbroken = scheduler.step(unbroken * 0.3, t, unbroken, return_dict=False)[0]
    state = DenoisingState.from_bytes(kept)
    assert state is not None
    other = UniPCMultistepScheduler.from_config(scheduler.config)
    other.set_timesteps(5)
    restore_scheduler(other, state.scheduler)
    latents = state.latents
    for t in other.timesteps[3:]:
        latents = other.step(latents * 0.3, t, latents, return_dict=False)[0]
    assert torch.equal(latents, unbroken)
    assert "_internal_dict" not in scheduler_state(scheduler)
    assert DenoisingState.from_bytes(kept[: len(kept) // 2]) is None
    assert DenoisingState.from_bytes(b"") is None and DenoisingState.from_bytes(None) is None


def test_workers_are_given_an_absolute_folder_for_videos() -> None:
    task = WanT2VTask({"tiny": True})
    assert task.sent_options == {"tiny": True, "output_dir": str(Path.cwd() / "out/videos")}
