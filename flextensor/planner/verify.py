"""An independent check that a plan is right: every visit finds its own bytes, whatever the timing.

Two steps are replayed byte range by byte range (the arena cut at every edge of a place or copy). A copy may land at
any time between the exit of the visit that it waits for and the start of the visit that needs it, so no visit between
the two may read what it writes, and what it brings must still be there when its visit comes.
"""

from __future__ import annotations

import bisect

from flextensor.planner.plan import ALIGNMENT, HOST, Copy, Plan, align
from flextensor.profile import Profile


class PlanError(ValueError):
    """A plan that would run wrong; the message says what and where."""


def verify_plan(plan: Plan, profile: Profile) -> None:
    """Raises PlanError with the first thing that is wrong; None otherwise."""
    _check_sizes(plan, profile)
    _check_order(plan)
    _Replay(plan, profile).run()


def _check_sizes(plan: Plan, profile: Profile) -> None:
    tensors = profile.tensors
    if plan.visits != profile.visits:
        raise PlanError("the plan's visits are not the profile's; plan again from this profile")
    for t, info in enumerate(tensors):
        if info.keep_resident and t not in plan.resident:
            raise PlanError(f"tensor {info.name!r} must be resident ({info.reason}), but the plan streams it")
        if t in plan.resident:
            continue
        if t not in plan.offsets:
            raise PlanError(f"tensor {info.name!r} is neither resident nor placed in the arena")
        place = plan.offsets[t]
        if place % ALIGNMENT or place < 0 or place + info.nbytes > plan.arena_bytes:
            raise PlanError(
                f"tensor {info.name!r} lies at {place} to {place + info.nbytes}; the arena has {plan.arena_bytes} "
                f"bytes and places are multiples of {ALIGNMENT}"
            )
    resident = sum(align(tensors[t].nbytes) for t in plan.resident)
    if resident != plan.resident_bytes or resident + plan.arena_bytes != plan.weight_bytes:
        raise PlanError(
            f"the plan counts {plan.resident_bytes} resident and {plan.weight_bytes} bytes in all; they are "
            f"{resident} and {resident + plan.arena_bytes}"
        )
    if plan.budget_bytes is not None and plan.weight_bytes > plan.budget_bytes:
        raise PlanError(f"the plan takes {plan.weight_bytes} bytes, above its budget of {plan.budget_bytes}")
    if sum(copy.nbytes for copy in plan.copies) != plan.streamed_bytes:
        raise PlanError(f"the plan says {plan.streamed_bytes} bytes streamed, but its copies say otherwise")


def _check_order(plan: Plan) -> None:
    steps = len(plan.visits)
    need, after = -1, None
    for index, copy in enumerate([*plan.copies, *plan.copies]):
        step = index // max(len(plan.copies), 1)
        position = step * steps + copy.visit
        waits = (step - copy.lag) * steps + copy.after
        what = f"copy {index % len(plan.copies)} (for visit {copy.visit} after visit {copy.after}, lag {copy.lag})"
        if not (0 <= copy.visit < steps and 0 <= copy.after < steps and copy.lag in (0, 1)):
            raise PlanError(f"{what} names a visit or lag that is not there")
        if not position - steps <= waits < position:
            raise PlanError(f"{what} does not wait for a visit in the step before its own")
        if position < need or (after is not None and waits < after):
            raise PlanError(f"{what} is out of order: a copy before it is needed or waits later")
        need, after = position, waits


class _Replay:
    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        edges = {0, plan.arena_bytes}
        for t, place in plan.offsets.items():
            edges.update((place, place + profile.tensors[t].nbytes))
        for copy in (*plan.copies, *plan.initial):
            edges.update((copy.arena_offset, copy.arena_offset + copy.nbytes))
        self.edges = sorted(edges)
        # What lies in a byte range, as (source offset - arena offset); a tensor is there when all of it says its own.
        self.content: list[int | None] = [None] * len(self.edges)
        self.last_reader = [-1] * len(self.edges)
        self.cuts = {t: self._cut(p, profile.tensors[t].nbytes) for t, p in plan.offsets.items()}

    def _cut(self, start: int, nbytes: int) -> slice:
        return slice(bisect.bisect_left(self.edges, start), bisect.bisect_left(self.edges, start + nbytes))

    def run(self) -> None:
        plan, steps = self.plan, len(self.plan.visits)
        by_visit: list[list[Copy]] = [[] for _ in plan.visits]
        for copy in plan.copies:
            by_visit[copy.visit].append(copy)
        targets = {id(copy): self._cut(copy.arena_offset, copy.nbytes) for copy in (*plan.copies, *plan.initial)}
        for copy in (*plan.copies, *plan.initial):
            self._check_copy(copy)
        reads = [[t for t in dict.fromkeys(unit.tensors) if t not in plan.resident] for unit in self.profile.units]
        for copy in plan.initial:
            self._write(targets[id(copy)], copy)
        for position in range(2 * steps):
            step, visit = divmod(position, steps)
            for copy in by_visit[visit]:
                waits = (step - copy.lag) * steps + copy.after
                cut = targets[id(copy)]
                read = max(self.last_reader[cut])
                if read > waits and read >= 0:
                    raise PlanError(
                        f"the copy for visit {visit} into bytes {copy.arena_offset} to "
                        f"{copy.arena_offset + copy.nbytes} waits for visit {copy.after} (lag {copy.lag}), but visit "
                        f"{read % steps} still reads there"
                    )
                self._write(cut, copy)
            for t in reads[plan.visits[visit]]:
                self._read(t, position)

    def _check_copy(self, copy: Copy) -> None:
        for t in copy.tensors:
            info = self.profile.tensors[t]
            at = info.offset - copy.source_offset
            if t in self.plan.resident or at < 0 or at + info.nbytes > copy.nbytes or copy.source != HOST:
                raise PlanError(f"a copy for visit {copy.visit} does not hold tensor {info.name!r} that it names")

    def _write(self, cut: slice, copy: Copy) -> None:
        self.content[cut] = [copy.source_offset - copy.arena_offset] * (cut.stop - cut.start)

    def _read(self, t: int, position: int) -> None:
        info, cut = self.profile.tensors[t], self.cuts[t]
        step, visit = divmod(position, len(self.plan.visits))
        own = info.offset - self.plan.offsets[t]
        ranges = cut.stop - cut.start
        if self.content[cut].count(own) != ranges:
            raise PlanError(
                f"visit {visit} of step {step} (unit {self.profile.units[self.plan.visits[visit]].name!r}) does not "
                f"find tensor {info.name!r} at {self.plan.offsets[t]}: other bytes lie there"
            )
        self.last_reader[cut] = [position] * ranges
