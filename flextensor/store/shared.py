"""The shared store: one file of weights on a tmpfs, however many processes.

Complete when it appears: it is written without a name, checked, then linked under the name that its content gives it.
A process that dies while it fills leaves nothing behind, not even memory: the kernel frees a file without a name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from flextensor.store.election import Election, StoreProgress, read_progress
from flextensor.store.errors import StoreAccessError, StoreCorruptError, StoreSpaceError, StoreTimeoutError
from flextensor.store.file_format import Manifest, encode_header, first_difference, header_size, read_manifest
from flextensor.store.filling import Reader, fill
from flextensor.store.host_store import MappedStore
from flextensor.store.layout import Layout, StoredTensor, UnitSpec, make_layout
from flextensor.store.limits import memory_limits
from flextensor.store.locking import MODE, holders, leads_to, let_go, open_locked, remove_unheld
from flextensor.store.mapping import map_file
from flextensor.store.naming import StoreName, check_namespace, content_identity, filesystem_type, remove_dead
from flextensor.store.sources import WeightSource

log = logging.getLogger(__name__)

Progress = Callable[[StoreProgress], None]

_POLL = 0.01
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


class SharedStore(MappedStore):
    """The store file, mapped twice.

    Copies to a device read a mapping of the file itself; it is what is pinned. Parameters point into a second,
    copy-on-write mapping of the same pages: it takes no memory until somebody writes to a parameter in place, and then
    only the pages written, of that process alone.
    """

    kind = "shared"
    shared = True

    def __init__(self, name: StoreName, fd: int, manifest: Manifest, *, created: bool, keep: bool) -> None:
        whole = map_file(fd, manifest.file_bytes)
        super().__init__(manifest.layout, manifest.identity, whole[manifest.header_bytes :])
        self.manifest = manifest
        self._own: torch.Tensor | None = map_file(fd, manifest.file_bytes, private=True)[manifest.header_bytes :]
        self._name = name
        self._status = os.fstat(fd)
        self._created = created
        self._let_go = weakref.finalize(self, _leave, os.getpid(), fd, name, keep)

    @property
    def path(self) -> str:
        """The file."""
        return self._name.file

    @property
    def file_key(self) -> tuple[str, int]:
        """Device (``major:minor``) and inode, as ``/proc/PID/smaps`` shows them."""
        device = self._status.st_dev
        return f"{os.major(device):02x}:{os.minor(device):02x}", self._status.st_ino

    def _parameter_bytes(self, tensor: StoredTensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            self._check_open()
            assert self._own is not None
            return self._own[tensor.offset : tensor.offset + tensor.nbytes]

    def _drop_memory(self) -> None:
        super()._drop_memory()
        self._own = None
        self._let_go()

    def _path(self) -> str:
        return self._name.file

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
) -> SharedStore:
    """The node's one copy of these weights: attached when it is there, waited for when another process fills it,
    filled when nobody does.

    namespace: part of the file's name; jobs of one namespace with different weights get different files.
    directory: a tmpfs. wait_timeout: seconds without a result while another process fills.
    progress: called in this thread, every 0.05 s at most, while filling and waiting.
    keep: leave the file for a warm start when the last user goes.

    Raises ValueError (layout, namespace), MissingWeightError, StoreSpaceError, StoreTimeoutError, StoreAccessError,
    StoreCorruptError.
    """
    check_namespace(namespace)
    layout = make_layout(units)
    if not layout.tensors:
        raise ValueError("there are no weights to store: no unit lists one")
    source.check(layout)
    started = time.perf_counter()
    if progress is not None:
        progress(StoreProgress("identity", 0, layout.nbytes, os.getpid(), socket.gethostname()))
    name = StoreName(os.path.abspath(directory), namespace, content_identity(source.identity(layout), layout))
    identity_seconds = time.perf_counter() - started
    store = _attach_or_fill(name, layout, source, wait_timeout, progress, keep)
    store.times.identity = identity_seconds
    return store


def _attach_or_fill(
    name: StoreName,
    layout: Layout,
    source: WeightSource,
    wait_timeout: float,
    progress: Progress | None,
    keep: bool,
) -> SharedStore:
    started = time.perf_counter()
    deadline = started + wait_timeout
    last: StoreProgress | None = None
    reported = 0.0
    while True:
        store = attach(name, layout, keep=keep)
        if store is not None:
            store.times.wait = time.perf_counter() - started
            return store
        election = Election.win(name.lock)
        if election is not None:
            try:
                # Between our look and our election another process may have finished.
                store = attach(name, layout, keep=keep)
                waited = time.perf_counter() - started
                if store is None:
                    store = _fill(name, layout, source, election, progress, keep)
                store.times.wait = waited
                return store
            finally:
                election.release()
        last = read_progress(name.lock) or last
        now = time.perf_counter()
        if now > deadline:
            raise StoreTimeoutError(
                f"waited {wait_timeout:g} s for the host store {name.file}; {last or 'nobody said who fills it'}; "
                "raise shm_wait_timeout, or end that process: the next one takes over at once"
            )
        if last is not None and now - reported >= 0.05:
            reported = now
            if progress is not None:
                progress(last)
        time.sleep(_POLL)


def attach(name: StoreName, layout: Layout | None, *, keep: bool = False) -> SharedStore | None:
    """The complete store of this name, or None when there is none.

    layout: what it must hold; None: whatever it says.
    Raises StoreAccessError when the file is not ours alone, StoreCorruptError when it is not what it must be.
    """
    try:
        fd = open_locked(name.file)
    except OSError as error:
        raise StoreAccessError(f"cannot open the host store {name.file}: {error.strerror}") from error
    if fd is None:
        return None
    try:
        _check_ours(fd, name.file)
        manifest = read_manifest(fd, name.file)
        if manifest.identity != name.identity:
            raise StoreCorruptError(f"{name.file} says that it is {manifest.identity!r}; remove it")
        difference = first_difference(manifest.layout, layout) if layout is not None else ""
        if difference:
            raise StoreCorruptError(f"{name.file} does not hold the weights that its name promises: {difference}")
        store = SharedStore(name, fd, manifest, created=False, keep=keep)
    except BaseException:
        let_go(fd)
        raise
    log.info("attached to host store %s (%d bytes)", name.file, manifest.file_bytes)
    return store


def _fill(
    name: StoreName,
    layout: Layout,
    source: WeightSource,
    election: Election,
    progress: Progress | None,
    keep: bool,
) -> SharedStore:
    started = time.perf_counter()
    election.announce(0, layout.weight_bytes)
    remove_dead(name.directory, spare=name)
    created = f"pid {os.getpid()} on {socket.gethostname()}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"
    header_bytes = header_size(name.namespace, name.identity, layout, created)
    total = header_bytes + layout.nbytes
    _check_space(name.directory, total)
    fd = _unnamed_file(name.directory)
    try:
        _reserve(fd, total, name.directory)
        memory = map_file(fd, total)
        checksums: dict[str, str] = {}
        done = 0
        opened = ((tensor, _opener(source, tensor)) for tensor in layout.tensors)
        for tensor, found in fill(opened, memory[header_bytes:], checksums=True):
            checksums[tensor.name] = found.hex()
            done += tensor.nbytes
            told = election.announce(done, layout.weight_bytes)
            if progress is not None and told is not None:
                progress(told)
        source.check_unchanged()
        manifest = Manifest(name.namespace, name.identity, layout, checksums, created, header_bytes)
        os.pwrite(fd, encode_header(manifest), 0)
        del memory
        read_manifest(fd, name.file)
        _link(fd, name.file)
        store = SharedStore(name, fd, manifest, created=True, keep=keep)
    except BaseException:
        let_go(fd)
        raise
    store.times.fill = time.perf_counter() - started
    log.info("filled host store %s (%d bytes) in %.2f s", name.file, total, store.times.fill)
    return store


def _opener(source: WeightSource, tensor: StoredTensor) -> Callable[[], tuple[Reader, bool]]:
    return lambda: source.open(tensor)


def _unnamed_file(directory: str) -> int:
    """A new file without a name, with the shared lock that it keeps when it gets one."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise StoreAccessError(
            f"cannot write the host store in {directory}: {error.strerror}; shm_dir must be a writable tmpfs"
        ) from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _link(fd: int, path: str) -> None:
    # With a directory descriptor Python calls linkat and follows the link in /proc, which is how an open file gets
    # a name; it never overwrites one.
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _check_ours(fd: int, path: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise StoreAccessError(f"{path} is no regular file; remove it")
    if status.st_uid != os.geteuid():
        raise StoreAccessError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; use another shm_dir")
    if status.st_mode & 0o077:
        raise StoreAccessError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}: others could change it; it must be {MODE:o}, remove it"
        )


def _check_space(directory: str, needed: int) -> None:
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if free < needed:
        raise _space_error(directory, needed, free)
    limits = memory_limits()
    if filesystem_type(directory) in _MEMORY_FILE_SYSTEMS and limits.available < needed:
        raise StoreSpaceError(
            f"the host store needs {needed} bytes of memory, {limits.source} has {limits.available} free; "
            "free memory, raise the container's limit, or use a smaller dtype",
            needed,
            limits.available,
        )


def _reserve(fd: int, total: int, directory: str) -> None:
    """Get every page now: a tmpfs that runs full later would end a process by SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        space = os.statvfs(directory)
        raise _space_error(directory, total, space.f_bavail * space.f_frsize) from error


def _space_error(directory: str, needed: int, free: int) -> StoreSpaceError:
    gib = -(-needed // 2**30)
    return StoreSpaceError(
        f"the host store needs {needed} bytes in {directory}, which has {free} free; enlarge it "
        f"(docker run --shm-size={gib}g, Kubernetes: an emptyDir of medium Memory, "
        f"or mount -o remount,size={gib}g {directory}) or set shm_dir to a larger tmpfs",
        needed,
        free,
    )


def _leave(pid: int, fd: int, name: StoreName, keep: bool) -> None:
    """Drop the lock; the last one out removes the file."""
    if os.getpid() != pid:
        return  # a forked child shares the lock with its parent, whose it is to drop
    if keep and leads_to(name.file, fd):
        os.close(os.open(name.keep, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE))
    let_go(fd)
    if not os.path.lexists(name.keep):
        remove_unheld(name.file)
