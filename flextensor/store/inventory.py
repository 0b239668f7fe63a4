"""The stores of a directory: what there is, who uses it, whether its bytes are right, and removing it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from flextensor.store.election import read_progress
from flextensor.store.errors import StoreAccessError, StoreCorruptError, StoreError
from flextensor.store.file_format import read_manifest
from flextensor.store.locking import check_ours, holders, is_held, let_go, remove_unheld
from flextensor.store.naming import StoreName, list_names
from flextensor.store.places import HandedFile, NamedFile, Place
from flextensor.store.shared import SharedStore, attach


@dataclass(frozen=True)
class StoreEntry:
    """One store of a directory.

    state: "in use", "kept" (nobody uses it, and it was asked to stay), "dead" (nobody uses it; the next start
        removes it), "filling", or "unreadable" (``detail`` says why).
    nbytes: the file. holders: process ids, as far as this PID namespace shows them.
    """

    namespace: str
    identity: str
    path: str
    state: Literal["in use", "kept", "dead", "filling", "unreadable"]
    nbytes: int
    units: int
    tensors: int
    holders: tuple[int, ...]
    detail: str


def list_stores(directory: str = "/dev/shm") -> list[StoreEntry]:
    """This user's stores, by namespace and identity."""
    return [entry for name in list_names(directory) if (entry := _describe(name)) is not None]


def verify_store(entry: StoreEntry, progress: Callable[[str, int], None] | None = None) -> Iterator[StoreCorruptError]:
    """Check every unit of a store against its checksums; yields an error for each unit that is wrong.

    progress(unit, bytes): called after each unit.
    Raises StoreError when the store is gone or cannot be attached to.
    """
    with _attach(entry) as store:
        for unit, tensors in store.layout.by_unit.items():
            try:
                store.verify(unit)
            except StoreCorruptError as error:
                yield error
            if progress is not None:
                progress(unit, sum(tensor.nbytes for tensor in tensors))


def remove_store(entry: StoreEntry, *, force: bool = False) -> None:
    """Remove a store that nobody uses.

    force: take its name away though it is used: its users keep their memory until they end, newcomers fill a new one.
    Raises StoreError, naming the users, when it is used and not ``force``.
    """
    name = StoreName(os.path.dirname(entry.path), entry.namespace, entry.identity)
    if entry.state == "filling" and is_held(name.lock):
        raise StoreError(f"{entry.path} is being filled ({entry.detail}); end that process instead")
    remove_unheld(name.lock)
    for pointer in name.pointers():
        if not remove_unheld(pointer) and os.path.lexists(pointer):
            raise StoreError(f"{entry.path} is memory of processes {entry.holders}; it goes when they end")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name.keep)
    if remove_unheld(name.file) or not os.path.lexists(name.file):
        return
    if not force:
        users = f"processes {', '.join(map(str, entry.holders))}" if entry.holders else "a process that we do not see"
        raise StoreError(f"{entry.path} is used by {users}; end them, or remove it by force")
    os.unlink(name.file)


def _attach(entry: StoreEntry) -> SharedStore:
    name = StoreName(os.path.dirname(entry.path), entry.namespace, entry.identity)
    place: Place = HandedFile(name) if name.pointers() else NamedFile(name)
    # What only looks must not decide that the store goes: a dead one is left for the next start.
    store = attach(place, entry.identity, None, visit=True)
    if store is None:
        raise StoreError(f"{entry.path} is gone")
    return store


def _describe(name: StoreName) -> StoreEntry | None:
    pointers = [path for path in name.pointers() if is_held(path)]
    progress = read_progress(name.lock)
    if progress is not None and is_held(name.lock):
        users = (progress.pid,)
        return StoreEntry(
            name.namespace, name.identity, name.file, "filling", progress.total, 0, 0, users, str(progress)
        )
    place: Place = HandedFile(name) if pointers else NamedFile(name)
    in_use = bool(pointers) or is_held(name.file)
    status = None
    try:
        fd = place.open()
        if fd is None:
            return None
        try:
            status = os.fstat(fd)
            check_ours(fd, place.label)
            manifest = read_manifest(fd, place.label)
        finally:
            let_go(fd)
    except (StoreAccessError, StoreCorruptError) as error:
        size = 0 if status is None else status.st_size
        return StoreEntry(name.namespace, name.identity, name.file, "unreadable", size, 0, 0, (), str(error))
    return StoreEntry(
        name.namespace,
        name.identity,
        name.file,
        "in use" if in_use else "kept" if os.path.lexists(name.keep) else "dead",
        status.st_size,
        len(manifest.layout.by_unit),
        len(manifest.layout.tensors),
        tuple(pid for pid in holders(status) if pid != os.getpid() or in_use),
        f"filled by {manifest.created}" + (", memfd" if pointers else ""),
    )
