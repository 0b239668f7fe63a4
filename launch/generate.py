"""``flextensor generate``: a file of prompts in, a file of answers out, on every worker at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from cluster.batch_size import BatchChoice
from cluster.items import tokens_of
from cluster.job import JobEnd, Session, device_of, ray_session, run_job
from cluster.job_spec import JobSpec, Work, forget_run, kept_choice
from cluster.journal import OutputJournal
from cluster.messages import JobProgress
from cluster.packing import pack_task, resolve_task
from cluster.parquet_files import is_parquet, require_pyarrow, write_answers
from cluster.task import TaskError
from launch.errors import signals_held, termination_raises
from launch.items import read_items
from launch.progress import ProgressView
from launch.report import RunReport, collect_report, curve_table
from launch.run_config import RunConfig


def generate(config: RunConfig, *, console: Console) -> RunReport | None:
    """Run the job to its end; None when there was nothing left to do.

    Raises the errors of ``launch.errors.USER_ERRORS`` for what the user can put right, NoWorkers when no worker is
    left, KeyboardInterrupt and Terminated after a clean stop.
    """
    spec = spec_of(config)
    device = device_of(spec)
    work, order = _open_work(config, spec, console)
    try:
        report: RunReport | None = None
        if work.is_done:
            console.print(f"nothing left to do; answers: {config.output}", soft_wrap=True)
        else:
            report = _run(config, spec, device, work, console)
        if is_parquet(config.output):
            rows = write_answers(spec.output, config.output, order)
            console.print(f"{config.output}: {rows} rows, from {spec.output}", soft_wrap=True)
        if report is not None:
            console.print(f"answers: {config.output}", soft_wrap=True)
        return report
    finally:
        work.journal.close()


def spec_of(config: RunConfig) -> JobSpec:
    """The job as the cluster takes it. Checks the task and its options: what is wrong is told before Ray starts.

    Raises TaskError, and what the task raises for its options.
    """
    packed = pack_task(config.task)
    task = resolve_task(packed)(config.task_settings())
    if config.batch_size == "auto" and not hasattr(task, "rehearse"):
        raise TaskError(f"batch_size auto: task {config.task} cannot be tried at several sizes; give a number")
    if config.batch_size == "auto" and config.task_options.get("batch_size"):
        raise TaskError("batch_size auto: leave task option batch_size out; it would split what is chosen")
    if is_parquet(config.output):
        require_pyarrow(config.output)
    spec = JobSpec(
        task=packed,
        task_options=getattr(task, "sent_options", config.task_settings()),
        output=config.journal,
        config=config.offload_config(),
        batch_size=config.batch_size,
        workers=config.workers,
        device=config.device,
        num_gpus=config.num_gpus,
        budget=config.budget,
        address=ray_address(config),
        namespace=config.namespace,
        verify=config.verify,
        checkpoint_seconds=config.checkpoint_seconds,
        coordinator=config.coordinator,
    )
    if not config.overwrite:
        kept_choice(spec)  # one that is spoilt is told now
    return spec


def _open_work(config: RunConfig, spec: JobSpec, console: Console) -> tuple[Work, Sequence[str]]:
    """What is to do, and the ids in the order of the prompts."""
    items, bad = read_items(config.prompts)
    journal = OutputJournal(spec.output, overwrite=config.overwrite)
    if config.overwrite:
        forget_run(spec)
        if is_parquet(config.output):
            config.output.unlink(missing_ok=True)  # of the run before: it must not be taken for this one's
    skipped = len(journal.finished)
    if skipped:
        failed = f", {len(journal.failed)} of them with an error" if journal.failed else ""
        console.print(
            f"{spec.output}: {skipped} items are finished{failed}; they are skipped (--overwrite starts anew)",
            soft_wrap=True,
        )
    for one in journal.write(line.as_result() for line in bad):
        console.print(f"{config.prompts} {one['error']}", style="yellow", soft_wrap=True)
    finished = sum(1 for item in items if str(item["id"]) in journal.finished)
    progress = JobProgress(total=len(items) + len(bad), skipped=finished + len(bad), failed=len(bad))
    return Work(items, journal, progress), [str(item["id"]) for item in items]


def _run(config: RunConfig, spec: JobSpec, device: str, work: Work, console: Console) -> RunReport:
    # Twice: Ray installs a handler of its own when it starts.
    with termination_raises(), ray_session(spec, device, signals_held) as session, termination_raises():
        where = f" --address {session.address} --namespace {session.namespace}" if spec.address is not None else ""
        commands = f"flextensor status{where} | flextensor replan --budget 40%{where}"
        console.print(f"run {session.namespace}; in another terminal: {commands}", soft_wrap=True)
        report = _run_in(session, config, spec, work, console)
    report.show(console)
    if config.report is not None:
        report.save(config.report)
        console.print(f"report: {config.report}", soft_wrap=True)
    return report


def _run_in(session: Session, config: RunConfig, spec: JobSpec, work: Work, console: Console) -> RunReport:
    def show_choice(choice: BatchChoice) -> None:
        console.print(curve_table(choice))
        again = " (as in the run before)" if choice.kept else ""
        console.print(f"batches of {choice.batch_size}{again}", soft_wrap=True)

    def collect(end: JobEnd) -> RunReport:
        return collect_report(config, session.device, end)

    with ProgressView(console, work.progress.total) as view:
        return run_job(
            spec,
            session,
            work,
            tokens_of=tokens_of,
            on_progress=view.update,
            collect=collect,
            on_choice=show_choice,
            held=signals_held,
        )


def ray_address(config: RunConfig) -> str | None:
    """The cluster to use: the run's own setting, or the one that this process was started in (``ray job submit``)."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


if __name__ == "__main__":
    # ``ray submit launch/cluster.yaml launch/generate.py -- --config ...`` runs this file on the head node.
    from launch.cli import main

    main(["generate", "--address", "auto", *sys.argv[1:]])
