"""A store on a hugetlbfs: huge pages set aside, files that can be mapped and read but not written to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flextensor.store import StoreAccessError, StoreSpaceError, TensorSource, shared_store
from flextensor.store.inventory import list_stores, verify_store
from flextensor.store.memory import weights_pss
from flextensor.store.places import free_bytes
from tests.store.holder import Holder
from tests.store.small_models import same, small_weights, units_of

pytestmark = pytest.mark.xdist_group("hugetlbfs")

_POOL = Path("/proc/sys/vm/nr_hugepages")
PAGES = 24
PAGE = 2 << 20


@pytest.fixture
def huge_dir(tmp_path: Path) -> Iterator[str]:
    """A hugetlbfs with 24 pages of 2 MiB of its own, given back afterwards."""
    folder = tmp_path / "huge"
    folder.mkdir()
    try:
        before = int(_POOL.read_text())
        _POOL.write_text(str(before + PAGES))
    except OSError:
        pytest.skip("cannot set huge pages aside here")
    command = ["mount", "-t", "hugetlbfs", "-o", f"pagesize=2M,size={PAGES * PAGE}", "none", str(folder)]
    mounted = int(_POOL.read_text()) == before + PAGES and subprocess.run(command, capture_output=True).returncode == 0
    try:
        if not mounted:
            pytest.skip("cannot mount a hugetlbfs here, or too few huge pages are free")
        yield str(folder)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
        _POOL.write_text(str(before))


def test_a_store_is_filled_shared_checked_and_leaves_nothing(huge_dir: str) -> None:
    tensors = small_weights()
    first = shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=huge_dir, keep=True)
    second = shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=huge_dir)
    assert (first.report().created_by_us, second.report().created_by_us) == (True, False)
    for store in (first, second):
        assert all(same(store.tensor(name), tensor) for name, tensor in tensors.items())
        assert all(torch.equal(store.source(n), store._parameter_bytes(store._find(n))) for n in tensors)
        assert os.stat(store.path).st_size % PAGE == 0 == store.report().nbytes % 4096
    assert int(first.report().huge_pages.split()[0]) >= PAGE
    assert weights_pss([os.getpid()], first) == os.stat(first.path).st_blocks * 512
    second.tensor("layers.0.up")[0, 0] = 99
    assert second.edited_in_place() == ("layers.0.up",)
    assert same(first.tensor("layers.0.up"), tensors["layers.0.up"])
    second.discard_private("layers.0.up")
    assert same(second.tensor("layers.0.up"), tensors["layers.0.up"])
    found = load_file(first.path)
    assert torch.equal(found["layers.0.norm"], tensors["layers.0.norm"])
    (entry,) = list_stores(huge_dir)
    assert list(verify_store(entry)) == []
    path = Path(first.path)
    second.close()
    first.close()
    assert path.exists()
    del first, second, store
    path.with_suffix(".keep").unlink()
    shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=huge_dir).close()
    assert os.listdir(huge_dir) == []


def test_processes_wait_die_and_are_replaced_as_on_a_tmpfs(huge_dir: str) -> None:
    filler = Holder.start(huge_dir, stands=True)
    at = filler.wait_in_filling()
    waiter = Holder.start(huge_dir)
    told = waiter.wait_for_progress(lambda told: told.phase == "waiting")
    assert (told.pid, told.done, told.total) == (filler.pid, at.done, at.total)
    filler.kill()
    assert waiter.wait("ready") == {"created": True, "wrong": []}
    newcomer = Holder.start(huge_dir)
    assert newcomer.wait("ready") == {"created": False, "wrong": []}
    waiter.kill()
    assert newcomer.ask("check", "checked") == []
    newcomer.close()
    assert os.listdir(huge_dir) == []
    assert free_bytes(huge_dir) == PAGES * PAGE


def test_too_few_huge_pages_are_told_with_what_to_do(huge_dir: str) -> None:
    model = {"layers.0.w": torch.zeros(60 << 17, dtype=torch.int64)}
    with pytest.raises(StoreSpaceError, match=r"31 huge pages of 2048 KiB, 7 more; set them aside \(sysctl") as caught:
        shared_store(units_of(model), TensorSource(model), namespace="t", directory=huge_dir)
    assert (caught.value.needed, caught.value.free) == (31 * PAGE, PAGES * PAGE)
    assert os.listdir(huge_dir) == []


def test_a_memfd_needs_a_tmpfs_for_its_pointers(huge_dir: str) -> None:
    tensors = small_weights()
    with pytest.raises(StoreAccessError, match="is a hugetlbfs"):
        shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=huge_dir, backing="memfd")
