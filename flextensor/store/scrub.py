"""Scrubber: checks a store's bytes all the time, a little at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from flextensor.store.errors import StoreClosedError, StoreCorruptError
from flextensor.store.host_store import HostStore
from flextensor.store.report import ScrubReport

log = logging.getLogger(__name__)

Unit = tuple[str, frozenset[str]]
"""A unit, and those of its weights that are checked."""


class Scrubber:
    """Verifies one unit after another in one thread that works at most ``share`` of the time (0.02: two per cent).

    It checks all weights, or those that ``follow`` names. What it finds is logged as an error, named in ``report`` and
    raised by ``check``; it then goes on. It ends when the store is closed.

    Raises ValueError for a share outside 0 to 1, StoreError when the store has no checksums.
    """

    def __init__(self, store: HostStore, *, share: float = 0.02) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share {share!r} is outside 0 to 1: it is the part of its time that the thread may work")
        self._store = store
        self._share = share
        for unit in list(store.layout.by_unit)[:1]:
            store.verify(unit, threads=1)  # missing checksums are told here, not in a thread
        self._changed = threading.Condition()
        self._units: tuple[Unit, ...] = ()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._bytes = 0
        self._rounds = 0
        self._corrupt: dict[str, None] = {}
        self._error: StoreCorruptError | None = None
        self.follow(tensor.name for tensor in store.layout.tensors)
        store.scrubber = self

    def follow(self, weights: Iterable[str]) -> None:
        """Check these weights alone from now on: those that the plan in force streams. With none it waits for some."""
        units: dict[str, set[str]] = {}
        for name in weights:
            units.setdefault(self._store.layout.by_name[name].unit, set()).add(name)
        chosen = tuple((unit, frozenset(units[unit])) for unit in self._store.layout.by_unit if unit in units)
        with self._changed:
            if chosen != self._units:
                self._units = chosen
                self._changed.notify_all()

    def start(self) -> None:
        """Begin; again has no effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store-scrub", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, after the unit that is being checked."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
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
        last = ""
        while (units := self._some_units()) is not None:
            # However often the plan changes, each unit's turn comes: it goes on behind the one checked last.
            behind = next((at for at, (unit, _) in enumerate(units, 1) if unit == last), 0)
            for unit, weights in (*units[behind:], *units[:behind]):
                started = time.perf_counter()
                try:
                    self._bytes += self._store.verify(unit, weights=weights, threads=1)
                except StoreCorruptError as error:
                    log.error("%s", error)
                    self._error = self._error or error
                    self._corrupt |= dict.fromkeys(error.tensors)
                except StoreClosedError:
                    return
                last = unit
                worked = time.perf_counter() - started
                with self._changed:
                    if self._changed.wait_for(lambda: self._stopped, worked / self._share - worked):
                        return
                if self._units is not units:
                    break
            else:
                self._rounds += 1

    def _some_units(self) -> tuple[Unit, ...] | None:
        """What to check, once there is something; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._units)
            return None if self._stopped else self._units
