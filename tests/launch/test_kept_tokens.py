"""A batch of answers that was broken off goes on behind its kept tokens, and ends with the unbroken run's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flextensor
from cluster.checkpoints import ItemCheckpoints
from launch.causal_lm import CausalLMTask

from .test_causal_lm import ITEMS, context, tokens
from .tiny_causal_lm import llama_config, save_model

NAMESPACE = "test-kept-tokens"


@pytest.fixture(autouse=True)
def managers_end() -> Iterator[None]:
    yield
    for name in ("w0", "w1"):
        with contextlib.suppress(flextensor.OffloadError):
            flextensor.release(name=name)


class Killed(BaseException):
    """The process dies here, as far as one can have it in a test."""


def ready(model: Path, kept: Path, name: str, device: str = "host", **options: Any) -> CausalLMTask:
    task = CausalLMTask({"model": str(model), "dtype": "float32", **options})
    task.load(
        replace(
            context(NAMESPACE, name, budget_fraction=0.4, gpu_device=device), checkpoints=ItemCheckpoints(kept, 0.0)
        )
    )
    task.warm_up(ITEMS)
    return task


def broken_off(task: CausalLMTask, at: int) -> None:
    """The batch of ITEMS by the task of manager ``w0``, killed at its ``at``-th step boundary."""
    steps: list[int] = []

    def die(step: int) -> None:
        steps.append(step)
        if len(steps) == at:
            raise Killed

    remove = flextensor.get_offload_manager("w0").on_step_boundary(die)
    with pytest.raises(Killed):
        task.run(ITEMS)
    remove()


@pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{"attention": "eager"}, {"cache": "static"}])
def test_a_broken_off_batch_goes_on_behind_its_tokens(tmp_path: Path, options: dict[str, Any], device: str) -> None:
    model, kept = save_model(tmp_path / "model", llama_config()), tmp_path / "kept"
    task = ready(model, kept, "w0", device, max_new_tokens=40, **options)
    whole = tokens(task.run(ITEMS))
    assert not kept.exists(), "nothing is left of a batch that is done"
    broken_off(task, 30)
    assert len(list(kept.iterdir())) == 1
    assert task.run(ITEMS[:2]) and len(list(kept.iterdir())) == 1, "another batch does not take it"
    other = ready(model, kept, "w1", device, max_new_tokens=40, **options)
    later: list[int] = []
    flextensor.get_offload_manager("w1").on_step_boundary(later.append)
    assert tokens(other.run(ITEMS)) == whole
    assert 5 <= len(later) <= 40 - 25, "only the rest was run"
    assert not kept.exists()
    assert flextensor.get_offload_manager("w1").live().copied_bytes_total > 0


def test_rows_that_had_ended_stay_ended_and_a_whole_batch_runs_no_step(tmp_path: Path) -> None:
    model, kept = save_model(tmp_path / "model", llama_config()), tmp_path / "kept"
    task = ready(model, kept, "w0", max_new_tokens=24)
    first = tokens(task.run(ITEMS))
    end = first["b"][4]
    text = (model / "generation_config.json").read_text()
    (model / "generation_config.json").write_text(text.replace('"eos_token_id": 2', f'"eos_token_id": {end}'))
    flextensor.release(name="w0")
    task = ready(model, kept, "w0", max_new_tokens=24)
    whole = task.run(ITEMS)
    assert {result["id"]: result["finish"] for result in whole}["b"] == "eos"
    broken_off(task, 16)
    (file,) = kept.iterdir()
    again = task.run(ITEMS)
    assert again == whole
    # A batch whose last token was kept is answered without a step.
    rows = [row for row in tokens(whole).values()]
    longest = max(map(len, rows))
    checkpoint = ItemCheckpoints(kept, 0.0).of(task._key(ITEMS))
    checkpoint.save(json.dumps({"tokens": [row + [end] * (longest - len(row)) for row in rows]}).encode())
    assert file.exists()
    steps: list[int] = []
    flextensor.get_offload_manager("w0").on_step_boundary(steps.append)
    assert task.run(ITEMS) == whole and steps == []
    checkpoint.save(json.dumps({"tokens": [[1, 2]]}).encode())
    assert task.run(ITEMS) == whole and steps != [], "tokens of another batch are not used"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_rehearsal_says_what_the_whole_batch_takes_and_leaves_nothing(tmp_path: Path, cache: str) -> None:
    model = save_model(tmp_path / "model", llama_config())
    task = ready(model, tmp_path / "kept", "w0", max_new_tokens=32, cache=cache)
    before = tokens(task.run(ITEMS[:2]))
    manager = flextensor.get_offload_manager("w0")
    with manager.every_step_timed():
        rehearsed = task.rehearse([*ITEMS, {"id": "long", "prompt": "x" * 900}], brief=False)
    steps = manager.sampled_steps()
    assert len(steps) == 9 and steps[0].kind != steps[1].kind == steps[-1].kind
    assert (rehearsed.tokens, rehearsed.leading, rehearsed.repeats) == (6 * 32, 1, 31)
    # 4 layers x 2 heads x 16 numbers of 4 bytes, keys and values, of 6 rows.
    a_position = 2 * 4 * 2 * 16 * 4 * 6
    assert rehearsed.cache_bytes % a_position == 0
    longer = (rehearsed.cache_bytes - rehearsed.cached_bytes) / a_position
    assert longer == (0 if cache == "static" else 32 - 9)
    assert tokens(task.run(ITEMS[:2])) == before
