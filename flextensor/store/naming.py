"""Names of store files in a directory, and removing those that nobody needs any more."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from flextensor.store.layout import Layout
from flextensor.store.locking import remove_unheld

log = logging.getLogger(__name__)

_NAMESPACE = re.compile(r"^[A-Za-z0-9._]([A-Za-z0-9._-]{0,63})$")
_PREFIX = "flextensor"


@dataclass(frozen=True)
class StoreName:
    """The files of one store. ``lock`` elects who fills it, ``keep`` marks that it shall outlive its users."""

    directory: str
    namespace: str
    identity: str

    @property
    def stem(self) -> str:
        """Their common beginning; the user id is in it, so that users of one machine do not meet."""
        return os.path.join(self.directory, f"{_prefix()}{self.namespace}-{self.identity}")

    @property
    def file(self) -> str:
        """The weights, complete since they have this name."""
        return self.stem + ".safetensors"

    @property
    def lock(self) -> str:
        """There while a process fills the store; says which and how far."""
        return self.stem + ".filling"

    def pointer(self, holder: str) -> str:
        """Where one holder of a memfd says how to get it."""
        return f"{self.stem}.memfd.{holder}"

    def pointers(self) -> list[str]:
        """The pointers there are, of the living and the dead."""
        start = os.path.basename(self.stem) + ".memfd."
        return [
            os.path.join(self.directory, file) for file in sorted(os.listdir(self.directory)) if file.startswith(start)
        ]

    @property
    def keep(self) -> str:
        """An empty file beside a store that was asked to stay."""
        return self.stem + ".keep"


def check_namespace(namespace: str) -> None:
    """Raise ValueError unless the namespace can be part of a file name."""
    if not _NAMESPACE.match(namespace):
        raise ValueError(f"shm_namespace {namespace!r}: use 1 to 64 letters, digits, '.', '_' or '-', not '-' first")


def content_identity(source_identity: str, layout: Layout) -> str:
    """The identity of these bytes in this layout: 32 hexadecimal digits."""
    return hashlib.sha256(f"{source_identity} {layout.fingerprint}".encode()).hexdigest()[:32]


def list_names(directory: str) -> list[StoreName]:
    """Stores of this user in a directory, complete or being filled, by namespace and identity."""
    found: set[StoreName] = set()
    pattern = re.compile(re.escape(_prefix()) + r"(.+)-([0-9a-f]{32})\.(safetensors|filling|keep|memfd\..+)$")
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            match = pattern.match(name)
            if match:
                found.add(StoreName(directory, match[1], match[2]))
    return sorted(found, key=lambda n: (n.namespace, n.identity))


def remove_dead(directory: str, spare: StoreName | None = None) -> list[str]:
    """Remove what no living process holds: complete stores that were not asked to stay, and election files.

    spare: a store to leave alone (the one that is wanted now). Returns the paths removed.
    """
    removed = []
    for name in list_names(directory):
        removed += [path for path in name.pointers() if remove_unheld(path)]
        if name == spare:
            continue
        if not os.path.lexists(name.keep) and remove_unheld(name.file):
            removed.append(name.file)
            log.info("removed dead store %s", name.file)
        if not os.path.lexists(name.file):
            with contextlib.suppress(OSError):
                os.unlink(name.keep)
        if remove_unheld(name.lock):
            removed.append(name.lock)
    return removed


def filesystem_type(path: str) -> str:
    """Type of the file system that holds ``path`` (``tmpfs``, ``hugetlbfs``, ``ext4``, ...)."""
    real = os.path.realpath(path)
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _prefix() -> str:
    return f"{_PREFIX}-u{os.geteuid()}-"
