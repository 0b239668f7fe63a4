"""Getting the pages of a new store file: all of them before the first byte is written, as large as they are to be had.

``posix_fallocate`` decides: when it returns, every page is there and writing cannot fail. Alone it is slow. It takes
4 KiB pages one by one under the file's lock, in one thread, and filling then maps and clears each of them by a fault of
its own: together several times the work of reading the weights. So the pages are asked for through the mapping before,
by all threads, and as huge pages: a page in each 2 MiB and ``MADV_COLLAPSE``, which needs neither a mount option nor
the administrator's ``shmem_enabled``. Nothing of that may fail but in speed.

Huge pages can be slower to get than small ones: three times where free memory goes back to a virtual machine's host
(measured), more where memory is in pieces and the kernel has to move others'. They are had once, and each process pins
them and copies from them, so they are worth some of that: a large store tries both sorts on its first pieces.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from flextensor.store.layout import round_up
from flextensor.store.mapping import HUGE_PAGE, MADV_POPULATE_WRITE, advise, is_hugetlbfs

_MADV_COLLAPSE = 25
_PIECE = 16 * HUGE_PAGE
_TRIED_FROM = 8
"""Pieces of a store on which both sorts of pages are tried."""

HUGE_MAY_TAKE = 8.0
"""Huge pages are taken while they cost at most so many times the time of small ones."""


def reserve(fd: int, memory: torch.Tensor, threads: int) -> None:
    """Get every page of a file, which ``memory`` (uint8) is the writable mapping of, behind its header, and map them.

    Raises OSError (ENOSPC) when there are not enough; the file is then empty.
    """
    size = os.fstat(fd).st_size
    if not is_hugetlbfs(fd):  # pages there are few, and large as they are
        _populate(memory, threads)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.ftruncate(fd, 0)  # an error is kept with its traceback, hence with the mapping; the pages shall go now
        raise


def _populate(memory: torch.Tensor, threads: int) -> None:
    start, end = memory.data_ptr() // HUGE_PAGE * HUGE_PAGE, memory.data_ptr() + memory.numel()
    pages = _Pages(start, end)
    pieces = list(range(start, end, _PIECE))
    if len(pieces) >= _TRIED_FROM:
        pages.choose(pieces.pop(0), pieces.pop(0))
    with ThreadPoolExecutor(threads, thread_name_prefix="store-reserve") as pool:
        list(pool.map(pages.get, pieces))


class _Pages:
    """What several threads ask the kernel for. Stops asking for huge pages, and for any, once it is refused; for huge
    ones too where they take too long."""

    def __init__(self, start: int, end: int) -> None:
        self._start = start
        self._end = end
        self._huge_refused = threading.Event()
        self._refused = threading.Event()

    def choose(self, huge: int, small: int) -> None:
        """Get one piece as huge pages and one as small ones; the rest as what is worth its time."""
        began = time.perf_counter()
        self.get(huge)
        halfway = time.perf_counter()
        self._populate(small, _PIECE)
        if halfway - began > HUGE_MAY_TAKE * (time.perf_counter() - halfway):
            self._huge_refused.set()

    def get(self, address: int) -> None:
        """The pages of one piece."""
        end = min(address + _PIECE, self._end)
        windows = range(address, end - HUGE_PAGE + 1, HUGE_PAGE)
        if windows and not self._huge_refused.is_set():
            for window in windows:
                # Which page decides the memory node: another one in each window, so that interleaved ones alternate.
                number = (window - self._start) // HUGE_PAGE % (HUGE_PAGE // mmap.PAGESIZE)
                self._populate(window + number * mmap.PAGESIZE, mmap.PAGESIZE)
            if advise(address, len(windows) * HUGE_PAGE, _MADV_COLLAPSE) not in (0, errno.EAGAIN):
                self._huge_refused.set()  # an older kernel, shmem_enabled is "deny", or no such page is free
        self._populate(address, round_up(end - address, mmap.PAGESIZE))

    def _populate(self, address: int, length: int) -> None:
        if not self._refused.is_set() and advise(address, length, MADV_POPULATE_WRITE):
            self._refused.set()  # before Linux 5.14, or there is no room: posix_fallocate will tell
