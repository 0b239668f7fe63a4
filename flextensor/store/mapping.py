"""Memory mappings as uint8 tensors.

A tensor keeps its mapping alive: ``torch.frombuffer`` holds the mmap object, which unmaps when the last tensor over it
is gone. So nothing here ever calls ``mmap.close()``: it would unmap under living tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from flextensor.store.layout import PAGE, StoredTensor, round_up

_PAGEMAP_ENTRIES = 1 << 20
_MADV_POPULATE_WRITE = 23


def map_anonymous(nbytes: int) -> torch.Tensor:
    """``nbytes`` of zeroed memory of this process, huge pages where the system has them."""
    area = mmap.mmap(-1, round_up(max(nbytes, 1), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge(area)
    return _as_tensor(area)[:nbytes]


def map_file(fd: int, nbytes: int, *, skip: int = 0, private: bool = False, writable: bool = True) -> torch.Tensor:
    """The first ``nbytes`` of a file, without the first ``skip`` of them.

    The tensor's storage begins behind what is skipped: torch calls a tensor pinned when its storage's begin is.
    private: writes go to pages of this process's own and never to the file.
    writable: False: a write ends the process by a signal.
    """
    area = mmap.mmap(
        fd,
        nbytes,
        flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED,
        prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
    )
    if not private:
        _advise_huge(area)
    return _as_tensor(area, skip)


def typed_view(raw: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """``raw`` (uint8, the tensor's bytes as stored) as the weight's dtype, shape and stride; no copy."""
    with torch.inference_mode(False), torch.no_grad():
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor as they lie in memory (uint8, one dimension); no copy."""
    with torch.inference_mode(False), torch.no_grad():
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return flat.view(torch.uint8)


def buffer_of(raw: torch.Tensor) -> memoryview:
    """The bytes of a uint8 host tensor as a writable buffer; no copy."""
    return raw.numpy().data


def pss_bytes(pid: int | None, *, files: Iterable[tuple[str, int]] = (), address: tuple[int, int] | None = None) -> int:
    """Proportional set size of mappings of a process (None: this one), in bytes: of the files given as
    (``major:minor``, inode), and of those that ``address`` (start, end) lies in.

    Raises ProcessLookupError when there is no such process, PermissionError when it is another user's.
    """
    return _smaps_sum(pid, ("Pss:",), set(files), address)


def populate(memory: torch.Tensor) -> None:
    """Map the pages of ``memory``, a part of a writable mapping, in one call instead of one fault a page."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = round_up(memory.data_ptr() + memory.numel(), mmap.PAGESIZE)
    with contextlib.suppress(OSError):  # a kernel before 5.14: the faults come one by one
        _call("madvise", start, end - start, _MADV_POPULATE_WRITE)


def own_pages(memory: torch.Tensor) -> list[tuple[int, int]]:
    """(start, end) in bytes of the pages of a copy-on-write file mapping that were written to, hence copied."""
    first = memory.data_ptr() // mmap.PAGESIZE
    last = -(-(memory.data_ptr() + memory.numel()) // mmap.PAGESIZE)
    spans: list[tuple[int, int]] = []
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for start in range(first, last, _PAGEMAP_ENTRIES):
            file.seek(start * 8)
            entries = np.frombuffer(file.read(min(_PAGEMAP_ENTRIES, last - start) * 8), dtype=np.uint64)
            # Bits 63 and 62: in memory, swapped out. Bit 61: a page of the file. A copy is memory of no file.
            copied = (entries >> np.uint64(62) != 0) & (entries >> np.uint64(61) & np.uint64(1) == 0)
            for index in np.flatnonzero(copied).tolist():
                begin = (start + index) * mmap.PAGESIZE - memory.data_ptr()
                if spans and spans[-1][1] == begin:
                    spans[-1] = (spans[-1][0], begin + mmap.PAGESIZE)
                else:
                    spans.append((begin, begin + mmap.PAGESIZE))
    return spans


def restore_own_pages(own: torch.Tensor, stored: torch.Tensor) -> None:
    """Undo what was written to ``own``, a part of a copy-on-write file mapping whose bytes in the file are ``stored``.

    Copies of whole pages are given back; on pages that it shares with its neighbours bytes are written back.
    """
    address = own.data_ptr()
    head = min(round_up(address, mmap.PAGESIZE) - address, own.numel())
    tail = max(head, (address + own.numel()) // mmap.PAGESIZE * mmap.PAGESIZE - address)
    if tail > head:
        _call("madvise", address + head, tail - head, mmap.MADV_DONTNEED)
    for edge in (slice(0, head), slice(tail, own.numel())):
        if not torch.equal(own[edge], stored[edge]):
            own[edge].copy_(stored[edge])


def huge_bytes(address: tuple[int, int]) -> int:
    """Bytes of huge pages in this process's mappings that ``address`` (start, end) lies in."""
    fields = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")
    return _smaps_sum(None, fields, set(), address)


def _smaps_sum(
    pid: int | None, fields: tuple[str, ...], files: set[tuple[str, int]], address: tuple[int, int] | None
) -> int:
    total = 0
    counted = False
    path = Path("/proc") / ("self" if pid is None else str(pid)) / "smaps"
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    for line in lines:
        if line[0] in "0123456789abcdef":
            span, _, _, device, inode, *_ = line.split(maxsplit=5)
            start, end = (int(number, 16) for number in span.split("-"))
            counted = (device, int(inode)) in files or (address is not None and start < address[1] and address[0] < end)
        elif counted and line.startswith(fields):
            total += int(line.split()[1]) * 1024
    return total


def _call(function: str, address: int, length: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, function)
    if call(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(argument)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def _as_tensor(area: mmap.mmap, skip: int = 0) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(area, dtype=torch.uint8, offset=skip)


def _advise_huge(area: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
