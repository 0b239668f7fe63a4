"""Joint plans over shared links, by the real planner: simulated GPUs whose profiles and links are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.asking import Member
from cluster.coordinator import Coordinator
from cluster.engines import with_wait
from cluster.joint import Load, links_of, settle
from cluster.messages import Budget, CoordinatorOptions, Measurement, Plans, Proposal, ReplanRequest, WorkerState
from cluster.solving import Proposals
from flextensor.config import OffloadConfig
from flextensor.planning import solve
from flextensor.profile import Profile, StepKind, TensorInfo, TransferCurve, UnitInfo

pytestmark = pytest.mark.whole_search

MIB = 1 << 20
LINK = 10e9


def profile_of(blocks: int, mib: int, compute: float) -> Profile:
    """``blocks`` units of two tensors, ``mib`` MiB together, ``compute`` seconds each."""
    half = mib * MIB // 2
    tensors = tuple(TensorInfo(f"b{k // 2}.{k % 2}", half, k * half) for k in range(2 * blocks))
    units = tuple(UnitInfo(f"b{k}", (2 * k, 2 * k + 1)) for k in range(blocks))
    columns = (compute,) * blocks, (0.0,) * blocks, (0.0,) * blocks
    return Profile(
        tensors, units, tuple(range(blocks)), (StepKind("step", *columns),), TransferCurve.from_bandwidth(LINK)
    )


class SimulatedGpu:
    """A worker whose GPU is a profile. asked: the bandwidths and waits that it has solved for."""

    def __init__(self, rank: int, profile: Profile, device: str, measured: float) -> None:
        self.rank, self.profile, self.device, self.measured = rank, profile, device, measured
        self.asked: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("on_measure", "on_propose"):
            method = getattr(self, f"on_{name}")

            class Call:
                @staticmethod
                def remote(*arguments: Any) -> Any:
                    async def answer() -> Any:
                        return method(*arguments)

                    return asyncio.ensure_future(answer())

            return Call
        raise AttributeError(name)

    def on_measure(self, number: int) -> Measurement:
        curve = TransferCurve.from_bandwidth(self.measured)
        return Measurement(self.rank, "a", self.device, curve, self.profile.transfer)

    def on_propose(
        self, number: int, budget: Budget, plans: Plans | None, transfer: TransferCurve | None, wait: float
    ) -> Proposal:
        if plans is None:
            curve = transfer or self.profile.transfer
            self.asked.append((curve.bandwidth, wait))
            profile = with_wait(replace(self.profile, transfer=curve), wait)
            plans = {f"worker-{self.rank}": solve(profile, budget, OffloadConfig())}
        return Proposal(self.rank, plans, 0, 0.1)


def joint(
    gpus: Sequence[SimulatedGpu], *, budgets: dict[int, Budget] | None = None, lockstep: bool = False
) -> tuple[Proposals, float, float]:
    """The proposals, the slowest worker's step, and the steps a second of all, as the shared links really give them."""
    groups = (tuple(gpu.rank for gpu in gpus),) if lockstep else ()

    async def solved() -> Proposals:
        coordinator = Coordinator(CoordinatorOptions("simulated", lockstep=groups))
        epoch = coordinator._replans.history.begin(1, "first", None)
        for gpu in gpus:
            state = WorkerState(gpu.rank, 1, 1, "a", gpu.device, "ready")
            coordinator._roster.members[gpu.rank] = Member(gpu.rank, gpu, state=state, joined=True)
            epoch.put(gpu.rank, {"": solve(gpu.profile, None, OffloadConfig())}, (budgets or {}).get(gpu.rank))
        members = coordinator._roster.joined()
        proposals, _ = await coordinator._replans._solver.solve(members, ReplanRequest(), 1, epoch)
        return proposals

    proposals = asyncio.run(solved())
    links = links_of([gpu.on_measure(1) for gpu in gpus])
    loads = {}
    for rank, proposal in proposals.items():
        load = Load.of(proposal.plan, gpus[rank].asked[-1][1] if gpus[rank].asked else 0.0)
        assert load is not None
        loads[rank] = load
    outlook = settle(links, loads, groups)
    return proposals, max(outlook.pace.values()), sum(1 / pace for pace in outlook.pace.values())


def test_a_worker_that_stalls_gets_what_its_neighbour_leaves_of_their_link() -> None:
    """Rank 1 computes long and copies little; rank 0 would stall with half of the link."""
    hungry, modest = profile_of(8, 64, 0.002), profile_of(8, 8, 0.02)
    gpus = [SimulatedGpu(0, hungry, "GPU-1", LINK / 2), SimulatedGpu(1, modest, "GPU-1", LINK / 2)]
    proposals, _, throughput = joint(gpus, budgets={0: 3 * 64 * MIB, 1: 3 * 8 * MIB})
    first, last = gpus[0].asked[0][0], gpus[0].asked[-1][0]
    assert first == pytest.approx(LINK / 2, rel=0.02) and last > 1.4 * first
    told = proposals[0].plan.prediction
    assert told is not None and told.step_seconds < proposals[0].plan.streamed_bytes / (0.7 * LINK)
    assert throughput > 1 / told.step_seconds


def test_a_lockstep_group_streams_more_where_it_waits_anyway() -> None:
    """In latency mode: rank 1 is done long before rank 0; it needs less memory to be in time."""
    slow, quick = profile_of(8, 16, 0.02), profile_of(8, 64, 0.004)
    apart = [SimulatedGpu(0, slow, "GPU-1", LINK), SimulatedGpu(1, quick, "GPU-2", LINK)]
    replicas, pace_apart, _ = joint(apart)
    together = [SimulatedGpu(0, slow, "GPU-1", LINK), SimulatedGpu(1, quick, "GPU-2", LINK)]
    group, pace, _ = joint(together, lockstep=True)
    assert together[1].asked[-1][1] > 0.1, "seconds a step that it waits"
    assert group[1].plan.weight_bytes < 0.95 * replicas[1].plan.weight_bytes
    assert pace <= 1.01 * pace_apart, "the group is not slower for it"


def test_workers_with_links_of_their_own_are_asked_once_for_what_they_measured() -> None:
    gpus = [SimulatedGpu(k, profile_of(6, 32, 0.004), f"GPU-{k}", LINK * (1 - k / 4)) for k in range(2)]
    joint(gpus, budgets={0: 3 * 32 * MIB, 1: 3 * 32 * MIB})
    assert [len(gpu.asked) for gpu in gpus] == [1, 1]
    assert [gpu.asked[0][0] for gpu in gpus] == pytest.approx([LINK, 0.75 * LINK], rel=0.01)
