"""The replan tail: a few steps that warm up and measure what was compiled since the profile, then a new plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WARM_STEPS = 2
MEASURED_STEPS = 3
"""Fewer would not do: a step that raises costs the sample of the one after it, too."""

State = Literal["idle", "in_progress", "done", "failed"]


@dataclass(frozen=True)
class StrategyReplanStatus:
    """Where the replan tail stands; reading it changes nothing.

    state: ``idle`` (none was asked for), ``in_progress``, ``done``, ``failed`` (terminal: restart the process).
    can_request: a request now would arm a tail. applied: the last tail put a new plan in force (None: none ended yet).
    reason: why not, where ``can_request`` is False or ``applied`` is False.
    """

    state: State
    can_request: bool
    applied: bool | None
    reason: str = ""


class ReplanTail:
    """Counts the steps of one request after another. The manager owns it and does the work."""

    def __init__(self) -> None:
        self.state: State = "idle"
        self.applied: bool | None = None
        self.reason = ""
        self.manual = False
        self.remaining = 0

    def arm(self, *, manual: bool) -> int:
        """Begin; returns the number of steps until the new plan."""
        self.state, self.applied, self.reason = "in_progress", None, ""
        self.manual = manual
        self.remaining = WARM_STEPS + MEASURED_STEPS
        return self.remaining

    def step_done(self) -> bool:
        """A step of the tail is over; True when it was the last."""
        self.remaining -= 1
        return self.remaining == 0

    @property
    def measures_next(self) -> bool:
        """True when the next step is a measured one, not a warm-up."""
        return self.state == "in_progress" and self.remaining <= MEASURED_STEPS

    @property
    def measuring_begins(self) -> bool:
        """True when the warm-up is over and no measured step has been taken yet."""
        return self.state == "in_progress" and self.remaining == MEASURED_STEPS

    def applied_plan(self) -> None:
        self.state, self.applied, self.reason = "done", True, ""

    def refused(self, reason: str) -> None:
        """No plan was made, nothing changed: another request may follow."""
        self.state, self.applied, self.reason = "done", False, reason

    def broken(self, reason: str) -> None:
        """Something raised half-way."""
        self.state, self.applied, self.reason = "failed", False, reason
