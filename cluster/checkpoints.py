"""How far a long item is, kept in a small file, so that whoever takes the item up after a death goes on from there.

One file a key; the key is everything that the item's numbers depend on. A file is whole when it appears, is checked
when it is read, and is gone when the item is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_MAGIC = b"flextensor checkpoint 1\n"
_DIGEST = hashlib.sha256().digest_size


class ItemCheckpoints:
    """Checkpoints in ``directory`` (None: nowhere, nothing is kept), each written at most once in ``seconds``."""

    def __init__(self, directory: Path | None = None, seconds: float = 60.0) -> None:
        self.directory = directory
        self._seconds = seconds
        self._told = False

    def of(self, key: str) -> ItemCheckpoint:
        """The checkpoint of one item or batch, there already or not."""
        return ItemCheckpoint(self, hashlib.sha256(key.encode()).hexdigest()[:32], self._seconds)

    def path(self, name: str) -> Path | None:
        """Where the checkpoint of this name lies."""
        return None if self.directory is None else self.directory / f"{name}.checkpoint"

    def failed(self, error: OSError) -> None:
        """A checkpoint could not be written: the item goes on without, and that is told once."""
        if not self._told:
            self._told = True
            logger.warning("no checkpoints of long items, cannot write to %s: %s", self.directory, error)


class ItemCheckpoint:
    """See the module. ``due``: it is time to ``save``, which never fails: an item is worth more than its checkpoint."""

    def __init__(self, owner: ItemCheckpoints, name: str, seconds: float) -> None:
        self._owner = owner
        self._path = owner.path(name)
        self._seconds = seconds
        self._saved_at = time.monotonic()

    @property
    def due(self) -> bool:
        """``seconds`` have passed since the item was begun or last saved."""
        return self._path is not None and time.monotonic() - self._saved_at >= self._seconds

    def save(self, data: bytes) -> None:
        """Replace what was kept; on disk when this returns."""
        if self._path is None:
            return
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(data).digest() + data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:
            self._owner.failed(error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def load(self) -> bytes | None:
        """What was kept last; None when there is nothing, or nothing that can be trusted."""
        if self._path is None:
            return None
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s is not used: %s", self._path, error)
            return None
        head = len(_MAGIC) + _DIGEST
        data = raw[head:]
        if not raw.startswith(_MAGIC) or raw[len(_MAGIC) : head] != hashlib.sha256(data).digest():
            logger.warning("%s is not used: it is no whole checkpoint", self._path)
            return None
        return data

    def remove(self) -> None:
        """The item is done."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()  # when it was the last one
