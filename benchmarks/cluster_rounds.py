"""What a round costs: the real coordinator over light actors, and over a simulated cluster of many GPUs."""

from __future__ import annotations

import asyncio
import os
import pickle
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray

from benchmarks.cluster_light import LightWorker
from benchmarks.cluster_rig import process_id
from cluster.asking import Member
from cluster.coordinator import Coordinator
from cluster.messages import (
    Budget,
    CoordinatorOptions,
    Measurement,
    Plans,
    Proposal,
    ReplanOutcome,
    ReplanRequest,
    WorkerState,
)
from flextensor.config import OffloadConfig
from flextensor.planner.plan import Plan
from flextensor.planning import solve
from flextensor.profile import Profile, StepKind, TensorInfo, TransferCurve, UnitInfo

CALLS_A_ROUND = 3
"""propose, prepare, commit."""
WORKERS_A_NODE = 8


class SeatedCoordinator(Coordinator):
    """The coordinator, with members that are given to it as joined; it does not watch them."""

    async def seat(self, handles: Sequence[Any], states: Sequence[Any], plans: Sequence[Plan | None]) -> None:
        """Members 0 .. n - 1, on these plans in epoch 1."""
        self._replans.epoch = 1
        epoch = self._replans.history.begin(1, "seated", None)
        for rank, (handle, state, plan) in enumerate(zip(handles, states, plans, strict=True)):
            self._roster.members[rank] = Member(rank, handle, state=state, joined=True, seen=time.monotonic())
            if plan is not None:
                epoch.put(rank, {f"worker-{rank}": plan}, None)


def light_rounds(count: int, *, rounds: int = 30, step_seconds: float = 0.0) -> dict[str, Any]:
    """Prepare and commit of ``count`` light actors: seconds, over ``rounds`` rounds of the real coordinator."""
    namespace = f"rounds-{uuid.uuid4().hex[:8]}"
    began = time.monotonic()
    maker = ray.remote(LightWorker).options(num_cpus=0, max_concurrency=3)
    handles = [maker.remote(rank, step_seconds) for rank in range(count)]
    options = CoordinatorOptions(namespace=namespace, rollback_margin=None, rollback_steps=0)
    coordinator = (
        ray.remote(SeatedCoordinator)
        .options(num_cpus=0, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}})
        .remote(options)
    )
    try:
        states = ray.get([handle.state.remote() for handle in handles], timeout=180)
        ray.get(coordinator.seat.remote(handles, states, [None] * count), timeout=60)
        ready = time.monotonic() - began
        process = psutil.Process(process_id(coordinator))
        outcomes: list[ReplanOutcome] = []
        for number in range(rounds + 2):
            if number == 2:
                spent = sum(process.cpu_times()[:2])
            outcomes.append(ray.get(coordinator.replan.remote(ReplanRequest(measure=False)), timeout=60))
        spent = sum(process.cpu_times()[:2]) - spent
        refused = [outcome.reason for outcome in outcomes if not outcome.committed]
        if refused:
            raise RuntimeError(f"a round of light actors was refused: {refused[0]}")
        took = sorted(outcome.round_seconds for outcome in outcomes[2:])
    finally:
        for handle in [*handles, coordinator]:
            ray.kill(handle)
    return {
        "actors": count,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "step_seconds": step_seconds,
        "median_seconds": statistics.median(took),
        "p90_seconds": took[int(0.9 * (len(took) - 1))],
        "most_seconds": took[-1],
        "ready_seconds": ready,
        "coordinator_cpu_a_call": spent / (rounds * count * CALLS_A_ROUND),
    }


# ---- a simulated cluster


def simulated_profile(blocks: int = 24, *, slower: float = 1.0, block_bytes: int = 486 << 20) -> Profile:
    """A profile like the engine model's: seven tensors a block, 3.6 ms of compute. ``slower``: of the compute."""
    shares = (0.0, 0.0, 0.069, 0.207, 0.241, 0.241, 0.242)
    tensors: list[TensorInfo] = []
    units: list[UnitInfo] = []
    offset = 0
    for block in range(blocks):
        first = len(tensors)
        for at, share in enumerate(shares):
            nbytes = max(int(share * block_bytes) // 256 * 256, 8192)
            small = share == 0.0
            tensors.append(TensorInfo(f"layers.{block}.{at}", nbytes, offset, small, "small" if small else ""))
            offset += nbytes
        units.append(UnitInfo(f"layers.{block}", tuple(range(first, len(tensors)))))
    column = tuple(3.6e-3 * slower for _ in range(blocks))
    zeros = tuple(0.0 for _ in range(blocks))
    kind = StepKind("step", compute=column, gap=zeros, host=tuple(0.4e-3 for _ in range(blocks)))
    return Profile(tuple(tensors), tuple(units), tuple(range(blocks)), (kind,), TransferCurve.from_bandwidth(55e9))


@dataclass
class _Call:
    """``handle.method.remote(...)`` as an awaitable: arguments and answer are pickled, as Ray does it."""

    method: Callable[..., Any]

    def remote(self, *arguments: Any) -> Any:
        async def call() -> Any:
            answer = self.method(*pickle.loads(pickle.dumps(arguments)))
            if isinstance(answer, _Later):
                await asyncio.sleep(answer.seconds)
                answer = answer.answer
            return pickle.loads(pickle.dumps(answer))

        return asyncio.ensure_future(call())


@dataclass(frozen=True)
class _Later:
    """An answer that takes so long on the worker's own machine."""

    answer: Any
    seconds: float


class SimulatedWorker:
    """One worker of the simulated cluster, on GPU number ``gpu``: a measured curve of its own, and plans that the real
    planner made.

    Each distinct profile is really solved once, beforehand and timed; a worker answers ``propose`` with that plan after
    that time, as on a machine of its own.
    """

    def __init__(
        self, rank: int, gpu: int, curve: TransferCurve, solved: Callable[[Budget, float], tuple[Plan, float]]
    ) -> None:
        self._rank, self._gpu, self._curve, self._solved = rank, gpu, curve, solved
        self._epoch, self._staged = 1, 0
        for name in ("state_now", "measure", "propose", "prepare", "commit", "abort"):
            setattr(self, name, _Call(getattr(self, f"_{name}")))
        self.state = _Call(self._state_now)
        self.planned_for = 0.0

    def _state_now(self) -> WorkerState:
        node = f"node{self._rank // WORKERS_A_NODE}"
        return WorkerState(self._rank, 1, 1000 + self._rank, node, f"GPU-{self._gpu}", "ready", epoch=self._epoch)

    def _measure(self, number: int) -> Measurement:
        state = self._state_now()
        return Measurement(self._rank, state.node, state.device, self._curve, self._curve)

    def _propose(
        self, number: int, budget: Budget, plans: Plans | None, transfer: TransferCurve | None, wait: float
    ) -> Any:
        seconds = 0.0
        if plans is None:
            assert transfer is not None
            self.planned_for = round(transfer.bandwidth, -6)
            plan, seconds = self._solved(budget, transfer.bandwidth)
            plans = {f"worker-{self._rank}": plan}
        return _Later(Proposal(self._rank, plans, 0, 0.1), seconds)

    def _prepare(
        self, number: int, epoch: int, plans: Plans, budget: Budget, timeout: float, stands_at: int | None
    ) -> None:
        self._staged = epoch

    def _commit(self, number: int) -> float:
        self._epoch = self._staged
        return 0.0

    def _abort(self, number: int) -> None:
        self._staged = 0


def simulated_cluster(
    gpus: int = 1024, *, workers_a_gpu: int = 1, kinds: int = 4, cost_a_call: float = 0.0, blocks: int = 24
) -> dict[str, Any]:
    """One joint replan of all workers. kinds: of links, by how fast they are. workers_a_gpu: with more than one the
    coordinator has to find who shares a link. cost_a_call: processor seconds of the coordinator for a call through Ray
    (``light_rounds`` measures it), which calls without Ray lack."""
    bandwidths = [55e9 / (1 + kind) for kind in range(kinds)]
    profile = simulated_profile(blocks)
    budget = 0.6
    solutions: dict[float, tuple[Plan, float]] = {}
    for bandwidth in bandwidths:
        began = time.perf_counter()
        plan = solve(replace(profile, transfer=TransferCurve.from_bandwidth(bandwidth)), budget, OffloadConfig())
        solutions[bandwidth] = plan, time.perf_counter() - began

    waited: list[float] = []

    def solved(asked: Budget, bandwidth: float) -> tuple[Plan, float]:
        nearest = min(solutions, key=lambda known: abs(known - bandwidth))
        waited.append(solutions[nearest][1])
        return solutions[nearest]

    workers = [
        SimulatedWorker(rank, gpu, TransferCurve.from_bandwidth(bandwidths[gpu % kinds] * (1 - rank % 5 / 1e3)), solved)
        for rank, gpu in ((rank, rank // workers_a_gpu) for rank in range(gpus * workers_a_gpu))
    ]

    async def replan() -> tuple[ReplanOutcome, float, float]:
        coordinator = SeatedCoordinator(CoordinatorOptions(namespace="simulated", rollback_margin=None))
        await coordinator.start()
        first, _ = solutions[bandwidths[0]]
        states = [worker._state_now() for worker in workers]
        await coordinator.seat(workers, states, [first] * len(workers))
        began, cpu = time.perf_counter(), time.process_time()
        outcome = await coordinator.replan(ReplanRequest(budget=budget))
        took = time.perf_counter() - began, time.process_time() - cpu
        for task in list(coordinator._background):
            task.cancel()
        return outcome, *took

    outcome, seconds, cpu = asyncio.run(replan())
    if not outcome.committed or {worker._epoch for worker in workers} != {outcome.epoch}:
        raise RuntimeError(f"the simulated cluster did not move as one: {outcome.reason}")
    by_gpu: dict[int, set[float]] = {}
    for worker in workers:
        by_gpu.setdefault(worker._gpu, set()).add(worker.planned_for)
    calls = (CALLS_A_ROUND + 1) * len(workers)
    return {
        "gpus": len({worker._state_now().device for worker in workers}),
        "workers": len(workers),
        "kinds": kinds,
        "tensors": len(profile.tensors),
        "slowest_solve_seconds": max(waited),
        "seconds": seconds,
        "coordinator_cpu_seconds": cpu,
        "round_seconds": outcome.round_seconds,
        "calls": calls,
        "ray_seconds": calls * cost_a_call,
        "seconds_with_ray": seconds + calls * cost_a_call,
        "links_shared_alike": all(len(found) == 1 for found in by_gpu.values()),
    }


class Simulation:
    """``simulated_cluster`` as an actor."""

    def run(self, gpus: int, cost_a_call: float) -> dict[str, Any]:
        """See ``simulated_cluster``."""
        return simulated_cluster(gpus, cost_a_call=cost_a_call)
