"""What people see while a job runs: a bar and a line a worker on a terminal, a line each few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.messages import JobProgress, RunStatus, WorkerState
from launch import words

LINE_INTERVAL = 5.0


class ProgressView:
    """A context manager; ``update`` shows the latest figures. Prints to ``console`` only."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._status: RunStatus | None = None
        self._lined = 0.0
        self._bar = Progress(
            TextColumn("items"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("items", total=total, rate="")
        self._live = Live(self._bar, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, job: JobProgress, status: RunStatus | None) -> None:
        """Show the job's progress and, where given, the run's newest status."""
        self._status = status or self._status
        rate = words.rate(job)
        if not self._console.is_terminal:
            self._line(job, rate)
            return
        self._bar.update(self._task, completed=job.skipped + job.done, rate=rate)
        workers = Table.grid(padding=(0, 2))
        for state in self._status.workers if self._status else ():
            workers.add_row(f"worker {state.rank}", worker_words(state))
        self._live.update(Group(self._bar, workers))

    def _line(self, job: JobProgress, rate: str) -> None:
        now = time.monotonic()
        if now - self._lined < LINE_INTERVAL and not job.finished:
            return
        self._lined = now
        workers = self._status.workers if self._status else ()
        said = "; ".join(f"worker {state.rank}: {worker_words(state)}" for state in workers)
        done = ", ".join(filter(None, [f"{job.skipped + job.done}/{job.total} items", rate]))
        self._console.print("; ".join(filter(None, [done, said])), soft_wrap=True)


def worker_words(state: WorkerState) -> str:
    """One worker's state in a few words: what it loads, or its step time and stall share."""
    if state.paused and state.parked:
        return f"paused at epoch {state.epoch}"
    if state.note:
        return state.note
    if state.step_seconds <= 0:
        return state.phase
    return (
        f"{state.step_seconds * 1e3:.1f} ms a step, stall {state.stall_share:.0%}, "
        f"{state.link_bytes_per_second / 1e9:.2f} GB/s, epoch {state.epoch}"
    )
