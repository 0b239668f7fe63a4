"""The run's event log: one JSON object a line, appended as things happen."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class EventLog:
    """Appends ``{"time": Unix seconds, "event": name, ...}``. No path: events go to the program's log only.

    A log that cannot be written is given up with one warning; a run does not fail for it.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._file = None
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as this object)
            except OSError as error:
                logger.warning("no event log at %s: %s", path, error)

    def write(self, event: str, **details: Any) -> None:
        """Append one event; its line is whole when the call returns."""
        logger.info("%s %s", event, details)
        if self._file is None:
            return
        record = {"time": round(time.time(), 3), "event": event, **details}
        try:
            self._file.write(json.dumps(record, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            logger.warning("the event log ends here: %s", error)
            self._file = None

    def close(self) -> None:
        """Give up the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
