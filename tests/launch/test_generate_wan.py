"""The two video configurations with the small random pipeline: ``flextensor generate`` runs them as people start them,
and a worker compiles as they say."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import flextensor
from cluster.messages import Item, Lease, WorkerStart
from cluster.worker import Worker
from launch.run_config import load_run_config
from launch.wan_tiny import BLOCKS
from tests.launch.conftest import ROOT, end_of, start_command

pytest.importorskip("diffusers")


@pytest.mark.ray
@pytest.mark.xdist_group("ray_launch")
@pytest.mark.parametrize("name", ["wan-t2v-compiled", pytest.param("wan-t2v-external-compile", marks=pytest.mark.slow)])
def test_a_video_configuration_runs_compiled_streams_and_verifies(local_ray: str, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    settings = {
        "task_options.compile_backend": "aot_eager",
        "task_options.output_dir": str(out),
        "offload.shm_namespace": f"launch-tests-{name}",
    }
    arguments = ["generate", "--config", str(ROOT / "configs" / f"{name}.yaml"), "--tiny", "--device", "host"]
    arguments += ["--output", str(out / "videos.jsonl"), "--report", str(out / "report.json"), "--verify", "2"]
    arguments += ["--workers", "1", "--address", local_ray, "--namespace", name]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    code, said, errors = end_of(start_command(*arguments))
    assert code == 0, said + errors
    lines = [json.loads(line) for line in (out / "videos.jsonl").read_text().splitlines()]
    prompts = [json.loads(line) for line in (ROOT / "configs" / "wan-prompts.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines} == {prompt["id"] for prompt in prompts}
    for line in lines:
        with Image.open(line["preview"]) as preview:
            assert preview.size == (64, 64)
        assert Path(line["video"]).stat().st_size > 0 and line["frames"] == 9
    report = json.loads((out / "report.json").read_text())
    assert report["verify"] == {"checked": 2, "identical": 2, "different": []}
    (detail,) = report["details"]
    assert detail["engine"]["streamed_bytes_a_step"] > 0
    assert detail["engine"]["device_weight_bytes"] <= 0.3 * detail["engine"]["weights_bytes"]
    for manager in ("", "-2"):
        (found,) = [value for key, value in detail["task"]["managers"].items() if key.endswith(f"0{manager}")]
        assert found["compile"]["compiled"] + found["compile"]["shared"] == BLOCKS and found["compile"]["eager"] == 0


@pytest.fixture
def namespace() -> Iterator[str]:
    yield f"test-{uuid.uuid4().hex[:12]}"
    for name in flextensor.registry.names():
        flextensor.release(name)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(None, marks=pytest.mark.slow)])
def test_a_worker_compiles_outside_the_engine_and_replans_where_the_configuration_says_so(
    namespace: str, tmp_path: Path, backend: str | None
) -> None:
    given = {"task_options.tiny": True, "task_options.output_dir": str(tmp_path), "device": "host"}
    if backend is not None:  # None: the configuration's own
        given["task_options.compile_backend"] = backend
    run = load_run_config(ROOT / "configs" / "wan-t2v-external-compile.yaml", given)
    assert run.task_options["compile"] == "external" and run.task_options["compile_backend"] == (backend or "inductor")
    items: list[Item] = [json.loads(line) for line in run.prompts.read_text().splitlines()][:1]
    torch._dynamo.reset()
    worker = Worker(
        WorkerStart(
            namespace="unit",
            rank=0,
            workers=1,
            device=run.device,
            config=run.offload_config(),
            task=run.task,
            task_options=run.task_settings(),
            budget=run.budget,
            store_namespace=namespace,
        )
    )
    worker.setup(tuple(items))
    try:
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results = worker.run(Lease(0, tuple(items))).results
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made > 0
        for name in ("worker-0", "worker-0-2"):
            manager = flextensor.get_offload_manager(name)
            assert manager.external_compile_active and manager.strategy_replan_status.applied is True
            report = manager.compile_report()
            assert (report.compiled + report.shared, report.eager, report.pending) == (BLOCKS, 0, 0)
            assert manager.plan is not None and manager.plan.streamed_bytes > 0
        assert worker.verify(tuple(items), tuple(results)) == {"checked": 1, "identical": 1, "different": []}
    finally:
        worker.close()
