"""The host device: a real device made of ordinary memory, a copy thread and a link of a set bandwidth.

Device memory is separate anonymous mappings, counted against ``memory_bytes``; an allocation beyond it raises
``torch.OutOfMemoryError`` as CUDA does. The compute stream is the calling thread: what it has run is done. A copy
stream is a thread with a queue; its copies take ``nbytes / link_bytes_per_second`` at least, all streams sharing the
link. Events carry time stamps.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flextensor.runtime.device import copy_each

CHUNK_BYTES = 4 << 20
"""A copy moves in chunks, so that two streams share the link evenly."""

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""What memory is got with: pages of a shared mapping, Python's default, take up to three times as long to come."""

UNWRITTEN: int | None = None
"""What new memory is filled with; None leaves zeros. A GPU's holds what somebody left there: tests set bytes that are
no numbers."""


@dataclass(eq=False)
class HostEvent:
    """Done when ``_done`` is set; a new record takes a new mark, as CUDA's do."""

    _done: threading.Event | None = None
    _stamp: list[float] = field(default_factory=lambda: [0.0])

    def _begin(self) -> tuple[threading.Event, list[float]]:
        self._done, self._stamp = threading.Event(), [0.0]
        return self._done, self._stamp

    def query(self) -> bool:
        return self._done is None or self._done.is_set()

    def synchronize(self) -> None:
        if self._done is not None:
            self._done.wait()

    def elapsed_seconds(self, end: HostEvent) -> float:
        return end._stamp[0] - self._stamp[0]


def _finish(mark: tuple[threading.Event, list[float]]) -> None:
    done, stamp = mark
    stamp[0] = time.perf_counter()
    done.set()


class ComputeStream:
    """The calling thread."""

    key = 0

    def record(self, event: HostEvent) -> None:
        _finish(event._begin())

    def wait(self, event: HostEvent) -> None:
        event.synchronize()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())

    def copier(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, together: bool = False
    ) -> Callable[[], None]:
        return copy_each(self, pairs)

    def synchronize(self) -> None:
        pass


class Link:
    """The wire between host and device memory; one chunk at a time goes over it."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._turn = threading.Lock()
        self._free_at = 0.0

    def move(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between two addresses at the link's pace."""
        for at in range(0, nbytes, CHUNK_BYTES):
            chunk = min(CHUNK_BYTES, nbytes - at)
            with self._turn:
                start = max(time.perf_counter(), self._free_at)
                ctypes.memmove(destination + at, source + at, chunk)
                self._free_at = start + chunk / self.bytes_per_second
            # Sleeping is coarse; a small debt is carried to the next chunk instead of being slept off.
            ahead = self._free_at - time.perf_counter()
            if ahead > 1e-3 or (ahead > 0 and at + chunk == nbytes):
                time.sleep(ahead)


class CopyStream:
    """A thread that runs queued work in order. It ends when the stream is closed or forgotten."""

    def __init__(self, link: Link) -> None:
        self.key = id(self)
        self._link = link
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._queue,), name="offload-copy", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def record(self, event: HostEvent) -> None:
        mark = event._begin()
        self._queue.put(lambda: _finish(mark))

    def wait(self, event: HostEvent) -> None:
        done = event._done  # the mark as it is now: a later record must not move what was waited for
        if done is not None and not done.is_set():
            self._queue.put(lambda: _wait(done))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        link = self._link  # not self: the queue must not keep the stream alive
        self._queue.put(lambda: link.move(destination.data_ptr(), source.data_ptr(), source.numel()))

    def copier(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, together: bool = False
    ) -> Callable[[], None]:
        return copy_each(self, pairs)

    def synchronize(self) -> None:
        event = HostEvent()
        self.record(event)
        event.synchronize()

    def close(self) -> None:
        """End the thread once what is queued is done."""
        if self._finalizer.detach() is not None:
            self._queue.put(None)
        self._thread.join()


def _wait(done: threading.Event) -> None:
    done.wait()


def _run(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()
        del task  # it holds tensors, and the next get may last


class HostDevice:
    """See the module's text. ``memory_bytes``: bytes; ``link_bytes_per_second``: bytes a second."""

    def __init__(self, *, memory_bytes: int, link_bytes_per_second: float) -> None:
        self.shared_link: str | None = None
        self.name = f"host ({link_bytes_per_second / 1e9:g} GB/s)"
        self.torch_device = torch.device("cpu")
        self.link = Link(link_bytes_per_second)
        self._memory_bytes = memory_bytes
        self._live: dict[int, int] = {}
        """Bytes of each allocation that is alive."""
        self._numbers = itertools.count()
        self._peak = 0
        self._lock = threading.Lock()
        self._compute = ComputeStream()
        self._streams: weakref.WeakSet[CopyStream] = weakref.WeakSet()

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            if nbytes > self.free_bytes():
                raise torch.OutOfMemoryError(
                    f"host device out of memory: {nbytes} bytes asked for, {self.free_bytes()} free "
                    f"of {self._memory_bytes} (raise host_memory_bytes or lower the budget)"
                )
            memory, number = mmap.mmap(-1, nbytes, flags=PRIVATE), next(self._numbers)
            # In this order, so that a Ctrl-C between any two of these lines leaves no bytes counted for nothing.
            weakref.finalize(memory, self._live.pop, number, None)
            self._live[number] = nbytes
            self._peak = max(self._peak, self.allocated_bytes())
        with torch.inference_mode(False):
            made = torch.frombuffer(memory, dtype=torch.uint8)
            return made if UNWRITTEN is None else made.fill_(UNWRITTEN)

    def compute_stream(self) -> ComputeStream:
        return self._compute

    def new_stream(self) -> CopyStream:
        stream = CopyStream(self.link)
        self._streams.add(stream)
        return stream

    def new_event(self, *, timed: bool) -> HostEvent:
        return HostEvent()

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def total_bytes(self) -> int:
        return self._memory_bytes

    def free_bytes(self) -> int:
        return self._memory_bytes - self.allocated_bytes()

    def allocated_bytes(self) -> int:
        return sum(list(self._live.values()))

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        with self._lock:
            self._peak = self.allocated_bytes()

    def is_capturing(self) -> bool:
        return False

    def release_cached(self) -> None:
        pass

    def close(self) -> None:
        for stream in list(self._streams):
            stream.close()
