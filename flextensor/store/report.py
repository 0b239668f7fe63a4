"""What a store says about itself."""

from __future__ import annotations

from dataclasses import dataclass

from flextensor.store.errors import StoreCorruptError


@dataclass(frozen=True)
class PinReport:
    """What ``HostStore.pin`` reached. Sizes are bytes, times seconds.

    pinned: bytes registered with CUDA, of ``wanted``.
    reason: why not everything is pinned; empty when it is.
    expected_bytes_per_second: measured speed of pageable copies; None where all is pinned or there is no GPU.
    notes: what was looked at and may matter (limits that CUDA may ignore).
    seconds: time that registering took, beside the filling or not. waited_seconds: how much longer the start took for
        it: what was left when the store was full, or all where another process had filled it.
    """

    wanted: int
    pinned: int
    seconds: float
    chunks: int
    reason: str = ""
    expected_bytes_per_second: float | None = None
    notes: tuple[str, ...] = ()
    waited_seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """True when every byte is pinned."""
        return self.pinned == self.wanted


@dataclass(frozen=True)
class ScrubReport:
    """What was checked so far. checked_bytes: bytes; rounds: times that every unit was checked.

    corrupt: names of the weights whose bytes were wrong; ``error`` is the first such error.
    """

    checked_bytes: int
    rounds: int
    corrupt: tuple[str, ...]
    error: StoreCorruptError | None


@dataclass(frozen=True)
class StoreReport:
    """A store's state. Sizes are bytes, times seconds.

    path: the file; empty for a private store, ``memfd:...`` for one without a name.
    created_by_us: this process filled it.
    holders: process ids that hold it, as far as this process's PID namespace shows them; None for a private store.
    fill_seconds: time to fill it here, reserve_seconds of it to get its pages.
    wait_seconds: time spent waiting for another process to fill it. identity_seconds: time to find its identity.
    huge_pages, numa: what is used, in words.
    edited: weights with a private copy; private_bytes is their sum.
    scrub: what was checked all the while (``shm_scrub_share``); None where nothing is.
    """

    kind: str
    identity: str
    path: str
    nbytes: int
    weight_bytes: int
    tensors: int
    shared: bool
    created_by_us: bool
    holders: tuple[int, ...] | None
    pin: PinReport | None
    edited: tuple[str, ...]
    private_bytes: int
    fill_seconds: float
    reserve_seconds: float
    wait_seconds: float
    identity_seconds: float
    huge_pages: str
    numa: str
    scrub: ScrubReport | None = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered with CUDA now."""
        return self.pin.pinned if self.pin else 0

    @property
    def pageable_reason(self) -> str:
        """Why copies are pageable; empty when they are not."""
        return self.pin.reason if self.pin else "not pinned yet"
