"""Processes that share a GPU's link measure it in turns, so that none finds another's measurement beside its own.

A turn is a name in the kernel's abstract socket namespace: it leaves no file, and is free again when its process dies.
Where there are no such sockets, or in containers with a network each, nobody waits.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator

PATIENCE_SECONDS = 2.0
"""A measurement takes less than a tenth of a second: eight processes of a GPU have theirs in this time."""
LOOK_SECONDS = 0.002


@contextlib.contextmanager
def turn(link: str | None, patience: float = PATIENCE_SECONDS) -> Iterator[bool]:
    """Alone among the processes that ask for a turn on ``link``; at once for a link of this process's own (None).

    Yields False when others had it for ``patience`` seconds, or nobody can have one: then it is not waited for.
    """
    if link is None:
        yield True
        return
    try:
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        yield False
        return
    with mark:
        yield _taken(mark, f"\0flextensor-link-{link}", time.monotonic() + patience)


def _taken(mark: socket.socket, name: str, until: float) -> bool:
    while True:
        try:
            mark.bind(name)
            return True
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                return False
        time.sleep(LOOK_SECONDS)
