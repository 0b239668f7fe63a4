"""``batch_size: auto``: tried by the workers, chosen with the plan, shown, and the same in a run that goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flextensor
from cluster.batch_size import BatchTrial, request_for
from launch.causal_lm import CausalLMTask
from tests.launch.conftest import Job, end_of

from .test_causal_lm import ITEMS, context, tokens
from .tiny_causal_lm import llama_config, save_model

LINK = {"offload": {"host_link_bytes_per_second": "200MB/s"}, "task_options": {"max_new_tokens": 12}}


@pytest.fixture
def manager_ends() -> Iterator[None]:
    yield
    with contextlib.suppress(flextensor.OffloadError):
        flextensor.release(name="w0")


def test_caches_of_larger_batches_take_memory_from_weights_until_nothing_fits(
    tmp_path: Path, manager_ends: None
) -> None:
    config = llama_config(hidden_size=128, intermediate_size=512, num_hidden_layers=6, max_position_embeddings=256)
    task = CausalLMTask({"model": str(save_model(tmp_path, config)), "dtype": "float32", "max_new_tokens": 192})
    # A share of the memory for everything: what caches take, weights give.
    settings = {"host_memory_bytes": 9_000_000, "max_gpu_mem_fraction": 1.0, "host_link_bytes_per_second": "400MB/s"}
    task.load(context("test-batch-size", **settings))
    task.warm_up(ITEMS)
    manager = flextensor.get_offload_manager("w0")
    items = [{"id": str(k), "prompt": "word " * 8} for k in range(64)]
    trial = BatchTrial(task, manager)
    before, said = manager.plan, []
    points = trial.run(request_for(items, (2, 8, 32, 64)), said.append)
    assert manager.plan is before, "trying takes no plan"
    fit = [point for point in points if not point.refused]
    assert [point.batch_size for point in fit] == [2, 8]
    assert all(a.beside_bytes < b.beside_bytes for a, b in itertools.pairwise(fit))
    assert all(a.weight_bytes >= b.weight_bytes for a, b in itertools.pairwise(fit))
    assert fit[-1].weight_bytes < fit[0].weight_bytes and fit[-1].streamed_bytes > fit[0].streamed_bytes
    assert all(point.weight_bytes + point.beside_bytes <= 9_000_000 for point in fit)
    assert points[2].refused and len(points) == 3, "the first that does not fit ends it"
    assert said[0] == "trying batches of 2"
    chosen = trial.settle(fit[-1].batch_size)
    task.run(items[:2])
    assert manager.plan is chosen and manager.profile.activation_bytes == fit[-1].beside_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_on_a_gpu_the_peak_of_a_batch_is_measured_and_its_plan_runs(
    tmp_path: Path, manager_ends: None, cache: str
) -> None:
    config = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    options = {"model": str(save_model(tmp_path, config)), "dtype": "float32", "max_new_tokens": 64, "cache": cache}
    task = CausalLMTask(options)
    task.load(context("test-batch-size", gpu_device="cuda:0", budget_fraction=0.5))
    task.warm_up(ITEMS)
    items = [{"id": str(k), "prompt": "word " * 8} for k in range(64)]
    trial = BatchTrial(task, flextensor.get_offload_manager("w0"))
    points = trial.run(request_for(items, (1, 8, 64)), lambda note: None)
    assert not any(point.refused for point in points)
    assert all(a.beside_bytes < b.beside_bytes for a, b in itertools.pairwise(points))
    assert points[-1].tokens_per_second > 4 * points[0].tokens_per_second, "64 items share one pass"
    before = tokens(task.run(items[:8]))
    manager = flextensor.get_offload_manager("w0")
    chosen = trial.settle(8)
    manager.device.reset_peak()
    assert tokens(task.run(items[:8])) == before and manager.plan is chosen
    used = manager.get_gpu_memory_usage()
    beside = used["peak"] - used["weights"] - used["other_weights"]
    assert beside <= 1.1 * points[1].beside_bytes + (1 << 20)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray_launch")
def test_a_run_chooses_its_batch_size_and_shows_what_from(local_ray: str, make_job: Callable[..., Job]) -> None:
    job = make_job(items=20, batch_size="auto", verify=4, **LINK)
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "auto"))
    assert code == 0, out + err
    report: dict[str, Any] = json.loads(job.report.read_text())
    choice = report["batch_size"]
    assert [point["batch_size"] for point in choice["curve"]][:3] == [1, 2, 4]
    taken = next(point for point in choice["curve"] if point["batch_size"] == choice["batch_size"])
    rates = {point["batch_size"]: point["job_tokens_per_second"] for point in choice["curve"]}
    assert taken["job_tokens_per_second"] >= 0.98 * max(rates.values()) and rates[1] < 0.7 * rates[choice["batch_size"]]
    assert "tokens/s" in out and "<- taken" in out and f"batches of {choice['batch_size']}\n" in out
    assert report["verify"]["checked"] == report["verify"]["identical"] >= 4
    assert all(worker["streamed_bytes"] > 0 for worker in report["workers"])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray_launch")
def test_a_run_that_goes_on_keeps_its_batch_size_and_another_size_gives_the_same_tokens(
    local_ray: str, make_job: Callable[..., Job]
) -> None:
    job = make_job(items=20, batch_size="auto", **LINK)
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "auto"))
    assert code == 0, out + err
    auto, size = job.answers(), json.loads(job.report.read_text())["batch_size"]["batch_size"]
    job.output.write_text("".join(job.output.read_text().splitlines(keepends=True)[:-1]))
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "auto"))
    assert code == 0 and f"batches of {size} (as in the run before)" in out, out + err
    assert tokens(list(job.answers().values())) == tokens(list(auto.values()))
    fixed = make_job(items=20, batch_size=3, **LINK)
    code, out, err = end_of(fixed.start("--address", local_ray, "--namespace", "auto"))
    assert code == 0, out + err
    assert tokens(list(fixed.answers().values())) == tokens(list(auto.values()))
