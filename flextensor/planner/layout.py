"""Where streamed tensors lie in the arena: what a profile says of their places, and the ring.

A place is an arena offset. Tensors that one visit reads never share bytes; tensors of different units may. The ring
keeps a unit's tensors together, so that they travel in one copy, and loses the bytes before the wrap; ``gaps.py`` is
the other way.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flextensor.planner.mix import kind_weights, kinds_of
from flextensor.planner.plan import ALIGNMENT, align
from flextensor.profile import Profile

Offsets = dict[int, int]


@dataclass(frozen=True)
class Layout:
    """What the planner asks of a profile again and again, worked out once.

    size: bytes a tensor takes on the device, rounded up to ALIGNMENT. forced: the tensors that must be resident:
    marked so, empty, or read by no unit. reads: a unit's other tensors in store order. shared: tensors that several
    units read, with those units.
    """

    profile: Profile
    size: tuple[int, ...]
    forced: frozenset[int]
    reads: tuple[tuple[int, ...], ...]
    shared: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(profile: Profile) -> Layout:
        """Raises ValueError for a visit or unit that names what is not there."""
        users: dict[int, list[int]] = {}
        for unit, info in enumerate(profile.units):
            for tensor in set(info.tensors):
                if not 0 <= tensor < len(profile.tensors):
                    raise ValueError(f"unit {info.name!r} reads tensor {tensor}, but there are {len(profile.tensors)}")
                users.setdefault(tensor, []).append(unit)
        for visit, unit in enumerate(profile.visits):
            if not 0 <= unit < len(profile.units):
                raise ValueError(f"visit {visit} is of unit {unit}, but there are {len(profile.units)} units")
        tensors = profile.tensors
        forced = frozenset(i for i, t in enumerate(tensors) if t.keep_resident or t.nbytes == 0 or i not in users)
        reads = tuple(
            tuple(sorted((t for t in set(info.tensors) if t not in forced), key=lambda t: tensors[t].offset))
            for info in profile.units
        )
        shared = {t: tuple(units) for t, units in users.items() if len(units) > 1 and t not in forced}
        return Layout(profile, tuple(align(t.nbytes) for t in tensors), forced, reads, shared)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Units in the order of their first visits; then those that no visit runs (fetched on demand)."""
        return tuple(dict.fromkeys((*self.profile.visits, *range(len(self.profile.units)))))

    @cached_property
    def forced_bytes(self) -> int:
        """Device memory of the tensors that must be resident."""
        return sum(self.size[t] for t in self.forced)

    @cached_property
    def total_bytes(self) -> int:
        """Device memory of all tensors."""
        return sum(self.size)

    @cached_property
    def unit_sets(self) -> tuple[frozenset[int], ...]:
        """The tensors of each unit, for membership."""
        return tuple(frozenset(r) for r in self.reads)

    def streamed(self, resident: frozenset[int]) -> list[list[int]]:
        """The streamed tensors of each unit, in store order."""
        return [[t for t in row if t not in resident] for row in self.reads]

    def unit_bytes(self, streamed: list[list[int]]) -> list[int]:
        """Bytes in the arena that each unit takes."""
        size = self.size
        return [sum([size[t] for t in row]) for row in streamed]

    @cached_property
    def at(self) -> tuple[int, ...]:
        """Store offset of each tensor."""
        return tuple(t.offset for t in self.profile.tensors)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Store offset behind each tensor's last byte."""
        return tuple(t.offset + t.nbytes for t in self.profile.tensors)

    @cached_property
    def following(self) -> tuple[int, ...]:
        """The tensor that follows in the store, alignment padding apart; -1 where none does."""
        order = sorted((t for t in range(len(self.size)) if self.size[t]), key=self.at.__getitem__)
        out = [-1] * len(self.size)
        for one, two in itertools.pairwise(order):
            if 0 <= self.at[two] - self.ends[one] < ALIGNMENT and self.at[two] % ALIGNMENT == 0:
                out[one] = two
        return tuple(out)

    def link_seconds(self, curve: Callable[[int], float], chosen: Sequence[int]) -> float:
        """Seconds of the copies of these tensors (in store order), one copy a contiguous run."""
        at, ends, following = self.at, self.ends, self.following
        total, first = 0.0, 0
        for i in range(1, len(chosen) + 1):
            if i == len(chosen) or following[chosen[i - 1]] != chosen[i]:
                total += curve(ends[chosen[i - 1]] - at[chosen[first]])
                first = i
        return total

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Seconds of compute and gap a visit, over the mix of step kinds; never 0."""
        kinds = kinds_of(self.profile)
        weights = [0.0] * len(self.profile.visits)
        for share, kind in zip(kind_weights(kinds), kinds, strict=True):
            for v, (compute, gap) in enumerate(zip(kind.compute, kind.gap, strict=True)):
                weights[v] += share * (compute + gap)
        # Where nothing is computed, all visits count alike; elsewhere this changes nothing.
        even = max(1e-3 * sum(weights) / max(len(weights), 1), 1e-9)
        return tuple(w + even for w in weights)


class NoRoom(Exception):
    """The arena is too small for these tensors; ``needed`` bytes are surely enough."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} bytes of arena are needed")
        self.needed = needed


def _avoid(layout: Layout, tensor: int, unit: int, offsets: Mapping[int, int]) -> list[tuple[int, int]]:
    """The ranges already taken by what is read together with ``tensor``, sorted."""
    units = layout.shared.get(tensor, (unit,))
    size = layout.size
    return sorted({(offsets[t], offsets[t] + size[t]) for u in units for t in layout.reads[u] if t in offsets})


def _first_fit(at: int, nbytes: int, arena: int, taken: list[tuple[int, int]]) -> int | None:
    """The first offset >= ``at`` where ``nbytes`` fit beside ``taken``, else None."""
    for start, end in taken:
        if at + nbytes <= start:
            break
        at = max(at, end)
    return at if at + nbytes <= arena else None


def _place_shared(layout: Layout, streamed: list[list[int]]) -> Offsets:
    """Shared tensors side by side from 0: what every unit finds at the same place without conflict."""
    offsets: Offsets = {}
    at = 0
    for unit in layout.order:
        for t in streamed[unit]:
            if t in layout.shared and t not in offsets:
                offsets[t] = at
                at += layout.size[t]
    return offsets


def _surely_enough(layout: Layout, streamed: list[list[int]]) -> int:
    shared = sum(layout.size[t] for t in {t for row in streamed for t in row if t in layout.shared})
    own = max((sum(layout.size[t] for t in row if t not in layout.shared) for row in streamed), default=0)
    return shared + own


def place_ring(layout: Layout, streamed: list[list[int]], arena: int) -> Offsets:
    """One after the other around the arena, in the order of first visits.

    Raises NoRoom when a unit's tensors do not fit side by side.
    """
    try:
        return _ring(layout, streamed, arena, {})
    except NoRoom:
        if not layout.shared:
            raise
        return _ring(layout, streamed, arena, _place_shared(layout, streamed))


def _ring(layout: Layout, streamed: list[list[int]], arena: int, offsets: Offsets) -> Offsets:
    size, shared = layout.size, layout.shared
    at = 0
    for unit in layout.order:
        row = streamed[unit]
        if not row:
            continue
        if not shared or not any(t in shared for t in row):
            # A unit's own tensors: only its own can be in the way, and only when it wraps onto itself.
            sizes = [size[t] for t in row]
            places = _around(sizes, at, arena) or _around(sizes, 0, arena)
            if places is None:
                raise NoRoom(_surely_enough(layout, streamed))
            offsets.update(zip(row, places, strict=True))
            at = places[-1] + sizes[-1]
            continue
        placed = _beside(layout, unit, row, at, arena, offsets) or _beside(layout, unit, row, 0, arena, offsets)
        if placed is None:
            raise NoRoom(_surely_enough(layout, streamed))
        offsets.update(placed)
        last = max(row, key=lambda t: layout.profile.tensors[t].offset)
        at = offsets[last] + size[last]
    return offsets


def _beside(layout: Layout, unit: int, row: list[int], at: int, arena: int, offsets: Offsets) -> Offsets | None:
    """Places from ``at`` on for a row with shared tensors, beside all that is read together with each."""
    placed: Offsets = {}
    for t in row:
        if t in offsets:
            placed[t] = offsets[t]
            continue
        taken = _avoid(layout, t, unit, ChainMap(placed, offsets))
        place = _first_fit(at, layout.size[t], arena, taken)
        if place is None:
            place = _first_fit(0, layout.size[t], arena, taken)
        if place is None:
            return None
        placed[t] = place
        at = place + layout.size[t]
    return placed


def _around(sizes: list[int], at: int, arena: int) -> list[int] | None:
    """Places from ``at`` on, once around the end of the arena at most; None when they would meet."""
    first = at if at + sizes[0] <= arena else 0
    places: list[int] = []
    end, limit, wrapped = first, arena, False
    for nbytes in sizes:
        if end + nbytes > limit:
            if wrapped or nbytes > first:
                return None
            end, limit, wrapped = 0, first, True
        places.append(end)
        end += nbytes
    return places


Placement = Callable[[Layout, list[list[int]], int], Offsets]
