"""Pinning memory in place: copies run at the link's full speed, without a second copy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import torch

from flextensor.store.limits import locked_memory_limit, memory_limits
from flextensor.store.registrar import CudaRegistrar, Registrar
from flextensor.store.report import PinReport

log = logging.getLogger(__name__)

Region = tuple[int, int]
"""Address and length in bytes."""

_MOST_OF_MEMORY = 0.95


class PinnedRegions:
    """The regions of one store that are registered.

    ``register`` may run in a thread beside other work; ``release`` waits for it.
    """

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._registrar: Registrar = CudaRegistrar()
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes registered."""
        return sum(self._regions.values())

    def register(
        self, regions: Iterable[Region], registrar: Registrar | None = None, *, read_only: bool = False
    ) -> PinReport:
        """Register what of ``regions`` is not registered yet.

        registrar: None: CUDA's, for the current device.
        read_only: the process may only read the memory; CUDA registers such a mapping only when it is told.
        Stops at the first refusal and says why in the report; never raises for it.
        """
        with self._lock:
            pinning = Pinning(self, regions, registrar or CudaRegistrar(), read_only=read_only)
            for region in pinning.regions:
                pinning.add(region)
            return pinning.report(waited=pinning.seconds)

    def release(self, within: Iterable[Region] | None = None) -> None:
        """Unregister everything, or the given regions."""
        with self._lock:
            chosen = dict(self._regions) if within is None else dict(merge_regions(within))
            for address in chosen:
                if self._regions.pop(address, None) is not None:
                    self._registrar.unregister(address)

    def has(self, region: Region) -> bool:
        """True when exactly this region is registered."""
        return self._regions.get(region[0]) == region[1]

    def add(self, region: Region, registrar: Registrar, read_only: bool) -> str:
        """Register one region; the reason when it is refused, else an empty text."""
        with self._lock:
            self._registrar = registrar
            reason = registrar.register(*region, read_only)
            if not reason:
                self._regions[region[0]] = region[1]
            return reason


class Pinning:
    """One round of registering: region by region, then what became of all of them.

    regions: what is wanted, merged. reason: why no more is registered, from the first refusal on.
    seconds: time that registering took.
    """

    def __init__(
        self, pins: PinnedRegions, regions: Iterable[Region], registrar: Registrar, *, read_only: bool
    ) -> None:
        self.regions = merge_regions(regions)
        self.seconds = 0.0
        self._pins = pins
        self._registrar = registrar
        self._read_only = read_only
        self._wanted = sum(nbytes for _, nbytes in self.regions)
        self._notes = _notes(self._wanted)
        self.reason = registrar.refusal() or _too_much(self._wanted)

    def add(self, region: Region) -> None:
        """Register one of ``regions``, unless it is or one was refused."""
        if self.reason or self._pins.has(region):
            return
        started = time.perf_counter()
        self.reason = self._pins.add(region, self._registrar, self._read_only)
        self.seconds += time.perf_counter() - started

    def report(self, *, waited: float) -> PinReport:
        """How much is registered; a warning is logged when it is not all. waited: seconds, see ``PinReport``."""
        pinned = sum(region[1] for region in self.regions if self._pins.has(region))
        speed = None
        if pinned < self._wanted:
            speed = self._registrar.pageable_speed()
            rate = f", expected speed {speed / 1e9:.1f} GB/s" if speed else ""
            # Without a GPU nothing is lost by it.
            level = logging.WARNING if torch.cuda.is_available() else logging.INFO
            text = "host store stays pageable (%d of %d bytes pinned)%s: %s"
            log.log(level, text, pinned, self._wanted, rate, self.reason)
        return PinReport(
            wanted=self._wanted,
            pinned=pinned,
            seconds=self.seconds,
            chunks=len(self.regions),
            reason=self.reason,
            expected_bytes_per_second=speed,
            notes=self._notes,
            waited_seconds=waited,
        )


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


def _too_much(wanted: int) -> str:
    # Of all memory, not of what is available: the weights are in memory already, and pinning takes no more of it. What
    # is available was looked at before they were filled.
    limits = memory_limits()
    most = int(limits.total * _MOST_OF_MEMORY)
    if wanted <= most:
        return ""
    return (
        f"{wanted} bytes to pin are more than {_MOST_OF_MEMORY:.0%} of {limits.source} ({limits.total} bytes); "
        "give the machine or the container more memory"
    )


def _notes(wanted: int) -> tuple[str, ...]:
    limit = locked_memory_limit()
    if limit is None or limit >= wanted:
        return ()
    # NVIDIA's driver does not count registered memory against the limit on Linux, so it is no ground to refuse.
    return (f"RLIMIT_MEMLOCK is {limit} bytes, less than {wanted}; if pinning is refused, raise it (ulimit -l)",)
