"""Batch jobs of the cluster benchmark: replans and a killed worker in the middle, answers against a quiet run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster_rig import Rig, median
from cluster.batch import BatchJob
from cluster.journal import OutputJournal
from cluster.leases import LeaseQueue
from cluster.messages import JobProgress

SEEDS = 8
MOST_ITEMS = 4000
CHECKED = 2
SETTLED = 1.5
"""A step that takes at most so many times its plan's median is a step of the steady state."""

Answers = list[dict[str, Any]]


def run_job(made: Rig, steps: int, work: Callable[[], None], *, least: int) -> tuple[Answers, JobProgress]:
    """A batch job that lasts until ``work`` (beside it, once workers have answered) is done and ``least`` items are.

    Raises what ``work`` raises.
    """
    assert made.pool is not None
    items = [{"id": f"i{k}", "seed": k % SEEDS, "steps": steps} for k in range(MOST_ITEMS)]
    queue = LeaseQueue([(item,) for item in items])
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)

    def during(progress: JobProgress) -> None:
        if thread.ident is None:
            if progress.done >= 2 * made.crew.workers:
                thread.start()
        elif not thread.is_alive() and progress.done >= least:
            while (lease := queue.take()) is not None:
                queue.finish(lease.number)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.jsonl"
        journal = OutputJournal(path)
        job = BatchJob(
            made.pool,
            queue,
            journal,
            progress=JobProgress(total=len(items)),
            tokens_of=lambda result: int(result.get("tokens", 0)),
            on_progress=during,
            tick=0.2,
        )
        try:
            progress = job.run()
        finally:
            journal.close()
            thread.join(120)
        if errors:
            raise errors[0]
        answers = [json.loads(line) for line in path.read_text().splitlines()]
    if len({answer["id"] for answer in answers}) != len(answers):
        raise RuntimeError("an item was answered twice")
    return answers, progress


def quiet(made: Rig, steps: int) -> tuple[dict[int, str], dict[str, Any]]:
    """The digest of each seed's output, from a job that nothing disturbs; and ``verify``'s word on some of them."""
    answers, _ = run_job(made, steps, lambda: None, least=2 * SEEDS)
    expected = {answer["seed"]: answer["digest"] for answer in answers}
    checked = answers[:CHECKED]
    items = tuple({"id": answer["id"], "seed": answer["seed"], "steps": steps} for answer in checked)
    verified: dict[str, Any] = ray.get(made.handles[0].verify.remote(items, tuple(checked)), timeout=120)
    return expected, verified


def different(answers: Answers, expected: dict[int, str]) -> list[str]:
    """The ids whose output is not the quiet run's."""
    return [str(answer["id"]) for answer in answers if answer.get("digest") != expected[answer["seed"]]]


def replans(made: Rig, steps: int, expected: dict[int, str], budgets: Sequence[float]) -> dict[str, Any]:
    """Synchronized replans under load: how long each worker stood, and when steps were steady again."""
    told: list[dict[str, Any]] = []

    def work() -> None:
        for budget in [*budgets, None]:
            time.sleep(1.0)
            before = made.states()
            asked = time.time()
            if budget is None:
                outcome = ray.get(made.coordinator.rollback.remote(), timeout=60)
            else:
                outcome = made.replan(budget=budget)
            ended = time.time()
            time.sleep(0.5)
            told.append(
                {
                    "to": "rollback" if budget is None else f"{budget:.0%}",
                    "committed": outcome.committed,
                    "epoch": outcome.epoch,
                    "began": asked,
                    "round_began": ended - outcome.round_seconds,
                    "ended": ended,
                    "measure_seconds": outcome.measure_seconds,
                    "round_seconds": outcome.round_seconds,
                    "parked_seconds": outcome.parked_seconds,
                    "moved_bytes": max(change.moved_bytes for change in outcome.changes),
                    "link_bytes_per_second": min(state.link_bytes_per_second for state in before),
                    "step_before": max(state.step_seconds for state in before),
                }
            )
        time.sleep(1.0)

    answers, progress = run_job(made, steps, work, least=2 * SEEDS)
    for one, following in itertools.zip_longest(told, told[1:]):
        one |= _pause_and_recovery(answers, one, following["began"] if following else float("inf"))
    return {
        "items": progress.done,
        "different": different(answers, expected),
        "replans": told,
        "pause_seconds": median([one["pause_seconds"] for one in told]),
        "recovery_seconds": median([one["recovery_seconds"] for one in told]),
    }


def _pause_and_recovery(answers: Answers, one: dict[str, Any], until: float) -> dict[str, float]:
    """pause: how much longer than a usual one the step was in which a worker changed plans, of any worker. recovery:
    from the round's begin to the first steady step after it, of the slowest worker. allowed: one step and moved bytes
    over the link.

    Steps are timed from begin to begin within one item: between two items a worker waits for other reasons, too. One
    that changed plans between two items did not pause.
    """
    pauses, recoveries = [], []
    for pid in {answer["pid"] for answer in answers}:
        items = [
            list(zip(answer["stamps"], answer["epochs"], strict=True)) for answer in answers if answer["pid"] == pid
        ]
        steps = sorted(pair for stamped in items for pair in itertools.pairwise(stamped))
        usual = [b - a for (a, _), (b, _) in steps if one["ended"] + 0.3 < a and b < until]
        if not usual:
            continue
        changed = one["ended"]
        for (a, before), (b, after) in steps:
            if before != after == one["epoch"]:
                pauses.append(b - a - median(usual))
                changed = a
        steady = SETTLED * max(median(usual), 1e-4)
        first = next((b for (a, _), (b, _) in steps if a >= changed and b - a <= steady), until)
        recoveries.append(first - one["round_began"])
    link = one["link_bytes_per_second"]
    allowed = one["step_before"] + (one["moved_bytes"] / link if link else 0.0)
    return {
        "pause_seconds": max(pauses, default=0.0),
        "recovery_seconds": max(recoveries, default=0.0),
        "allowed_seconds": allowed,
    }


def killed_worker(made: Rig, steps: int, expected: dict[int, str], *, patience: float = 90.0) -> dict[str, Any]:
    """SIGKILL of the last worker in the middle of a job: when it has answered an item again; is anything lost?"""
    victim = made.crew.workers - 1
    found: dict[str, float] = {}

    def work() -> None:
        old = made.states([victim])[0]
        found["killed"] = time.time()
        os.kill(old.pid, signal.SIGKILL)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(0.2)
            status = ray.get(made.coordinator.status.remote(), timeout=60)
            new = [s for s in status.workers if s.rank == victim and s.incarnation != old.incarnation and s.steps > 0]
            if new and new[0].phase == "ready" and new[0].lease is not None:
                found["pid"] = new[0].pid
                time.sleep(1.0)
                return
        raise TimeoutError(f"worker {victim} did not take up work within {patience:.0f} s of its kill")

    answers, progress = run_job(made, steps, work, least=2 * SEEDS)
    again = [answer["finished"] for answer in answers if answer["pid"] == found["pid"]]
    others = sorted(a["finished"] for a in answers if a["pid"] != found["pid"] and a["finished"] > found["killed"])
    return {
        "items": progress.done,
        "failed": progress.failed,
        "different": different(answers, expected),
        "seconds_to_next_item": min(again) - found["killed"] if again else None,
        "others_seconds_to_next_item": others[0] - found["killed"] if others else None,
    }
