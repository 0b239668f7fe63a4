"""Who fills a store: the process that holds the lock of its election file. The others read there how far it is."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from dataclasses import dataclass

from flextensor.store.errors import StoreAccessError
from flextensor.store.locking import holders, let_go, open_locked
from flextensor.store.mapping import is_hugetlbfs

_RECORD = 512
_INTERVAL = 0.05
"""Seconds between two announcements."""


@dataclass(frozen=True)
class StoreProgress:
    """How far a store is.

    phase: "identity" (hashing what shall be loaded), "filling" (this process fills), "waiting" (another one does).
    done, total: bytes. pid, host: who fills; the pid is one of that process's own PID namespace.
    """

    phase: str
    done: int
    total: int
    pid: int
    host: str

    def __str__(self) -> str:
        share = f"{self.done / 2**30:.2f} of {self.total / 2**30:.2f} GiB"
        if self.phase == "waiting":
            return f"host store: process {self.pid} on {self.host} fills it, {share}"
        return f"host store: {self.phase}, {share}"


class Election:
    """The right to fill one store, until ``release`` or this process's end."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._last = 0.0

    @staticmethod
    def win(path: str) -> Election | None:
        """The right, or None when another process has it.

        Raises StoreAccessError when the file is another user's, who could keep us waiting for ever, or no file.
        """
        try:
            there = os.lstat(path)
            if there.st_uid != os.geteuid():
                raise StoreAccessError(
                    f"{path} belongs to user {there.st_uid}, not to {os.geteuid()}; use another shm_dir"
                )
            if not stat.S_ISREG(there.st_mode):
                raise StoreAccessError(f"{path} is no regular file; remove it")
        except FileNotFoundError:
            pass
        try:
            fd = open_locked(path, exclusive=True, create=True)
        except OSError as error:
            raise StoreAccessError(f"cannot open {path}: {error.strerror}; remove it") from error
        return None if fd is None else Election(path, fd)

    def announce(self, done: int, total: int) -> StoreProgress | None:
        """Tell the others, at most every 0.05 s (and when all is done): what was told, else None."""
        now = time.monotonic()
        if done < total and now - self._last < _INTERVAL:
            return None
        self._last = now
        progress = StoreProgress("filling", done, total, os.getpid(), socket.gethostname())
        record = json.dumps({"pid": progress.pid, "host": progress.host[:200], "done": done, "total": total})
        try:
            os.pwrite(self._fd, record.encode().ljust(_RECORD), 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.utime(self._fd, ns=(done, total))  # a hugetlbfs knows no write(), but times
        return progress

    def release(self) -> None:
        """Give the right back and remove the file."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        finally:
            let_go(self._fd)


def read_progress(path: str) -> StoreProgress | None:
    """What the process that fills announced last; None when there is no such file or it was just being written."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            return None
        if is_hugetlbfs(fd):
            filler = (*holders(status), 0)[0]
            return StoreProgress("waiting", status.st_atime_ns, status.st_mtime_ns, filler, socket.gethostname())
        data = json.loads(os.pread(fd, _RECORD, 0))
        return StoreProgress("waiting", int(data["done"]), int(data["total"]), int(data["pid"]), str(data["host"]))
    except (ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(fd)
