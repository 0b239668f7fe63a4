"""The Device protocol: what the loader and the manager ask of a device. ``cuda.py`` and ``host.py`` implement it.

Streams and events follow CUDA's semantics: work on a stream runs in order; ``record`` marks the work queued so far;
``wait`` makes later work of a stream wait, never the calling thread (on the host device the compute stream *is* the
calling thread).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark on a stream."""

    def query(self) -> bool:
        """True once the marked work is done."""

    def synchronize(self) -> None:
        """Block the calling thread until the marked work is done."""

    def elapsed_seconds(self, end: Any) -> float:
        """Seconds from this event to ``end``; both timed, both done."""


class Stream(Protocol):
    """A queue of device work. ``key`` tells two streams apart."""

    key: int

    def record(self, event: Any) -> None:
        """Mark the work queued so far."""

    def wait(self, event: Any) -> None:
        """Later work on this stream starts only after ``event``'s."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of bytes (two uint8 tensors of the same length), host to device or within the device."""

    def copier(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, together: bool = False
    ) -> Callable[[], None]:
        """A function that queues these (destination, source) copies, as ``copy`` does, at the least host time.

        together: they may go in any order among themselves, and the function is never called in a capture.
        """

    def synchronize(self) -> None:
        """Block the calling thread until the stream is empty."""


class Device(Protocol):
    """One device and its link to host memory."""

    name: str
    torch_device: torch.device
    shared_link: str | None
    """Names the link to host memory among the processes that share it; None: it is this process's own."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of ``nbytes`` on the device, aligned to 256 bytes, uninitialised."""

    def compute_stream(self) -> Stream:
        """The stream that the caller's kernels go to now."""

    def new_stream(self) -> Stream:
        """A stream for copies, beside the compute stream."""

    def new_event(self, *, timed: bool) -> Event:
        """An event; ``timed`` events give ``elapsed_seconds``."""

    def synchronize(self) -> None:
        """Block until the device is idle."""

    def total_bytes(self) -> int:
        """The device's memory."""

    def free_bytes(self) -> int:
        """What an allocation could get now, this process's cached memory included."""

    def allocated_bytes(self) -> int:
        """What this process's tensors take now, as far as the device knows."""

    def peak_bytes(self) -> int:
        """The most that ``allocated_bytes`` was since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Forget the peak."""

    def is_capturing(self) -> bool:
        """True while the compute stream records a CUDA graph."""

    def release_cached(self) -> None:
        """Give cached blocks back to the system, so that an arena of another size fits."""

    def close(self) -> None:
        """Stop the device's threads."""


def copy_each(stream: Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """A ``copier`` made of single ``copy`` calls."""
    kept = tuple(pairs)

    def queue() -> None:
        for destination, source in kept:
            stream.copy(destination, source)

    return queue
