"""The answers file is the journal: one JSON line an item, keyed by the item's id, whole lines only, none twice."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JournalError(ValueError):
    """An output file that cannot be used; the message names it and the remedy."""


def unwritable(results: Iterable[dict[str, Any]]) -> str:
    """Why a result cannot become a line of JSON; "" when all can."""
    for result in results:
        try:
            json.dumps(result)
        except (TypeError, ValueError):
            for key, value in result.items():
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    return f"the result of item {result.get('id')} has {key!r}, which is no JSON: {error}"
            return f"the result of item {result.get('id')} is no JSON"
    return ""


class OutputJournal:
    """Answers on disk. ``finished`` has the ids that are there already; lines for these are never written again.

    Opening cuts a torn last line (a process died while it wrote). One process at a time writes: the file is locked,
    and the kernel drops the lock with the process.

    Raises JournalError when another run writes the file, when a line in the middle is not one of ours, and when
    the path cannot be written.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.cut_bytes = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115 (lives as long as this object)
        except OSError as error:
            raise JournalError(f"cannot write the output {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise JournalError(f"another run is writing {self.path}; give this one another --output") from None
        try:
            if overwrite:
                self._file.truncate(0)
            else:
                self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        good = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            good += len(line)
            try:
                record = json.loads(line)
                key = str(record["id"])
            except (ValueError, KeyError, TypeError):
                raise JournalError(
                    f"{self.path} line {number} is not an answer of this program (a JSON object with an 'id'); "
                    "give another --output, or --overwrite to start anew"
                ) from None
            self.finished.add(key)
            if record.get("error"):
                self.failed.add(key)
        size = self._file.seek(0, os.SEEK_END)
        if size > good:
            self.cut_bytes = size - good
            logger.warning("%s: cut a torn last line of %d bytes", self.path, self.cut_bytes)
            self._file.truncate(good)

    def write(self, results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Append the results whose ids are not there yet, one line each, and wait until they are on disk.

        Returns what was written.
        """
        fresh: list[dict[str, Any]] = []
        for result in results:
            key = str(result["id"])
            if key not in self.finished:
                self.finished.add(key)
                if result.get("error"):
                    self.failed.add(key)
                fresh.append(result)
        if fresh:
            self._file.write(b"".join(map(_line, fresh)))
            self._file.flush()
            os.fsync(self._file.fileno())
        return fresh

    def close(self) -> None:
        """Give up the file and its lock."""
        self._file.close()


def _line(result: dict[str, Any]) -> bytes:
    try:
        return json.dumps(result, ensure_ascii=False).encode() + b"\n"
    except (
        UnicodeEncodeError
    ):  # half of a surrogate pair, as JSON's \\ud83d or a file name can have it: kept as an escape
        return json.dumps(result).encode() + b"\n"
