"""The Task protocol: what a job does with a model. How a task travels to the workers: ``cluster.packing``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.checkpoints import ItemCheckpoints
from cluster.messages import Item
from flextensor.config import OffloadConfig


class TaskError(ValueError):
    """A task that cannot be used or sent; the message names it and the remedy."""


@dataclass(frozen=True)
class TaskContext:
    """What a worker gives its task.

    ``load`` calls ``flextensor.offload(..., config=context.config, name=context.manager_name)``; the weights go to the
    node's shared store under ``store_namespace``. ``progress`` says in a few words what is going on. ``checkpoints``:
    where an item that takes long may keep how far it is.
    """

    config: OffloadConfig
    manager_name: str
    store_namespace: str
    progress: Callable[[str], None]
    checkpoints: ItemCheckpoints = field(default_factory=ItemCheckpoints)


@dataclass(frozen=True)
class Rehearsal:
    """The beginning of a batch as it ran, and what the whole batch would take.

    tokens: that the whole batch brings. leading: the first steps, which a batch takes once however long it is.
    repeats: how many steps like those behind them the whole batch takes. cache_bytes: what its caches take at its end;
    cached_bytes: what they took in the rehearsal.
    """

    tokens: float
    leading: int = 0
    repeats: float = 0.0
    cache_bytes: int = 0
    cached_bytes: int = 0


class Task(Protocol):
    """One kind of job. Made in the worker from the run's ``task_options``; every method runs in the model's thread."""

    def load(self, context: TaskContext) -> None:
        """Build and offload the model."""

    def warm_up(self, items: Sequence[Item]) -> None:
        """Run a few steps until the manager has its first plan; ``items`` may be empty."""

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """One result a given item, each with the item's ``id``; the results may be in any order."""

    def verify(self, items: Sequence[Item], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Run the items on an un-offloaded copy and compare: ``{"checked": n, "identical": n, "different": [ids]}``."""

    def describe(self) -> dict[str, Any]:
        """What the report says of the model: name, dtype, parameters ..."""


class ClosingTask(Task, Protocol):
    """A task that holds more than the worker's own manager."""

    def close(self) -> None:
        """Give back what ``load`` took; the worker's own manager is released by the worker."""


class SizedTask(Task, Protocol):
    """A task whose batch size can be chosen by measuring: ``batch_size: auto``."""

    def rehearse(self, items: Sequence[Item], *, brief: bool) -> Rehearsal:
        """Run the beginning of what ``run`` does with these items as one batch: its first steps and a few of those that
        repeat; ``brief``: as few as show how much memory a batch takes. Nothing of it stays."""


TaskFactory = Callable[[dict[str, Any]], Task]
