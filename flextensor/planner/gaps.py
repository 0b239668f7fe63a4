"""Places for an arena of few tensors: each as far in time from the readers around it as it can be.

Where a ring holds only two or three of the largest tensors, what it loses before the wrap makes neighbours in time
share bytes, and the link waits. Here each tensor takes the place whose last reader before and next reader after are
farthest from its own visit, the next step's included; a second round then knows all places. Only visits that the
arena could hold between are looked at: beyond that, farther is no better.
"""

from __future__ import annotations

from collections.abc import Sequence

from flextensor.planner.layout import Layout, NoRoom, Offsets, place_ring

ROUNDS = 2
MOST_NEIGHBOURS = 24
"""Visits looked at on each side; with more in the arena the ring's loss is small."""

_Places = list[tuple[int, int]]
"""(start, end) in the arena, what lies side by side as one."""


def place_apart(layout: Layout, streamed: list[list[int]], arena: int) -> Offsets:
    """Each tensor at its own best place, in the order of visits. Raises NoRoom when they do not fit."""
    return _places(layout, streamed, arena, layout.order)


def place_largest_first(layout: Layout, streamed: list[list[int]], arena: int) -> Offsets:
    """The same, large units before small ones, which then fit between them. Raises NoRoom."""
    sizes = layout.unit_bytes(streamed)
    return _places(layout, streamed, arena, sorted(layout.order, key=lambda unit: -sizes[unit]))


def _places(layout: Layout, streamed: list[list[int]], arena: int, order: Sequence[int]) -> Offsets:
    try:
        return _Apart(layout, streamed, arena).places(order)
    except NoRoom:
        # Best places can leave a unit's last tensor only pieces; the ring never does.
        return place_ring(layout, streamed, arena)


class _Apart:
    def __init__(self, layout: Layout, streamed: list[list[int]], arena: int) -> None:
        self.layout, self.streamed, self.arena = layout, streamed, arena
        self.offsets: Offsets = {}
        bandwidth = layout.profile.transfer.bandwidth
        self.bytes = layout.unit_bytes(streamed)
        self.busy = [unit for unit in layout.profile.visits if streamed[unit]]
        self.when: list[float] = []
        now = 0.0
        for unit, weight in zip(layout.profile.visits, layout.weights, strict=True):
            if streamed[unit]:
                self.when.append(now)
            now += max(self.bytes[unit] / bandwidth, weight)
        self.cycle = now
        self.at: dict[int, list[int]] = {}
        for i, unit in enumerate(self.busy):
            self.at.setdefault(unit, []).append(i)
        self.places_of: dict[int, _Places] = {unit: [] for unit in self.at}
        self.edges_of: dict[int, set[int]] = {unit: set() for unit in self.at}

    def places(self, units: Sequence[int]) -> Offsets:
        size = self.layout.size
        order = [
            (unit, sorted(self.streamed[unit], key=lambda t: (-size[t], t)), self._around(unit))
            for unit in units
            if self.streamed[unit]
        ]
        for _ in range(ROUNDS):
            for unit, tensors, around in order:
                self._place_unit(unit, tensors, around)
        return self.offsets

    def _around(self, unit: int) -> list[list[int]]:
        """The units of the visits around, nearest in time first, those at the same distance together."""
        busy, when, cycle, count = self.busy, self.when, self.cycle, len(self.busy)
        nearest: dict[int, float] = {}
        for i in self.at.get(unit, ()):
            for step in (1, -1):
                budget, j = self.arena, i
                for _ in range(min(count - 1, MOST_NEIGHBOURS)):
                    j += step
                    other = busy[j % count]
                    if other == unit or budget < 0:
                        break
                    away = abs(when[j % count] + cycle * (j // count) - when[i])
                    budget -= self.bytes[other]
                    if away < nearest.get(other, cycle):
                        nearest[other] = away
        by_time: dict[float, list[int]] = {}
        for other, away in nearest.items():
            by_time.setdefault(away, []).append(other)
        return [by_time[away] for away in sorted(by_time)]

    def _place_unit(self, unit: int, tensors: list[int], around: list[list[int]]) -> None:
        """``tensors``: the unit's, large ones first."""
        layout, size, offsets = self.layout, self.layout.size, self.offsets
        at, following, shared = layout.at, layout.following, layout.shared
        todo = [t for t in tensors if t not in shared or t not in offsets]
        for t in todo:
            offsets.pop(t, None)
        edges = set[int]().union(*[self.edges_of[other] for others in around for other in others])
        for t in todo:
            beside = [b for u in shared.get(t, (unit,)) for b in self.streamed[u] if b in offsets]
            taken = [(offsets[b], offsets[b] + size[b]) for b in beside]
            wished = [offsets[b] + at[t] - at[b] for b in beside if following[b] == t or following[t] == b]
            place = self._best(size[t], around, edges, taken, wished)
            if place is None:
                raise NoRoom(self.bytes[unit])
            offsets[t] = place
        for changed in {unit}.union(*[shared[t] for t in todo if t in shared]):
            self._note(changed)

    def _note(self, unit: int) -> None:
        """Where the tensors of a unit lie now."""
        places: _Places = []
        edges: set[int] = set()
        for t in self.streamed[unit]:
            if (start := self.offsets.get(t)) is None:
                continue
            end = start + self.layout.size[t]
            edges.update((start, end))
            if places and places[-1][1] == start:
                places[-1] = places[-1][0], end
            else:
                places.append((start, end))
        self.places_of[unit], self.edges_of[unit] = places, edges

    def _best(
        self, nbytes: int, around: list[list[int]], edges: set[int], taken: _Places, wished: list[int]
    ) -> int | None:
        """The place whose nearest reader is farthest away; None if ``taken`` leaves none.

        Among equals: one that begins or ends where another does, so that fewer pieces are left; a wished one (one copy
        with its neighbour in the store); then the lowest.
        """
        top = self.arena - nbytes
        edges = edges.union((0, self.arena), *taken)
        places = [at for at in edges.union([edge - nbytes for edge in edges], wished) if 0 <= at <= top]
        for start, end in taken:
            places = [at for at in places if at + nbytes <= start or at >= end]
        if not places:
            return None
        for others in around:
            if len(places) == 1:
                return places[0]
            left = places
            for other in others:
                for start, end in self.places_of[other]:
                    left = [at for at in left if at + nbytes <= start or at >= end]
            if not left:
                break
            places = left
        return max(places, key=lambda at: ((at in edges) + (at + nbytes in edges), at in wished, -at))
