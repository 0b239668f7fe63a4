"""A Wan text-to-video checkpoint on disk, as diffusers saves it. No torch: asked before anything is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.model_files import TaskInputError, stored_tensors

TRANSFORMERS = ("transformer", "transformer_2")
_WEIGHTS = ("text_encoder", "vae")
_FOLDERS = ("tokenizer", "scheduler")


@dataclass(frozen=True)
class WanIndex:
    """What ``model_index.json`` says. transformers: one name or two; with two, ``boundary_ratio`` is the share of the
    noise schedule at and above which the first one works."""

    directory: Path
    transformers: tuple[str, ...]
    scheduler: str
    boundary_ratio: float | None
    expand_timesteps: bool


def read_index(directory: str | Path) -> WanIndex:
    """The directory's parts, checked by their files' headers.

    Raises TaskInputError when it is missing, is another pipeline's, or lacks a part.
    """
    folder = Path(directory)
    file = folder / "model_index.json"
    if not folder.is_dir():
        raise TaskInputError(
            f"model directory {folder} does not exist; name a Wan text-to-video checkpoint in diffusers' form, or set "
            "the task option tiny for a small random one"
        )
    try:
        index = json.loads(file.read_text())
        kind = index["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskInputError(f"{folder} has no usable model_index.json ({error}); name a diffusers pipeline") from error
    if kind != "WanPipeline":
        raise TaskInputError(f"{folder} is a {kind}; this task runs a WanPipeline (text to video)")
    transformers = tuple(name for name in TRANSFORMERS if _is_given(index.get(name)))
    if not transformers or transformers[0] != TRANSFORMERS[0]:
        raise TaskInputError(f"{file} names no 'transformer'; copy the checkpoint again")
    for name in (*_WEIGHTS, *transformers):
        stored_tensors(folder / name)
    for name in _FOLDERS:
        if not (folder / name).is_dir():
            raise TaskInputError(f"{folder} lacks the folder {name!r}; copy the checkpoint again")
    return WanIndex(
        directory=folder,
        transformers=transformers,
        scheduler=str(index["scheduler"][1]),
        boundary_ratio=index.get("boundary_ratio"),
        expand_timesteps=bool(index.get("expand_timesteps", False)),
    )


def _is_given(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None
