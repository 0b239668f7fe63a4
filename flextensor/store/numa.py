"""Where memory lies on a machine with several NUMA nodes, so that no node's memory bus is the limit of all its GPUs.

A store that GPUs of several nodes read is spread over those nodes, page by page; one that GPUs of a single node read
lies there. The policy is set before the first page is touched; what became of it is read back from the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from flextensor.store.layout import PAGE
from flextensor.store.mapping import MADV_POPULATE_READ, advise

log = logging.getLogger(__name__)

_SYSFS = Path("/sys")
_STATUS = Path("/proc/self/status")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_PREFERRED = 1
_INTERLEAVE = 3
_NVIDIA = 0x10DE
_DISPLAY = 0x03
"""PCI's class of graphics and 3D controllers."""
_SAMPLES = 64


@dataclass(frozen=True)
class Topology:
    """memory: nodes with memory that this process may use. gpus: those of them that NVIDIA GPUs are attached to."""

    memory: tuple[int, ...]
    gpus: tuple[int, ...]


def read_topology(sysfs: Path = _SYSFS, status: Path = _STATUS) -> Topology:
    """What the system says; one node where it says nothing."""
    nodes = set(_node_list(sysfs / "devices/system/node/has_memory") or (0,))
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("Mems_allowed_list:"):
            nodes &= set(_numbers(line.partition(":")[2])) or nodes
    gpus = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        if _hexadecimal(device / "vendor") == _NVIDIA and (_hexadecimal(device / "class") or 0) >> 16 == _DISPLAY:
            node = pci_node(device.name, sysfs)
            if node in nodes:
                gpus.add(node)
    return Topology(tuple(sorted(nodes)), tuple(sorted(gpus)))


def pci_node(address: str, sysfs: Path = _SYSFS) -> int | None:
    """The node of a PCI device (``0000:3b:00.0``); None when the system does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def gpu_node(device: torch.device | int) -> int | None:
    """The node of a CUDA device; None when the system does not say."""
    properties = torch.cuda.get_device_properties(device)
    # Not in torch's stubs; absent from builds for other accelerators.
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return None
    return pci_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


def place_shared(memory: torch.Tensor, topology: Topology) -> str:
    """Choose where the pages of a new store come from that all GPUs of the machine may read; what was done, in words.

    memory: its mapping, not touched yet.
    """
    if len(topology.memory) < 2:
        return "one node"
    if len(topology.gpus) == 1:
        return set_policy(memory, _PREFERRED, topology.gpus)
    return set_policy(memory, _INTERLEAVE, topology.gpus or topology.memory)


def place_private(memory: torch.Tensor, node: int | None, topology: Topology) -> str:
    """The same for memory that one GPU reads, attached to ``node`` (None: not known)."""
    if len(topology.memory) < 2:
        return "one node"
    if node in topology.memory:
        return set_policy(memory, _PREFERRED, (node,))
    return set_policy(memory, _INTERLEAVE, topology.memory)


def set_policy(memory: torch.Tensor, mode: int, nodes: tuple[int, ...]) -> str:
    """``mbind`` the pages that ``memory`` (it begins on a page) lies on; what was done, in words."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not placed: no mbind known on {platform.machine()}"
    words = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for node in nodes:
        words[node // bits] |= 1 << (node % bits)
    address = memory.data_ptr()
    if address % PAGE:
        raise ValueError(f"memory at {address:#x} does not begin on a page")
    result = _syscall()(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(memory.numel()),
        ctypes.c_int(mode),
        words,
        ctypes.c_ulong(16 * bits),
        ctypes.c_uint(0),
    )
    if result != 0:
        reason = os.strerror(ctypes.get_errno())
        log.info("memory policy not set: %s", reason)
        return f"not placed: {reason}"
    named = ", ".join(map(str, nodes))
    return f"node {named} preferred" if mode == _PREFERRED else f"interleaved over nodes {named}"


def placement(policy: str, memory: torch.Tensor) -> str:
    """What was asked for (``policy``) and what the kernel says of the pages, in words."""
    pages = nodes_of(memory)
    if not pages:
        return policy
    found = ", ".join(f"node {node}: {count}" for node, count in pages.items())
    return f"{policy}{'; ' if policy else ''}pages looked at on {found}"


def nodes_of(memory: torch.Tensor) -> dict[int, int]:
    """Of up to 64 pages spread over ``memory``, how many lie on which node. Empty where the system does not say."""
    number = _MOVE_PAGES.get(platform.machine())
    if number is None or not memory.numel():
        return {}
    step = max(mmap.PAGESIZE, memory.numel() // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE)
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    addresses = list(range(first, memory.data_ptr() + memory.numel(), step))[:_SAMPLES]
    for address in addresses:
        advise(address, mmap.PAGESIZE, MADV_POPULATE_READ)  # a page that is not mapped here is on no node
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    found = (ctypes.c_int * len(addresses))(*[-1] * len(addresses))
    result = _syscall()(
        ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(len(addresses)), pages, None, found, ctypes.c_int(0)
    )
    return dict(sorted(Counter(node for node in found if node >= 0).items())) if result == 0 else {}


@functools.cache
def _syscall() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


def _node_list(path: Path) -> tuple[int, ...]:
    try:
        return _numbers(path.read_text())
    except (OSError, ValueError):
        return ()


def _numbers(text: str) -> tuple[int, ...]:
    """``0-1,4`` as numbers."""
    found: list[int] = []
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _hexadecimal(path: Path) -> int | None:
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        return None
