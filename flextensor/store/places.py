"""Where a shared store lives: a named file on a tmpfs, or a memfd that its holders hand to each other.

Both are open files with a shared lock while somebody uses them; they differ in how a newcomer finds the file and in
what is left when the last user goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Protocol

from flextensor.store.errors import StoreAccessError, StoreSpaceError
from flextensor.store.limits import memory_limits
from flextensor.store.locking import MODE, check_ours, is_held, leads_to, let_go, open_locked, remove_unheld
from flextensor.store.naming import StoreName, filesystem_type

log = logging.getLogger(__name__)

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_RECORD = 512


class Place(Protocol):
    """One store's file. ``label`` names it in messages."""

    label: str

    def open(self) -> int | None:
        """A locked descriptor of the complete store, or None when there is none (here to be found)."""

    def check_space(self, needed: int) -> None:
        """Raise StoreSpaceError unless ``needed`` bytes are free now."""

    def create(self) -> int:
        """A locked descriptor of a new, empty file that nobody finds yet."""

    def no_room(self, needed: int, error: OSError) -> StoreSpaceError:
        """What to raise when the pages of a new file of ``needed`` bytes are not to be had."""

    def publish(self, fd: int) -> None:
        """Let others find the complete file."""

    def join(self, fd: int) -> None:
        """Called by who attached."""

    def leave(self, fd: int, keep: bool) -> None:
        """Drop the lock and close; the last one out removes what is left, unless it shall be kept."""


class NamedFile:
    """A file on a tmpfs. Written without a name, so that a filler's death leaves nothing; linked when complete."""

    def __init__(self, name: StoreName) -> None:
        self._name = name
        self.label = name.file

    def open(self) -> int | None:
        return _open(self._name.file)

    def check_space(self, needed: int) -> None:
        free = free_bytes(self._name.directory)
        if free < needed:
            raise _space_error(self._name.directory, needed, free)
        if filesystem_type(self._name.directory) in _MEMORY_FILE_SYSTEMS:  # a hugetlbfs has taken its memory already
            _check_memory(needed)

    def create(self) -> int:
        try:
            fd = os.open(self._name.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
        except OSError as error:
            raise StoreAccessError(
                f"cannot write the host store in {self._name.directory}: {error.strerror}; "
                "shm_dir must be a writable tmpfs"
            ) from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def no_room(self, needed: int, error: OSError) -> StoreSpaceError:
        return _space_error(self._name.directory, needed, free_bytes(self._name.directory))

    def publish(self, fd: int) -> None:
        _give_name(fd, self._name.file)

    def join(self, fd: int) -> None:
        pass

    def leave(self, fd: int, keep: bool) -> None:
        if keep and leads_to(self._name.file, fd):
            os.close(os.open(self._name.keep, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE))
        let_go(fd)
        if not os.path.lexists(self._name.keep):
            remove_unheld(self._name.file)


class HandedFile:
    """A memfd, for where the tmpfs is too small and memory is not.

    It has no name. Each process that has it leaves a pointer in the directory (a few bytes, locked while the process
    lives) that says where to find it: ``/proc/PID/fd/N``. A newcomer takes it from any living holder, so they must see
    each other's processes and run as one user. When the last holder is gone, so is the memory.
    """

    def __init__(self, name: StoreName) -> None:
        self._name = name
        self._pointer: int | None = None
        self.label = f"memfd:{os.path.basename(name.file)}"

    def open(self) -> int | None:
        for path in self._name.pointers():
            if not is_held(path):
                continue
            place = _read_pointer(path)
            try:
                fd = None if place is None else os.open(place, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                log.info("cannot take the host store from %s: %s", place, error.strerror)
                continue
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_SH)
                return fd
        return None

    def check_space(self, needed: int) -> None:
        _check_memory(needed)

    def create(self) -> int:
        fd = os.memfd_create(os.path.basename(self._name.file), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, MODE)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def no_room(self, needed: int, error: OSError) -> StoreSpaceError:
        return StoreSpaceError(
            f"cannot get {needed} bytes of memory for the host store: {error.strerror}; free memory, raise the "
            "container's limit, or use a smaller dtype",
            needed,
            memory_limits().available,
        )

    def publish(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.join(fd)

    def join(self, fd: int) -> None:
        pointer = os.open(self._name.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
        fcntl.flock(pointer, fcntl.LOCK_SH)
        os.write(pointer, json.dumps({"pid": os.getpid(), "fd": fd}).encode())
        path = self._name.pointer(f"{os.getpid()}.{fd}")
        remove_unheld(path)  # of a dead process that had our number
        _give_name(pointer, path)
        self._pointer = pointer

    def leave(self, fd: int, keep: bool) -> None:
        if self._pointer is not None:
            path = self._name.pointer(f"{os.getpid()}.{fd}")
            if leads_to(path, self._pointer):
                os.unlink(path)
            let_go(self._pointer)
        let_go(fd)


def check_directory(directory: str, backing: str = "file") -> None:
    """Raise StoreAccessError unless files can be made in the directory, and, for a memfd, written to."""
    if not os.path.isdir(directory):
        raise StoreAccessError(f"shm_dir {directory} is no directory; make it, or set shm_dir to a tmpfs")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreAccessError(f"shm_dir {directory} cannot be written by user {os.geteuid()}; set it to another tmpfs")
    if backing == "memfd" and filesystem_type(directory) == "hugetlbfs":
        raise StoreAccessError(f"shm_dir {directory} is a hugetlbfs, which holds no pointers to a memfd; use a tmpfs")


def _open(path: str) -> int | None:
    try:
        return open_locked(path)
    except OSError as error:
        raise StoreAccessError(f"cannot open the host store {path}: {error.strerror}; remove it") from error


def _read_pointer(path: str) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            check_ours(fd, path)
            data = json.loads(os.read(fd, _RECORD))
            return f"/proc/{int(data['pid'])}/fd/{int(data['fd'])}"
        finally:
            os.close(fd)
    return None


def _give_name(fd: int, path: str) -> None:
    # With a directory descriptor Python calls linkat and follows the link in /proc, which is how an open file gets
    # a name; it never overwrites one.
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def free_bytes(directory: str, sysfs: Path = Path("/sys")) -> int:
    """Bytes that a new file in the directory can have."""
    space = os.statvfs(directory)
    mounted = space.f_bavail * space.f_frsize
    if filesystem_type(directory) != "hugetlbfs":
        return mounted
    pool = sysfs / f"kernel/mm/hugepages/hugepages-{space.f_bsize >> 10}kB"
    free, promised, most_more, more = (
        int((pool / f"{name}_hugepages").read_text()) for name in ("free", "resv", "nr_overcommit", "surplus")
    )
    in_pool = (free - promised + max(0, most_more - more)) * space.f_bsize
    return min(in_pool, mounted) if space.f_blocks else in_pool  # 0 blocks: mounted without a size


def _check_memory(needed: int) -> None:
    limits = memory_limits()
    if limits.available < needed:
        raise StoreSpaceError(
            f"the host store needs {needed} bytes of memory, {limits.source} has {limits.available} free; "
            "free memory, raise the container's limit, or use a smaller dtype",
            needed,
            limits.available,
        )


def _space_error(directory: str, needed: int, free: int) -> StoreSpaceError:
    gib = -(-needed // 2**30)
    if filesystem_type(directory) == "hugetlbfs":
        page = os.statvfs(directory).f_bsize
        return StoreSpaceError(
            f"the host store needs {needed} bytes in {directory}, which has {free} free: {needed // page} huge pages "
            f"of {page >> 10} KiB, {(needed - free) // page} more; set them aside (sysctl vm.nr_hugepages, or in "
            f"/sys/kernel/mm/hugepages/hugepages-{page >> 10}kB), or set shm_dir to a tmpfs",
            needed,
            free,
        )
    return StoreSpaceError(
        f"the host store needs {needed} bytes in {directory}, which has {free} free; enlarge it "
        f"(docker run --shm-size={gib}g, Kubernetes: an emptyDir of medium Memory, "
        f"or mount -o remount,size={gib}g {directory}), set shm_dir to a larger tmpfs, or use backing='memfd'",
        needed,
        free,
    )
