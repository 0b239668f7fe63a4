"""How much memory a process may take, and what is done where that is too little."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from flextensor.store import HostStore, StoreSpaceError, TensorSource, limits, private_store, shared_store
from flextensor.store.limits import memory_limits
from tests.store.small_models import same, small_weights, units_of
from tests.store.test_pin_beside import ListOfRegions

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of the test's own: this process is in /outer/inner of the second version, in /old of the first."""
    root = tmp_path / "cgroup"
    (root / "outer" / "inner").mkdir(parents=True)
    (root / "memory" / "old").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory,hugetlb:/old\n1:cpu:/elsewhere\n0::/outer/inner\n")
    monkeypatch.setattr(limits, "_CGROUP", root)
    monkeypatch.setattr(limits, "_OWN_GROUPS", own)
    return root


def group(folder: Path, most: int | str, used: int, *, file: int = 0) -> None:
    """A group of the second version. file: bytes of the page cache in it, which are given back when they are needed."""
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\nactive_file {file // 2}\ninactive_file {file - file // 2}\nshmem 9\n")


def test_without_limits_of_groups_the_system_counts(groups: Path) -> None:
    group(groups / "outer" / "inner", "max", 5 * MIB)
    found = memory_limits()
    assert found.source == "system memory" and found.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found.available < found.total


def test_the_least_of_a_group_and_those_around_it_counts_and_the_page_cache_is_free(groups: Path) -> None:
    group(groups / "outer" / "inner", 64 * MIB, 40 * MIB, file=8 * MIB)
    found = memory_limits()
    assert (found.total, found.available) == (64 * MIB, 32 * MIB)
    assert found.source == f"control group {groups / 'outer' / 'inner'}"
    group(groups / "outer", 80 * MIB, 70 * MIB)
    found = memory_limits()
    assert (found.total, found.available, found.source) == (64 * MIB, 10 * MIB, f"control group {groups / 'outer'}")


def test_groups_of_the_first_version_count_too(groups: Path) -> None:
    old = groups / "memory" / "old"
    (old / "memory.limit_in_bytes").write_text(str(48 * MIB))
    (old / "memory.usage_in_bytes").write_text(str(50 * MIB))
    (old / "memory.stat").write_text("total_active_file 0\ntotal_inactive_file 1048576\n")
    found = memory_limits()
    assert (found.total, found.available, found.source) == (48 * MIB, 0, f"control group {old}")
    (old / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))  # no limit, as the first version writes it
    assert memory_limits().source == "system memory"


@pytest.mark.parametrize("backing", ["file", "memfd"])
def test_a_store_that_the_group_has_no_memory_for_is_refused_before_it_is_filled(
    groups: Path, shm_dir: str, backing: str
) -> None:
    tensors = small_weights()
    inner = groups / "outer" / "inner"
    group(inner, 64 * MIB, 63 * MIB)
    with pytest.raises(
        StoreSpaceError, match=rf"control group {inner} has {MIB} free.*raise the container's"
    ) as caught:
        shared_store(units_of(tensors), TensorSource(tensors), namespace="t", directory=shm_dir, backing=backing)
    assert caught.value.free == MIB < caught.value.needed
    assert os.listdir(shm_dir) == []
    group(inner, 64 * MIB, 32 * MIB)
    with shared_store(
        units_of(tensors), TensorSource(tensors), namespace="t", directory=shm_dir, backing=backing
    ) as store:
        assert all(same(store.tensor(name), tensor) for name, tensor in tensors.items())


def test_more_than_the_group_can_hold_is_not_pinned_and_the_store_is_right_all_the_same(groups: Path) -> None:
    tensors = small_weights()
    with private_store(units_of(tensors), tensors) as store:
        inner, registrar = groups / "outer" / "inner", ListOfRegions()
        group(inner, MIB, 0)
        report = store.pin_with(registrar)
        assert report.pinned == 0 and registrar.asked == [] and not report.complete
        assert f"more than 95% of control group {inner} ({MIB} bytes)" in report.reason
        assert all(same(store.tensor(name), tensor) for name, tensor in tensors.items())
        group(inner, 2 * store.layout.nbytes, 2 * store.layout.nbytes)
        assert store.pin_with(registrar).complete, "pinning takes no memory beyond that which is in use already"


def _store() -> HostStore:
    tensors = small_weights()
    return private_store(units_of(tensors), tensors)


def test_a_limit_of_locked_memory_is_told_and_is_no_ground_to_refuse() -> None:
    """Beside what was refused: NVIDIA's driver does not count what it registers."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with _store() as store:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
        try:
            assert limits.locked_memory_limit() == 65536
            report = store.pin_with(ListOfRegions())
        finally:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
        assert report.complete and report.reason == ""
        (note,) = report.notes
        assert "RLIMIT_MEMLOCK is 65536 bytes" in note and "ulimit -l" in note
