"""SIGKILL of a worker and of the command in the middle of a long batch: it goes on inside the batch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.launch.conftest import Job, end_of

from .test_causal_lm import expected
from .test_generate import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]

NEW_TOKENS = 300


def test_a_long_batch_outlives_its_worker_and_its_driver(
    local_ray: str, make_job: Callable[..., Job], small_model: Path
) -> None:
    job = make_job(
        items=3,
        workers=1,
        checkpoint_seconds=0.3,
        task_options={"max_new_tokens": NEW_TOKENS},
        offload={"host_link_bytes_per_second": "60MB/s"},
    )
    kept = job.output.with_name("answers.checkpoints")

    def newest() -> float:
        return max((file.stat().st_mtime for file in kept.glob("*.checkpoint")), default=0.0)

    process = job.start("--address", local_ray, "--namespace", "inside")
    wait_for(lambda: newest() > 0)
    time.sleep(2)
    coordinator = ray.get_actor("coordinator", namespace="inside")
    (worker,) = ray.get(coordinator.status.remote(), timeout=30).workers
    os.kill(worker.pid, signal.SIGKILL)
    killed = time.time()
    wait_for(lambda: newest() > killed + 1)  # the new worker has taken the batch up
    tokens = [len(row) for file in kept.glob("*.checkpoint") for row in _rows(file)]
    process.kill()
    process.communicate()
    assert job.output.read_bytes() == b""
    wait_for(lambda: "inside" not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)})
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "inside"))
    assert code == 0, out + err
    prompts = [json.loads(line) for line in (job.config.parent / "prompts.jsonl").read_text().splitlines()]
    items = sorted(prompts, key=lambda item: -len(item["prompt"]))
    want = expected(small_model, items, NEW_TOKENS)
    assert {key: answer["tokens"] for key, answer in job.answers().items()} == want
    report: dict[str, Any] = json.loads(job.report.read_text())
    warm_up = 16
    assert report["workers"][0]["steps"] <= NEW_TOKENS - min(tokens) + warm_up, "only the rest was run"
    assert not kept.exists()


def _rows(file: Path) -> list[list[int]]:
    raw = file.read_bytes()
    rows: list[list[int]] = json.loads(raw[raw.index(b'{"tokens"') :])["tokens"]
    return rows
