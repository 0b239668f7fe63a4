"""When a run should be planned again without being asked. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.messages import WorkerState

FEWEST_STEPS = 16
"""A worker's medians say nothing before it has run this many steps."""


def reason_to_replan(states: Sequence[WorkerState], drift: float) -> str:
    """Why the plans in force no longer fit what is measured; "" when they do.

    ``drift``: the share by which a step may differ from its prediction. A step may be slower without any fault of the
    plan's (the compute itself got slower), so the time is compared only where stalls or idle links say that another
    plan could help.
    """
    for state in states:
        predicted = state.predicted
        if predicted is None or state.steps < FEWEST_STEPS or state.step_seconds <= 0:
            continue
        stall_allowed = predicted.stall_seconds + drift * predicted.step_seconds
        if state.stall_seconds > stall_allowed:
            return (
                f"worker {state.rank} waits {state.stall_seconds * 1e3:.1f} ms a step for copies, "
                f"predicted were {predicted.stall_seconds * 1e3:.1f} ms"
            )
        if state.gpu is not None and state.gpu.throttle and state.step_seconds > predicted.step_seconds * (1 + drift):
            return f"worker {state.rank}'s GPU throttles ({', '.join(state.gpu.throttle)})"
        if state.stall_seconds + drift * state.step_seconds < predicted.stall_seconds:
            return (
                f"worker {state.rank} waits {state.stall_seconds * 1e3:.1f} ms a step for copies, less than the "
                f"predicted {predicted.stall_seconds * 1e3:.1f} ms: the link is faster than planned for"
            )
    return ""
