"""Scrubber: checks a store's bytes all the time, a little at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from flextensor.store.errors import StoreClosedError, StoreCorruptError
from flextensor.store.host_store import HostStore
from flextensor.store.report import ScrubReport

log = logging.getLogger(__name__)


class Scrubber:
    """Verifies one unit after another in one thread that works at most ``share`` of the time (0.02: two per cent).

    units: which, in which order (those that are streamed); None: all. What it finds is logged as an error, named in
    ``report`` and raised by ``check``; it then goes on. It ends when the store is closed.

    Raises ValueError for a share outside 0 to 1, StoreError when the store has no checksums.
    """

    def __init__(self, store: HostStore, *, share: float = 0.02, units: Sequence[str] | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share {share!r} is outside 0 to 1: it is the part of its time that the thread may work")
        self._store = store
        self._share = share
        self._units = tuple(store.layout.by_unit) if units is None else tuple(units)
        for unit in self._units[:1]:
            store.verify(unit, threads=1)  # an unknown unit or missing checksums are told here, not in a thread
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._bytes = 0
        self._rounds = 0
        self._corrupt: dict[str, None] = {}
        self._error: StoreCorruptError | None = None
        store.scrubber = self

    def start(self) -> None:
        """Begin; again has no effect."""
        if self._thread is None and self._units:
            self._thread = threading.Thread(target=self._run, name="store-scrub", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, after the unit that is being checked."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise the StoreCorruptError that was found, if any."""
        if self._error is not None:
            raise self._error

    def report(self) -> ScrubReport:
        """What was checked and found."""
        return ScrubReport(self._bytes, self._rounds, tuple(self._corrupt), self._error)

    def _run(self) -> None:
        while True:
            for unit in self._units:
                started = time.perf_counter()
                try:
                    self._bytes += self._store.verify(unit, threads=1)
                except StoreCorruptError as error:
                    log.error("%s", error)
                    self._error = self._error or error
                    self._corrupt |= dict.fromkeys(error.tensors)
                except StoreClosedError:
                    return
                worked = time.perf_counter() - started
                if self._stop.wait(worked / self._share - worked):
                    return
            self._rounds += 1
