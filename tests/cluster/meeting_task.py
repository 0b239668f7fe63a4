"""A task whose workers run every step together: each waits within the step until all are there, as collectives do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_task import TinyTask

from cluster.messages import Item
from cluster.task import TaskContext

PATIENCE = 240.0
"""Seconds after which a step goes on alone."""


class MeetingTask(TinyTask):
    """Options, beside those of the tiny task: ``folder`` in which ``parties`` workers meet; ``slow``: seconds that each
    step of the worker of rank 0 takes longer. Results have ``epochs``: [number of the step, epoch of its plan]."""

    def load(self, context: TaskContext) -> None:
        super().load(context)
        assert self._model is not None
        self._name, self._number, self._epochs = context.manager_name, -1, []  # type: ignore[var-annotated]
        self._model.blocks[2].register_forward_pre_hook(lambda *_: self._meet())

    def _meet(self) -> None:
        if self._number < 0:
            return
        folder, number = Path(self._options["folder"]), self._number
        self._number += 1
        self._epochs.append([number, self._manager.epoch])
        if self._name.endswith("-0"):
            time.sleep(float(self._options.get("slow", 0.0)))
        (folder / f"{number}.{self._name}").touch()
        end = time.monotonic() + PATIENCE
        while len(list(folder.glob(f"{number}.*"))) < self._options["parties"] and time.monotonic() < end:
            if (folder / "over").exists():  # the others' job may be over
                return
            time.sleep(0.001)

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        self._number = max(self._number, 0)
        results = super().run(items)
        results[0]["epochs"], self._epochs = self._epochs, []
        return results
