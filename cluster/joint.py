"""One plan for all: which link each worker really has, beside what the others take of it. Pure Python.

[Note: shared links] Workers on one GPU share its link. What they measure while all of them copy adds up to the link's
capacity (never more than one of them had of it alone). How much of it each one gets depends on how much it asks for,
its streamed bytes a step: a worker that computes longer than it copies leaves the rest to the others. An independent
replica asks at its own pace; a worker in a lockstep group at the pace of the group's slowest, for which it waits. So
``settle`` goes round: from paces to shares of the links, from shares to step times, and so to paces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.messages import Measurement
from cluster.options import LockstepGroups
from flextensor.planner.plan import Plan

HOST_DEVICE = "host"
_TURNS = 60
_HALVINGS = 20
_STILL = 1e-5


@dataclass(frozen=True)
class Link:
    """The workers on one link, and its bytes a second with all of them at once."""

    ranks: tuple[int, ...]
    capacity: float

    @property
    def even_share(self) -> float:
        """What each has while all copy."""
        return self.capacity / len(self.ranks)


@dataclass(frozen=True)
class Load:
    """A worker's step under a plan: seconds without any wait for copies, and bytes over the link."""

    compute_seconds: float
    streamed_bytes: float

    @staticmethod
    def of(plan: Plan, wait: float = 0.0) -> Load | None:
        """wait: seconds for its lockstep group that the plan's prediction has in it. None for a plan without one."""
        told = plan.prediction
        if told is None:
            return None
        return Load(max(told.step_seconds - told.stall_seconds - wait, 0.0), plan.streamed_bytes)

    def seconds(self, bandwidth: float) -> float:
        """A step with so much of a link."""
        return max(self.compute_seconds, self.streamed_bytes / bandwidth)


@dataclass(frozen=True)
class Outlook:
    """What is to be expected: each worker's bytes a second, its own step, and with the waits for its group."""

    bandwidth: Mapping[int, float]
    step_seconds: Mapping[int, float]
    pace: Mapping[int, float]

    def wait(self, rank: int) -> float:
        """Seconds a step for which a worker waits for its group."""
        return self.pace[rank] - self.step_seconds[rank]


def links_of(measurements: Iterable[Measurement]) -> tuple[Link, ...]:
    """The links, from what all workers measured at the same time. Host devices have one each."""
    by_device: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        own = f"{HOST_DEVICE} of {one.rank}" if one.device == HOST_DEVICE else one.device
        by_device.setdefault((one.node, own), []).append(one)
    links = []
    for group in by_device.values():
        together = sum(one.transfer.bandwidth for one in group)
        alone = max(max(one.alone.bandwidth, one.transfer.bandwidth) for one in group)
        links.append(Link(tuple(sorted(one.rank for one in group)), min(together, alone)))
    return tuple(links)


def settle(links: Sequence[Link], loads: Mapping[int, Load], lockstep: LockstepGroups = ()) -> Outlook:
    """What each worker gets and how long its step takes, all of them running; see the module's note."""
    groups = [tuple(rank for rank in group if rank in loads) for group in lockstep]
    groups = [group for group in groups if group]
    grouped = {rank for group in groups for rank in group}
    singles = [rank for rank in loads if rank not in grouped]
    link_of = {rank: link for link in links for rank in link.ranks}
    pace = {rank: load.compute_seconds for rank, load in loads.items()}
    for group in groups:
        pace |= dict.fromkeys(group, max(pace[rank] for rank in group))

    def steps_of(ranks: Sequence[int], pace: Mapping[int, float]) -> dict[int, float]:
        shares: dict[int, float] = {}
        for link in {link_of[rank]: None for rank in ranks}:
            shares |= _shares(link, loads, pace)
        return {rank: loads[rank].seconds(shares[rank]) for rank in ranks}

    for _ in range(_TURNS):
        before = dict(pace)
        # Half-way: a pace that is too quick takes too much of the link, and one that is too slow too little.
        pace |= {rank: (pace[rank] + seconds) / 2 for rank, seconds in steps_of(singles, pace).items()}
        for group in groups:
            pace |= dict.fromkeys(group, _quickest(group, pace, steps_of))
        if all(abs(pace[rank] - before[rank]) <= _STILL * pace[rank] for rank in pace):
            break
    bandwidth: dict[int, float] = {}
    for link in links:
        bandwidth |= _shares(link, loads, pace)
    steps = {rank: load.seconds(bandwidth[rank]) for rank, load in loads.items()}
    told = {rank: max(pace[rank], steps[rank]) if rank in grouped else steps[rank] for rank in loads}
    for group in groups:
        told |= dict.fromkeys(group, max(told[rank] for rank in group))
    return Outlook(bandwidth, steps, told)


def _quickest(
    group: tuple[int, ...],
    pace: Mapping[int, float],
    steps_of: Callable[[Sequence[int], Mapping[int, float]], dict[int, float]],
) -> float:
    """The quickest pace that all of the group can keep. A slower one leaves more of the links to each member."""

    def slowest_at(seconds: float) -> float:
        return max(steps_of(group, {**pace, **dict.fromkeys(group, seconds)}).values())

    low = max(steps_of(group, {**pace, **dict.fromkeys(group, float("inf"))}).values())  # the others ask for nothing
    if slowest_at(low) <= low * (1 + _STILL):
        return low
    high = slowest_at(low)
    while slowest_at(high) > high:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if slowest_at(middle) <= middle else (middle, high)
    return high


def _shares(link: Link, loads: Mapping[int, Load], pace: Mapping[int, float]) -> dict[int, float]:
    """Bytes a second for each worker of a link: what the others leave at their pace, and an even share at least."""
    ranks = [rank for rank in link.ranks if rank in loads]
    demands = {rank: loads[rank].streamed_bytes / pace[rank] if pace[rank] > 0 else float("inf") for rank in ranks}
    taken = fair_shares(link.capacity, demands)
    total = sum(taken.values())
    even = link.capacity / max(len(ranks), 1)
    return {rank: max(even, link.capacity - (total - taken[rank])) for rank in ranks}


def fair_shares(capacity: float, demands: Mapping[int, float]) -> dict[int, float]:
    """Max-min fair: nobody gets more than it asks for, and who gets less gets as much as anyone."""
    shares: dict[int, float] = {}
    left = capacity
    waiting = sorted(demands, key=lambda rank: (demands[rank], rank))
    while waiting:
        rank = waiting.pop(0)
        shares[rank] = min(demands[rank], left / (len(waiting) + 1))
        left -= shares[rank]
    return shares


def score(outlook: Outlook, lockstep: LockstepGroups = ()) -> tuple[float, float, float]:
    """Less is better: the slowest lockstep group's step, then the sum of the groups' steps, then the independent
    replicas' steps a second together (negative)."""
    groups = [group for group in lockstep if any(rank in outlook.pace for rank in group)]
    steps = [max(outlook.pace[rank] for rank in group if rank in outlook.pace) for group in groups]
    grouped = {rank for group in groups for rank in group}
    throughput = sum(1 / pace for rank, pace in outlook.pace.items() if rank not in grouped and pace > 0)
    return max(steps, default=0.0), sum(steps), -throughput


def is_better(one: tuple[float, ...], other: tuple[float, ...], margin: float = 0.005) -> bool:
    """True where the first figure that differs by more than ``margin`` (a share) is less in ``one``."""
    for ours, theirs in zip(one, other, strict=True):
        if abs(ours - theirs) > margin * max(abs(ours), abs(theirs)):
            return ours < theirs
    return False
