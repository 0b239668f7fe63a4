"""A tmpfs that is too small: refused before a byte is written, with what is needed, what is free and what to do."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from pathlib import Path

import pytest
import torch

from flextensor.store import StoreAccessError, StoreCorruptError, StoreSpaceError, TensorSource, shared_store
from flextensor.store.filling import Reader
from flextensor.store.layout import StoredTensor
from flextensor.store.places import NamedFile
from tests.store.small_models import same, units_of

MODEL = {f"layers.{index}.w": torch.arange(25 << 18, dtype=torch.int64) for index in range(4)}
"""200 MiB."""


def test_a_model_larger_than_the_tmpfs_is_refused(small_tmpfs: str) -> None:
    with pytest.raises(StoreSpaceError, match="--shm-size=1g") as caught:
        shared_store(units_of(MODEL), TensorSource(MODEL), namespace="t", directory=small_tmpfs)
    assert caught.value.needed > 200 << 20
    assert 63 << 20 < caught.value.free <= 64 << 20
    assert small_tmpfs in str(caught.value)
    assert os.listdir(small_tmpfs) == []
    told = pickle.loads(pickle.dumps(caught.value))  # as a worker tells it to the command that started it
    assert (str(told), told.needed, told.free) == (str(caught.value), caught.value.needed, caught.value.free)


def test_a_corrupt_store_names_its_weights_in_another_process_too() -> None:
    told = pickle.loads(pickle.dumps(StoreCorruptError("unit 'a' is wrong", ("a.w", "a.b"))))
    assert type(told) is StoreCorruptError and str(told) == "unit 'a' is wrong" and told.tensors == ("a.w", "a.b")


def test_the_same_model_fits_as_a_memfd(small_tmpfs: str) -> None:
    with shared_store(
        units_of(MODEL), TensorSource(MODEL), namespace="t", directory=small_tmpfs, backing="memfd"
    ) as store:
        assert same(store.tensor("layers.3.w"), MODEL["layers.3.w"])
    assert os.listdir(small_tmpfs) == []


def test_a_tmpfs_that_fills_up_after_the_check_is_an_error_and_no_signal(
    small_tmpfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = NamedFile.check_space

    def check_and_lose(place: NamedFile, needed: int) -> None:
        check(place, needed)
        (Path(small_tmpfs) / "other").write_bytes(b"x" * (40 << 20))

    monkeypatch.setattr(NamedFile, "check_space", check_and_lose)
    model = {"layers.0.w": torch.zeros(50 << 17, dtype=torch.int64)}
    with pytest.raises(StoreSpaceError, match="--shm-size=1g") as caught:
        shared_store(units_of(model), TensorSource(model), namespace="t", directory=small_tmpfs)
    assert 50 << 20 < caught.value.needed < 51 << 20
    assert caught.value.free <= 24 << 20
    assert os.listdir(small_tmpfs) == ["other"]
    space = os.statvfs(small_tmpfs)
    assert space.f_bavail * space.f_frsize >= 23 << 20, "its pages are given back while the error lives"
    del caught  # its traceback has the mapping
    gc.collect()


def _open_files_under(directory: str) -> list[int]:
    """Descriptors of files without a name: what a store is while it is filled."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(f"{directory}/#") and target.endswith("(deleted)"):
                found.append(int(name))
    return found


def test_every_page_is_there_before_the_first_byte_is_read(shm_dir: str) -> None:
    reserved: list[tuple[int, int]] = []

    class Watched(TensorSource):
        def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
            (fd,) = _open_files_under(shm_dir)
            status = os.fstat(fd)
            reserved.append((status.st_blocks * 512, status.st_size))
            return super().open(tensor)

    shared_store(units_of(MODEL), Watched(MODEL), namespace="t", directory=shm_dir).close()
    assert len(reserved) == len(MODEL)
    assert all(held >= size > 200 << 20 for held, size in reserved)


def test_a_store_that_leaves_makes_room_for_the_next(small_tmpfs: str) -> None:
    for value in range(3):
        model = {"layers.0.w": torch.full((5 << 20,), value, dtype=torch.int64)}
        with shared_store(units_of(model), TensorSource(model), namespace="t", directory=small_tmpfs) as store:
            assert same(store.tensor("layers.0.w"), model["layers.0.w"])


def test_a_dead_store_makes_room_for_the_next(small_tmpfs: str) -> None:
    from tests.store.holder import Holder

    holder = Holder.start(small_tmpfs, 1, rows=15_000)  # about 42 MiB
    holder.wait("ready")
    holder.kill()
    assert len(os.listdir(small_tmpfs)) == 1
    again = Holder.start(small_tmpfs, 2, rows=15_000)
    assert again.wait("ready") == {"created": True, "wrong": []}
    again.close()
    assert os.listdir(small_tmpfs) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match=r"shm_dir .*nowhere is no directory"):
        shared_store(units_of(MODEL), TensorSource(MODEL), namespace="t", directory=str(tmp_path / "nowhere"))
