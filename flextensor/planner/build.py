"""The Plan of given residency, arena and places."""

from __future__ import annotations

from flextensor.planner.copies import Run, initial_runs, runs_of
from flextensor.planner.layout import Layout, NoRoom, Offsets, Placement, place_ring
from flextensor.planner.plan import HOST, BudgetError, Copy, Plan, align
from flextensor.profile import Profile


def default_arena(layout: Layout, streamed: list[list[int]]) -> int:
    """Bytes for each streamed visit and the streamed one after it, or for all if that is less."""
    sizes = layout.unit_bytes(streamed)
    cycle = [unit for unit in layout.profile.visits if sizes[unit]]
    pairs = [sizes[a] + (sizes[b] if a != b else 0) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    everything = sum(layout.size[t] for t in {t for row in streamed for t in row})
    return min(max([*pairs, *sizes, 0]), everything)


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
        initial=tuple(_copy(layout, run, offsets) for run in initial_runs(layout, streamed, offsets, runs)),
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
