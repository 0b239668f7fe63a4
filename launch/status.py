"""``flextensor status``: a run's workers, as a table or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import ray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cluster.messages import RunStatus, WorkerState
from cluster.session import SessionError, find_run
from launch import words

ANSWER_TIMEOUT = 30.0
WATCH_INTERVAL = 1.0


def show_status(*, address: str | None, namespace: str | None, watch: bool, as_json: bool, console: Console) -> None:
    """Print a run's status once, or again and again until the run ends or Ctrl-C."""
    coordinator = find_run(address=address, namespace=namespace)

    def ask() -> RunStatus:
        status: RunStatus = ask_run(coordinator.status.remote())
        return status

    told = _until_the_end(ask) if watch else iter([ask()])
    if as_json:
        for status in told:
            print(json.dumps(status_json(status)), file=console.file, flush=True)
    elif watch:
        with Live(console=console, refresh_per_second=4) as live:
            for status in told:
                live.update(status_view(status))
    else:
        console.print(status_view(next(told)))


def _until_the_end(ask: Callable[[], RunStatus]) -> Iterator[RunStatus]:
    """Each second, until the job is finished or the run that has answered once is no more."""
    status = ask()
    yield status
    while not status.job.finished:
        time.sleep(WATCH_INTERVAL)
        try:
            status = ask()
        except RunEnded:
            return
        yield status


class RunEnded(SessionError):
    """The run was there, and is no more."""


def ask_run(reference: Any, timeout: float = ANSWER_TIMEOUT) -> Any:
    """A coordinator's answer.

    Raises SessionError when it does not come, RunEnded when it never will.
    """
    try:
        return ray.get(reference, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise SessionError(f"the run's coordinator did not answer within {timeout:.0f} s; try again") from None
    except ray.exceptions.RayActorError:
        raise RunEnded("the run has ended") from None


def status_json(status: RunStatus) -> dict[str, Any]:
    """The status as plain data, with the derived figures."""
    data = asdict(status)
    for row, state in zip(data["workers"], status.workers, strict=True):
        row["stall_share"] = state.stall_share
        row["link_share"] = state.link_share
    data["job"]["tokens_per_second"] = status.job.tokens_per_second
    return data


def status_view(status: RunStatus) -> RenderableType:
    """The table that people see."""
    title = f"{status.namespace}, epoch {status.epoch}{', paused' if status.paused else ''}"
    table = words.table(
        "worker", "device", "epoch", "resident", "streamed", "step/pred. ms", "stall", "GB/s", "host mem", title=title
    )
    for state in status.workers:
        table.add_row(*_row(state))
    job = status.job
    weights = sum(state.weights_pss_bytes for state in status.workers)
    lines: list[RenderableType] = [
        table,
        Text(
            ", ".join(
                filter(None, [f"{job.skipped + job.done}/{job.total} items", f"{job.failed} failed", words.rate(job)])
            )
            + (f", {status.joules_an_item:.1f} J an item" if status.joules_an_item is not None else "")
            + (f"; host memory for weights: {words.size(weights)}" if weights else "")
        ),
    ]
    for state in status.workers:
        for what, reason in (("refused a plan", state.refusal), ("planned by itself", state.own_reason)):
            if reason:
                lines.append(Text(f"worker {state.rank} {what}: {reason}", style="yellow"))
    lines += [Text(missing, style="yellow") for missing in status.missing]
    return Group(*lines)


def _link(state: WorkerState) -> str:
    """Measured against the link's own rate, GB/s."""
    nominal = state.link_nominal_bytes_per_second
    return f"{state.link_bytes_per_second / 1e9:.2f}" + (f"/{nominal / 1e9:.3g}" if nominal else "")


def _row(state: WorkerState) -> tuple[str, ...]:
    device = f"{state.gpu.name.removeprefix('NVIDIA ')} {state.gpu.uuid[-6:]}" if state.gpu else state.device
    who = f"{state.rank} {state.node}"
    if state.predicted is None or state.phase != "ready":
        return who, device, state.note or state.phase
    return (
        who,
        device,
        f"{state.epoch} paused" if state.paused else str(state.epoch),
        words.size(state.resident_bytes),
        words.size(state.streamed_bytes),
        f"{state.step_seconds * 1e3:.1f}/{state.predicted.step_seconds * 1e3:.1f}",
        f"{state.stall_share:.0%}",
        _link(state),
        words.size(state.host.pss_bytes) if state.host else "-",
    )
