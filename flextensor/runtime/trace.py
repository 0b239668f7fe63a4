"""One step as people look at it: what computed, what was on the link, what lay where in the arena, who waited.

``timeline`` joins the times of a sampled step with the Plan that it ran under; ``chrome.py`` and the launcher's picture
draw that. Seconds from the step's first arrival.

[Note: the wrap] Prefetch does not drain at the end of a step, so copies for the next step's first visits are under way
when one ends. In the steady state each step is like the one before: what this step leaves over at its end is drawn at
its beginning too, marked ``wrapped``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flextensor.planner.plan import Copy, Plan
from flextensor.profile import TensorInfo, UnitInfo
from flextensor.runtime.timing import CopySpan, StepTimes

SHORTEST_STALL = 2e-6
"""Shorter waits are the events' own resolution; they are not drawn."""


@dataclass(frozen=True)
class Computing:
    """A visit: the compute stream came to it at ``arrive``, stalled until ``start``, was done at ``end``."""

    visit: int
    unit: str
    arrive: float
    start: float
    end: float

    @property
    def stall(self) -> float:
        """Seconds that it waited for its weights."""
        return self.start - self.arrive


@dataclass(frozen=True)
class Copying:
    """A copy on the link. ``wrapped``: of the step before, still under way when this one began."""

    visit: int
    unit: str
    source: str
    tensors: tuple[str, ...]
    arena_offset: int
    nbytes: int
    start: float
    end: float
    wrapped: bool = False


@dataclass(frozen=True)
class Occupancy:
    """Bytes of the arena that belong to a unit's tensors: being filled from ``start`` to ``filled``, read from
    ``read`` on, free at ``end``. Times beyond the step's are cut off; ``wrapped`` as in ``Copying``."""

    visit: int
    unit: str
    tensors: tuple[str, ...]
    arena_offset: int
    nbytes: int
    start: float
    filled: float
    read: float
    end: float
    wrapped: bool = False


@dataclass(frozen=True)
class Timeline:
    """One step. ``period``: seconds from its beginning to the next one's."""

    kind: str
    period: float
    computing: tuple[Computing, ...]
    copying: tuple[Copying, ...]
    occupancies: tuple[Occupancy, ...]
    arena_bytes: int

    @property
    def stall_seconds(self) -> float:
        """All waiting of the step."""
        return sum(span.stall for span in self.computing)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that the step put on the link."""
        return sum(span.nbytes for span in self.copying if not span.wrapped)


def timeline(
    times: StepTimes,
    plan: Plan,
    units: Sequence[UnitInfo],
    tensors: Sequence[TensorInfo],
    *,
    period: float | None = None,
) -> Timeline:
    """The step ``times``, which ran under ``plan``. ``units`` and ``tensors``: the profile's, by index.

    period: seconds of a step, back to back, where it is known; at least the step's own length.
    Raises ValueError when the times are of another plan.
    """
    if len(times.end) != len(plan.visits):
        raise ValueError(f"the step has {len(times.end)} visits, the plan {len(plan.visits)}: times of another plan")
    whole = max(period or 0.0, times.end[-1])
    names = [units[unit].name for unit in plan.visits]
    computing = tuple(
        Computing(visit, names[visit], times.arrive[visit], times.start[visit], times.end[visit])
        for visit in range(len(names))
    )
    matched = match_copies(times.copies, plan)
    copying = [
        Copying(
            copy.visit,
            names[copy.visit],
            copy.source,
            tuple(tensors[t].name for t in copy.tensors),
            copy.arena_offset,
            copy.nbytes,
            span.start,
            span.end,
        )
        for span, copy in matched
    ]
    occupied = [_occupancy(span, copy, times, plan, units, tensors, whole) for span, copy in matched]
    return Timeline(
        times.kind,
        whole,
        computing,
        tuple(sorted([*copying, *_wrapped_copies(copying, whole)], key=lambda c: (c.start, c.arena_offset))),
        tuple(
            sorted(
                [*_cut(occupied, whole), *_staying(plan, units, tensors, whole)],
                key=lambda o: (o.start, o.arena_offset),
            )
        ),
        plan.arena_bytes,
    )


def match_copies(spans: Sequence[CopySpan], plan: Plan) -> list[tuple[CopySpan, Copy]]:
    """Which of the plan's copies each span was: those of one visit in the order in which the loader issues them.

    Raises ValueError for a span that no copy of the plan explains.
    """
    issued = sorted(enumerate(plan.copies), key=lambda pair: (pair[1].after, pair[1].lag, pair[0]))
    waiting: dict[int, list[Copy]] = {}
    for _, copy in issued:
        waiting.setdefault(copy.visit, []).append(copy)
    pairs = []
    for span in spans:
        candidates = waiting.get(span.visit, [])
        found = next((copy for copy in candidates if copy.nbytes == span.nbytes), None)
        if found is None:
            raise ValueError(f"a copy of {span.nbytes} bytes for visit {span.visit} is not in the plan: another plan's")
        candidates.remove(found)
        pairs.append((span, found))
    return pairs


def _occupancy(
    span: CopySpan,
    copy: Copy,
    times: StepTimes,
    plan: Plan,
    units: Sequence[UnitInfo],
    tensors: Sequence[TensorInfo],
    period: float,
) -> Occupancy:
    """From the copy to the last visit that reads it; times may lie beyond the step."""
    count = len(plan.visits)
    first = copy.visit + copy.lag * count
    last = max(first + _reach(tensor, copy.visit, plan, units) for tensor in copy.tensors)

    def at(moments: Sequence[float], position: int) -> float:
        return moments[position % count] + period * (position // count)

    return Occupancy(
        copy.visit,
        units[plan.visits[copy.visit]].name,
        tuple(tensors[t].name for t in copy.tensors),
        copy.arena_offset,
        copy.nbytes,
        span.start,
        span.end,
        at(times.start, first),
        at(times.end, last),
    )


def _reach(tensor: int, visit: int, plan: Plan, units: Sequence[UnitInfo]) -> int:
    """How many visits after ``visit`` the last one reads the tensor before it is copied in again."""
    count = len(plan.visits)
    fetched = {copy.visit for copy in plan.copies if tensor in copy.tensors}
    reach = 0
    for ahead in range(1, count):
        later = (visit + ahead) % count
        if later in fetched:
            break
        if tensor in units[plan.visits[later]].tensors:
            reach = ahead
    return reach


def _wrapped_copies(copying: Sequence[Copying], period: float) -> Iterator[Copying]:
    """The link's last copies of the step before, up to where this step's own begin (no two steps are quite alike)."""
    begins = min((span.start for span in copying), default=0.0)
    for span in copying:
        if span.end > period and max(span.start - period, 0.0) < begins:
            yield Copying(
                span.visit,
                span.unit,
                span.source,
                span.tensors,
                span.arena_offset,
                span.nbytes,
                max(span.start - period, 0.0),
                min(span.end - period, begins),
                wrapped=True,
            )


def _cut(occupied: Sequence[Occupancy], period: float) -> Iterator[Occupancy]:
    """What of each lies within the step, of this step's copies and of the steps' before."""
    for whole in occupied:
        for steps_ago in range(int(whole.end // period) + 1):
            shift = steps_ago * period
            # Bytes of the step before were there when they were read, whatever this step's copy of them took.
            filled = min(whole.filled, whole.read) - shift
            start, end = max(min(whole.start - shift, filled), 0.0), min(whole.end - shift, period)
            if end > start:
                yield Occupancy(
                    whole.visit,
                    whole.unit,
                    whole.tensors,
                    whole.arena_offset,
                    whole.nbytes,
                    start,
                    min(max(filled, start), end),
                    min(max(whole.read - shift, start), end),
                    end,
                    wrapped=steps_ago > 0,
                )


def _staying(
    plan: Plan, units: Sequence[UnitInfo], tensors: Sequence[TensorInfo], period: float
) -> Iterator[Occupancy]:
    """Tensors that keep their place in the arena for ever."""
    copied = {tensor for copy in plan.copies for tensor in copy.tensors}
    for tensor, offset in plan.offsets.items():
        if tensor in copied:
            continue
        readers = [visit for visit, unit in enumerate(plan.visits) if tensor in units[unit].tensors]
        if readers:
            info = tensors[tensor]
            unit = units[plan.visits[readers[0]]].name
            yield Occupancy(readers[0], unit, (info.name,), offset, info.nbytes, 0.0, 0.0, 0.0, period, wrapped=True)


# ---- lanes

RESOLUTION = 1e-9


@dataclass(frozen=True)
class SlotLane:
    """Occupancies that follow each other in one place of the arena. ``name``: the place's bytes."""

    name: str
    occupancies: tuple[Occupancy, ...]


def slot_lanes(step: Timeline) -> list[SlotLane]:
    """The arena as lanes: one a range of bytes whose tenants share none with another range's; several for a range in
    which tenants of different places overlap in time."""
    lanes: list[SlotLane] = []
    for low, high, tenants in _ranges(step.occupancies):
        rows: list[list[Occupancy]] = []
        for tenant in sorted(tenants, key=lambda o: (o.start, o.arena_offset)):
            row = next((row for row in rows if row[-1].end <= tenant.start + RESOLUTION), None)
            if row is None:
                rows.append([tenant])
            else:
                row.append(tenant)
        place = f"arena {low / 2**20:.0f}-{high / 2**20:.0f} MiB"
        lanes += [SlotLane(place if at == 0 else f"{place} ({at + 1})", tuple(row)) for at, row in enumerate(rows)]
    return lanes


def _ranges(occupancies: Sequence[Occupancy]) -> list[tuple[int, int, list[Occupancy]]]:
    """(first byte, byte after the last, tenants) of each connected range, by address."""
    found: list[tuple[int, int, list[Occupancy]]] = []
    for tenant in sorted(occupancies, key=lambda o: (o.arena_offset, o.start)):
        end = tenant.arena_offset + tenant.nbytes
        if found and tenant.arena_offset < found[-1][1]:
            low, high, tenants = found[-1]
            tenants.append(tenant)
            found[-1] = (low, max(high, end), tenants)
        else:
            found.append((tenant.arena_offset, end, [tenant]))
    return found
