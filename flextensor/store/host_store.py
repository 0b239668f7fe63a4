"""HostStore: the weights of a model in host memory, by unit and offset. What all kinds of store have in common."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from flextensor.store.errors import StoreClosedError, StoreCorruptError, StoreError
from flextensor.store.filling import checksums_of
from flextensor.store.layout import Layout, StoredTensor, pin_chunks
from flextensor.store.mapping import huge_bytes, map_anonymous, touch_huge, typed_view
from flextensor.store.numa import placement
from flextensor.store.pin_beside import PinBesideFilling
from flextensor.store.pinning import PinnedRegions, Region
from flextensor.store.registrar import CudaRegistrar, Registrar
from flextensor.store.report import PinReport, StoreReport

if TYPE_CHECKING:
    from flextensor.store.scrub import Scrubber


@dataclass
class FillTimes:
    """Seconds that it took to get the weights."""

    fill: float = 0.0
    reserve: float = 0.0
    wait: float = 0.0
    identity: float = 0.0


class HostStore:
    """Immutable weights in host memory.

    Copies to a device come from ``bytes`` and ``source``; a parameter that shall lie in host memory points at
    ``tensor``. Edits go through ``make_private``: a copy of the touched tensor that only this process sees.
    All methods may be called from any thread.
    """

    kind = "private"
    shared = False
    _read_only = False

    def __init__(self, layout: Layout, identity: str, *, pinning: PinBesideFilling | None = None) -> None:
        self.layout = layout
        self.identity = identity
        self.times = FillTimes()
        self.checksums: Mapping[str, str] | None = None
        self.numa = ""
        self.scrubber: Scrubber | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._private: dict[str, torch.Tensor] = {}
        self._pinning = pinning
        self._pins = PinnedRegions() if pinning is None else pinning.pins
        self._pin_report: PinReport | None = None
        self._registrar: Registrar = CudaRegistrar()
        # Memory must not go while CUDA has it registered, even when nobody closes the store.
        self._unpin_at_end = weakref.finalize(self, self._pins.release if pinning is None else pinning.abandon)
        self._unpin_at_end.atexit = False

    # What a kind of store provides.

    def _stored_bytes(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor's immutable bytes (uint8)."""
        raise NotImplementedError

    def _parameter_bytes(self, tensor: StoredTensor) -> torch.Tensor:
        """The same bytes for a parameter to point at; writes to them stay in this process."""
        return self._stored_bytes(tensor)

    def _run(self, offset: int, nbytes: int) -> torch.Tensor:
        """Immutable bytes by offset (uint8)."""
        raise NotImplementedError

    def _regions(self) -> list[Region]:
        """What ``pin`` registers, cut where no copy spans the cut."""
        raise NotImplementedError

    def _drop_memory(self) -> None:
        """Forget the mapping; it goes when the last tensor over it goes."""
        raise NotImplementedError

    # Bytes.

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A run of the immutable store (uint8, no copy); private copies are not in it.

        Raises ValueError outside the store, StoreClosedError after ``close``.
        """
        self._check_open()
        if offset < 0 or nbytes < 0 or offset + nbytes > self.layout.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside the store of {self.layout.nbytes} bytes")
        return self._run(offset, nbytes)

    def source(self, name: str) -> torch.Tensor:
        """The tensor's bytes where they now lie (uint8): the private copy when it was edited, else the store."""
        self._check_open()
        private = self._private.get(name)
        return self._stored_bytes(self._find(name)) if private is None else private

    def tensor(self, name: str) -> torch.Tensor:
        """The weight with its dtype, shape and stride, no copy: the private copy when it was edited, else the store.

        Writing to it in place never reaches another process, but ``source`` does not see it either: use
        ``make_private`` to edit.
        """
        self._check_open()
        private = self._private.get(name)
        stored = self._find(name)
        return typed_view(self._parameter_bytes(stored) if private is None else private, stored)

    # Copy on write.

    def make_private(self, name: str) -> torch.Tensor:
        """A writable copy of the weight that only this process sees (dtype, shape and stride as before).

        The first call copies, later ones give the same memory. Pinned when the store is.
        """
        self._check_open()
        stored = self._find(name)
        with self._lock:
            if name not in self._private:
                copy = map_anonymous(stored.nbytes)
                copy.copy_(self._parameter_bytes(stored))
                if self._pins.nbytes:
                    self._pins.register([_region(copy)], self._registrar)
                self._private[name] = copy
            return typed_view(self._private[name], stored)

    def discard_private(self, name: str) -> None:
        """Undo ``make_private``: the weight is the store's again. No effect when there is no private copy."""
        self._find(name)
        with self._lock:
            private = self._private.pop(name, None)
            if private is not None:
                self._pins.release([_region(private)])

    @property
    def edited(self) -> tuple[str, ...]:
        """Names of the weights that have a private copy."""
        return tuple(self._private)

    @property
    def private_bytes(self) -> int:
        """Bytes of the private copies."""
        return sum(copy.numel() for copy in self._private.values())

    def edited_in_place(self) -> tuple[str, ...]:
        """Weights that were written to through ``tensor`` without ``make_private``, so that ``source`` differs.

        Only a shared store can have any: it looks at which pages this process has copied.
        """
        return ()

    def keep_edits(self) -> tuple[str, ...]:
        """``make_private`` for all that ``edited_in_place`` finds: their new values count from now on. Their names."""
        names = self.edited_in_place()
        for name in names:
            self.make_private(name)
        return names

    # Checking.

    def verify(
        self, unit: str | None = None, *, weights: Collection[str] | None = None, threads: int | None = None
    ) -> int:
        """Compare the stored bytes of a unit (None: of all) with the checksums taken when it was filled.

        weights: of these alone (None: of all in the unit). threads: None: as many as fill a store. Returns the bytes
        checked; private copies are not looked at.
        Raises StoreCorruptError naming the weights, StoreError when there are no checksums, KeyError for the unit.
        """
        self._check_open()
        if self.checksums is None:
            raise StoreError(f"store {self.identity!r} has no checksums; only shared stores, or checksums=True, have")
        if unit is not None and unit not in self.layout.by_unit:
            raise KeyError(f"the store has no unit {unit!r}")
        tensors = self.layout.tensors if unit is None else self.layout.by_unit[unit]
        if weights is not None:
            tensors = tuple(tensor for tensor in tensors if tensor.name in weights)
        found = checksums_of([self._stored_bytes(tensor) for tensor in tensors], threads)
        bad = [tensor for tensor, value in zip(tensors, found, strict=True) if self.checksums[tensor.name] != value]
        if bad:
            names = ", ".join(f"{tensor.name!r} of unit {tensor.unit!r}" for tensor in bad[:5])
            raise StoreCorruptError(
                f"host store {self._path() or self.identity}: {len(bad)} of {len(tensors)} weights checked have wrong "
                f"bytes: {names}; end its users, remove it (flextensor store rm) and start again",
                tuple(tensor.name for tensor in bad),
            )
        return sum(tensor.nbytes for tensor in tensors)

    # Pinning.

    def pin(self, device: torch.device | int | None = None) -> PinReport:
        """Register the memory with CUDA in place, chunk by chunk; again is free.

        device: the CUDA device whose context to use, when called from a thread of its own.
        Never raises for a refusal: the store stays pageable, the report and a logged warning say why.
        """
        return self.pin_with(CudaRegistrar(device))

    def pin_with(self, registrar: Registrar) -> PinReport:
        """``pin`` by what a registrar does; what began beside the filling is brought to its end."""
        self._check_open()
        with self._lock:
            if self._pinning is not None:
                stored, self._pinning = self._pinning.finish(), None
            else:
                stored = self._pins.register(self._regions(), registrar, read_only=self._read_only)
            self._pin_report, self._registrar = stored, registrar
            if stored.complete:
                self._pins.register([_region(copy) for copy in self._private.values()], registrar)
            return stored

    def unpin(self) -> None:
        """Undo ``pin``. No copy from the store may be under way."""
        with self._lock:
            if self._pinning is not None:
                self._pinning.abandon()
                self._pinning = None
            self._pins.release()
            self._pin_report = None

    # Life.

    def close(self) -> None:
        """Unregister and let go of the memory; again is free. Tensors handed out stay readable while they live."""
        if self.scrubber is not None:
            self.scrubber.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.unpin()
            self._private.clear()
            self._drop_memory()

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def report(self) -> StoreReport:
        """Where the weights are, what they take, who holds them."""
        return StoreReport(
            kind=self.kind,
            identity=self.identity,
            path=self._path(),
            nbytes=self.layout.nbytes,
            weight_bytes=self.layout.weight_bytes,
            tensors=len(self.layout.tensors),
            shared=self.shared,
            created_by_us=self._created_by_us(),
            holders=self._holders(),
            pin=self._pin_report,
            edited=self.edited,
            private_bytes=self.private_bytes,
            fill_seconds=self.times.fill,
            reserve_seconds=self.times.reserve,
            wait_seconds=self.times.wait,
            identity_seconds=self.times.identity,
            huge_pages=self._huge_pages(),
            numa=self._placement(),
            scrub=None if self.scrubber is None else self.scrubber.report(),
        )

    def _path(self) -> str:
        return ""

    def _created_by_us(self) -> bool:
        return True

    def _holders(self) -> tuple[int, ...] | None:
        return None

    def _huge_pages(self) -> str:
        """Where the kernel gave huge pages; empty where a mapping cannot be told from others."""
        return ""

    def _placement(self) -> str:
        """On which NUMA nodes the memory is."""
        return self.numa

    def _find(self, name: str) -> StoredTensor:
        try:
            return self.layout.by_name[name]
        except KeyError:
            raise KeyError(f"the store has no weight {name!r}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"store {self.identity!r} is closed")


class MappedStore(HostStore):
    """A store whose weights lie in one mapping, packed by its layout."""

    def __init__(
        self,
        layout: Layout,
        identity: str,
        memory: torch.Tensor,
        *,
        checksums: Mapping[str, str] | None = None,
        pinning: PinBesideFilling | None = None,
    ) -> None:
        super().__init__(layout, identity, pinning=pinning)
        self._memory: torch.Tensor | None = memory
        self._touched = False
        self.checksums = checksums

    @property
    def memory(self) -> torch.Tensor:
        """The whole mapping (uint8, ``layout.nbytes``)."""
        if self._memory is None:
            raise StoreClosedError(f"store {self.identity!r} is closed")
        return self._memory

    def _run(self, offset: int, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self.memory[offset : offset + nbytes]

    def _stored_bytes(self, tensor: StoredTensor) -> torch.Tensor:
        return self._run(tensor.offset, tensor.nbytes)

    def _regions(self) -> list[Region]:
        base = self.memory.data_ptr()
        return [(base + start, end - start) for start, end in pin_chunks(self.layout)]

    def _huge_pages(self) -> str:
        if self._memory is None:
            return ""
        if self.shared and not self._touched:  # it was filled through another mapping
            touch_huge(self._memory)
            self._touched = True
        start = self._memory.data_ptr()
        return f"{huge_bytes((start, start + self._memory.numel()))} of {self._memory.numel()} bytes"

    def _placement(self) -> str:
        return self.numa if self._memory is None else placement(self.numa, self._memory)

    def _drop_memory(self) -> None:
        self._memory = None


class AdoptedStore(HostStore):
    """Weights that stay where they lie, each in its own memory; offsets are virtual and no two tensors touch."""

    kind = "adopted"

    def __init__(self, layout: Layout, identity: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(layout, identity)
        self._bytes = dict(tensors)
        self._starts = [tensor.offset for tensor in layout.tensors]
        # Decided once: after ``pin`` every tensor says that it is pinned.
        # Whole storages, not weights: a copy of something larger that begins in a registered part would fail.
        self._pageable = [_storage_region(raw) for raw in self._bytes.values() if not raw.is_pinned()]

    def _stored_bytes(self, tensor: StoredTensor) -> torch.Tensor:
        return self._bytes[tensor.name]

    def _run(self, offset: int, nbytes: int) -> torch.Tensor:
        found = self.layout.tensors[bisect.bisect_right(self._starts, offset) - 1]
        start = offset - found.offset
        if start + nbytes > found.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} leave weight {found.name!r} ({found.nbytes} bytes at "
                f"{found.offset}); adopted weights lie apart, so a run is within one"
            )
        return self._bytes[found.name][start : start + nbytes]

    def _regions(self) -> list[Region]:
        return self._pageable

    def _drop_memory(self) -> None:
        self._bytes.clear()


def _storage_region(raw: torch.Tensor) -> Region:
    storage = raw.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _region(raw: torch.Tensor) -> Region:
    return raw.data_ptr(), raw.numel()
