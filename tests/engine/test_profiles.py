"""Profiles saved and loaded: the first call streams by a plan; what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flextensor as ft
from flextensor.profile import Profile
from tests.engine.conftest import MakePair
from tests.engine.harness import Pair, noise
from tests.engine.models import Alternating, Blocks, Counters, Linears, TiedLM


@pytest.fixture
def saved(pair: MakePair, tmp_path: Path) -> Path:
    """The profile of Blocks."""
    one = pair(Blocks(), noise(2, 48))
    with pytest.raises(ft.OffloadError, match="no profile yet"):
        ft.save_profile(tmp_path / "early.json", one.name)
    one.to_inference()
    path = tmp_path / "deep" / "blocks.json"
    ft.save_profile(path, one.name)
    one.release()
    return path


@pytest.mark.parametrize("budget", ["all", "some", "none"])
@pytest.mark.parametrize("mode", ["allocation_block_transfer", "raw_block_transfer"])
@pytest.mark.parametrize("start", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_call_after_loading_is_planned(
    device: str, tmp_path: Path, start: str, mode: str, budget: str
) -> None:
    def make(**settings: Any) -> Pair:
        return Pair(Blocks().to(start), noise(2, 48), device=device, transfer_mode=mode, under_model=False, **settings)

    first = make(budget=0.5)
    first.to_inference()
    least = first.least()
    first.manager.save_profile(tmp_path / "p.json")
    first.release()
    one = make(budget={"all": None, "some": 0.6, "none": least}[budget])
    if budget == "all":
        one.manager.release()
        one = make(budget=2 * one.model_bytes)
    ft.load_profile(tmp_path / "p.json", one.name)
    assert one.manager.phase == "inference" and one.manager.iters_before_inference == 0
    one.run(3)
    live = one.manager.live()
    assert live.unforeseen_visits == 0
    plan = one.manager.plan
    if budget == "all":
        assert not plan.offsets
    else:
        one.streams(3)
        assert plan.streamed_bytes > 0
        assert one.manager.report()["device_weight_bytes"] <= (one.budget or 0)
    one.replan(least)
    one.release()


def test_offload_from_profile(device: str, saved: Path) -> None:
    config = ft.OffloadConfig(
        include_patterns=("layers.*",), gpu_device=device, resident_below_bytes=256, budget_bytes="100KiB"
    )
    config = config.updated(host_link_bytes_per_second=2e9)
    model, plain = Blocks(), Blocks()
    plain.load_state_dict(model.state_dict())
    plain.to("cpu" if device == "host" else device)
    ft.offload_from_profile(model, saved, config, name="loaded")
    x = torch.randn(2, 48, device=next(plain.parameters()).device)
    assert torch.equal(model(x), plain(x))
    manager = ft.get_offload_manager("loaded")
    assert manager.phase == "inference" and manager.plan is not None and manager.plan.streamed_bytes > 0
    ft.release("loaded")


@pytest.mark.parametrize("other", ["more units", "other sizes", "other names", "other threshold"])
def test_a_profile_of_another_model_is_refused(pair: MakePair, saved: Path, other: str) -> None:
    models = {
        "more units": lambda: pair(Blocks(count=7), noise(2, 48)),
        "other sizes": lambda: pair(Blocks(inner=130), noise(2, 48)),
        "other names": lambda: pair(Linears([48] * 7), noise(2, 48)),
        "other threshold": lambda: pair(Alternating(), noise(2, 64), patterns=("linears.*",)),
    }
    one = models[other]()
    with pytest.raises(ft.ProfileMismatch, match="profile again"):
        one.manager.load_profile(saved)
    assert one.manager.phase == "discovery"
    one.to_inference()


def test_a_profile_of_another_dtype_is_refused(pair: MakePair, tmp_path: Path) -> None:
    half = pair(Blocks().half(), lambda i: torch.randn(2, 48, dtype=torch.float16))
    half.to_inference()
    half.manager.save_profile(tmp_path / "half.json")
    other = pair(Blocks().bfloat16(), lambda i: torch.randn(2, 48, dtype=torch.bfloat16))
    with pytest.raises(ft.ProfileMismatch, match="bfloat16"):
        other.manager.load_profile(tmp_path / "half.json")
    other.to_inference()


def test_a_profile_of_another_device_is_refused(pair: MakePair, saved: Path) -> None:
    Profile.load(saved)
    data = json.loads(saved.read_text())
    data["device"] = "NVIDIA Imaginary 9000"
    saved.write_text(json.dumps(data))
    one = pair(Blocks(), noise(2, 48))
    with pytest.raises(ft.ProfileMismatch, match="Imaginary"):
        one.manager.load_profile(saved)
    one.run(4)


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"format": 99}', "\x00\x01"])
def test_a_file_that_is_no_profile_is_refused(pair: MakePair, tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    one = pair(Blocks(), noise(2, 48))
    with pytest.raises(ft.ProfileMismatch, match="profile again"):
        one.manager.load_profile(path)
    one.run(4)


def test_what_discovery_found_is_in_the_profile(pair: MakePair, tmp_path: Path) -> None:
    """State of the forward, tied weights: known at once when a profile is loaded."""
    for model, inputs, patterns in (
        (Counters, noise(2, 64), ("layers.*",)),
        (TiedLM, lambda i: torch.randint(0, 300, (2, 6)), ("embed", "layers.*", "head")),
    ):
        settings: dict[str, Any] = {"patterns": patterns, "budget": 0.95, "under_model": False, "exact": False}
        first = pair(model(), inputs, **settings)
        first.to_inference()
        first.manager.save_profile(tmp_path / "found.json")
        one = pair(model(), inputs, **settings)
        one.manager.load_profile(tmp_path / "found.json")
        one.run(4)
        one.replan(one.least())
        one.same_state()


def test_stored_profiles_are_found_again_and_bad_ones_replaced(pair: MakePair, tmp_path: Path) -> None:
    first = pair(Blocks(), noise(2, 48), profile_storage_dir=str(tmp_path), name="stored")
    first.to_inference()
    first.release()
    (path,) = tmp_path.iterdir()
    second = pair(Blocks(), noise(2, 48), profile_storage_dir=str(tmp_path), name="stored")
    assert second.manager.phase == "inference"
    second.streams(2)
    second.release()
    path.write_text("{")
    third = pair(Blocks(), noise(2, 48), profile_storage_dir=str(tmp_path), name="stored")
    assert third.manager.phase == "discovery"
    third.to_inference()
    Profile.load(path)
    third.release()
    half = pair(Blocks().half(), lambda i: torch.randn(2, 48).half(), profile_storage_dir=str(tmp_path), name="stored")
    half.to_inference()
    half.release()
    brain = pair(
        Blocks().bfloat16(), lambda i: torch.randn(2, 48).bfloat16(), profile_storage_dir=str(tmp_path), name="stored"
    )
    brain.to_inference()
    assert len(list(tmp_path.iterdir())) in (2, 3)


def test_out_of_memory_while_profiling_is_no_sample_and_saves_nothing(pair: MakePair, tmp_path: Path) -> None:
    one = pair(Blocks(), noise(2, 48), profile_storage_dir=str(tmp_path), name="stored", profiling_iters=2)
    one.run(2)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for an activation")

    for _ in range(3):
        hook = one.model.layers[4].register_forward_pre_hook(full)
        with pytest.raises(torch.OutOfMemoryError):
            one.model(*one.arguments())
        hook.remove()
        assert one.manager.phase == "profiling" and one.manager.plan is None and not list(tmp_path.iterdir())
    one.run(1)
    assert one.manager.phase == "inference" and one.manager.plan is not None
    (path,) = tmp_path.iterdir()
    assert Profile.load(path).visits == one.manager.plan.visits
    one.streams(4)
    assert one.manager.report()["device_weight_bytes"] <= (one.budget or 0)


def test_a_read_only_store_of_profiles_is_not_written(pair: MakePair, tmp_path: Path) -> None:
    one = pair(Blocks(), noise(2, 48), profile_storage_dir=str(tmp_path), profile_read_only=True)
    one.to_inference()
    assert not list(tmp_path.iterdir())


def test_a_loaded_profile_whose_budget_has_no_plan_leaves_a_working_model(pair: MakePair, saved: Path) -> None:
    one = pair(Blocks(), noise(2, 48), budget=30_000)
    with pytest.raises(ft.BudgetError) as caught:
        one.manager.load_profile(saved)
    one.run(2)
    one.budget = caught.value.needed
    one.replan(caught.value.needed)
    one.streams(3)


def test_a_profile_edited_by_hand_that_lost_a_residency_is_still_right(pair: MakePair, saved: Path) -> None:
    profile = Profile.load(saved)
    tensors = tuple(replace(tensor, keep_resident=False, reason="") for tensor in profile.tensors)
    replace(profile, tensors=tensors).save(saved)
    one = pair(Blocks(), noise(2, 48))
    one.manager.load_profile(saved)
    one.run(4)
