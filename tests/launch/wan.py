"""What tests of the Wan task share: contexts, items, tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import flextensor
from cluster.messages import Item
from cluster.task import TaskContext
from launch.video_files import Frames
from launch.wan_options import TINY_LIMITS
from launch.wan_t2v import WanT2VTask

ITEMS: list[Item] = [
    {"id": "cat", "prompt": "a cat on a wall", "seed": 3},
    {"id": "dog", "prompt": "a dog in the rain", "negative_prompt": "blurred"},
]
BUDGET = 1_300_000
"""Of the 4.4 MB of a tiny transformer."""
SIZES: dict[str, Any] = dict(TINY_LIMITS)


def context(namespace: str, name: str = "w0", **settings: Any) -> TaskContext:
    config = flextensor.OffloadConfig(
        **{
            "gpu_device": "host",
            "shm_enabled": True,
            "shm_namespace": namespace,
            "budget_bytes": BUDGET,
            "resident_below_bytes": 4096,
            "host_link_bytes_per_second": "2GB/s",
            **settings,
        }
    )
    return TaskContext(config, name, namespace, lambda text: None)


def loaded(namespace: str, output: Path, *, settings: dict[str, Any] | None = None, **options: Any) -> WanT2VTask:
    """A task with a tiny pipeline (or ``model=``), loaded and warm."""
    source = {} if "model" in options else {"tiny": True}
    task = WanT2VTask({**source, **SIZES, "output_dir": str(output), **options})
    task.load(context(namespace, **(settings or {})))
    task.warm_up(ITEMS)
    return task


def save_checkpoint(folder: Path, *, stages: int = 2) -> Path:
    """A tiny checkpoint as diffusers saves it, in shards, with the first ``stages`` transformers."""
    from launch.wan_tiny import tiny_parts, whole_pipeline

    parts = tiny_parts()
    if stages == 1:
        del parts.transformers["transformer_2"]
        parts.boundary_ratio = None
    whole_pipeline(parts).save_pretrained(folder, max_shard_size="2MB")
    return folder


def diffusers_frames(pipeline: Any, item: Item, seed: int) -> Frames:
    """What diffusers' own call of the pipeline gives: nothing of the task's code."""
    pipeline.set_progress_bar_config(disable=True)
    video = pipeline(
        prompt=item["prompt"],
        negative_prompt=item.get("negative_prompt", ""),
        height=SIZES["height"],
        width=SIZES["width"],
        num_frames=SIZES["frames"],
        num_inference_steps=SIZES["steps"],
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=SIZES["text_tokens"],
        output_type="np",
    ).frames[0]
    return np.rint(video * 255).astype(np.uint8)


def managers(*names: str) -> list[flextensor.OffloadManager]:
    return [flextensor.get_offload_manager(name) for name in names]
