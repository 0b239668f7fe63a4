"""The store file: open to any safetensors tool, and refused when it is not what it must be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flextensor.store import StoreAccessError, StoreCorruptError, TensorSource, UnitSpec, WeightSpec, shared_store
from flextensor.store.file_format import read_manifest
from tests.store.small_models import same, small_weights, units_of


def _keep_one(directory: str, seed: int = 0) -> Path:
    tensors = small_weights(seed)
    with shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=directory, keep=True) as store:
        return Path(store.path)


def _start(directory: str, seed: int = 0) -> None:
    tensors = small_weights(seed)
    shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=directory).close()


def test_the_safetensors_library_opens_it(shm_dir: str) -> None:
    tensors = small_weights()
    path = _keep_one(shm_dir)
    found = load_file(path)
    for name, tensor in tensors.items():
        order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
        assert same(found[name], tensor.permute(order))
    assert all(int(tensor.sum()) == 0 for name, tensor in found.items() if name not in tensors)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["flextensor.checksums"]).keys() == tensors.keys()


def test_data_begins_on_a_page_and_the_manifest_says_all(shm_dir: str) -> None:
    path = _keep_one(shm_dir)
    fd = os.open(path, os.O_RDONLY)
    manifest = read_manifest(fd, str(path))
    os.close(fd)
    assert manifest.header_bytes % 4096 == 0
    assert manifest.file_bytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    tensors = small_weights()
    assert {n: (t.dtype, t.shape, t.stride) for n, t in manifest.layout.by_name.items()} == {
        n: (t.dtype, tuple(t.shape), t.stride()) for n, t in tensors.items()
    }


def _edit_header(path: Path, old: bytes, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    assert len(old) == len(new) and data.count(old) >= 1
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 4096), "its manifest says"),
        (lambda path: os.truncate(path, 5), "no page-aligned safetensors header"),
        (lambda path: path.write_bytes(b"x" * 8192), "no page-aligned safetensors header"),
        (lambda path: _edit_header(path, b'flextensor.layout"', b'flextensor.layoot"'), "cannot be read"),
        (lambda path: _edit_header(path, b'bfloat16\\"', b'bfloat61\\"'), "cannot be read"),
        (lambda path: _edit_header(path, b"[500, 300], [300, 1]", b"[500, 301], [300, 1]"), "cannot be read"),
        (lambda path: _edit_header(path, b'version":"1"', b'version":"0"'), "version 0"),
        (lambda path: _edit_header(path, b"layers.0.norm", b"layers.0.nurm"), "'layers.0.norm' is missing"),
    ],
)
def test_a_damaged_file_is_refused_and_named(shm_dir: str, damage: object, complaint: str) -> None:
    path = _keep_one(shm_dir)
    damage(path)  # type: ignore[operator]
    with pytest.raises(StoreCorruptError, match=complaint) as caught:
        _start(shm_dir)
    assert str(path) in str(caught.value)


def test_a_symbolic_link_is_not_followed(shm_dir: str) -> None:
    path = _keep_one(shm_dir)
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    with pytest.raises(StoreAccessError, match="symbolic link"):
        _start(shm_dir)


def test_a_file_that_others_may_write_is_refused(shm_dir: str) -> None:
    path = _keep_one(shm_dir)
    path.chmod(0o666)
    with pytest.raises(StoreAccessError, match="mode 666"):
        _start(shm_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(shm_dir: str) -> None:
    path = _keep_one(shm_dir)
    os.chown(path, 12345, 12345)
    with pytest.raises(StoreAccessError, match="belongs to user 12345"):
        _start(shm_dir)


def test_a_weight_with_a_name_of_the_format_is_refused(shm_dir: str) -> None:
    weight = torch.zeros(3)
    units = [UnitSpec("u", (WeightSpec.of("__metadata__", weight),))]
    with pytest.raises(ValueError, match="cannot be called"):
        shared_store(units, TensorSource({"__metadata__": weight}), namespace="t", directory=shm_dir)
    assert os.listdir(shm_dir) == []
