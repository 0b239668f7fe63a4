"""An offloaded model as a stage of a Ray Data pipeline: an extra, for data that is in Ray Data already.

    dataset.map_batches(OffloadedModel, fn_constructor_kwargs={"model": make, "run": run, "config": {...}},
                        concurrency=2, num_gpus=1, batch_size=8)

or ``map_offloaded(dataset, workers=2, model=make, ...)``. Ray Data starts the workers, feeds and restarts them. There
is no coordinator in it: no replans, no status, no journal to go on from; for these use ``cluster.run_batch``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.messages import Item
from cluster.model_task import MakeModel, ModelTask, RunItems
from cluster.packing import resolve_task
from cluster.states import budget_settings
from cluster.task import Task, TaskContext, TaskError, TaskFactory
from flextensor.config import ConfigError, OffloadConfig, parse_budget

if TYPE_CHECKING:
    from torch import nn


class OffloadedModel:
    """A class for ``Dataset.map_batches``; its arguments (``fn_constructor_kwargs``) as ``cluster.run_batch`` has them.

    A batch's rows are items (columns as keys); what ``run`` returns becomes columns beside the given ones, and an
    item's ``error`` one, too. The weights lie once a node in host memory, however many of these there are.
    """

    def __init__(
        self,
        *,
        model: MakeModel | None = None,
        run: RunItems | None = None,
        compile_fn: Callable[[nn.Module], nn.Module] | None = None,
        task: str | TaskFactory | None = None,
        task_options: Mapping[str, Any] | None = None,
        config: OffloadConfig | Mapping[str, Any] | None = None,
        budget: str | int | float | None = None,
        device: str = "auto",
    ) -> None:
        self._name = f"ray-data-{os.getpid()}"
        self._task = _task_of(task, model, run, compile_fn)(dict(task_options or {}))
        self._warm = False
        settings = config if isinstance(config, OffloadConfig) else OffloadConfig(**(config or {}))
        changes: dict[str, Any] = {"shm_enabled": True, "gpu_device": _device(device)}
        settings = settings.updated(**changes, **budget_settings(None if budget is None else parse_budget(budget)))
        self._task.load(TaskContext(settings, self._name, settings.shm_namespace, lambda note: None))
        # When Ray Data lets go of this object, or else when the process ends.
        self._end = weakref.finalize(self, _release, self._task, self._name)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Columns in, columns out; the first batch is also what the model is profiled with."""
        items = _items(batch)
        if not self._warm:
            self._task.warm_up(items)
            self._warm = True
        results = {str(result["id"]): result for result in self._task.run(items)}
        rows = [results[str(item["id"])] for item in items]
        names = dict.fromkeys(name for row in rows for name in row if name != "id" or "id" in batch)
        return {**batch, **{name: _column([row.get(name) for row in rows]) for name in names}}

    def close(self) -> None:
        """Release the model and its share of the host store."""
        self._end()


def _release(task: Any, name: str) -> None:
    import flextensor

    if hasattr(task, "close"):
        task.close()
    with contextlib.suppress(flextensor.OffloadError):
        flextensor.release(name=name, keep_weights=False)


def map_offloaded(dataset: Any, *, workers: int, num_gpus: float = 1.0, batch_size: int = 8, **settings: Any) -> Any:
    """``dataset.map_batches(OffloadedModel, ...)`` on ``workers`` actors of ``num_gpus`` each; ``settings``: those of
    ``OffloadedModel``.

    Raises TaskError without ``ray[data]``.
    """
    require_ray_data()
    return dataset.map_batches(
        OffloadedModel,
        fn_constructor_kwargs=settings,
        batch_size=batch_size,
        batch_format="numpy",
        concurrency=workers,
        num_gpus=num_gpus,
    )


def require_ray_data() -> None:
    """Raises TaskError, with the command that installs it, where Ray Data or what it needs is missing."""
    try:
        import pandas  # type: ignore[import-untyped]  # noqa: F401
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        raise TaskError(f"Ray Data is not installed ({error}); pip install 'flextensor-ray[data]'") from None


def _task_of(
    task: str | TaskFactory | None,
    model: MakeModel | None,
    run: RunItems | None,
    compile_fn: Callable[[nn.Module], nn.Module] | None,
) -> Callable[[dict[str, Any]], Task | Any]:
    if task is not None:
        return resolve_task(task) if isinstance(task, str) else task
    if model is None or run is None:
        raise ConfigError("OffloadedModel: give model and run, or a task")
    return functools.partial(ModelTask, model=model, run=run, compile_fn=compile_fn)


def _device(wanted: str) -> str:
    import torch

    if wanted != "auto":
        return "cuda:0" if wanted == "cuda" else wanted
    return "cuda:0" if torch.cuda.is_available() else "host"


def _items(batch: Mapping[str, Any]) -> list[Item]:
    count = len(next(iter(batch.values()), ()))
    rows = [{name: _scalar(column[at]) for name, column in batch.items()} for at in range(count)]
    return [{"id": f"row-{at}", **row} for at, row in enumerate(rows)]


def _scalar(value: Any) -> Any:
    """A number or text of numpy as Python's own; arrays stay."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _column(values: list[Any]) -> Any:
    import numpy as np

    with contextlib.suppress(ValueError):  # rows of several lengths
        column = np.array(values)
        if column.dtype.kind in "biuf":
            return column
    ragged = np.empty(len(values), dtype=object)
    ragged[:] = values
    return ragged
