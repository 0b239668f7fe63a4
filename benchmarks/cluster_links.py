"""One worker a GPU: each link alone and with all workers at once, and a plan from what each worker measures alone
against the coordinator's from what all measure together. Figures are JSON-able: bytes, seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from benchmarks.cluster_rig import TRIAL_STEPS, Rig, median

SEED = 3
"""Of all items here, so that outputs can be compared whatever the plan and the worker."""
LARGEST_COPY, LARGEST_COPY_HOST = 256 << 20, 4 << 20
DISPATCH_SECONDS = 0.3
"""Within which all workers have got an item."""
MEASURED_SECONDS = 0.7
"""For which workers run before they are measured, at most."""
AFTER_SECONDS = 0.3
"""For which workers run on when they are measured: no link is free before all have been asked."""

Items = dict[int, dict[str, Any]]


def links(made: Rig, budgets: Sequence[float], seconds: float) -> dict[str, Any]:
    """The links' curves, and a row for latency mode and for each budget, the plans under joint load each time.

    Raises RuntimeError when an output is not the resident model's, or nothing was streamed.
    """
    began = time.monotonic()
    alone, together = _items(made, shared=False), _items(made, shared=True)
    found: dict[str, Any] = {"link": "one a worker" if made.crew.cuda else "one a worker, halved while all work"}
    found["curves"] = curves(made, seconds / 2, alone, together)
    digests: set[str] = set()
    rows = [_row(made, None, seconds, alone, together, digests)]
    rows += [_row(made, budget, seconds, alone, together, digests) for budget in budgets]
    ray.get([made.lease(rank, 1, **item) for rank, item in alone.items()], timeout=120)  # host links are whole again
    verified = _verify(made, digests)
    return found | {"plans": rows, "verified": verified, "seconds": time.monotonic() - began}


def _items(made: Rig, *, shared: bool) -> Items:
    """More for each worker's items. Host devices have a link each and nothing in common: it is halved instead."""
    item: dict[str, Any] = {"seed": SEED}
    if not made.crew.cuda:
        item["link"] = made.crew.host_link / (2 if shared else 1)
    return dict.fromkeys(range(made.crew.workers), item)


def curves(made: Rig, seconds: float, alone: Items, together: Items) -> list[dict[str, Any]]:
    """Of each worker: its transfer curve as its profile has it (measured at set-up, where others are set up at the same
    time), with all others idle, and with all copying at once. Rows of (bytes, seconds)."""
    ranks = range(made.crew.workers)
    single = {rank: _curves_at_once(made, [rank], seconds, alone)[rank] for rank in ranks}
    joint = _curves_at_once(made, ranks, seconds, together)
    return [
        {
            "rank": rank,
            "setup": single[rank]["profile"],
            "alone": single[rank]["points"],
            "together": joint[rank]["points"],
        }
        for rank in ranks
    ]


def _curves_at_once(made: Rig, ranks: Sequence[int], seconds: float, each: Items) -> dict[int, dict[str, Any]]:
    """Medians over the curves that each worker has measured while all did."""
    largest = LARGEST_COPY if made.crew.cuda else LARGEST_COPY_HOST
    for lasts in (seconds, 4 * seconds + 1.0):  # on a busy machine one may end before another begins
        asked = {"copies": largest, "seconds": lasts, "at": time.time() + DISPATCH_SECONDS}
        answers = ray.get([made.lease(rank, 0, **each[rank], **asked) for rank in ranks], timeout=120)
        told = [answer.results[0] for answer in answers]
        begin, end = max(one["began"] for one in told), min(one["finished"] for one in told)
        inside = [[points for a, b, points in one["curves"] if begin <= a and b <= end] for one in told]
        if all(inside):
            return {
                rank: {"profile": one["profile"], "points": _medians(rows)}
                for rank, one, rows in zip(ranks, told, inside, strict=True)
            }
    raise RuntimeError(f"no curve lies within the {end - begin:.3f} s in which all workers measure theirs")


def _medians(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    return [(column[0][0], median([seconds for _, seconds in column])) for column in zip(*curves, strict=True)]


def _row(
    made: Rig, budget: float | None, seconds: float, alone: Items, together: Items, digests: set[str]
) -> dict[str, Any]:
    """Both plans of one budget (None: latency mode), each under joint load. again: the solo ones after the joint ones,
    since clocks move; the speedup is over the mean of both."""
    request: dict[str, Any] = {"latency": True} if budget is None else {"budget": budget}
    first = made.replan(measure=False, **request)
    steps = {change.rank: change.predicted.step_seconds for change in first.changes if change.predicted is not None}
    planned_for: dict[int, float] = {}
    for rank in range(made.crew.workers):
        own = {rank: steps[rank]}
        planned_for |= _measured_replan(
            made, own, min(seconds, MEASURED_SECONDS), alone, workers=(rank,), reason="measured alone", **request
        )
    solo = _under_load(made, seconds, together, planned_for, digests)
    steps = {one["rank"]: one["step_seconds"] for one in solo["each"]}
    shared = _measured_replan(
        made, steps, min(seconds, MEASURED_SECONDS), together, reason="measured together", **request
    )
    joint = _under_load(made, seconds, together, shared, digests)
    made.rollback()
    again = _under_load(made, seconds, together, planned_for, digests)
    usual = statistics.mean(one["steps_per_second"] for one in (solo, again))
    faster = joint["steps_per_second"] / usual
    return {"budget": budget, "solo": solo, "joint": joint, "again": again, "speedup": faster}


def _measured_replan(
    made: Rig, step_seconds: Mapping[int, float], seconds: float, each: Items, **request: Any
) -> dict[int, float]:
    """A plan from what these workers measure after they have run for ``seconds``, and on; the others idle. The bytes a
    second that each of them had of its link."""
    counts = {rank: max(round((seconds + AFTER_SECONDS) / step), 8) for rank, step in step_seconds.items()}
    running = [made.lease(rank, count, **each[rank]) for rank, count in counts.items()]
    time.sleep(seconds)
    measured = made.links(list(counts))
    made.replan(measure=True, **request)
    ray.get(running, timeout=120)
    return {one.rank: one.transfer.bandwidth for one in measured}


def _under_load(
    made: Rig, seconds: float, together: Items, planned_for: Mapping[int, float], digests: set[str]
) -> dict[str, Any]:
    """All workers at once under the plans in force."""
    readings = made.measure(range(made.crew.workers), seconds, together)
    for reading in readings:
        if not (reading.copied_bytes and reading.state.streamed_bytes):
            raise RuntimeError(f"worker {reading.rank} has streamed nothing: its plan shows nothing of its link")
    digests |= {reading.digest for reading in readings}
    each = [one.as_json() | {"planned_link_bytes_per_second": planned_for[one.rank]} for one in readings]
    return {
        "steps_per_second": sum(reading.steps_per_second for reading in readings),
        "off": statistics.mean(one["step_seconds"] / one["predicted_step_seconds"] - 1 for one in each),
        "each": each,
    }


def _verify(made: Rig, digests: set[str]) -> dict[str, Any]:
    """All outputs are one, and it is that of the same model, resident."""
    if len(digests) != 1:
        raise RuntimeError(f"the plans' and workers' outputs are not the same: {len(digests)} different ones")
    item = {"id": "resident", "seed": SEED, "steps": TRIAL_STEPS}
    told: dict[str, Any] = ray.get(made.handles[0].verify.remote((item,), ({"digest": digests.pop()},)), timeout=120)
    if told["different"]:
        raise RuntimeError("the outputs are not the resident model's")
    return told
