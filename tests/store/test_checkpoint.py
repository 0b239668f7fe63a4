"""Reading checkpoints straight into the store."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flextensor.store import MissingWeightError, SafetensorsSource, StoreError, UnitSpec, WeightSpec, shared_store
from flextensor.store.checkpoint import file_hash
from tests.store.small_models import same, small_weights, units_of


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name].contiguous() for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("save", [_save, _save_sharded])
def test_weights_arrive_with_the_models_bits_and_strides(shm_dir: str, tmp_path: Path, save: object) -> None:
    tensors = small_weights()
    source = SafetensorsSource(save(tmp_path, tensors))  # type: ignore[operator]
    with shared_store(units_of(tensors), source, namespace="t", directory=shm_dir) as store:
        assert all(same(store.tensor(name), tensor) for name, tensor in tensors.items())
        store.verify()


def test_a_cast_on_the_way_equals_torchs(shm_dir: str, tmp_path: Path) -> None:
    large = {"u.big": torch.randn(3 << 20, generator=torch.Generator().manual_seed(1)), "u.n": torch.arange(5)}
    source = SafetensorsSource(_save(tmp_path, large), dtype=torch.bfloat16)
    wanted = {"u.big": large["u.big"].to(torch.bfloat16), "u.n": large["u.n"]}
    with shared_store(units_of(wanted), source, namespace="t", directory=shm_dir) as store:
        assert all(same(store.tensor(name), tensor) for name, tensor in wanted.items())


def test_other_units_another_dtype_or_another_file_name_make_another_store(shm_dir: str, tmp_path: Path) -> None:
    """Of one checkpoint. All are open at the same time, and each has its own bytes."""
    tensors = {"a.w": torch.randn(300, 8), "a.v": torch.randn(40), "b.w": torch.randn(20, 8)}
    folder, renamed = tmp_path / "model", tmp_path / "renamed"
    for place in (folder, renamed):
        place.mkdir()
        save_file(tensors, place / ("model.safetensors" if place is folder else "other.safetensors"))
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    in_one = (UnitSpec("all", tuple(WeightSpec.of(name, tensor) for name, tensor in tensors.items())),)
    wanted = [
        (units_of(tensors), folder, None, tensors),
        (in_one, folder, None, tensors),
        (units_of(halves), folder, torch.bfloat16, halves),
        (units_of(tensors), renamed, None, tensors),
        (units_of(tensors), folder, None, tensors),
    ]
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(
                shared_store(units, SafetensorsSource(place, dtype=dtype), namespace="t", directory=shm_dir)
            )
            for units, place, dtype, _ in wanted
        ]
        assert [store.report().created_by_us for store in stores] == [True, True, True, True, False]
        assert len({store.identity for store in stores}) == 4 == len(os.listdir(shm_dir))
        for store, (_, _, _, right) in zip(stores, wanted, strict=True):
            assert all(same(store.tensor(name), tensor) for name, tensor in right.items())
    assert os.listdir(shm_dir) == []


def test_names_map_weights_to_keys_and_tied_weights_to_one_key(shm_dir: str, tmp_path: Path) -> None:
    table = torch.randn(50, 8)
    folder = _save(tmp_path, {"model.embed.weight": table})
    units = [UnitSpec("head", (WeightSpec.of("lm_head.weight", table),))]
    source = SafetensorsSource(folder, names={"lm_head.weight": "model.embed.weight"})
    with shared_store(units, source, namespace="t", directory=shm_dir) as store:
        assert same(store.tensor("lm_head.weight"), table)


def test_what_does_not_fit_is_refused_before_anything_is_written(shm_dir: str, tmp_path: Path) -> None:
    tensors = small_weights()
    folder = _save(tmp_path, tensors)
    wrong_name = {**tensors, "layers.0.upp": tensors["layers.0.up"]}
    with pytest.raises(MissingWeightError, match=r"no key 'layers\.0\.upp'.*nearest keys: 'layers\.0\.up'"):
        shared_store(units_of(wrong_name), SafetensorsSource(folder), namespace="t", directory=shm_dir)
    wrong_shape = {**tensors, "layers.0.norm": torch.zeros(34)}
    with pytest.raises(MissingWeightError, match=r"layers\.0\.norm.*\(34,\).*\(33,\)"):
        shared_store(units_of(wrong_shape), SafetensorsSource(folder), namespace="t", directory=shm_dir)
    wrong_dtype = {**tensors, "layers.0.norm": torch.zeros(33, dtype=torch.float16)}
    with pytest.raises(MissingWeightError, match=r"dtype=torch\.float16 to cast"):
        shared_store(units_of(wrong_dtype), SafetensorsSource(folder), namespace="t", directory=shm_dir)
    assert os.listdir(shm_dir) == []


def test_files_that_are_no_checkpoint_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no safetensors checkpoint in"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(StoreError, match="is not a safetensors file"):
        SafetensorsSource(tmp_path)
    _save(tmp_path, small_weights())
    os.truncate(tmp_path / "model.safetensors", os.path.getsize(tmp_path / "model.safetensors") - 10)
    with pytest.raises(StoreError, match="is cut short: 10 bytes are missing"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(StoreError, match=r"gone\.safetensors.*not there"):
        SafetensorsSource(tmp_path)


def test_identity_follows_the_content_not_the_place_or_the_time(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    first = file_hash(_save(tmp_path / "a", small_weights(1)) / "model.safetensors")
    assert file_hash(_save(tmp_path / "b", small_weights(1)) / "model.safetensors") == first
    assert file_hash(_save(tmp_path / "c", small_weights(2)) / "model.safetensors") != first
    file = tmp_path / "a" / "model.safetensors"
    before = os.stat(file)
    with open(file, "r+b") as stream:  # one byte, the same size, the old times
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_hash(file) != first


def test_a_file_of_the_hub_cache_is_known_by_its_name(tmp_path: Path) -> None:
    name = "ab" * 32
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(b"never read")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / name)
    assert file_hash(tmp_path / "model.safetensors") == f"sha256:{name}"


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(shm_dir: str, tmp_path: Path) -> None:
    tensors = small_weights()
    folder = _save(tmp_path, tensors)

    def rewrite(_: object) -> None:
        os.utime(folder / "model.safetensors", (1, 1))

    with pytest.raises(StoreError, match="changed while it was read"):
        shared_store(units_of(tensors), SafetensorsSource(folder), namespace="t", directory=shm_dir, progress=rewrite)
    assert os.listdir(shm_dir) == []
