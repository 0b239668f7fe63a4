"""Memory nodes: what the system says, the policy that is set, and where the pages are."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from flextensor.store import TensorSource, private_store, shared_store
from flextensor.store.mapping import map_file
from flextensor.store.numa import (
    Topology,
    nodes_of,
    pci_node,
    place_private,
    place_shared,
    read_topology,
    set_policy,
)
from flextensor.store.reserving import reserve
from tests.store.small_models import small_weights, units_of

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_PREFERRED, _INTERLEAVE = 1, 3
SIZE = 4 << 20


def _system(root: Path, nodes: str, gpus: dict[str, int], allowed: str = "0-63") -> Topology:
    """The topology read from files as sysfs has them, with a network card on node 1 beside the GPUs."""
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/has_memory").write_text(nodes + "\n")
    (root / "status").write_text(f"Name:\tpython\nMems_allowed:\tffffffff\nMems_allowed_list:\t{allowed}\n")
    devices = {address: ("0x10de", "0x030200", node) for address, node in gpus.items()}
    devices["0000:01:00.0"] = ("0x15b3", "0x020000", 1)
    devices["0000:02:00.0"] = ("0x10de", "0x068000", 1)  # an NVSwitch
    for address, (vendor, kind, node) in devices.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in {"vendor": vendor, "class": kind, "numa_node": str(node)}.items():
            (folder / name).write_text(text + "\n")
    return read_topology(root, root / "status")


@pytest.mark.parametrize(
    ("nodes", "gpus", "allowed", "wanted"),
    [
        ("0", {"0000:3b:00.0": -1}, "0", Topology((0,), ())),
        ("0-1", {}, "0-1", Topology((0, 1), ())),
        ("0-1", {"0000:3b:00.0": 0, "0000:d8:00.0": 1}, "0-63", Topology((0, 1), (0, 1))),
        ("0-1", {"0000:3b:00.0": 1, "0000:d8:00.0": 1}, "0-63", Topology((0, 1), (1,))),
        ("0-1,4,6-7", {"0000:3b:00.0": 4, "0001:00:00.0": 7}, "0-63", Topology((0, 1, 4, 6, 7), (4, 7))),
        ("0-1", {"0000:3b:00.0": 0, "0000:d8:00.0": 1}, "1", Topology((1,), (1,))),
    ],
)
def test_the_topology_is_read_from_the_systems_files(
    tmp_path: Path, nodes: str, gpus: dict[str, int], allowed: str, wanted: Topology
) -> None:
    assert _system(tmp_path, nodes, gpus, allowed) == wanted
    for address, node in gpus.items():
        assert pci_node(address, tmp_path) == (node if node >= 0 else None)
    assert pci_node("0000:ff:1f.0", tmp_path) is None


def test_a_system_that_says_nothing_has_one_node(tmp_path: Path) -> None:
    assert read_topology(tmp_path, tmp_path / "status") == Topology((0,), ())


def test_this_machines_topology_can_be_used() -> None:
    found = read_topology()
    assert found.memory and set(found.gpus) <= set(found.memory)


def _policy_of(address: int) -> tuple[int, int]:
    """The kernel's policy of the page at an address: mode, and the first word of its nodes."""
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = _GET_MEMPOLICY[platform.machine()]
    failed = call(
        ctypes.c_long(number),
        ctypes.byref(mode),
        nodes,
        ctypes.c_ulong(1024),
        ctypes.c_void_p(address),
        ctypes.c_long(2),
    )
    assert failed == 0, os.strerror(ctypes.get_errno())
    return mode.value & 0xFF, nodes[0]


@pytest.mark.parametrize(
    ("place", "mode", "words"),
    [
        (lambda memory: place_shared(memory, Topology((0, 1), (0,))), _PREFERRED, "node 0 preferred"),
        (lambda memory: place_private(memory, 0, Topology((0, 1), (0, 1))), _PREFERRED, "node 0 preferred"),
        (lambda memory: set_policy(memory, _INTERLEAVE, (0,)), _INTERLEAVE, "interleaved over nodes 0"),
    ],
)
def test_the_kernel_takes_the_policy_and_the_pages_follow_it(
    shm_dir: str, place: object, mode: int, words: str
) -> None:
    fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, SIZE)
    memory = map_file(fd, SIZE)
    assert place(memory) == words  # type: ignore[operator]
    assert _policy_of(memory.data_ptr() + SIZE // 2) == (mode, 1)
    reserve(fd, memory, threads=2)
    found = nodes_of(memory)
    assert set(found) == {0} and sum(found.values()) == 64
    os.close(fd)


def test_gpus_of_several_nodes_get_a_spread_store_and_a_node_that_is_not_there_is_told(shm_dir: str) -> None:
    fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, SIZE)
    memory = map_file(fd, SIZE)
    two = place_shared(memory, Topology((0, 1), (0, 1)))
    if 1 in read_topology().memory:
        assert two == "interleaved over nodes 0, 1"
    assert place_shared(memory, Topology((900, 901), (900,))).startswith("not placed: ")
    assert place_shared(memory, Topology((0,), (0,))) == "one node"
    os.close(fd)


def test_reports_say_where_the_pages_are(shm_dir: str) -> None:
    tensors = small_weights()
    units = units_of(tensors)
    with (
        shared_store(units, TensorSource(tensors), namespace="t", directory=shm_dir) as shared,
        shared_store(units, TensorSource(tensors), namespace="t", directory=shm_dir) as attached,
        private_store(units, tensors, numa_node=0) as private,
    ):
        assert not attached.report().created_by_us
        for store in (shared, attached, private):
            assert "pages looked at on node" in store.report().numa
        if len(read_topology().memory) == 1:
            assert shared.report().numa.startswith("one node; ")
