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

from tests.launch.conftest import ROOT, Job, end_of, start_command

from .test_causal_lm import expected
from .test_generate import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray_launch"), pytest.mark.slow]

NEW_TOKENS = 300


def test_a_long_batch_outlives_its_worker_and_its_driver(
    local_ray: str, make_job: Callable[..., Job], small_model: Path
) -> None:
    job = make_job(
        items=3,
        workers=1,
        checkpoint_seconds=0.3,
        task_options={"max_new_tokens": NEW_TOKENS},
        offload={"host_link_bytes_per_second": "20MB/s"},
    )
    kept = job.output.with_name("answers.checkpoints")

    def newest() -> float:
        return max((file.stat().st_mtime for file in kept.glob("*.checkpoint")), default=0.0)

    process = job.start("--address", local_ray, "--namespace", "inside")
    wait_for(lambda: newest() > 0)
    time.sleep(2)
    coordinator = ray.get_actor("coordinator", namespace="inside")
    (worker,) = ray.get(coordinator.status.remote(), timeout=120).workers
    os.kill(worker.pid, signal.SIGKILL)
    killed = time.time()
    wait_for(lambda: newest() > killed + 1)  # the new worker has taken the batch up
    tokens = [len(row) for file in kept.glob("*.checkpoint") for row in _rows(file)]
    process.kill()
    process.communicate()
    assert job.output.read_bytes() == b""
    wait_for(lambda: "inside" not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)})
    quick = ("--set", "offload.host_link_bytes_per_second=1GB/s")  # no more need for time
    code, out, err = end_of(job.start("--address", local_ray, "--namespace", "inside", *quick))
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


def test_a_video_outlives_its_worker_and_its_driver_to_the_same_bits(local_ray: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    (tmp_path / "prompts.jsonl").write_text('{"id": "sea", "prompt": "Waves at dusk.", "seed": 5}\n')
    kept = tmp_path / "killed" / "videos.checkpoints"

    def start(name: str, link: str) -> Any:
        out = tmp_path / name
        arguments = ["generate", "--config", str(ROOT / "configs" / "wan-t2v-compiled.yaml"), "--tiny"]
        arguments += ["--device", "host", "--workers", "1", "--address", local_ray, "--namespace", name]
        arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(out / "videos.jsonl")]
        arguments += ["--report", str(out / "report.json"), "--set", f"task_options.output_dir={out}"]
        arguments += ["--set", "task_options.compile=none", "--set", "checkpoint_seconds=0.1"]
        arguments += ["--set", f"offload.host_link_bytes_per_second={link}", "--set", f"offload.shm_namespace={name}"]
        return start_command(*arguments)

    def line(name: str) -> dict[str, Any]:
        (one,) = [json.loads(text) for text in (tmp_path / name / "videos.jsonl").read_text().splitlines()]
        found: dict[str, Any] = one
        return found

    process = start("killed", "3MB/s")  # a step takes seconds
    wait_for(lambda: any(kept.glob("*.checkpoint")))
    coordinator = ray.get_actor("coordinator", namespace="killed")
    (worker,) = ray.get(coordinator.status.remote(), timeout=120).workers
    os.kill(worker.pid, signal.SIGKILL)
    (file,) = kept.glob("*.checkpoint")
    before = file.stat().st_mtime
    wait_for(lambda: file.exists() and file.stat().st_mtime > before)  # a step further, in the new worker
    process.kill()
    process.communicate()
    code, said, errors = end_of(start("killed", "1GB/s"))
    assert code == 0, said + errors
    assert not kept.exists()
    code, said, errors = end_of(start("quiet", "1GB/s"))
    assert code == 0, said + errors
    digests = ("latents_sha256", "frames_sha256")
    assert {key: line("killed")[key] for key in digests} == {key: line("quiet")[key] for key in digests}
    files = {path.name for path in (tmp_path / "killed").iterdir()}
    assert not [name for name in files if ".part" in name or "latents" in name], files
