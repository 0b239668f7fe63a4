"""Which items are run next: a queue of leases that loses none and gives up on none too early.

Pure Python: no Ray, no clock. The batches are made from the whole input in one fixed way, so that an item shares
its batch with the same others in every run; a batch's numbers may depend on its padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.messages import Item, Lease


@dataclass(frozen=True)
class SetAside:
    """An item that failed as often as an item may, and its last error."""

    item: Item
    error: str


def make_batches(items: Sequence[Item], size: int, length: Callable[[Item], int]) -> list[tuple[Item, ...]]:
    """Batches of at most ``size`` items of like length (``length`` in any unit), longest first.

    Longest first, so that the greatest memory need shows at once and the job's end is even.
    """
    if size < 1:
        raise ValueError(f"a batch holds {size} items; it needs 1 or more")
    ordered = by_length(items, length)
    return [tuple(ordered[at : at + size]) for at in range(0, len(ordered), size)]


def by_length(items: Sequence[Item], length: Callable[[Item], int]) -> list[Item]:
    """Longest first; items of one length in their order."""
    return sorted(items, key=lambda item: -length(item))


class LeaseQueue:
    """Each lease is out at one worker at most, and comes back by ``finish`` or ``give_back``."""

    def __init__(self, batches: Iterable[Sequence[Item]], *, attempts: int = 3) -> None:
        if attempts < 1:
            raise ValueError(f"attempts = {attempts}: an item needs 1 or more")
        self._attempts = attempts
        self._waiting: deque[Lease] = deque()
        self._out: dict[int, Lease] = {}
        self._next = 0
        for batch in batches:
            self._add(tuple(batch), 1)

    def _add(self, items: tuple[Item, ...], attempt: int, *, first: bool = False) -> None:
        lease = Lease(number=self._next, items=items, attempt=attempt)
        self._next += 1
        (self._waiting.appendleft if first else self._waiting.append)(lease)

    def take(self) -> Lease | None:
        """The next lease, or None when none waits now."""
        if not self._waiting:
            return None
        lease = self._waiting.popleft()
        self._out[lease.number] = lease
        return lease

    def finish(self, number: int) -> bool:
        """The lease's results are written. False when it is not out (a second answer to it)."""
        return self._out.pop(number, None) is not None

    def give_back(self, number: int, *, error: str, blame: bool) -> list[SetAside]:
        """The lease was not done.

        blame: it may be the items' own fault, so the attempt counts: a batch that failed twice is split into single
        items, and an item that failed ``attempts`` times alone is set aside and returned.
        """
        lease = self._out.pop(number, None)
        if lease is None:
            return []
        if not blame:
            self._add(lease.items, lease.attempt, first=True)
        elif len(lease.items) == 1:
            if lease.attempt >= self._attempts:
                return [SetAside(lease.items[0], error)]
            self._add(lease.items, lease.attempt + 1, first=True)
        elif lease.attempt >= min(2, self._attempts):
            for item in lease.items:
                self._add((item,), 1)
        else:
            self._add(lease.items, lease.attempt + 1, first=True)
        return []

    @property
    def finished(self) -> bool:
        """True when no lease waits and none is out."""
        return not self._waiting and not self._out
