"""Places -> the copies of one step, and the Plan made of them.

[Note: what a copy waits for]
Let a position count visits over steps without end. Visit position ``p`` reads tensor ``t``; ``q`` is the last position
before ``p`` that reads any byte of ``t``'s place. If ``q`` reads ``t`` itself, the bytes are still there and no copy is
made. Else they were another tensor's, and the copy goes after ``q`` has exited. Copies go in the order in which visits
need them, so a copy also waits for what the copies before it wait for: the running maximum of ``q``. As ``p - V`` reads
``t``, ``q`` is less than a step away, and so ``lag`` is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flextensor.planner.layout import Layout, NoRoom, Offsets, Placement, Readers, place_ring
from flextensor.planner.plan import HOST, BudgetError, Copy, Plan, align
from flextensor.profile import Profile


@dataclass(frozen=True)
class Run:
    """Tensors that travel together for ``visit`` after position ``after`` (negative: in the step before)."""

    visit: int
    after: int
    tensors: tuple[int, ...]
    nbytes: int


def default_arena(layout: Layout, streamed: list[list[int]]) -> int:
    """Bytes for each streamed visit and the streamed one after it, or for all if that is less."""
    sizes = layout.unit_bytes(streamed)
    cycle = [unit for unit in layout.profile.visits if sizes[unit]]
    pairs = [sizes[a] + (sizes[b] if a != b else 0) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    everything = sum(layout.size[t] for t in {t for row in streamed for t in row})
    return min(max([*pairs, *sizes, 0]), everything)


def runs_of(layout: Layout, streamed: list[list[int]], offsets: Offsets, arena: int) -> list[Run]:
    """One step's copies in the steady state, in the order in which they go ([Note: what a copy waits for])."""
    visits = layout.profile.visits
    joined = [_contiguous(layout, row, offsets) if row else [] for row in streamed]
    ranges = [_ranges(layout, parts, offsets) for parts in joined]
    readers = Readers(arena)
    steps = len(visits)
    put = readers.set
    for p, unit in enumerate(visits):
        for start, end in ranges[unit]:
            put(start, end, p - steps)
    waits: list[list[tuple[int, tuple[int, ...]]]] = []
    latest = -steps
    for p, unit in enumerate(visits):
        found: list[tuple[int, tuple[int, ...]]] = []
        for part, (start, end) in zip(joined[unit], ranges[unit], strict=True):
            found.extend(_missing(layout, readers, unit, part, start, end, offsets))
        for start, end in ranges[unit]:
            put(start, end, p)
        waits.append(found)
        for after, _ in found:
            if after > latest:
                latest = after
    out: list[Run] = []
    after = latest - steps
    for p, found in enumerate(waits):
        if not found:
            continue
        if len(found) > 1:
            found.sort()
            merged: list[tuple[int, list[int]]] = []
            for q, part in found:
                after = max(after, q)
                if merged and merged[-1][0] == after:
                    merged[-1][1].extend(part)
                else:
                    merged.append((after, list(part)))
            for q, tensors in merged:
                tensors.sort(key=lambda t: layout.profile.tensors[t].offset)
                out.extend(_run(layout, p, q, part) for part in _contiguous(layout, tensors, offsets))
        else:
            after = max(after, found[0][0])
            out.append(_run(layout, p, after, found[0][1]))
    return out


def _run(layout: Layout, visit: int, after: int, tensors: tuple[int, ...]) -> Run:
    first, last = layout.profile.tensors[tensors[0]], layout.profile.tensors[tensors[-1]]
    return Run(visit, after, tensors, last.offset + last.nbytes - first.offset)


def _contiguous(layout: Layout, row: Iterable[int], offsets: Offsets) -> list[tuple[int, ...]]:
    """``row`` (in store order) cut where store or arena are not contiguous."""
    tensors = layout.profile.tensors
    parts: list[list[int]] = []
    before = -1
    for t in row:
        if (
            before >= 0
            and layout.adjoins(before, t)
            and offsets[t] - offsets[before] == tensors[t].offset - tensors[before].offset
        ):
            parts[-1].append(t)
        else:
            parts.append([t])
        before = t
    return [tuple(part) for part in parts]


def _ranges(layout: Layout, parts: list[tuple[int, ...]], offsets: Offsets) -> list[tuple[int, int]]:
    return [(offsets[part[0]], offsets[part[-1]] + layout.size[part[-1]]) for part in parts]


def _missing(
    layout: Layout, readers: Readers, unit: int, part: tuple[int, ...], start: int, end: int, offsets: Offsets
) -> list[tuple[int, tuple[int, ...]]]:
    """What of ``part`` is not in its place when ``unit`` needs it, with the last reader of that place."""
    visits, sets = layout.profile.visits, layout.unit_sets
    seen = readers.span(start, end)
    q = max(seen)
    if len(part) == 1 or min(seen) == q:
        there = sets[visits[q % len(visits)]]
        if unit == visits[q % len(visits)] or all(t in there for t in part):
            return []
        if len(part) == 1 or not any(t in there for t in part):
            return [(q, part)]
    found: list[tuple[int, tuple[int, ...]]] = []
    for t in part:
        q = max(readers.span(offsets[t], offsets[t] + layout.size[t]))
        if t not in sets[visits[q % len(visits)]]:
            found.append((q, (t,)))
    return found


def initial_copies(layout: Layout, streamed: list[list[int]], offsets: Offsets, runs: list[Run]) -> list[Copy]:
    """What a step finds in the arena from the step before, to be fetched once before the first step."""
    by_visit: dict[int, set[int]] = {}
    for run in runs:
        by_visit.setdefault(run.visit, set()).update(run.tensors)
    seen: set[int] = set()
    out: list[Copy] = []
    for visit, unit in enumerate(layout.profile.visits):
        new = [t for t in streamed[unit] if t not in seen]
        seen.update(new)
        kept = [t for t in new if t not in by_visit.get(visit, ())]
        for part in _contiguous(layout, kept, offsets):
            out.append(_copy(layout, _run(layout, visit, -1, part), offsets))
    return out


def _copy(layout: Layout, run: Run, offsets: Offsets) -> Copy:
    steps = len(layout.profile.visits)
    return Copy(
        visit=run.visit,
        source=HOST,
        source_offset=layout.profile.tensors[run.tensors[0]].offset,
        arena_offset=offsets[run.tensors[0]],
        nbytes=run.nbytes,
        tensors=run.tensors,
        after=run.after % steps,
        lag=0 if run.after >= 0 else 1,
    )


def assemble(
    layout: Layout,
    resident: frozenset[int],
    streamed: list[list[int]],
    offsets: Offsets,
    arena: int,
    budget_bytes: int | None,
) -> Plan:
    """The Plan of given places."""
    runs = runs_of(layout, streamed, offsets, arena)
    resident_bytes = sum(layout.size[t] for t in resident)
    return Plan(
        visits=layout.profile.visits,
        resident=resident,
        offsets=offsets,
        arena_bytes=arena,
        copies=tuple(_copy(layout, run, offsets) for run in runs),
        initial=tuple(initial_copies(layout, streamed, offsets, runs)),
        resident_bytes=resident_bytes,
        weight_bytes=resident_bytes + arena,
        streamed_bytes=sum(run.nbytes for run in runs),
        budget_bytes=budget_bytes,
    )


def build_plan(
    profile: Profile,
    resident: frozenset[int],
    arena_bytes: int | None = None,
    *,
    placement: Placement = place_ring,
    budget_bytes: int | None = None,
) -> Plan:
    """The plan that keeps ``resident`` (and what must be) on the device and streams the rest.

    arena_bytes: bytes for streamed tensors; None takes what two streamed visits in a row need.
    Raises BudgetError when a unit's streamed tensors do not fit the arena side by side, or the plan the budget.
    """
    layout = Layout.of(profile)
    keep = frozenset(resident) | layout.forced
    streamed = layout.streamed(keep)
    arena = align(default_arena(layout, streamed) if arena_bytes is None else arena_bytes)
    try:
        offsets = placement(layout, streamed, arena)
    except NoRoom as error:
        if arena_bytes is not None:
            raise BudgetError(
                f"an arena of {arena} bytes is too small for these streamed tensors; {error.needed} bytes are enough",
                error.needed,
            ) from None
        arena = error.needed
        offsets = placement(layout, streamed, arena)
    used = max((offsets[t] + layout.size[t] for t in offsets), default=0)
    plan = assemble(layout, keep, streamed, offsets, used, budget_bytes)
    if budget_bytes is not None and plan.weight_bytes > budget_bytes:
        raise BudgetError(
            f"the plan takes {plan.weight_bytes} bytes of device memory, above the budget of {budget_bytes}; "
            f"raise the budget, or keep fewer tensors resident",
            plan.weight_bytes,
        )
    return plan
