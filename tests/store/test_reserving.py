"""Pages of a store: all there before the first byte, huge ones where the kernel gives them, for every process."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest
import torch

from flextensor.store import TensorSource, shared_store
from flextensor.store.mapping import HUGE_PAGE, huge_bytes, map_file
from flextensor.store.reserving import reserve
from tests.store.small_models import same, units_of

MODEL = {f"layers.{index}.w": torch.arange(1 << 20, dtype=torch.int64) * (index + 1) for index in range(3)}
"""24 MiB."""


def _kernel_collapses(directory: str) -> bool:
    """Whether this machine makes a huge page of a file here when it is asked (Linux 6.1, shmem_enabled not "deny")."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.ftruncate(file.fileno(), HUGE_PAGE)
        memory = map_file(file.fileno(), HUGE_PAGE)
        memory[0] = 1
        libc = ctypes.CDLL(None, use_errno=True)
        return int(libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(HUGE_PAGE), 25)) == 0


def _huge(text: str) -> int:
    return int(text.split()[0])


def test_a_store_lies_in_huge_pages_and_each_process_says_so(shm_dir: str) -> None:
    if not _kernel_collapses(shm_dir):
        pytest.skip("this kernel makes no huge pages for a tmpfs")
    with shared_store(units_of(MODEL), TensorSource(MODEL), namespace="t", directory=shm_dir) as first:
        assert _huge(first.report().huge_pages) >= 20 << 20, first.report().huge_pages
        with shared_store(units_of(MODEL), TensorSource(MODEL), namespace="t", directory=shm_dir) as second:
            assert not second.report().created_by_us
            assert _huge(second.report().huge_pages) >= 20 << 20
            second.tensor("layers.0.w")[5] = -1  # a copy of one small page, not of a huge one
            assert second.edited_in_place() == ("layers.0.w",)
            second.discard_private("layers.0.w")
            assert all(same(second.tensor(name), tensor) for name, tensor in MODEL.items())
        assert all(same(first.tensor(name), tensor) for name, tensor in MODEL.items())


@pytest.mark.parametrize("refused", ["huge pages", "populating"])
def test_a_kernel_that_refuses_gives_small_pages_and_the_same_bytes(
    shm_dir: str, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr("flextensor.store.reserving._MADV_COLLAPSE", 9999)
    if refused == "populating":
        monkeypatch.setattr("flextensor.store.reserving.MADV_POPULATE_WRITE", 9999)
    with shared_store(units_of(MODEL), TensorSource(MODEL), namespace="t", directory=shm_dir) as store:
        assert all(same(store.tensor(name), tensor) for name, tensor in MODEL.items())
        store.verify()


@pytest.mark.parametrize("slow", [True, False])
def test_a_large_store_takes_huge_pages_only_where_they_are_worth_their_time(
    shm_dir: str, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    if not _kernel_collapses(shm_dir):
        pytest.skip("this kernel makes no huge pages for a tmpfs")
    monkeypatch.setattr("flextensor.store.reserving.HUGE_MAY_TAKE", 0.0 if slow else 1e9)
    size = 9 * 16 * HUGE_PAGE
    fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, size)
    memory = map_file(fd, size)
    reserve(fd, memory, threads=2)
    assert os.fstat(fd).st_blocks * 512 >= size
    huge = huge_bytes((memory.data_ptr(), memory.data_ptr() + size))
    assert huge == 16 * HUGE_PAGE if slow else huge >= size - 16 * HUGE_PAGE - HUGE_PAGE
    os.close(fd)


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE - 4096, HUGE_PAGE, HUGE_PAGE + 1, 70 << 20])
def test_every_page_is_got_whatever_the_size(shm_dir: str, size: int) -> None:
    fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, size)
    memory = map_file(fd, size)
    reserve(fd, memory, threads=3)
    assert os.fstat(fd).st_blocks * 512 >= size
    assert os.fstat(fd).st_size == size
    assert memory.numel() == size and int(memory.sum()) == 0
    address = memory.data_ptr()
    assert address % HUGE_PAGE == 0
    del memory
    assert huge_bytes((address, address + size)) == 0, "the mapping goes with its last tensor"
    os.close(fd)
