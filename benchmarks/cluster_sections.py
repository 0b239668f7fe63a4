"""The parts of the cluster benchmark that need real workers; each returns JSON-able figures (bytes, seconds)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray

from benchmarks.cluster_rig import Crew, Reading, Rig, median, process_id, rig, shared_gpu

BUDGETS = (0.25, 0.5, 0.75)


def counts_up_to(workers: int) -> list[int]:
    """1, 2, 4 ... and ``workers`` itself."""
    counts = [1]
    while counts[-1] * 2 < workers:
        counts.append(counts[-1] * 2)
    return counts if workers == 1 else [*counts, workers]


def scaling(made: Rig, model: str, budgets: Sequence[float], seconds: float) -> list[dict[str, Any]]:
    """A row a budget and a number of workers at work: the others are up, hold the store and idle.

    The plans are joint: all workers run while they are measured for them.
    """
    rows = []
    for budget in budgets:
        joint_replan(made, budget=budget, measure_seconds=min(seconds, 1.0))
        alone = alone_link = 0.0
        for count in counts_up_to(made.crew.workers):
            readings = made.measure(range(count), seconds)
            together = sum(reading.steps_per_second for reading in readings)
            told = summary(readings)
            alone, alone_link = alone or together, alone_link or told["link_bytes_per_second"]
            rows.append(
                {
                    "model": model,
                    "budget": budget,
                    "workers": count,
                    "steps_per_second": together,
                    "efficiency": together / (count * alone),
                    **told,
                    # The plans are for all at work: for fewer of them nothing was predicted.
                    "predicted_step_seconds": told["predicted_step_seconds"] if count == made.crew.workers else None,
                    "link_share": told["link_bytes_per_second"] / alone_link if alone_link else None,
                    "each": [reading.as_json() for reading in readings],
                }
            )
    return rows


def summary(readings: Sequence[Reading]) -> dict[str, Any]:
    """The slowest worker's step, and what goes over the links in all."""
    slowest = max(readings, key=lambda reading: reading.seconds / reading.steps)
    told = slowest.as_json()
    rates = [reading.state.link_bytes_per_second for reading in readings]
    joules = [reading.joules_a_step for reading in readings]
    gpus = len({reading.state.device for reading in readings})  # workers of one GPU share its counter
    keys = ("step_seconds", "stall_seconds", "stall_share", "predicted_step_seconds", "streamed_bytes", "weight_bytes")
    return {
        **{key: told[key] for key in (*keys, "total_bytes")},
        "link_bytes_per_second": min(rates),
        "joules_a_step": None if None in joules else statistics.mean(j or 0.0 for j in joules) * gpus / len(joules),
    }


def joint_replan(made: Rig, *, measure_seconds: float, **request: Any) -> Any:
    """A plan from what all workers measure while all of them run."""
    made.replan(measure=False, **request)
    made.measure(range(made.crew.workers), measure_seconds)
    return _replan_under_load(made, measure_seconds, {}, **request)


def _replan_under_load(made: Rig, seconds: float, each: Mapping[int, dict[str, Any]], **request: Any) -> Any:
    """A plan from what all workers measure after they have run for so long. each: rank -> more for its items."""
    steps = _steps_for(made, 2 * seconds + 1.0)
    running = [made.lease(rank, count, **each.get(rank, {})) for rank, count in enumerate(steps)]
    time.sleep(seconds)
    outcome = made.replan(measure=True, **request)
    ray.get(running, timeout=120)
    return outcome


def _steps_for(made: Rig, seconds: float) -> list[int]:
    return [min(max(round(seconds / max(state.step_seconds, 1e-4)), 8), 4000) for state in made.states()]


HUNGRY_TOKENS, HUNGRY_BUDGET = 64, 0.1
"""On one GPU: the second worker's steps compute next to nothing and stream nearly all, so that the link never rests."""


def contention(crew: Crew, seconds: float, *, repeats: int = 3) -> dict[str, Any]:
    """Two workers on one link: the first one's plan from what it measures alone, against the coordinator's from what
    both measure together.

    Latency mode (least memory that costs no time): there the link decides how much is streamed. On one GPU the second
    worker takes all of the link that it gets. (Of two workers alike whose compute fills the GPU, both compute and link
    are halved, and the plan for one is the plan for two.) Host devices have a link each, so on them two workers alike
    run on links that are halved while both work.
    """
    half, whole = {"link": crew.host_link / 2}, {"link": crew.host_link}
    both: dict[int, dict[str, Any]] = {0: half, 1: half}
    alone: dict[int, dict[str, Any]] = {0: whole, 1: whole}
    if crew.cuda:
        both, alone = {1: {"tokens": HUNGRY_TOKENS}}, {}
    rows: dict[str, list[dict[str, Any]]] = {"solo": [], "joint": []}
    links: list[float] = []
    with rig(shared_gpu(crew)) as made:
        devices = {state.device for state in made.states()}
        if crew.cuda and len(devices) != 1:
            raise RuntimeError(f"two workers with half a GPU each are on {len(devices)} GPUs: {sorted(devices)}")
        made.replan(latency=True, measure=False)
        at_setup = [one.alone.bandwidth for one in made.links([0, 1])]
        planned = None
        if crew.cuda:
            made.replan(budget=HUNGRY_BUDGET, workers=(1,), measure=False)
            planned = (0,)

        def read(which: str, outcome: Any) -> None:
            readings = made.measure([0, 1], seconds, both)
            first = readings[0].as_json()
            rows[which].append(
                {
                    "steps_per_second": readings[0].steps_per_second,
                    "other_steps_per_second": readings[1].steps_per_second,
                    **{key: first[key] for key in SHOWN},
                    "weight_bytes": next(change.weight_bytes for change in outcome.changes if change.rank == 0),
                }
            )

        for _ in range(repeats):  # in turn: clocks move
            links.append(made.measure([0], seconds, alone)[0].state.link_bytes_per_second)
            # What it has measured alone, and nobody asked about the other.
            read("solo", made.replan(latency=True, workers=planned, measure=False, reason="measured alone"))
            together = {"latency": True, "workers": planned, "reason": "measured together"}
            read("joint", _replan_under_load(made, seconds, both, **together))
    solo, joint = _middle(rows["solo"]), _middle(rows["joint"])
    return {
        "shared": "one GPU's link, with a worker that takes all that it gets"
        if crew.cuda
        else "a link halved for both",
        "alone_link_bytes_per_second": median(links),
        "setup_link_bytes_per_second": at_setup,
        "solo": solo,
        "joint": joint,
        "speedup": joint["steps_per_second"] / solo["steps_per_second"],
        "other_speedup": joint["other_steps_per_second"] / solo["other_steps_per_second"],
    }


SHOWN = (
    "step_seconds",
    "stall_seconds",
    "stall_share",
    "predicted_step_seconds",
    "streamed_bytes",
    "total_bytes",
    "link_bytes_per_second",
)


def _middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the numbers, column by column."""
    found: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        found[key] = None if any(value is None for value in values) else statistics.median(values)
    return found


def memory_by_workers(made: Rig, model: str) -> list[dict[str, Any]]:
    """Host memory of the weights over all processes that hold them, against one copy: a row a number of workers. The
    others have let go of theirs, so nothing else can be measured afterwards."""
    rows = []
    for count in reversed(counts_up_to(made.crew.workers)):
        ray.get([handle.close.remote() for handle in made.handles[count:]], timeout=120)
        reports = ray.get([handle.report.remote() for handle in made.handles[:count]], timeout=120)
        by_node = {report["node"]: report for report in reports}
        pss = sum(report["weights_pss_bytes"] for report in by_node.values())
        store = sum(report["store_bytes"] for report in by_node.values())
        row = {"model": model, "workers": count, "nodes": len(by_node), "store_bytes": store}
        rows.append(row | {"weights_pss_bytes": pss, "copies": pss / store})
    return rows[::-1]


def coordinator_cost(made: Rig, seconds: float) -> dict[str, Any]:
    """What the coordinator's questions at 1 s cost a step.

    cpu_share: processor time that one ``state`` call takes in the worker, a second: the most of a step that it can
        delay. (It is not told from steps with the coordinator at work and stopped: they differ by less than steps do
        from one second to the next.) coordinator_cpu_share: what the coordinator itself takes of a core meanwhile.
    """
    worker = psutil.Process(process_id(made.handles[0]))
    coordinator = psutil.Process(process_id(made.coordinator))
    calls = 100
    before = sum(worker.cpu_times()[:2])
    for _ in range(calls):
        ray.get(made.handles[0].state.remote(), timeout=60)
    spent = sum(worker.cpu_times()[:2]) - before
    watched, began = sum(coordinator.cpu_times()[:2]), time.monotonic()
    made.measure(range(made.crew.workers), 2 * seconds)
    return {
        "interval_seconds": 1.0,
        "calls": calls,
        "cpu_share": spent / calls,
        "coordinator_cpu_share": (sum(coordinator.cpu_times()[:2]) - watched) / (time.monotonic() - began),
    }
