"""Small changes of a choice: what the search tries once it has a good one.

A move is a set of streamed tensors and an arena for it. Arenas matter in steps: one that holds two streamed units
exactly can do what none between it and the next sum of units does better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from flextensor.planner.build import default_arena
from flextensor.planner.layout import Layout
from flextensor.planner.plan import ALIGNMENT, align
from flextensor.planner.trial import Judge, Trial

FEW = 40
"""Models of so few tensors have time for more arenas a choice, and of SO_FEW_THAT_ALL for every choice."""

SO_FEW_THAT_ALL = 10

Move = tuple[frozenset[int], int]


def neighbours(judge: Judge, best: Trial) -> Iterator[Move]:
    """Other arenas for the same choice; one tensor more or less; two changed for each other; any two."""
    layout, streamed = judge.layout, best.streamed
    rows = _rows(layout, streamed)
    arenas = [align(int(best.arena * f)) for f in (0.85, 0.93, 0.97, 1.03, 1.1)]
    arenas += [nbytes for nbytes in _sums(layout, rows) if nbytes < best.arena][:12]
    yield from ((streamed, arena) for arena in dict.fromkeys([*arenas, align(default_arena(layout, rows))]))
    few = len(judge.everything) <= FEW
    for changed in _changed(judge, streamed):
        rooms = _rooms(judge, best, changed)
        yield from ((changed, arena) for arena in rooms)
        if few and rooms:
            yield from ((changed, arena) for arena in _exact(layout, changed, rooms[0]))


def every_choice(judge: Judge, best: Callable[[], Trial | None]) -> Iterator[Move]:
    """Every set of tensors, first in the arenas that are nearest at hand, then in all that sums of its tensors fill.

    ``best`` may change between moves. What cannot be as fast as it is left out; the fastest on paper come first.
    """
    tensors = sorted(judge.everything)
    every = [frozenset(c) for n in range(len(tensors) + 1) for c in itertools.combinations(tensors, n)]
    bounded = sorted(((judge.least_seconds(streamed), at, streamed) for at, streamed in enumerate(every)))
    for exact in (False, True):
        for least, _, streamed in bounded:
            known = best()
            if known is None or least > judge.slowest_worth(known):
                break
            rooms = _rooms(judge, known, streamed)
            if rooms:
                arenas = _filled(judge.layout, streamed, rooms[0]) if exact else rooms
                yield from ((streamed, arena) for arena in arenas)


def _filled(layout: Layout, streamed: frozenset[int], most: int) -> list[int]:
    """Every sum of these tensors that holds the largest unit, larger ones first; then those beyond the room, as what is
    not used of an arena is given back."""
    sums = {0}
    for t in streamed:
        sums |= {nbytes + layout.size[t] for nbytes in sums}
    largest = max(layout.unit_bytes(_rows(layout, streamed)), default=0)
    fit = sorted((nbytes for nbytes in sums if largest <= nbytes <= most), reverse=True)
    return [*fit, *sorted(nbytes for nbytes in sums if most < nbytes <= most + most // 2)]


def _changed(judge: Judge, streamed: frozenset[int]) -> Iterator[frozenset[int]]:
    size = judge.layout.size
    inside = sorted(streamed, key=lambda t: (-size[t], t))
    outside = sorted(judge.everything - streamed, key=lambda t: (-size[t], t))
    yield from (streamed - {t} for t in inside)
    yield from (streamed | {t} for t in outside)
    for a in inside:
        yield from (streamed - {a} | {b} for b in outside)
    yield from (streamed - set(pair) for pair in itertools.combinations(inside, 2))
    yield from (streamed | set(pair) for pair in itertools.combinations(outside, 2))


def _rooms(judge: Judge, best: Trial, streamed: frozenset[int]) -> list[int]:
    """All the room that is left for this choice's arena, and the arena that ``best`` has; none if nothing fits.

    In latency mode the room is what makes the plan smaller than ``best``.
    """
    budget = judge.limits.budget_bytes
    most_bytes = best.weight_bytes - ALIGNMENT if budget is None else budget
    held = sum([judge.layout.size[t] for t in streamed])
    room = (most_bytes - judge.layout.total_bytes + held) // ALIGNMENT * ALIGNMENT
    if room < (ALIGNMENT if held else 0):
        return []
    most = min(room, held)
    return list(dict.fromkeys((most, min(most, best.arena))))


def _exact(layout: Layout, streamed: frozenset[int], most: int) -> list[int]:
    """Arenas that sums of units fill; and one beyond the room, as what is not used of an arena is given back."""
    held = sum([layout.size[t] for t in streamed])
    sums = [nbytes for nbytes in _sums(layout, _rows(layout, streamed)) if nbytes < most]
    return [*sums[:10], min(held, most + most // 4)]


def _rows(layout: Layout, streamed: frozenset[int]) -> list[list[int]]:
    return [[t for t in row if t in streamed] for row in layout.reads]


def _sums(layout: Layout, rows: list[list[int]]) -> list[int]:
    """Bytes of two, three and four streamed units, larger sums first: arenas without a remainder."""
    sizes = sorted({nbytes for nbytes in layout.unit_bytes(rows) if nbytes}, reverse=True)[:6]
    found: dict[int, None] = {}
    for n in (2, 3, 4):
        some = {sum(c) for c in itertools.combinations_with_replacement(sizes, n)}
        found.update(dict.fromkeys(sorted(some, reverse=True)))
    return list(found)
