"""Plan x Profile -> when each copy and visit of one step starts and ends, in the steady state.

One copy stream in order, one compute stream in order, a host that issues visits and never waits. A copy starts when
the one before it is done and the visit that it waits for has exited; a visit when its copies are done, the compute
stream has come to it and the host has issued it. Steps follow each other without a pause, so the recurrence is run
until a step takes as long as the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flextensor.planner.mix import kind_weights, kinds_of, resident_seconds
from flextensor.planner.plan import Plan, Prediction
from flextensor.profile import Profile, StepKind, TransferCurve

MOST_STEPS = 16
"""Steps simulated at most; a step that then still varies is given as the mean of the last half."""

CopyTimes = list[list[tuple[float, int, int]]]
"""A visit's copies: seconds, the visit waited for, and 1 where that is in the step before."""


@dataclass(frozen=True)
class CopySpan:
    """When ``plan.copies[copy]`` is on the link; seconds from the step's start, negative when it starts before."""

    copy: int
    visit: int
    start: float
    end: float


@dataclass(frozen=True)
class VisitSpan:
    """When a visit computes, and the ``stall`` before it: compute stream idle for a copy only. Seconds."""

    visit: int
    start: float
    end: float
    stall: float


@dataclass(frozen=True)
class Simulation:
    """One step of one kind in the steady state. Seconds; time 0 is the end of the step before."""

    kind: str
    visits: tuple[VisitSpan, ...]
    copies: tuple[CopySpan, ...]
    step_seconds: float
    compute_seconds: float
    stall_seconds: float
    transfer_seconds: float
    floor_seconds: float


def copy_times(plan: Plan, curve: TransferCurve) -> CopyTimes:
    """What the recurrence needs of a plan's copies."""
    times: CopyTimes = [[] for _ in plan.visits]
    for copy in plan.copies:
        times[copy.visit].append((curve.seconds(copy.nbytes), copy.after, copy.lag))
    return times


@dataclass
class _Clock:
    """The state that one step leaves to the next: where the two streams and the host are, and the last exits."""

    exits: list[float]
    compute: float = 0.0
    link: float = 0.0
    host: float = 0.0


def _step(times: CopyTimes, kind: StepKind, clock: _Clock) -> None:
    before, exits = clock.exits, [0.0] * len(times)
    link, now, host = clock.link, clock.compute, clock.host
    for v, (copies, compute, gap, issue) in enumerate(zip(times, kind.compute, kind.gap, kind.host, strict=True)):
        host += issue
        now += gap
        if host > now:
            now = host
        if copies:
            for seconds, after, lag in copies:
                free = before[after] if lag else exits[after]
                link = (free if free > link else link) + seconds
            if link > now:
                now = link
        now += compute
        exits[v] = now
    clock.exits, clock.compute, clock.link, clock.host = exits, now, link, host


def settle(times: CopyTimes, kind: StepKind, transfer: float) -> tuple[float, _Clock]:
    """Seconds of a step in the steady state, and the clock at the end of one.

    transfer: seconds of all copies of a step, below which no step can be.
    """
    floor = max(resident_seconds(kind), transfer)
    clock = _Clock([0.0] * len(times))
    ends = [0.0]
    for count in range(MOST_STEPS):
        _step(times, kind, clock)
        ends.append(max(clock.compute, clock.link))
        if count >= 2 and abs((ends[-1] - ends[-2]) - (ends[-2] - ends[-3])) <= 1e-6 * floor:
            return max(floor, ends[-1] - ends[-2]), clock
    half = MOST_STEPS // 2
    return max(floor, (ends[-1] - ends[-1 - half]) / half), clock


def simulate(plan: Plan, profile: Profile, *, kind: StepKind | str | None = None) -> Simulation:
    """One step of ``kind`` (a kind, its name, or None: the profile's first) in the steady state.

    Raises KeyError for a name that the profile has not.
    """
    kinds = kinds_of(profile)
    if isinstance(kind, str):
        named = [k for k in kinds if k.name == kind]
        if not named:
            raise KeyError(f"no step kind {kind!r} in the profile; it has {', '.join(repr(k.name) for k in kinds)}")
        kind = named[0]
    chosen = kind or kinds[0]
    times = copy_times(plan, profile.transfer)
    transfer = sum(seconds for row in times for seconds, _, _ in row)
    step, clock = settle(times, chosen, transfer)
    visits, copies = _spans(plan, times, chosen, clock)
    return Simulation(
        kind=chosen.name,
        visits=visits,
        copies=copies,
        step_seconds=step,
        compute_seconds=sum(chosen.compute),
        stall_seconds=sum(span.stall for span in visits),
        transfer_seconds=transfer,
        floor_seconds=max(resident_seconds(chosen), transfer),
    )


def _spans(
    plan: Plan, times: CopyTimes, kind: StepKind, clock: _Clock
) -> tuple[tuple[VisitSpan, ...], tuple[CopySpan, ...]]:
    """The step after ``clock``, span by span; the same recurrence as ``_step``."""
    zero, exits = clock.compute, [0.0] * len(times)
    link, now, host = clock.link, clock.compute, clock.host
    visits: list[VisitSpan] = []
    copies: list[CopySpan] = []
    for v, row in enumerate(times):
        host += kind.host[v]
        issued = max(now + kind.gap[v], host)
        for seconds, after, lag in row:
            start = max(link, clock.exits[after] if lag else exits[after])
            link = start + seconds
            copies.append(CopySpan(len(copies), v, start - zero, link - zero))
        start = max(issued, link) if row else issued
        now = exits[v] = start + kind.compute[v]
        visits.append(VisitSpan(v, start - zero, now - zero, start - issued))
    return tuple(visits), tuple(copies)


def predict(plan: Plan, profile: Profile) -> Prediction:
    """The steady state over the profile's mix of step kinds."""
    kinds = kinds_of(profile)
    mix = list(zip(kind_weights(kinds), (simulate(plan, profile, kind=kind) for kind in kinds), strict=True))
    return Prediction(
        step_seconds=sum(w * s.step_seconds for w, s in mix),
        compute_seconds=sum(w * s.compute_seconds for w, s in mix),
        stall_seconds=sum(w * s.stall_seconds for w, s in mix),
        transfer_seconds=sum(w * s.transfer_seconds for w, s in mix),
        floor_seconds=sum(w * s.floor_seconds for w, s in mix),
        by_kind={s.kind: s.step_seconds for _, s in mix},
    )


def predicted(plan: Plan, profile: Profile) -> Plan:
    """The plan with its prediction."""
    return replace(plan, prediction=predict(plan, profile))
