"""Memory mappings as uint8 tensors.

A tensor keeps its mapping alive: ``torch.frombuffer`` holds the object that was mapped, and the memory is unmapped when
the last tensor over it is gone. So nothing here is ever unmapped by hand: it would be under living tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from flextensor.store.layout import PAGE, StoredTensor, round_up

HUGE_PAGE = 2 << 20
"""What the kernel can map by one entry where file and address are aligned to it (x86-64, aarch64 with 4 KiB pages)."""

_PAGEMAP_ENTRIES = 1 << 20
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Get and map pages for writing; an error instead of a SIGBUS where there is none to be had."""
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_HUGETLBFS = 0x958458F6


def map_anonymous(nbytes: int) -> torch.Tensor:
    """``nbytes`` of zeroed memory of this process, huge pages where the system has them."""
    area = mmap.mmap(-1, round_up(max(nbytes, 1), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return _as_tensor(area)[:nbytes]


def map_file(fd: int, nbytes: int, *, skip: int = 0, private: bool = False, writable: bool = True) -> torch.Tensor:
    """The first ``nbytes`` of a file, without the first ``skip`` of them.

    The file begins at an address that its huge pages can be mapped at. The tensor's storage begins behind what is
    skipped: torch calls a tensor pinned when its storage's begin is.
    private: writes go to pages of this process's own and never to the file.
    writable: False: a write ends the process by a signal.

    Raises OSError.
    """
    page = page_size(fd)
    length = round_up(nbytes, page)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # No reserve: huge pages for copies that are hardly ever made would be taken from everybody.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
    address = _map_aligned(fd, length, max(page, HUGE_PAGE), protection, flags)
    area = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(area, _unmap, address, length).atexit = False
    if not private:
        advise(address, length, mmap.MADV_HUGEPAGE)
    return _as_tensor(area, skip)


def page_size(fd: int) -> int:
    """Bytes of the pages that a file's memory consists of: the huge ones of its mount on a hugetlbfs, else 4096.

    Sizes of files and mappings there are multiples of it.
    """
    return max(PAGE, os.fstatvfs(fd).f_bsize) if is_hugetlbfs(fd) else PAGE


def is_hugetlbfs(fd: int) -> bool:
    """True for a file whose memory is huge pages set aside; it can be read and mapped there, but not written to."""
    words = (ctypes.c_long * 32)()
    return _libc().fstatfs(ctypes.c_int(fd), words) == 0 and words[0] & 0xFFFFFFFF == _HUGETLBFS


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
    advise(start, end - start, MADV_POPULATE_WRITE)  # a kernel before 5.14: the faults come one by one


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
    if tail > head and advise(address + head, tail - head, mmap.MADV_DONTNEED):
        head = tail = own.numel()  # a hugetlbfs gives back whole huge pages only
    for edge in (slice(0, head), slice(tail, own.numel())):
        if not torch.equal(own[edge], stored[edge]):
            own[edge].copy_(stored[edge])


def huge_bytes(address: tuple[int, int]) -> int:
    """Bytes of huge pages in this process's mappings that ``address`` (start, end) lies in, as far as they are mapped:
    a page that was never touched is none yet."""
    fields = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")
    return _smaps_sum(None, fields, set(), address)


def touch_huge(memory: torch.Tensor) -> None:
    """Map the huge pages of a shared mapping that another mapping, or process, has filled: one page of each is read."""
    start = memory.data_ptr() // HUGE_PAGE * HUGE_PAGE
    for address in range(start, memory.data_ptr() + memory.numel(), HUGE_PAGE):
        if advise(address, mmap.PAGESIZE, MADV_POPULATE_READ):
            return


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


def advise(address: int, length: int, advice: int) -> int:
    """``madvise``; 0, or the error number where the kernel does not follow."""
    failed = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _map_aligned(fd: int, length: int, alignment: int, protection: int, flags: int) -> int:
    """Map the file's first ``length`` bytes at a multiple of ``alignment``: the address."""
    whole = length + alignment
    start = _mmap(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = round_up(start, alignment)
    try:
        _mmap(address, length, protection, flags | _MAP_FIXED, fd)
    except OSError:
        _unmap(start, whole)
        raise
    if address > start:
        _unmap(start, address - start)
    if start + whole > address + length:
        _unmap(address + length, start + whole - address - length)
    return address


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    call = _libc().mmap
    call.restype = ctypes.c_void_p
    found: int | None = call(
        ctypes.c_void_p(address),
        ctypes.c_size_t(length),
        ctypes.c_int(protection),
        ctypes.c_int(flags),
        ctypes.c_int(fd),
        ctypes.c_long(0),
    )
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
    return found


def _unmap(address: int, length: int) -> None:
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def _as_tensor(area: mmap.mmap | ctypes.Array[ctypes.c_ubyte], skip: int = 0) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.frombuffer(area, dtype=torch.uint8, offset=skip)
