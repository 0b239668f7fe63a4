"""Files of results: whole when they appear under their names, and on disk before the journal names them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; renamed to ``path`` at the block's end, removed when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.part{path.suffix}")  # one name: what a killed writer left is written over
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def file_stem(key: str) -> str:
    """A file name for an item's id: itself where it is a plain one, else made plain with a hash behind it."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", key).strip(".-")[:80]
    return plain if plain == key else f"{plain or 'item'}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
