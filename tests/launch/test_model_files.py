"""Model directories: what is in one, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.model_files import TaskInputError, checkpoint_files, stored_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_headers_tell_names_shapes_types_and_bytes(model: Path) -> None:
    stored = stored_tensors(model)
    assert {(t.name, t.dtype, t.shape, t.nbytes) for t in stored.values()} == {
        ("a", "F32", (2, 3), 24),
        ("b", "BF16", (4,), 8),
    }


def test_the_index_decides_which_files_are_the_model(model: Path) -> None:
    save_file({"c": torch.zeros(1)}, model / "part-1.safetensors")
    save_file({"stray": torch.zeros(1)}, model / "consolidated.safetensors")
    index = {"weight_map": {"c": "part-1.safetensors", "a": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in checkpoint_files(model)] == ["model.safetensors", "part-1.safetensors"]
    assert set(stored_tensors(model)) == {"a", "b", "c"}
    (model / "part-1.safetensors").unlink()
    with pytest.raises(TaskInputError, match=r"lacks part-1.safetensors, which its index names"):
        checkpoint_files(model)


def test_a_directory_that_is_no_model_is_named_with_the_remedy(model: Path) -> None:
    with pytest.raises(TaskInputError, match=r"nowhere does not exist; name a Hugging Face"):
        checkpoint_files(model / "nowhere")
    with pytest.raises(TaskInputError, match=r"is a file, not a directory"):
        checkpoint_files(model / "config.json")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(TaskInputError, match=r"has no safetensors \(it has pytorch_model.bin\); save the model with"):
        checkpoint_files(model)
    (model / "config.json").unlink()
    with pytest.raises(TaskInputError, match=r"has no config.json"):
        checkpoint_files(model)


def test_a_file_that_is_cut_short_or_something_else_is_found_by_its_header(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(TaskInputError, match=r"is cut short: 5 bytes are missing"):
        stored_tensors(model)
    for junk in (b"", b"\x00" * 64, b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(junk)
        with pytest.raises(TaskInputError, match=r"is not a safetensors file"):
            stored_tensors(model)
