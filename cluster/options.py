"""How a run's coordinator behaves, and how that is written in a run's YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flextensor.config import ConfigError, unknown_key_message

TRIGGERS = ("drift", "link", "throttle", "memory", "members")
"""What makes a run plan again without being asked; see ``cluster.drift``."""

LONGEST_ROUND = 600.0
"""Seconds within which a round ends whose step boundaries come soon: who waits for one need not wait longer."""

LockstepGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CoordinatorOptions:
    """Times are seconds.

    prepare_timeout: how long a round waits for step boundaries, and hang: a worker whose model thread shows none for so
        long is started again; both are longer where steps were measured to take longer.
    learn_timeout: how long a coordinator that was started again waits for each worker's word of the run, before it
        goes on with those that answered; the others are taken up when they do.
    automatic: replan without being asked (default), for the reasons in ``triggers`` (of TRIGGERS), at most once in
        ``minimum_interval``.
    drift: the share by which a measured step may leave its prediction; link_change: the share by which the measured
        link may leave what the plan was made for; device_memory, host_memory: the share of the device's and of the
        node's memory that stays free.
    rollback_margin: a new plan whose measured step is slower than the old one's by more than this share is rolled
        back (None: never).
    lockstep: groups of ranks that run every step together; all others are independent replicas.
    """

    namespace: str
    events_path: str | None = None
    poll: float = 1.0
    measure_timeout: float = 120.0
    prepare_timeout: float = 30.0
    commit_timeout: float = 30.0
    learn_timeout: float = 5.0
    hang: float = 600.0
    automatic: bool = True
    triggers: tuple[str, ...] = TRIGGERS
    drift: float = 0.25
    link_change: float = 0.3
    device_memory: float = 0.02
    host_memory: float = 0.03
    minimum_interval: float = 60.0
    rollback_margin: float | None = 0.25
    rollback_steps: int = 40
    lockstep: LockstepGroups = ()

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The lockstep group of a rank; empty where it runs on its own."""
        return next((group for group in self.lockstep if rank in group), ())


def coordinator_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run's ``coordinator`` section, as CoordinatorOptions takes them.

    Raises ConfigError for a key that there is not and for a value that cannot be used.
    """
    known = [f.name for f in dataclasses.fields(CoordinatorOptions) if f.name not in ("namespace", "events_path")]
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(unknown_key_message(key, known, "coordinator setting"))
        if key == "triggers":
            settings[key] = _triggers(value)
        elif key == "lockstep":
            settings[key] = _lockstep(value)
        elif key == "automatic":
            if not isinstance(value, bool):
                raise ConfigError(f"coordinator.automatic = {value!r}: write true or false")
            settings[key] = value
        elif (_is_number(value) and (value > 0 or key != "poll")) or (key == "rollback_margin" and value is None):
            settings[key] = value
        else:
            least = "above 0" if key == "poll" else "0 or more"
            raise ConfigError(f"coordinator.{key} = {value!r}: write a number, {least}")
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _triggers(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"coordinator.triggers = {value!r}: write a list of {', '.join(TRIGGERS)}")
    for one in value:
        if one not in TRIGGERS:
            raise ConfigError(unknown_key_message(str(one), list(TRIGGERS), "coordinator trigger"))
    return tuple(value)


def _lockstep(value: Any) -> LockstepGroups:
    """``[[0, 1], [2, 3]]``."""
    groups = value if isinstance(value, list | tuple) else None
    if groups is None or not all(isinstance(group, list | tuple) and len(group) > 1 for group in groups):
        raise ConfigError(f"coordinator.lockstep = {value!r}: write groups of two ranks or more, as [[0, 1], [2, 3]]")
    ranks = [rank for group in groups for rank in group]
    wrong = [rank for rank in ranks if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0]
    if wrong:
        raise ConfigError(f"coordinator.lockstep: {wrong[0]!r} is no rank; write whole numbers, 0 or more")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigError(f"coordinator.lockstep: rank {twice[0]} is in two groups or twice in one")
    return tuple(tuple(group) for group in groups)


def require_ranks(groups: LockstepGroups, workers: Iterable[int]) -> None:
    """Raise ConfigError where a lockstep group has a rank that the run does not have."""
    there = set(workers)
    missing = sorted({rank for group in groups for rank in group} - there)
    if missing:
        raise ConfigError(
            f"coordinator.lockstep names rank {missing[0]}, but the run has {len(there)} workers (ranks 0 to "
            f"{max(there, default=0)})"
        )
