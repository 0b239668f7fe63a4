"""``cluster.run_batch``: a batch job from a program, on every GPU of this machine or of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cluster.batch_size import BatchChoice
from cluster.items import item_length, items_of, tokens_of
from cluster.job import JobEnd, device_of, ray_session, run_job, verify_leases
from cluster.job_spec import JobSpec, Work, beside, forget_run, kept_choice
from cluster.journal import OutputJournal
from cluster.messages import Item, JobProgress, RunStatus
from cluster.model_task import MakeModel, ModelTask, RunItems
from cluster.options import coordinator_settings
from cluster.packing import pack, pack_task, resolve_task
from cluster.parquet_files import is_parquet, journal_of, require_pyarrow, write_answers
from cluster.task import TaskError, TaskFactory
from flextensor.config import ConfigError, OffloadConfig, parse_budget

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class BatchOutcome:
    """A job that is done. verify: what running some items again gave (None: not asked for). batch_size: the choice
    where it was ``auto``."""

    output: Path
    ids: tuple[str, ...]
    progress: JobProgress
    verify: dict[str, Any] | None = None
    batch_size: BatchChoice | None = None

    def results(self) -> Iterator[dict[str, Any]]:
        """The answers in the order of the items; an item that failed has ``error``."""
        with open(journal_of(self.output), encoding="utf-8") as lines:
            answers = {str(answer["id"]): answer for answer in map(json.loads, lines)}
        yield from (answers[key] for key in self.ids)


def run_batch(
    items: Iterable[Any],
    *,
    output: str | Path,
    model: MakeModel | None = None,
    run: RunItems | None = None,
    compile_fn: Callable[[nn.Module], nn.Module] | None = None,
    task: str | TaskFactory | None = None,
    task_options: Mapping[str, Any] | None = None,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    budget: str | int | float | None = None,
    batch_size: Literal["auto"] | int = 8,
    length: Callable[[Item], int] = item_length,
    workers: Literal["auto"] | int = "auto",
    device: Literal["auto", "cuda", "host"] = "auto",
    num_gpus: float = 1.0,
    address: str | None = None,
    namespace: str = "flextensor",
    overwrite: bool = False,
    verify: int = 0,
    checkpoint_seconds: float = 60.0,
    coordinator: Mapping[str, Any] | None = None,
    on_progress: Callable[[JobProgress, RunStatus | None], None] = lambda progress, status: None,
) -> BatchOutcome:
    """Run ``items`` through an offloaded model on all workers; every item's answer is in ``output`` once, also when the
    program is killed and run again. Blocks until all are done.

    items: dicts (an ``id`` each, or they are numbered), texts, or anything that can be pickled.
    model: called in each worker, returns the module, or a module on the meta device and a ``WeightSource``.
    run: ``run(model, items)`` returns a result an item, in order: a dict of plain values, tensors, images; or a value.
    compile_fn: applied to each unit, as in ``flextensor.offload``.
    task, task_options: in place of these three, a ``cluster.task.Task`` by ``module:name`` or its class.
    output: JSON lines, or ``.parquet`` (then the journal lies beside it); images go to a folder beside it.
    config: of the engine; needs ``include_patterns``. budget: weights on each device: ``"6GiB"``, ``"50%"``.
    length: what items are bucketed by. address: a Ray cluster; None: the Ray of this process, or one of its own.
    verify: so many items are run again on an un-offloaded copy.

    Functions of the script travel by cloudpickle. Raises TaskError for what cannot be sent (naming it), ItemError,
    ConfigError, JournalError and SessionError for what else can be put right, NoWorkers when no worker is left.
    """
    target = Path(output).expanduser().absolute()
    _check("device", device, "auto, cuda or host", device in ("auto", "cuda", "host"))
    _check("num_gpus", num_gpus, "a number above 0", num_gpus > 0)
    _check("verify", verify, "0 or more", verify >= 0)
    _check("namespace", namespace, "a text", bool(namespace))
    spec = JobSpec(
        task=_packed(task, model, run, compile_fn, target),
        task_options=dict(task_options or {}),
        output=journal_of(target),
        config=config if isinstance(config, OffloadConfig) else OffloadConfig(**(config or {})),
        batch_size=_count("batch_size", batch_size),
        workers=_count("workers", workers),
        device=device,
        num_gpus=num_gpus,
        budget=None if budget is None else parse_budget(budget),
        address=address,
        namespace=namespace,
        verify=verify,
        checkpoint_seconds=checkpoint_seconds,
        coordinator=coordinator_settings(coordinator or {}),
    )
    pack("task_options", spec.task_options)
    spec = dataclasses.replace(spec, task_options=_checked_options(spec))
    if is_parquet(target):
        require_pyarrow(target)
    if not overwrite:
        kept_choice(spec)  # one that is spoilt is told now
    where = device_of(spec)
    found = items_of(items)
    ids = tuple(str(item["id"]) for item in found)
    journal = OutputJournal(spec.output, overwrite=overwrite)
    try:
        if overwrite:
            forget_run(spec)
            if is_parquet(target):
                target.unlink(missing_ok=True)  # of the run before: it must not be taken for this one's
        before = sum(1 for key in ids if key in journal.finished)
        work = Work(found, journal, JobProgress(total=len(found), skipped=before), length)
        outcome = BatchOutcome(target, ids, work.progress)
        if not work.is_done:
            with ray_session(spec, where) as session:
                outcome = run_job(
                    spec,
                    session,
                    work,
                    tokens_of=tokens_of,
                    on_progress=on_progress,
                    collect=lambda end: _outcome(end, target, ids, verify=verify > 0),
                )
        if is_parquet(target):
            write_answers(spec.output, target, ids)
        return outcome
    finally:
        journal.close()


def _outcome(end: JobEnd, target: Path, ids: tuple[str, ...], *, verify: bool) -> BatchOutcome:
    return BatchOutcome(target, ids, end.progress, verify_leases(end) if verify else None, end.choice)


def _packed(
    task: str | TaskFactory | None,
    model: MakeModel | None,
    run: RunItems | None,
    compile_fn: Callable[[nn.Module], nn.Module] | None,
    target: Path,
) -> str | bytes:
    if task is not None:
        if model is not None or run is not None or compile_fn is not None:
            raise ConfigError("run_batch: give either task, or model and run")
        return pack_task(task)
    if model is None or run is None:
        missing = "model" if model is None else "run"
        raise ConfigError(f"run_batch: {missing} is missing; give model and run, or a task")
    for what, given in (("model", model), ("run", run), ("compile_fn", compile_fn)):
        if given is not None and not callable(given):
            raise ConfigError(f"run_batch: {what} is {type(given).__name__}; give a function")
        pack(what, given)  # apart, so that the message names which of them it is
    return pack_task(
        functools.partial(ModelTask, model=model, run=run, compile_fn=compile_fn, files=beside(target, "files"))
    )


def _checked_options(spec: JobSpec) -> dict[str, Any]:
    """What workers give the task: their current directory is another one."""
    task: Any = resolve_task(spec.task)(spec.task_options)
    if spec.batch_size == "auto" and not hasattr(task, "rehearse"):
        raise TaskError("batch_size auto: this task cannot be tried at several sizes; give a number")
    sent: dict[str, Any] = getattr(task, "sent_options", spec.task_options)
    return sent


def _check(what: str, value: Any, wanted: str, right: bool) -> None:
    if not right:
        raise ConfigError(f"run_batch: {what} = {value!r}; use {wanted}")


def _count(what: str, value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"run_batch: {what} = {value!r}; use 'auto' or a whole number, 1 or more")
    return value
