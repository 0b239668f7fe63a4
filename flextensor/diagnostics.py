"""``enable_diagnostics``: what a plan does, in the log, without being asked. INFO lines, one block an event.

When a plan comes into force: what is resident, what is streamed, what is expected. Once ``SETTLED_STEPS`` of its steps
were timed: what they took, visit by visit, beside what was expected. Every step is timed meanwhile, as with
``offload_timing="eager"``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flextensor.planner.plan import Plan
from flextensor.runtime.timing import format_offload_timing_table

if TYPE_CHECKING:
    from flextensor.manager import OffloadManager

logger = logging.getLogger(__name__)

SETTLED_STEPS = 8


class Diagnostics:
    """Told of each step that is done; knows which plan it has spoken of."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._steps = 0

    def step_done(self, manager: OffloadManager) -> None:
        """A step of the model is over."""
        plan = manager.plan
        if plan is None:
            return
        if plan is not self._plan:
            self._plan, self._steps = plan, 0
            _log_plan(manager, plan)
        self._steps += 1
        if self._steps == SETTLED_STEPS:
            _log_steps(manager)


def _log_plan(manager: OffloadManager, plan: Plan) -> None:
    expected = plan.prediction
    logger.info(
        "%s, epoch %d: %d units, %d visits; %d bytes resident, an arena of %d, %d bytes streamed a step in %d copies; "
        "expected step %s",
        manager.name,
        manager.epoch,
        len(manager.units),
        len(plan.visits),
        plan.resident_bytes,
        plan.arena_bytes,
        plan.streamed_bytes,
        len(plan.copies),
        "unknown"
        if expected is None
        else f"{expected.step_seconds * 1e3:.3f} ms, stalls {expected.stall_seconds * 1e3:.3f} ms",
    )


def _log_steps(manager: OffloadManager) -> None:
    rows, live, expected = manager.collect_offload_timing(), manager.live(), manager.expectation()
    logger.info(
        "%s, epoch %d, after %d steps: %.3f ms a step, compute %.3f ms, stalls %.3f ms, link %.2f GB/s, %d visits "
        "fetched on demand; expected %s\n%s",
        manager.name,
        manager.epoch,
        live.steps,
        live.step_seconds * 1e3,
        live.compute_seconds * 1e3,
        live.stall_seconds * 1e3,
        live.link_bytes_per_second / 1e9,
        live.unforeseen_visits,
        "unknown"
        if expected is None
        else f"{expected.prediction.step_seconds * 1e3:.3f} ms (measured: {expected.measured})",
        format_offload_timing_table(rows),
    )
