"""From a profile, a configuration and the device's room to the plan that is wanted. Pure functions.

A budget counts all weights of the model that are on the device; the planner is asked for what is left of it beside the
weights of no unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from flextensor.config import OffloadConfig
from flextensor.planner.apart import search_apart
from flextensor.planner.plan import BudgetError, Plan, align
from flextensor.planner.search import search
from flextensor.profile import Profile

SHRINK_AFTER_OOM = 0.75
"""After a step ran out of memory, the next plan's weights are at most this share of what they were."""

PROVISIONAL_EFFORT = 0.1
"""Of the search for a plan that another one is expected to follow: about 1% of the step's time, for a tenth of its."""


@dataclass(frozen=True)
class Room:
    """The device's memory as it is now, bytes. weights: of the plan in force. other: weights of no unit."""

    weights: int
    other: int
    free: int
    total: int


def solve(
    profile: Profile, budget: int | float | None, config: OffloadConfig, *, apart: bool = False, effort: float = 1.0
) -> Plan:
    """The best plan for a budget: bytes (int), a share of the model's weights (float), or None: the least memory that
    costs no time. apart: in a process of its own, for when this one runs the model meanwhile. effort: as ``search``
    takes it.

    Raises BudgetError with the least bytes that work.
    """
    other = profile.other_bytes
    nbytes: int | None = None
    if budget is not None:
        nbytes = share_of_weights(profile, budget) if isinstance(budget, float) else budget
    try:
        return (search_apart if apart else search)(
            profile,
            budget_bytes=None if nbytes is None else nbytes - other,
            num_blocks=config.num_blocks,
            min_blocks=config.min_blocks,
            transfer_budget_scale=config.transfer_budget_scale,
            effort=effort,
        )
    except BudgetError as error:
        needed = error.needed + other
        raise BudgetError(
            f"a budget of {nbytes} bytes for weights does not work: at least {needed} bytes are needed ({other} of "
            "them for weights of no unit)",
            needed,
        ) from None


def share_of_weights(profile: Profile, share: float) -> int:
    """Bytes that are this share of all weights as they lie on a device."""
    return int(share * (sum(align(tensor.nbytes) for tensor in profile.tensors) + profile.other_bytes))


def weight_limit(profile: Profile, room: Room) -> int:
    """Bytes that weights may take: what they take now, and what is free beyond the activations' peak."""
    return room.weights + room.other + max(room.free - profile.activation_bytes, 0)


def configured_limit(profile: Profile, room: Room, config: OffloadConfig) -> int | None:
    """Bytes that weights may take by the configuration; None in latency mode, which sets no limit."""
    if config.budget_bytes is not None:
        return config.budget_bytes
    if config.budget_fraction is not None:
        return share_of_weights(profile, config.budget_fraction)
    return _share_of_device(profile, room, config)


def _share_of_device(profile: Profile, room: Room, config: OffloadConfig) -> int | None:
    share = config.max_gpu_mem_fraction
    return None if share is None else max(int(share * room.total) - profile.activation_bytes, 0)


def solve_configured(profile: Profile, room: Room, config: OffloadConfig, *, effort: float = 1.0) -> Plan:
    """The plan that the configuration asks for, within what is really free. Raises BudgetError as ``solve`` does."""
    asked = configured_limit(profile, room, config)
    budget = None if asked is None else min(asked, weight_limit(profile, room))
    return solve_in_room(profile, budget, room, config, effort=effort)


def solve_in_room(
    profile: Profile,
    budget: int | float | None,
    room: Room,
    config: OffloadConfig,
    *,
    apart: bool = False,
    effort: float = 1.0,
) -> Plan:
    """``solve``; without a budget, weights take at most what is free and the configured share of the device."""
    plan = solve(profile, budget, config, apart=apart, effort=effort)
    limit = most_weights(profile, room, config)
    if budget is not None or plan.weight_bytes + profile.other_bytes <= limit:
        return plan
    return solve(profile, limit, config, apart=apart, effort=effort)


def most_weights(profile: Profile, room: Room, config: OffloadConfig) -> int:
    """Bytes that weights may take beside what steps were seen to need: of what is free, and of the configured share of
    the device. What the budget says does not depend on steps."""
    share = _share_of_device(profile, room, config)
    return weight_limit(profile, room) if share is None else min(weight_limit(profile, room), share)


def check(plan: Plan, profile: Profile, room: Room, device: str) -> None:
    """Raise BudgetError when ``plan`` does not fit the device as it is now."""
    limit, need = weight_limit(profile, room), plan.weight_bytes + room.other
    if need > limit:
        raise BudgetError(
            f"the plan takes {need} bytes for weights; {limit} are available on {device} beside activations of "
            f"{profile.activation_bytes} bytes",
            need,
        )


def fewer_weights(profile: Profile, weights: int, config: OffloadConfig) -> Plan | None:
    """A plan with clearly fewer weights than ``weights`` bytes, which were too many; None when there is none."""
    budget = int((weights + profile.other_bytes) * SHRINK_AFTER_OOM)
    try:
        plan = solve(profile, budget, config)
    except BudgetError as error:
        plan = solve(profile, error.needed, config)
    return plan if plan.weight_bytes < weights else None
