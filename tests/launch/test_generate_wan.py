"""``flextensor generate`` runs the two video configurations as people start them, with the small random pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from launch.wan_tiny import BLOCKS
from tests.launch.conftest import ROOT, end_of, start_command

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray_launch")]


@pytest.mark.parametrize("name", ["wan-t2v-compiled", pytest.param("wan-t2v-external-compile", marks=pytest.mark.slow)])
def test_a_video_configuration_runs_compiled_streams_and_verifies(local_ray: str, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    settings = {
        "task_options.tiny": "true",
        "task_options.compile_backend": "aot_eager",
        "task_options.output_dir": str(out),
        "offload.shm_namespace": f"launch-tests-{name}",
    }
    arguments = ["generate", "--config", str(ROOT / "configs" / f"{name}.yaml"), "--device", "host", "--workers", "1"]
    arguments += ["--output", str(out / "videos.jsonl"), "--report", str(out / "report.json"), "--verify", "2"]
    arguments += ["--address", local_ray, "--namespace", name]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    code, said, errors = end_of(start_command(*arguments), timeout=240)
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
