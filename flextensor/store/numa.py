"""Spreading memory over the nodes of a machine, so that no node's memory bus is the limit of all its GPUs."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

import torch

from flextensor.store.layout import PAGE

log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_INTERLEAVE = 3
_NODES = Path("/sys/devices/system/node/has_memory")


def memory_nodes() -> tuple[int, ...]:
    """Numbers of the NUMA nodes that have memory."""
    try:
        text = _NODES.read_text().strip()
    except OSError:
        return (0,)
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return tuple(nodes)


def gpu_node(device: torch.device | int) -> int | None:
    """The NUMA node of a CUDA device; None when the system does not say."""
    properties = torch.cuda.get_device_properties(device)
    # Not in torch's stubs; absent from builds for other accelerators.
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return None
    file = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node")
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def interleave(memory: torch.Tensor) -> str:
    """Let the pages of a mapping, not touched yet, come from all nodes in turn; what was done, in words."""
    nodes = memory_nodes()
    if len(nodes) < 2:
        return "one node"
    return _bind(memory, _INTERLEAVE, nodes, f"interleaved over nodes {', '.join(map(str, nodes))}")


def prefer(memory: torch.Tensor, node: int) -> str:
    """Let the pages of a mapping, not touched yet, come from one node while it has room; what was done, in words."""
    if len(memory_nodes()) < 2:
        return "one node"
    return _bind(memory, _PREFERRED, (node,), f"node {node} preferred")


def _bind(memory: torch.Tensor, mode: int, nodes: tuple[int, ...], done: str) -> str:
    """Set the memory policy of the pages that ``memory`` (page-aligned) lies on."""
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
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    result = syscall(
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
    return done
