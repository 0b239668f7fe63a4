"""A task made of a program's functions, without Ray around it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flextensor
from cluster.model_task import ModelTask
from cluster.task import TaskContext
from flextensor.config import OffloadConfig

ITEMS = [{"id": "a", "value": 1.0}, {"id": "b", "value": 2.0}]


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


def test_a_verification_looks_into_images_and_leaves_those_of_the_answers(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    shade = 0

    def run(model: Any, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = model(torch.stack([torch.full((64,), item["value"]) for item in items]))
        return [
            {
                "sum": row.sum(),
                "picture": image.new("L", (2, 2), shade),
                "inside": {"first": (row[:2], 1), "frames": [image.new("L", (2, 2), shade)]},
            }
            for row in rows
        ]

    task = ModelTask({}, model=make, run=run, files=tmp_path / "files")
    config = OffloadConfig(
        include_patterns=("*",),
        gpu_device="host",
        budget_fraction=0.5,
        resident_below_bytes=0,
        shm_namespace=f"test-{uuid.uuid4().hex[:8]}",
    )
    task.load(TaskContext(config, "model-task", config.shm_namespace, lambda note: None))
    try:
        task.warm_up(ITEMS)
        answers = task.run(ITEMS)
        assert task.verify(ITEMS, answers) == {"checked": 2, "identical": 2, "different": []}
        shade = 9
        assert task.verify(ITEMS, answers)["different"] == ["a", "b"]
        assert {Path(answer["picture"]).name for answer in answers} == {"a-picture.png", "b-picture.png"}
        assert image.open(answers[0]["picture"]).getpixel((0, 0)) == 0
        inside = json.loads(json.dumps(answers[0]))["inside"]
        assert len(inside["first"][0]) == 2 and inside["first"][1] == 1
        assert Path(inside["frames"][0]).name == "a-inside-frames-0.png"
    finally:
        flextensor.release(name="model-task", keep_weights=False)
