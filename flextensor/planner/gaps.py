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
        self.busy = [unit for unit in layout.profile.visits if streamed[unit]]
        self.when: list[float] = []
        now = 0.0
        weights = layout.weights
        for visit, unit in enumerate(layout.profile.visits):
            link = sum([layout.size[t] for t in streamed[unit]]) / bandwidth
            if streamed[unit]:
                self.when.append(now)
            now += max(link, weights[visit])
        self.cycle = now
        self.at: dict[int, list[int]] = {}
        for i, unit in enumerate(self.busy):
            self.at.setdefault(unit, []).append(i)

    def places(self, units: Sequence[int]) -> Offsets:
        order = [unit for unit in units if self.streamed[unit]]
        for _ in range(ROUNDS):
            for unit in order:
                self._place_unit(unit)
        return self.offsets

    def _neighbours(self, unit: int) -> list[tuple[float, int, int]]:
        """(seconds away, start, end) of placed tensors of the visits around, nearest first."""
        count, size = len(self.busy), self.layout.size
        nearest: dict[int, float] = {}
        for i in self.at.get(unit, ()):
            for step in (1, -1):
                budget, j = self.arena, i
                for _ in range(min(count - 1, MOST_NEIGHBOURS)):
                    j += step
                    other = self.busy[j % count]
                    if other == unit or budget < 0:
                        break
                    away = abs(self.when[j % count] + self.cycle * (j // count) - self.when[i])
                    for t in self.streamed[other]:
                        budget -= size[t]
                        if t in self.offsets and away < nearest.get(t, self.cycle):
                            nearest[t] = away
        found = [(away, self.offsets[t], self.offsets[t] + size[t]) for t, away in nearest.items()]
        found.sort()
        return found

    def _place_unit(self, unit: int) -> None:
        layout, size = self.layout, self.layout.size
        todo = [t for t in self.streamed[unit] if t not in layout.shared or t not in self.offsets]
        for t in todo:
            self.offsets.pop(t, None)
        around = self._neighbours(unit)
        for t in sorted(todo, key=lambda t: (-size[t], t)):
            beside = [b for u in layout.shared.get(t, (unit,)) for b in self.streamed[u] if b in self.offsets]
            taken = [(self.offsets[b], self.offsets[b] + size[b]) for b in beside]
            wished = {
                self.offsets[b] + layout.at[t] - layout.at[b]
                for b in beside
                if layout.following[b] == t or layout.following[t] == b
            }
            at = self._best(size[t], around, taken, wished)
            if at is None:
                raise NoRoom(sum(size[t] for t in self.streamed[unit]))
            self.offsets[t] = at

    def _best(
        self, nbytes: int, around: list[tuple[float, int, int]], taken: list[tuple[int, int]], wished: set[int]
    ) -> int | None:
        """The place whose nearest reader is farthest away; None if ``taken`` leaves none.

        Among equals: a wished one (one copy with its neighbour in the store); one that begins or ends where another
        does, so that fewer pieces are left; then the lowest.
        """
        top = self.arena - nbytes
        if top < 0:
            return None
        starts = {0, top, *wished}
        edges = {0, self.arena}
        for _, start, end in around:
            starts.update((end, start - nbytes, start, end - nbytes))
            edges.update((start, end))
        for start, end in taken:
            starts.update((end, start - nbytes))
            edges.update((start, end))
        best: tuple[float, int, bool, int] | None = None
        for at in sorted(starts):
            if at < 0 or at > top:
                continue
            stop = at + nbytes
            if any(start < stop and at < end for start, end in taken):
                continue
            away = self.cycle
            for seconds, start, end in around:
                if start < stop and at < end:
                    away = seconds
                    break
            rank = (away, (at in edges) + (stop in edges), at in wished, -at)
            if best is None or rank > best:
                best = rank
        return None if best is None else -best[3]
