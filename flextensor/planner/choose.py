"""Which tensors are streamed: spread over the step so that copies hide behind compute.

Each unit has a menu: subsets of its tensors, each with its bytes and its seconds on the link, those dominated by
another left out. A walk over the visits lets the link's debt grow by ``rate`` seconds a second of compute and pays it
with the menu's nearest entry (error diffusion), so that anywhere in the step copies take ``rate`` times the compute
beside them, as near as whole tensors allow.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from flextensor.planner.layout import Layout

ALL_SUBSETS_UP_TO = 7
"""Units of more tensors offer ranges of the store, largest and smallest tensors instead of every subset."""


@dataclass(frozen=True)
class Menu:
    """What may be streamed of one unit, by growing bytes and seconds (per visit)."""

    tensors: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def under(self, nbytes: int) -> int:
        """The index of the largest entry of at most ``nbytes``."""
        return bisect.bisect_right(self.nbytes, nbytes) - 1


class Menus:
    """The menus of all units, their tensors that no other unit reads, and the weight of each visit."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.curve = cache(layout.profile.transfer.seconds)
        self._known: dict[tuple[object, ...], tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]] = {}
        self.menus = [self._menu([t for t in row if t not in layout.shared]) for row in layout.reads]
        self.weights = layout.weights
        self.seconds = [menu.seconds for menu in self.menus]
        self.limits = [seconds[-1] for seconds in self.seconds]
        self._known_steps: dict[tuple[tuple[float, ...], int], tuple[float, int]] = {}
        self.counts = [0] * len(self.menus)
        for unit in layout.profile.visits:
            self.counts[unit] += 1
        self._known_tops: dict[int, list[int]] = {}

    def _menu(self, row: Sequence[int]) -> Menu:
        tensors = [self.layout.profile.tensors[t] for t in row]
        shape = tuple((t.nbytes, t.offset - tensors[0].offset) for t in tensors)
        if shape not in self._known:
            self._known[shape] = self._entries(row)
        picks, seconds = self._known[shape]
        size = self.layout.size
        chosen = tuple(tuple(row[i] for i in pick) for pick in picks)
        return Menu(chosen, tuple(sum(size[t] for t in pick) for pick in chosen), seconds)

    def _entries(self, row: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
        size = self.layout.size
        costed: list[tuple[int, float, tuple[int, ...]]] = []
        for pick in _subsets(row, size):
            chosen = [row[i] for i in pick]
            costed.append((sum(size[t] for t in chosen), self.layout.link_seconds(self.curve, chosen), pick))
        costed.sort(key=lambda c: (-c[0], c[1], c[2]))
        best: list[tuple[int, float, tuple[int, ...]]] = []
        for entry in costed:
            if not best or entry[1] < best[-1][1]:
                best.append(entry)
        best.reverse()
        return tuple(pick for _, _, pick in best), tuple(seconds for _, seconds, _ in best)

    def spread(self, rate: float, cap: int) -> list[int]:
        """The entry of each unit's menu at ``rate`` seconds of copies a second of compute, ``cap`` bytes a unit."""
        tops = self._tops(cap)
        picked = [-1] * len(self.menus)
        debt = 0.0
        seconds, limits = self.seconds, self.limits
        for unit, weight in zip(self.layout.profile.visits, self.weights, strict=True):
            debt += rate * weight
            own = seconds[unit]
            at = picked[unit]
            if at < 0:
                at, top = bisect.bisect_left(own, debt), tops[unit]
                if at > top:
                    at = top
                elif at and own[at] - debt >= debt - own[at - 1]:
                    at -= 1
                picked[unit] = at
            debt -= own[at]
            # What no entry here can pay is not owed by the next unit: it has its own compute to hide behind.
            limit = limits[unit]
            if debt > limit:
                debt = limit
            elif debt < -limit:
                debt = -limit
        return [top if at < 0 else at for at, top in zip(picked, tops, strict=True)]

    def _tops(self, cap: int) -> list[int]:
        if cap not in self._known_tops:
            self._known_tops[cap] = [menu.under(cap) for menu in self.menus]
        return self._known_tops[cap]

    def transfer(self, picked: Sequence[int]) -> float:
        """Seconds of a step's copies, were every visit to fetch what it reads."""
        return sum([self.seconds[unit][picked[unit]] for unit in self.layout.profile.visits])

    def resident_bytes(self, picked: Sequence[int]) -> int:
        """Bytes that stay on the device of the tensors that the menus decide."""
        return sum([menu.nbytes[-1] - menu.nbytes[i] for menu, i in zip(self.menus, picked, strict=True)])

    def fit(self, room: int, cap: int) -> list[int] | None:
        """The most resident of the spreads in ``room`` bytes, the rest of the room filled; None if nothing fits."""
        high = max_rate = self._top_rate()
        picked = self.spread(high, cap)
        if self.resident_bytes(picked) > room:
            picked = self._tops(cap)
            if self.resident_bytes(picked) > room:
                return None
        low = 0.0
        for _ in range(16):
            middle = (low + high) / 2
            trial = self.spread(middle, cap)
            if self.resident_bytes(trial) <= room:
                high, picked = middle, trial
            else:
                low = middle
            if high - low < 1e-4 * high or high - low < 1e-9 * max_rate:
                break
        return self.fill(picked, room - self.resident_bytes(picked))

    def fit_cheapest(self, room: int, cap: int) -> list[int] | None:
        """Resident what saves the most seconds on the link a byte, in ``room`` bytes; None if nothing fits.

        Where copies are the bottleneck anyway, their sum counts and not where they stand.
        """
        picked = list(self._tops(cap))
        room -= self.resident_bytes(picked)
        if room < 0:
            return None
        heap = [step for unit in range(len(picked)) if (step := self._step_down(unit, picked[unit]))]
        heapq.heapify(heap)
        while heap:
            _, _, unit, at = heapq.heappop(heap)
            nbytes = self.menus[unit].nbytes
            freed = nbytes[picked[unit]] - nbytes[at]
            if freed > room:
                continue
            room -= freed
            picked[unit] = at
            if step := self._step_down(unit, at):
                heapq.heappush(heap, step)
        return picked

    def _step_down(self, unit: int, now: int) -> tuple[float, float, int, int] | None:
        """The entry below ``now`` that saves the most a byte: (- saving, spread over units, unit, entry)."""
        menu = self.menus[unit]
        if (menu.seconds, now) not in self._known_steps:
            best = (0.0, -1)
            for at in range(now):
                saving = (menu.seconds[now] - menu.seconds[at]) / (menu.nbytes[now] - menu.nbytes[at])
                if saving > best[0] * (1 + 1e-9):
                    best = (saving, at)
            self._known_steps[menu.seconds, now] = best
        saving, at = self._known_steps[menu.seconds, now]
        # Equal units take turns far from each other: multiples of the golden ratio fill a step evenly.
        turn = (unit * 0.6180339887498949) % 1.0
        return None if at < 0 else (-round(saving * self.counts[unit], 18), turn, unit, at)

    def _top_rate(self) -> float:
        """A rate at which every unit streams all it may."""
        return 2.0 + 2 * max(
            (self.menus[u].seconds[-1] / w for u, w in zip(self.layout.profile.visits, self.weights, strict=True)),
            default=0.0,
        )

    def fill(self, picked: Sequence[int], room: int) -> list[int]:
        """Fewer bytes streamed where ``room`` allows, first where copies are longest beside their compute."""
        out = list(picked)
        pressure = [0.0] * len(out)
        for unit, weight in zip(self.layout.profile.visits, self.weights, strict=True):
            pressure[unit] = max(pressure[unit], self.menus[unit].seconds[out[unit]] / weight)
        for unit in sorted(range(len(out)), key=lambda u: (-pressure[u], u)):
            menu = self.menus[unit]
            now = menu.nbytes[out[unit]]
            least = bisect.bisect_left(menu.nbytes, now - room, 0, out[unit])
            room -= now - menu.nbytes[least]
            out[unit] = least
        return out

    def streamed(self, picked: Sequence[int], shared: frozenset[int]) -> frozenset[int]:
        """The streamed tensors of these entries, and ``shared`` ones with them."""
        chosen = itertools.chain.from_iterable(m.tensors[i] for m, i in zip(self.menus, picked, strict=True))
        return frozenset(chosen) | shared


def _subsets(row: Sequence[int], size: Sequence[int]) -> list[tuple[int, ...]]:
    n = len(row)
    if n <= ALL_SUBSETS_UP_TO:
        return [pick for r in range(n + 1) for pick in itertools.combinations(range(n), r)]
    ranges = [tuple(range(a, b)) for a in range(n) for b in range(a, n + 1)]
    rest = [tuple(i for i in range(n) if not a <= i < b) for a in range(n) for b in range(a + 1, n)]
    by_size = sorted(range(n), key=lambda i: (size[row[i]], i))
    ends = [tuple(sorted(by_size[a:b])) for a in range(n) for b in range(a, n + 1)]
    return list(dict.fromkeys([*ranges, *rest, *ends]))
