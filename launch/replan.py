"""``flextensor replan``, ``rollback``, ``pause`` and ``resume``: change a run from another terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from cluster.messages import ReplanOutcome, ReplanRequest, RunStatus
from cluster.options import LONGEST_ROUND
from cluster.roster import BOUNDARY_PATIENCE, longest_between_boundaries
from cluster.session import find_run
from flextensor.config import ConfigError, parse_budget
from launch import words
from launch.status import ask_run


def request_of(budget: str | None, workers: str | None, *, measure: bool, dry_run: bool) -> ReplanRequest:
    """What the command line asks for. ``budget``: ``40%``, ``6GiB``, ``latency`` or None: as it is.

    Raises ConfigError for a budget or a list of workers that is none.
    """
    latency = budget is not None and budget.strip().lower() == "latency"
    ranks = None
    if workers is not None:
        try:
            ranks = tuple(int(part) for part in workers.split(","))
        except ValueError:
            raise ConfigError(f"--workers {workers!r}: write ranks, for example 0,2") from None
    return ReplanRequest(
        budget=None if budget is None or latency else parse_budget(budget),
        latency=latency,
        workers=ranks,
        measure=measure,
        dry_run=dry_run,
        reason=f"budget {budget}" if budget else "asked for",
    )


def run_replan(request: ReplanRequest, *, address: str | None, namespace: str | None, console: Console) -> bool:
    """Ask the run for a replan and tell what came of it; False when it was refused."""
    coordinator = find_run(address=address, namespace=namespace)
    return _tell(ask_run(coordinator.replan.remote(request), _patience(coordinator)), console)


def run_rollback(*, address: str | None, namespace: str | None, console: Console) -> bool:
    """Ask the run to go back to the plan before; False when it was refused."""
    coordinator = find_run(address=address, namespace=namespace)
    return _tell(ask_run(coordinator.rollback.remote(), _patience(coordinator)), console)


def run_pause(on: bool, *, address: str | None, namespace: str | None, console: Console) -> None:
    """Pause or resume all workers of a run."""
    coordinator = find_run(address=address, namespace=namespace)
    told = ask_run(coordinator.pause.remote(on))
    what = "stand at their next step boundary" if on else "go on"
    console.print(f"{told} workers {what}")


def _patience(coordinator: Any) -> float:
    """Seconds to wait for a round: it waits for a step boundary of every worker; a step of a video takes minutes."""
    status: RunStatus = ask_run(coordinator.status.remote())
    longest = max((longest_between_boundaries(state) for state in status.workers), default=0.0)
    return LONGEST_ROUND + BOUNDARY_PATIENCE * longest


def _tell(outcome: ReplanOutcome, console: Console) -> bool:
    if (not outcome.committed and not outcome.dry_run) or (outcome.reason and not outcome.committed):
        console.print(f"refused: {outcome.reason}; all workers stay at epoch {outcome.epoch}", soft_wrap=True)
        return False
    table = words.table(
        "worker",
        "weights on device",
        "streamed a step",
        "moved",
        "step before",
        "predicted",
        "stall",
        title="dry run, nothing changed" if outcome.dry_run else f"epoch {outcome.epoch}",
    )
    for change in outcome.changes:
        predicted = change.predicted
        table.add_row(
            str(change.rank),
            f"{words.size(change.before_weight_bytes)} -> {words.size(change.weight_bytes)}",
            f"{words.size(change.before_streamed_bytes)} -> {words.size(change.streamed_bytes)}",
            words.size(change.moved_bytes),
            words.milliseconds(change.before_step_seconds),
            words.milliseconds(predicted.step_seconds if predicted else 0.0),
            words.milliseconds(predicted.stall_seconds if predicted else 0.0),
        )
    console.print(table)
    if outcome.committed:
        measured, agreed = words.milliseconds(outcome.measure_seconds), words.milliseconds(outcome.round_seconds)
        stood = f", longest stand {words.milliseconds(outcome.parked_seconds)}" if outcome.parked_seconds else ""
        times = f"measured and solved in {measured}, agreed in {agreed}{stood}"
        console.print(f"all workers move at their next step; {times}")
    return True


if __name__ == "__main__":
    # ``ray submit launch/cluster.yaml launch/replan.py -- --budget 40%`` runs this file on the head node.
    from launch.cli import main

    main(["replan", "--address", "auto", *sys.argv[1:]])
