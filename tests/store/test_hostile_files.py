"""Store files, checkpoints and lock files as accidents and other users leave them: an error of ours."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from flextensor.checkpoint_files import CheckpointFileError, read_tensors
from flextensor.store import StoreAccessError, StoreCorruptError, TensorSource, shared_store
from flextensor.store.file_format import read_manifest
from flextensor.store.inventory import list_stores
from tests.store.small_models import small_weights, units_of

ROUNDS = 250
STRANGE: list[Any] = [-1, 0, 1, 7, 2**31, 2**63, 2**70, 1.5, True, None, "", "x", "bfloat16", "_dynamo", [], [1], {}]


def _file(directory: str) -> Path:
    tensors = small_weights(rows=20)
    with shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=directory, keep=True) as store:
        return Path(store.path)


def _start(directory: str) -> None:
    tensors = small_weights(rows=20)
    shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=directory).close()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


def _changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part, anywhere in it, replaced, removed or repeated."""
    value = json.loads(json.dumps(value))
    path = rng.choice(_places(value)[1:])
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    how = rng.choice(["replace", "replace", "remove", "repeat"])
    if how == "remove":
        del inside[path[-1]]
    elif how == "repeat" and isinstance(inside, list):
        inside.insert(path[-1], inside[path[-1]])
    else:
        inside[path[-1]] = rng.choice(STRANGE)
    return value


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), length


def _with_header(data: bytes, header: Any, length: int) -> bytes:
    return length.to_bytes(8, "little") + json.dumps(header).encode().ljust(length)[:length] + data[8 + length :]


def _tampered_layout(data: bytes, rng: random.Random) -> bytes:
    header, length = _header(data)
    key = rng.choice(["flextensor.layout", "flextensor.layout", "flextensor.checksums"])
    header["__metadata__"][key] = json.dumps(_changed(json.loads(header["__metadata__"][key]), rng))
    return _with_header(data, header, length)


def _tampered_header(data: bytes, rng: random.Random) -> bytes:
    header, length = _header(data)
    header["__metadata__"] = _changed(header["__metadata__"], rng)
    return _with_header(data, rng.choice([header, header, header, [header], "x", None]), length)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(_header(data)[1] + 8)] = rng.randrange(256)
    return bytes(damaged)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, 7, 8, 9, rng.randrange(len(data)), len(data) - 1])]


def _grown(data: bytes, rng: random.Random) -> bytes:
    return data + bytes(rng.choice([1, 4096, 1 << 20]))


def _other_length(data: bytes, rng: random.Random) -> bytes:
    length = rng.choice([0, 1, 4088, 8184, len(data), 2**31, 2**63, 2**64 - 8, rng.randrange(2**64)])
    return length.to_bytes(8, "little") + data[8:]


def _nested(data: bytes, rng: random.Random) -> bytes:
    length = _header(data)[1]
    return length.to_bytes(8, "little") + (b"[" * (length // 2)).ljust(length, b"]") + data[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [_tampered_layout, _tampered_header, _flipped, _cut, _grown, _other_length, _nested],
    ids=lambda d: d.__name__,
)
def test_a_store_file_is_refused_or_holds_what_its_manifest_says(
    shm_dir: str, tmp_path: Path, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    data = _file(shm_dir).read_bytes()
    refused = 0
    for seed in range(ROUNDS if damage is not _nested else 1):
        path = tmp_path / "damaged.safetensors"
        path.write_bytes(damage(data, random.Random(seed)))
        fd = os.open(path, os.O_RDONLY)
        try:
            manifest = read_manifest(fd, str(path))
        except StoreCorruptError as error:
            refused += 1
            assert str(path) in str(error) and "remove it" in str(error)
        else:  # then what it changed does no harm: every weight lies within the file, apart from the others
            end = 0
            for tensor in manifest.layout.tensors:
                assert end <= tensor.offset and tensor.nbytes > 0 and tensor.offset % 256 == 0
                end = tensor.offset + tensor.nbytes
            assert manifest.header_bytes + end <= path.stat().st_size
            assert set(manifest.checksums) == set(manifest.layout.by_name)
        finally:
            os.close(fd)
    assert refused > 0


def test_a_changed_layout_is_never_attached_to(shm_dir: str) -> None:
    path = _file(shm_dir)
    data = path.read_bytes()
    for seed in range(60):
        damaged = _tampered_layout(data, random.Random(seed))
        if _header(damaged)[0] == _header(data)[0]:
            continue
        path.write_bytes(damaged)
        try:
            _start(shm_dir)
        except StoreCorruptError:
            continue
        changed = json.loads(_header(damaged)[0]["__metadata__"]["flextensor.layout"])
        assert changed == json.loads(_header(data)[0]["__metadata__"]["flextensor.layout"])


@pytest.mark.parametrize("damage", [_flipped, _cut, _other_length, _nested], ids=lambda d: d.__name__)
def test_a_checkpoint_file_is_refused_or_lies_within_itself(
    tmp_path: Path, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in small_weights(rows=20).items()}, path)
    data, refused = path.read_bytes(), 0
    for seed in range(ROUNDS if damage is not _nested else 1):
        path.write_bytes(damage(data, random.Random(seed)))
        try:
            found = read_tensors(path)
        except CheckpointFileError as error:
            refused += 1
            assert str(path) in str(error)
        else:
            assert all(t.start >= 0 and t.start + t.nbytes <= path.stat().st_size for t in found)
    assert refused > 0


def _as_folder(path: Path) -> None:
    path.mkdir()


def _as_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _as_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [_as_folder, _as_pipe, _as_link], ids=lambda m: m.__name__)
@pytest.mark.parametrize("suffix", [".safetensors", ".filling"])
def test_what_is_no_file_under_a_stores_name_is_named(shm_dir: str, make: Callable[[Path], None], suffix: str) -> None:
    path = _file(shm_dir).with_suffix(suffix)
    path.with_suffix(".safetensors").unlink()
    path.with_suffix(".keep").unlink()
    make(path)
    with pytest.raises(StoreAccessError) as caught:
        _start(shm_dir)
    assert str(path) in str(caught.value) and "remove it" in str(caught.value)
    assert Path("/etc/passwd").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_in_a_folder_that_all_may_write_no_file_of_another_is_used(shm_dir: str, mode: int) -> None:
    path = _file(shm_dir)
    os.chmod(shm_dir, mode)
    _start(shm_dir)
    for planted in (path, path.with_suffix(".filling")):
        if planted != path:
            path.unlink()
            planted.write_bytes(b"")
        os.chown(planted, 12345, 12345)
        with pytest.raises(StoreAccessError, match="belongs to user 12345") as caught:
            _start(shm_dir)
        assert str(planted) in str(caught.value)
    assert [entry.state for entry in list_stores(shm_dir)] == []
