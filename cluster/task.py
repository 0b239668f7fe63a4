"""The Task protocol: what a job does with a model. And how a task travels to the workers."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle

from cluster.checkpoints import ItemCheckpoints
from cluster.messages import Item
from flextensor.config import OffloadConfig

LIMIT_BYTES = 64 << 20


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


def pack_task(source: str | TaskFactory) -> str | bytes:
    """The task as it travels: a ``module:name`` string as it is, a callable by cloudpickle.

    Raises TaskError for a string of another form, for a callable that cannot be pickled (naming what it captures)
    and for one that drags more than 64 MiB along.
    """
    if isinstance(source, str):
        _split(source)
        return source
    try:
        packed: bytes = cloudpickle.dumps(source)
    except (TypeError, pickle.PicklingError) as error:
        raise TaskError(
            f"task {_name(source)} cannot be sent to the workers: {_captured(source) or error}; "
            "make it inside the factory, or name the task as 'module:name'"
        ) from error
    if len(packed) > LIMIT_BYTES:
        raise TaskError(
            f"task {_name(source)} takes {len(packed) / 2**20:.0f} MiB along (limit {LIMIT_BYTES >> 20} MiB); "
            "load large tensors inside the factory"
        )
    return packed


def resolve_task(packed: str | bytes) -> TaskFactory:
    """The factory behind what ``pack_task`` made.

    Raises TaskError when the module cannot be imported or has no such name.
    """
    if isinstance(packed, bytes):
        factory: TaskFactory = pickle.loads(packed)
        return factory
    module_name, name = _split(packed)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TaskError(f"task {packed!r}: cannot import {module_name!r}: {error}") from error
    try:
        factory = getattr(module, name)
    except AttributeError:
        raise TaskError(f"task {packed!r}: module {module_name!r} has no {name!r}") from None
    return factory


def _split(source: str) -> tuple[str, str]:
    module, _, name = source.partition(":")
    if not module or not name:
        raise TaskError(f"task {source!r}: write 'module:name', for example 'launch.causal_lm:CausalLMTask'")
    return module, name


def _name(source: Any) -> str:
    return getattr(source, "__qualname__", type(source).__name__)


def _captured(source: Any) -> str:
    """What inside ``source`` refuses to be pickled, as far as one level of captured variables shows it."""
    found: list[str] = []
    code = getattr(source, "__code__", None)
    cells = dict(zip(code.co_freevars, source.__closure__ or (), strict=False)) if code is not None else {}
    held: dict[str, Any] = {}
    for key, cell in cells.items():
        held[key] = cell.cell_contents
    if code is not None:
        held |= {key: source.__globals__[key] for key in code.co_names if key in source.__globals__}
    held |= {f"self.{key}": value for key, value in getattr(source, "__dict__", {}).items()}
    for key, value in held.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            found.append(f"it captures {key!r} ({type(value).__name__}: {error})")
    return "; ".join(found)
