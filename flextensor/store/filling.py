"""Filling a store: many threads, pieces of a few MiB, each checked while it is hot; results in the layout's order."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flextensor.store.checksum import Checksum, checksum
from flextensor.store.layout import StoredTensor
from flextensor.store.mapping import populate

PIECE = 8 << 20
"""Bytes a thread moves at a time; a multiple of every element size, of a page and of a checksum's row.

Not smaller: sixteen threads that take the interpreter lock for every MiB fill four times slower (measured).
"""
_HOT = 4 << 20
"""Bytes that are checked before the next ones are read: less than a core's share of cache; a multiple as ``PIECE`` is.
"""

Reader = Callable[[torch.Tensor, int], None]
"""Writes the bytes from ``start`` of one tensor into a uint8 view, as long as the view is."""


def thread_count() -> int:
    """Threads that fill: the cores that this process may use, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


def fill(
    tensors: Iterable[tuple[StoredTensor, Callable[[], tuple[Reader, bool]]]],
    memory: torch.Tensor,
    *,
    checksums: bool,
    map_pages: bool = True,
    ahead: int = 256 << 20,
) -> Generator[tuple[StoredTensor, Checksum]]:
    """Fill ``memory`` (uint8) and yield each tensor, in order, once it is in, with its checksum.

    tensors: each with a function that opens it: its reader, and whether pieces of it may be read apart. It is called
        late, so that not more than about ``ahead`` bytes of sources are open at once.
    map_pages: map a piece's pages in one call, ahead of its bytes. Not for memory that comes in huge pages: they are
        few, still hot when the bytes come, and one call for many holds what an import beside needs, too.

    An exception of a reader ends the filling and is raised here.
    """
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="store-fill") as pool:
        waiting: deque[tuple[StoredTensor, list[tuple[int, Future[Checksum]]]]] = deque()
        outstanding = 0
        try:
            for tensor, open_source in tensors:
                while waiting and (outstanding >= ahead or all(piece.done() for _, piece in waiting[0][1])):
                    outstanding -= waiting[0][0].nbytes
                    yield _finish(*waiting.popleft())
                reader, divisible = open_source()
                step = PIECE if divisible else tensor.nbytes
                pieces = []
                for start in range(0, tensor.nbytes, step):
                    end = min(start + step, tensor.nbytes)
                    target = memory[tensor.offset + start : tensor.offset + end]
                    pieces.append(
                        (start, pool.submit(_fill_piece, reader, divisible, target, start, checksums, map_pages))
                    )
                del reader
                waiting.append((tensor, pieces))
                outstanding += tensor.nbytes
                del pieces
            while waiting:
                yield _finish(*waiting.popleft())
        finally:
            for _, left in waiting:
                for _, future in left:
                    future.cancel()


def _finish(tensor: StoredTensor, pieces: list[tuple[int, Future[Checksum]]]) -> tuple[StoredTensor, Checksum]:
    total = Checksum()
    for start, future in pieces:
        total += future.result().at(start)
    pieces.clear()
    return tensor, total


def _fill_piece(
    reader: Reader, divisible: bool, target: torch.Tensor, start: int, checksums: bool, map_pages: bool
) -> Checksum:
    with torch.inference_mode(False), torch.no_grad():
        if map_pages:
            populate(target)
        if not (divisible and checksums):
            reader(target, start)
            return checksum(target) if checksums else Checksum()
        total = Checksum()
        for at in range(0, target.numel(), _HOT):
            part = target[at : at + _HOT]
            reader(part, start + at)
            total += checksum(part).at(at)
        return total


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes between two uint8 tensors of one length without the interpreter lock.

    Host to host it is a plain memmove: torch's own copy would start a team of threads in each of ours.
    """
    if source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
    else:
        target.copy_(source)


def checksums_of(raws: Sequence[torch.Tensor], threads: int | None = None) -> list[str]:
    """The checksums (hexadecimal) of uint8 host tensors, computed by several threads."""
    with ThreadPoolExecutor(threads or thread_count(), thread_name_prefix="store-check") as pool:
        pieces = [
            [(start, pool.submit(checksum, raw[start : start + PIECE])) for start in range(0, raw.numel(), PIECE)]
            for raw in raws
        ]
        return [sum((f.result().at(s) for s, f in parts), Checksum()).hex() for parts in pieces]
