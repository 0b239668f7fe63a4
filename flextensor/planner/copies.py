"""Places in the arena -> the copies of one step, in the order in which they go.

[Note: what a copy waits for]
Let a position count visits over steps without end. Visit position ``p`` reads tensor ``t``; ``q`` is the last position
before ``p`` that reads any byte of ``t``'s place. If ``q`` reads ``t`` itself, the bytes are still there and no copy is
made. Else they were another tensor's, and the copy goes after ``q`` has exited. Copies go in the order in which visits
need them, so a copy also waits for what the copies before it wait for: the running maximum of ``q``. As ``p - V`` reads
``t``, ``q`` is less than a step away, and so ``lag`` is 0 or 1.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from flextensor.planner.layout import Layout, Offsets

NEVER = -(1 << 60)


class Run(NamedTuple):
    """Tensors that travel together for ``visit`` after position ``after`` (negative: in the step before)."""

    visit: int
    after: int
    tensors: tuple[int, ...]
    nbytes: int


class Readers:
    """Bytes of the arena -> the last position that reads them; a piecewise constant function."""

    def __init__(self, arena: int) -> None:
        self.arena = arena
        self.starts = [0]
        self.last = [NEVER]

    def span(self, start: int, end: int) -> list[int]:
        """The last positions of the pieces in [start, end)."""
        i = bisect.bisect_right(self.starts, start) - 1
        return self.last[i : bisect.bisect_left(self.starts, end, i)]

    def put(self, start: int, end: int, position: int) -> None:
        """``position`` reads [start, end)."""
        starts, last = self.starts, self.last
        i = bisect.bisect_right(starts, start) - 1
        j = bisect.bisect_left(starts, end, i)
        new_starts, new_last = [start], [position]
        if (starts[j] if j < len(starts) else self.arena) > end:
            new_starts.append(end)
            new_last.append(last[j - 1])
        if starts[i] < start:
            i += 1
        starts[i:j] = new_starts
        last[i:j] = new_last


def runs_of(layout: Layout, streamed: list[list[int]], offsets: Offsets, arena: int) -> list[Run]:
    """One step's copies in the steady state, in order ([Note: what a copy waits for])."""
    visits, size, steps = layout.profile.visits, layout.size, len(layout.profile.visits)
    parts = [contiguous(layout, row, offsets) if row else [] for row in streamed]
    ranges = [[(offsets[part[0]], offsets[part[-1]] + size[part[-1]]) for part in own] for own in parts]
    readers = Readers(arena)
    for p, unit in enumerate(visits):
        for start, end in ranges[unit]:
            readers.put(start, end, p - steps)
    waits: list[list[tuple[int, tuple[int, ...]]]] = []
    latest = -steps
    for p, unit in enumerate(visits):
        found: list[tuple[int, tuple[int, ...]]] = []
        for part, (start, end) in zip(parts[unit], ranges[unit], strict=True):
            seen = readers.span(start, end)
            if len(seen) == 1 and not layout.shared:
                if visits[seen[0] % steps] != unit:
                    found.append((seen[0], part))
            else:
                found.extend(_missing(layout, readers, part, offsets))
        for start, end in ranges[unit]:
            readers.put(start, end, p)
        waits.append(found)
        for after, _ in found:
            latest = max(latest, after)
    return _in_order(layout, waits, latest - steps, offsets)


def _missing(
    layout: Layout, readers: Readers, part: tuple[int, ...], offsets: Offsets
) -> list[tuple[int, tuple[int, ...]]]:
    """What of ``part`` is not in its place, each tensor with the last reader of its place."""
    visits, sets = layout.profile.visits, layout.unit_sets
    found: list[tuple[int, tuple[int, ...]]] = []
    for t in part:
        q = max(readers.span(offsets[t], offsets[t] + layout.size[t]))
        if t in sets[visits[q % len(visits)]]:
            continue
        if found and found[-1][0] == q and layout.following[found[-1][1][-1]] == t:
            found[-1] = (q, (*found[-1][1], t))
        else:
            found.append((q, (t,)))
    return found


def _in_order(
    layout: Layout, waits: list[list[tuple[int, tuple[int, ...]]]], after: int, offsets: Offsets
) -> list[Run]:
    """The copies of each visit, those that may go first in front; ``after`` comes from the step before."""
    at, ends = layout.at, layout.ends
    out: list[Run] = []
    for p, found in enumerate(waits):
        groups: list[tuple[int, tuple[int, ...]]] = []
        if len(found) > 1:
            found.sort()
        for q, part in found:
            after = max(after, q)
            if groups and groups[-1][0] == after:
                groups[-1] = (after, groups[-1][1] + part)
            else:
                groups.append((after, part))
        for q, tensors in groups:
            runs = [tensors]
            if len(found) > 1:
                runs = contiguous(layout, sorted(tensors, key=at.__getitem__), offsets)
            for part in runs:
                out.append(Run(p, q, part, ends[part[-1]] - at[part[0]]))
    return out


def contiguous(layout: Layout, row: Iterable[int], offsets: Offsets) -> list[tuple[int, ...]]:
    """``row`` (in store order) cut where store or arena are not contiguous."""
    at, following = layout.at, layout.following
    parts: list[tuple[int, ...]] = []
    now: list[int] = []
    due = -1
    base = 0
    for t in row:
        place = offsets[t] - at[t]
        if t != due or place != base:
            if now:
                parts.append(tuple(now))
            now = []
            base = place
        now.append(t)
        due = following[t]
    if now:
        parts.append(tuple(now))
    return parts


def initial_runs(layout: Layout, streamed: list[list[int]], offsets: Offsets, runs: list[Run]) -> list[Run]:
    """What a step finds in the arena from the step before, to be fetched once before the first step."""
    by_visit: dict[int, set[int]] = {}
    for run in runs:
        by_visit.setdefault(run.visit, set()).update(run.tensors)
    seen: set[int] = set()
    out: list[Run] = []
    for visit, unit in enumerate(layout.profile.visits):
        new = [t for t in streamed[unit] if t not in seen]
        seen.update(new)
        kept = [t for t in new if t not in by_visit.get(visit, ())]
        for part in contiguous(layout, kept, offsets):
            out.append(Run(visit, -1, part, layout.ends[part[-1]] - layout.at[part[0]]))
    return out
