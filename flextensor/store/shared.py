"""The shared store: one file of weights in memory, however many processes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch

from flextensor.store.election import Election, StoreProgress, read_progress
from flextensor.store.errors import StoreCorruptError, StoreTimeoutError
from flextensor.store.file_format import Manifest, encode_header, first_difference, header_size, read_manifest
from flextensor.store.filling import Reader, fill, thread_count
from flextensor.store.host_store import MappedStore
from flextensor.store.layout import Layout, StoredTensor, UnitSpec, make_layout, round_up
from flextensor.store.locking import check_ours, holders, let_go, remove_unheld
from flextensor.store.mapping import buffer_of, map_file, own_pages, page_size, restore_own_pages
from flextensor.store.naming import StoreName, check_namespace, content_identity, remove_dead
from flextensor.store.numa import place_shared, read_topology
from flextensor.store.pin_beside import PinBesideFilling
from flextensor.store.places import HandedFile, NamedFile, Place, check_directory
from flextensor.store.registrar import Registrar
from flextensor.store.reserving import reserve
from flextensor.store.sources import WeightSource

log = logging.getLogger(__name__)

Progress = Callable[[StoreProgress], None]

_POLL = 0.01
_REPORT_EVERY = 0.05


class SharedStore(MappedStore):
    """The store file, mapped twice.

    Copies to a device read a mapping of the file itself: it is pinned, and read-only for the processor. Parameters
    point into a second, copy-on-write mapping of the same pages: it takes no memory until somebody writes to a
    parameter in place, and then only the pages written, of that process alone.
    """

    kind = "shared"
    shared = True
    _read_only = True

    def __init__(
        self,
        label: str,
        fd: int,
        manifest: Manifest,
        *,
        memory: torch.Tensor,
        created: bool,
        leave: Callable[[int], None],
        pinning: PinBesideFilling | None = None,
    ) -> None:
        """memory: the mapping that copies read, see ``map_data``; ``pinning`` may have begun to register it."""
        size, skip = manifest.file_bytes, manifest.header_bytes
        super().__init__(manifest.layout, manifest.identity, memory, checksums=manifest.checksums, pinning=pinning)
        self._own: torch.Tensor | None = map_file(fd, size, skip=skip, private=True)
        self.manifest = manifest
        self._label = label
        self._status = os.fstat(fd)
        self.page_bytes = page_size(fd)
        self._created = created
        self._leave = weakref.finalize(self, _leave, os.getpid(), leave, fd)

    @property
    def path(self) -> str:
        """The file, or what stands for it in messages."""
        return self._label

    @property
    def file_key(self) -> tuple[str, int]:
        """Device (``major:minor``) and inode, as ``/proc/PID/smaps`` shows them."""
        device = self._status.st_dev
        return f"{os.major(device):02x}:{os.minor(device):02x}", self._status.st_ino

    @property
    def file_bytes(self) -> int:
        """Size of the file, which is the memory that it takes."""
        return self.manifest.file_bytes

    def edited_in_place(self) -> tuple[str, ...]:
        self._check_open()
        assert self._own is not None
        spans = own_pages(self._own)
        touched = (
            tensor
            for tensor in self.layout.tensors
            if any(start < tensor.offset + tensor.nbytes and tensor.offset < end for start, end in spans)
        )
        return tuple(
            tensor.name
            for tensor in touched
            if tensor.name not in self._private
            and not torch.equal(self._parameter_bytes(tensor), self._stored_bytes(tensor))
        )

    def discard_private(self, name: str) -> None:
        super().discard_private(name)
        tensor = self._find(name)
        restore_own_pages(self._parameter_bytes(tensor), self._stored_bytes(tensor))

    def _parameter_bytes(self, tensor: StoredTensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            self._check_open()
            assert self._own is not None
            return self._own[tensor.offset : tensor.offset + tensor.nbytes]

    def _drop_memory(self) -> None:
        super()._drop_memory()
        self._own = None
        self._leave()

    def _path(self) -> str:
        return self._label

    def _created_by_us(self) -> bool:
        return self._created

    def _holders(self) -> tuple[int, ...] | None:
        return holders(self._status)


def shared_store(
    units: Iterable[UnitSpec],
    source: WeightSource,
    *,
    namespace: str,
    directory: str = "/dev/shm",
    wait_timeout: float = 600.0,
    progress: Progress | None = None,
    keep: bool = False,
    backing: Literal["file", "memfd"] = "file",
    registrar: Registrar | None = None,
) -> SharedStore:
    """The node's one copy of these weights: attached when it is there, waited for when another process fills it,
    filled when nobody does.

    namespace: part of the file's name; jobs of one namespace with different weights get different files.
    directory: a tmpfs. wait_timeout: seconds without a result while another process fills.
    progress: called in this thread, every 0.05 s at most, while filling and waiting.
    keep: leave the file for a warm start when the last user goes.
    backing: "memfd" takes memory that is no file of ``directory``, for where that is too small; it cannot be kept.
    registrar: pin the store with it: chunk by chunk beside the filling, when this process fills; done when this
        returns, as ``HostStore.pin`` does it. None: it stays pageable until that is called.

    Raises ValueError (layout, namespace), MissingWeightError, StoreSpaceError, StoreTimeoutError, StoreAccessError,
    StoreCorruptError.
    """
    check_namespace(namespace)
    if keep and backing == "memfd":
        raise ValueError("keep=True needs backing='file': a memfd goes with its last user")
    check_directory(directory, backing)
    layout = make_layout(units)
    if not layout.tensors:
        raise ValueError("there are no weights to store: no unit lists one")
    source.check(layout)
    started = time.perf_counter()
    if progress is not None:
        progress(StoreProgress("identity", 0, layout.weight_bytes, os.getpid(), socket.gethostname()))
    name = StoreName(os.path.abspath(directory), namespace, content_identity(source.identity(layout), layout))
    identity_seconds = time.perf_counter() - started
    remove_dead(name.directory, spare=name)
    store = _Start(name, layout, source, progress, keep, backing, registrar).get(wait_timeout)
    store.times.identity = identity_seconds
    if registrar is not None:
        try:
            store.pin_with(registrar)
        except BaseException:
            store.close()
            raise
    return store


class _Start:
    """One process's way to the store: attach, wait or fill."""

    def __init__(
        self,
        name: StoreName,
        layout: Layout,
        source: WeightSource,
        progress: Progress | None,
        keep: bool,
        backing: Literal["file", "memfd"],
        registrar: Registrar | None,
    ) -> None:
        self._name = name
        self._layout = layout
        self._source = source
        self._progress = progress
        self._keep = keep
        self._backing = backing
        self._registrar = registrar

    def get(self, wait_timeout: float) -> SharedStore:
        started = time.perf_counter()
        last: StoreProgress | None = None
        reported = 0.0
        while True:
            store = self._attach()
            waited = time.perf_counter() - started
            election = None if store is not None else Election.win(self._name.lock)
            if election is not None:
                try:
                    # Between our look and our election another process may have finished.
                    store = self._attach() or self._fill(election)
                finally:
                    election.release()
            if store is not None:
                if election is None:  # who filled it may have died before it gave the right back
                    remove_unheld(self._name.lock)
                store.times.wait = waited
                return store
            last = read_progress(self._name.lock) or last
            if waited > wait_timeout:
                raise StoreTimeoutError(
                    f"waited {wait_timeout:g} s for {self._name.file}: {last or 'nobody said who fills it'}; "
                    "raise shm_wait_timeout, or end that process: the next one takes over at once"
                )
            if last is not None and self._progress is not None and waited - reported >= _REPORT_EVERY:
                reported = waited
                self._progress(last)
            time.sleep(_POLL)

    def _place(self) -> Place:
        return NamedFile(self._name) if self._backing == "file" else HandedFile(self._name)

    def _attach(self) -> SharedStore | None:
        return attach(self._place(), self._name.identity, self._layout, keep=self._keep)

    def _fill(self, election: Election) -> SharedStore:
        started = time.perf_counter()
        name, layout, place = self._name, self._layout, self._place()
        election.announce(0, layout.weight_bytes)
        created = f"pid {os.getpid()} on {socket.gethostname()}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"
        header_bytes = header_size(name.namespace, name.identity, layout, created)
        fd = place.create()
        pinning: PinBesideFilling | None = None
        try:
            total = round_up(header_bytes + layout.nbytes, page_size(fd))
            data_bytes = total - header_bytes
            place.check_space(total)
            reserving = time.perf_counter()
            try:
                os.ftruncate(fd, total)
                memory = map_file(fd, total)
                numa = place_shared(memory, read_topology())
                reserve(fd, memory, thread_count())
            except OSError as error:
                raise place.no_room(total, error) from error
            reserved = time.perf_counter() - reserving
            data = map_data(fd, total, header_bytes)
            if self._registrar is not None:
                pinning = PinBesideFilling(layout, data, self._registrar, read_only=True)
            checksums = self._read_all(memory[header_bytes:], election, pinning)
            self._source.check_unchanged()
            manifest = Manifest(name.namespace, name.identity, layout, checksums, created, header_bytes, data_bytes)
            buffer_of(memory)[:header_bytes] = encode_header(manifest)  # a hugetlbfs knows no write()
            del memory
            read_manifest(fd, place.label)
            place.publish(fd)
            leave = partial(place.leave, keep=self._keep)
            store = SharedStore(place.label, fd, manifest, memory=data, created=True, leave=leave, pinning=pinning)
        except BaseException:
            if pinning is not None:
                pinning.abandon()
            let_go(fd)
            raise
        store.numa = numa
        store.times.reserve = reserved
        store.times.fill = time.perf_counter() - started
        log.info("filled host store %s (%d bytes) in %.2f s", place.label, total, store.times.fill)
        return store

    def _read_all(self, memory: torch.Tensor, election: Election, pinning: PinBesideFilling | None) -> dict[str, str]:
        checksums: dict[str, str] = {}
        done = 0
        opened = ((tensor, _opener(self._source, tensor)) for tensor in self._layout.tensors)
        # Closed, so that no thread writes any more when an error of ours leaves here.
        with contextlib.closing(fill(opened, memory, checksums=True)) as filled:
            for tensor, found in filled:
                checksums[tensor.name] = found.hex()
                if pinning is not None:
                    pinning.filled(tensor)
                done += tensor.nbytes
                told = election.announce(done, self._layout.weight_bytes)
                if self._progress is not None and told is not None:
                    self._progress(told)
        return checksums


def attach(
    place: Place, identity: str, layout: Layout | None, *, keep: bool = False, visit: bool = False
) -> SharedStore | None:
    """The complete store at a place, or None when there is none.

    layout: what it must hold; None: whatever it says.
    visit: only to look: others do not find the store through this process, and it removes nothing when it goes.
    Raises StoreAccessError when the file is not ours alone, StoreCorruptError when it is not what it must be.
    """
    fd = place.open()
    if fd is None:
        return None
    store: SharedStore | None = None
    try:
        check_ours(fd, place.label)
        manifest = read_manifest(fd, place.label)
        if manifest.identity != identity:
            raise StoreCorruptError(f"{place.label} says that it is {manifest.identity!r}; remove it")
        difference = first_difference(manifest.layout, layout) if layout is not None else ""
        if difference:
            raise StoreCorruptError(f"{place.label} does not hold the weights that its name promises: {difference}")
        leave = let_go if visit else partial(place.leave, keep=keep)
        data = map_data(fd, manifest.file_bytes, manifest.header_bytes)
        store = SharedStore(place.label, fd, manifest, memory=data, created=False, leave=leave)
        if not visit:
            place.join(fd)
    except BaseException:
        if store is None:
            let_go(fd)
        else:
            store.close()
        raise
    log.info("attached to host store %s (%d bytes)", place.label, manifest.file_bytes)
    return store


def map_data(fd: int, file_bytes: int, header_bytes: int) -> torch.Tensor:
    """The weights of a store file as copies read them: the file's own pages, read-only. Raises OSError."""
    return map_file(fd, file_bytes, skip=header_bytes, writable=False)


def _opener(source: WeightSource, tensor: StoredTensor) -> Callable[[], tuple[Reader, bool]]:
    return lambda: source.open(tensor)


def _leave(pid: int, leave: Callable[[int], None], fd: int) -> None:
    # A forked child shares the lock with its parent, whose it is to drop.
    if os.getpid() == pid:
        leave(fd)
