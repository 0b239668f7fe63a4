"""Memory mappings as uint8 tensors.

A tensor keeps its mapping alive: ``torch.frombuffer`` holds the mmap object, which unmaps when the last tensor over it
is gone. So nothing here ever calls ``mmap.close()``: it would unmap under living tensors.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

from flextensor.store.layout import PAGE, StoredTensor, round_up


def map_anonymous(nbytes: int) -> torch.Tensor:
    """``nbytes`` of zeroed memory of this process, huge pages where the system has them."""
    area = mmap.mmap(-1, round_up(max(nbytes, 1), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge(area)
    return _as_tensor(area)[:nbytes]


def map_file(fd: int, nbytes: int, *, private: bool = False) -> torch.Tensor:
    """The first ``nbytes`` of a file, readable and writable.

    private: writes go to pages of this process's own and never to the file.
    """
    area = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    if not private:
        _advise_huge(area)
    return _as_tensor(area)


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


def pss_bytes(pid: int, matches: Iterable[tuple[str, int]] = (), address: tuple[int, int] | None = None) -> int:
    """Proportional set size of a process's mappings: of files given as (``major:minor``, inode), or of those that
    begin inside ``address`` (start, end). Bytes.

    Raises ProcessLookupError when there is no such process, PermissionError when it is another user's.
    """
    return _smaps_sum(pid, "Pss:", set(matches), address)


def huge_bytes(address: tuple[int, int]) -> int:
    """Bytes of huge pages in this process's mappings that begin inside ``address`` (start, end)."""
    fields = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")
    return sum(_smaps_sum(None, field, set(), address) for field in fields)


def _smaps_sum(pid: int | None, field: str, files: set[tuple[str, int]], address: tuple[int, int] | None) -> int:
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
            start = int(span.split("-")[0], 16)
            counted = (device, int(inode)) in files or (address is not None and address[0] <= start < address[1])
        elif counted and line.startswith(field):
            total += int(line.split()[1]) * 1024
    return total


def _as_tensor(area: mmap.mmap) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.frombuffer(area, dtype=torch.uint8)


def _advise_huge(area: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
