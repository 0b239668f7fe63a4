"""Pinning memory in place with ``cudaHostRegister``: copies run at the link's full speed, without a second copy."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable

import torch

from flextensor.cudart import cuda_runtime
from flextensor.store.limits import locked_memory_limit, memory_limits
from flextensor.store.report import PinReport

log = logging.getLogger(__name__)

Region = tuple[int, int]
"""Address and length in bytes."""

_PORTABLE = 1
_READ_ONLY = 8
_PROBE_BYTES = 32 << 20
_MOST_OF_MEMORY = 0.95


class PinnedRegions:
    """The regions of one store that are registered with CUDA.

    ``register`` may run in a thread beside the filling; ``release`` waits for it.
    """

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._device: torch.device | int | None = None
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes registered."""
        return sum(self._regions.values())

    def register(
        self, regions: Iterable[Region], device: torch.device | int | None = None, *, read_only: bool = False
    ) -> PinReport:
        """Register what of ``regions`` is not registered yet.

        read_only: the process may only read the memory; CUDA registers such a mapping only when it is told.
        Stops at the first refusal and says why in the report; never raises for it, and leaves no CUDA error behind.
        """
        with self._lock:
            started = time.perf_counter()
            todo = merge_regions(regions)
            wanted = sum(nbytes for _, nbytes in todo)
            notes = _notes(wanted)
            reason = self._refusal(wanted)
            if not reason:
                self._device = device
                with torch.cuda.device(device):
                    for address, nbytes in todo:
                        if self._regions.get(address) == nbytes:
                            continue
                        reason = _register(address, nbytes, read_only)
                        if reason:
                            break
                        self._regions[address] = nbytes
            pinned = sum(nbytes for address, nbytes in todo if self._regions.get(address) == nbytes)
            speed = None
            if pinned < wanted:
                speed = _pageable_speed(device)
                rate = f", expected speed {speed / 1e9:.1f} GB/s" if speed else ""
                # Without a GPU nothing is lost by it.
                level = logging.WARNING if torch.cuda.is_available() else logging.INFO
                log.log(level, "host store stays pageable (%d of %d bytes pinned)%s: %s", pinned, wanted, rate, reason)
            return PinReport(
                wanted=wanted,
                pinned=pinned,
                seconds=time.perf_counter() - started,
                chunks=len(todo),
                reason=reason,
                expected_bytes_per_second=speed,
                notes=notes,
            )

    def release(self, within: Iterable[Region] | None = None) -> None:
        """Unregister everything, or the given regions."""
        with self._lock:
            chosen = dict(self._regions) if within is None else dict(merge_regions(within))
            mine = [address for address in chosen if self._regions.pop(address, None) is not None]
            if not mine:
                return
            # On the device that registered: the call would make a context on the current one.
            with torch.cuda.device(self._device):
                for address in mine:
                    _unregister(address)

    def _refusal(self, wanted: int) -> str:
        if not torch.cuda.is_available():
            return "no CUDA device"
        limits = memory_limits()
        most = int(limits.total * _MOST_OF_MEMORY)
        if wanted > most:
            return (
                f"{wanted} bytes to pin are more than {_MOST_OF_MEMORY:.0%} of {limits.source} ({limits.total} bytes); "
                "give the machine or the container more memory"
            )
        return ""


def merge_regions(regions: Iterable[Region]) -> list[Region]:
    """Regions by ascending address; those that overlap become one.

    They are not rounded to pages: the driver refuses a copy that begins in a registered region and ends outside, so a
    region must hold nothing that is not ours (measured; two regions may share a page).
    """
    merged: list[Region] = []
    for address, nbytes in sorted(regions):
        if merged and address < sum(merged[-1]):
            first, length = merged[-1]
            merged[-1] = (first, max(address + nbytes, first + length) - first)
        elif nbytes:
            merged.append((address, nbytes))
    return merged


def _register(address: int, nbytes: int, read_only: bool) -> str:
    """Register one region; the reason when it is refused, else an empty text."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0))
    if int(code) == 0:
        return ""
    text = runtime.cudaGetErrorString(code)
    _clear_error()
    return f"cudaHostRegister of {nbytes} bytes at {address:#x} failed with {int(code)} ({text})"


def _unregister(address: int) -> None:
    code = torch.cuda.cudart().cudaHostUnregister(address)
    if int(code) != 0:
        log.warning("cudaHostUnregister at %#x failed with %d", address, int(code))
        _clear_error()


def _clear_error() -> None:
    """Take the failed call's error off this thread, or the next kernel launch would report it as its own."""
    library = cuda_runtime()
    if library is not None:
        library.cudaGetLastError()
        return
    with contextlib.suppress(RuntimeError):
        torch.empty(1, dtype=torch.uint8, device="cuda").fill_(0)


def _pageable_speed(device: torch.device | int | None) -> float | None:
    """Bytes a second of a copy from pageable memory to the device; None without one or without room on it."""
    if not torch.cuda.is_available():
        return None
    try:
        with torch.cuda.device(device):
            source = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device="cpu")
            target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
            best = float("inf")
            for _ in range(3):
                torch.cuda.synchronize()
                started = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize()
                best = min(best, time.perf_counter() - started)
    except RuntimeError:
        return None
    return _PROBE_BYTES / best


def _notes(wanted: int) -> tuple[str, ...]:
    limit = locked_memory_limit()
    if limit is None or limit >= wanted:
        return ()
    # NVIDIA's driver does not count registered memory against the limit on Linux, so it is no ground to refuse.
    return (f"RLIMIT_MEMLOCK is {limit} bytes, less than {wanted}; if pinning is refused, raise it (ulimit -l)",)
