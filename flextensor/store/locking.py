"""Files that live as long as somebody holds a lock on them.

``flock`` locks belong to the open file, and the kernel drops them when the last process that has it open dies, by
whatever signal, also across PID namespaces. Rules that make it safe:

- Whoever opens a file by name locks it and then checks that the name still leads to it: a janitor may have removed
  the name in between.
- A name is removed only by someone who holds the exclusive lock of the file under that name.
- A shared lock is never converted to an exclusive one: the kernel drops the first before it takes the second.
- ``mmap`` duplicates the descriptor, so a mapping alone keeps the lock: letting go is an explicit unlock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from flextensor.store.errors import StoreAccessError

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
MODE = 0o600


def open_locked(path: str, *, exclusive: bool = False, create: bool = False) -> int | None:
    """A descriptor of the file now under ``path``, locked; the caller closes it.

    A shared lock is waited for (only a janitor's short look can be in the way); an exclusive one is not.
    None when there is no such file or, for an exclusive lock, somebody holds it.

    Raises OSError for everything else: a folder that is missing, ELOOP for a symbolic link.
    """
    while True:
        try:
            fd = os.open(path, _FLAGS | (os.O_CREAT if create else 0), MODE)
        except FileNotFoundError:
            if create:  # then it is the folder that is missing
                raise
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
            if leads_to(path, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def leads_to(path: str, fd: int) -> bool:
    """True when ``path`` is still a name of the open file."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def let_go(fd: int) -> None:
    """Drop the lock, though mappings of the file may live on, and close."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def remove_unheld(path: str) -> bool:
    """Remove the file unless somebody holds it; True when it was removed here."""
    try:
        fd = open_locked(path, exclusive=True)
    except OSError:
        return False
    if fd is None:
        return False
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
    return True


def is_held(path: str) -> bool:
    """True while anybody holds a lock on the file."""
    fd = open_locked(path, exclusive=True)
    if fd is None:
        return os.path.lexists(path)
    os.close(fd)
    return False


def check_ours(fd: int, path: str) -> None:
    """Raise StoreAccessError unless the open file is a regular file of this user that nobody else may write."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise StoreAccessError(f"{path} is no regular file; remove it")
    if status.st_uid != os.geteuid():
        raise StoreAccessError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; use another shm_dir")
    if status.st_mode & 0o077:
        raise StoreAccessError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}: others could change it; it must be {MODE:o}, remove it"
        )


def holders(status: os.stat_result) -> tuple[int, ...]:
    """Ids of the processes that took a lock on the file, as this PID namespace shows them, ascending."""
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = set()
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        parts = line.split()
        if "->" not in parts and len(parts) >= 6 and parts[5] == where and parts[1] == "FLOCK":
            found.add(int(parts[4]))
    return tuple(sorted(pid for pid in found if pid > 0))
