"""When a run should be planned again without being asked, and why. Pure Python: no clock, no Ray.

Each trigger can be left out by the run's options. A step that takes another time than predicted asks for a plan
whatever the cause: where the compute itself got slower, there is more time for copies, and fewer weights need to be
resident. The next plan's prediction is then for the compute as it is, so that one cause asks once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.messages import CoordinatorOptions, EngineState, WorkerState

FEWEST_STEPS = 16
"""Medians say nothing before so many steps have been run under a plan."""


@dataclass(frozen=True)
class Trigger:
    """A reason to plan again. kind: one of ``cluster.options.TRIGGERS``. budget: another one, for this worker only."""

    kind: str
    reason: str
    rank: int | None = None
    budget: int | None = None


class TriggerWatch:
    """Looks at the workers' states, over and over. ``planned`` tells it of each new plan."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self._options = options
        self._members: dict[int, int] | None = None
        self._steps: dict[tuple[int, int, str], int] = {}
        self._pcie: dict[tuple[int, int], tuple[int | None, int | None]] = {}

    def planned(self, states: Sequence[WorkerState]) -> None:
        """A plan for these workers has just come in force: what follows is compared with it."""
        self._members = {state.rank: state.incarnation for state in states}
        self._steps = {
            (state.rank, state.incarnation, one.name): one.steps for state in states for one in state.engines
        }
        self._pcie = {
            (state.rank, state.incarnation): (state.gpu.pcie_generation, state.gpu.pcie_width)
            for state in states
            if state.gpu is not None and state.busy
        }

    def look(self, states: Sequence[WorkerState], *, complete: bool) -> Trigger | None:
        """The first reason that there is. complete: no worker is away or on the way."""
        options = self._options
        looks: dict[str, Callable[[], Trigger | None]] = {
            "members": lambda: self._members_changed(states) if complete else None,
            "memory": lambda: memory_is_tight(states, options.device_memory, options.host_memory),
            "throttle": lambda: gpu_throttles(self._settled(states), options.drift),
            "link": lambda: self._slot_changed(states) or link_changed(self._settled(states), options.link_change),
            "drift": lambda: (
                stalls_drift(self._settled(states), options.drift)
                or steps_drift(self._settled(states), options.drift, lambda rank: bool(options.group_of(rank)))
            ),
        }
        for kind, look in looks.items():
            if kind in options.triggers and (found := look()) is not None:
                return found
        return None

    def _settled(self, states: Sequence[WorkerState]) -> list[tuple[WorkerState, EngineState]]:
        """The managers that have run long enough under their plan."""
        return [
            (state, one)
            for state in states
            for one in state.engines
            if one.steps - self._steps.get((state.rank, state.incarnation, one.name), 0) >= FEWEST_STEPS
            and one.predicted is not None
            and one.step_seconds > 0
        ]

    def _members_changed(self, states: Sequence[WorkerState]) -> Trigger | None:
        now = {state.rank: state.incarnation for state in states}
        before, first = self._members or {}, self._members is None
        if first and len(now) < 2:
            return None  # a plan of one alone is the plan for all
        joined = sorted(rank for rank, life in now.items() if before.get(rank) != life)
        left = sorted(before.keys() - now.keys())
        if joined:
            return Trigger("members", f"{_workers(joined)} joined")
        if left:
            return Trigger("members", f"{_workers(left)} left")
        return None

    def _slot_changed(self, states: Sequence[WorkerState]) -> Trigger | None:
        """PCIe itself says that the link is another one. An idle GPU saves power on its link: that says nothing."""
        for state in states:
            if state.gpu is None or not state.busy:
                continue
            now = (state.gpu.pcie_generation, state.gpu.pcie_width)
            before = self._pcie.setdefault((state.rank, state.incarnation), now)
            if None not in (*now, *before) and now != before:
                return Trigger(
                    "link",
                    f"worker {state.rank}'s link is PCIe {now[0]} x{now[1]} now, it was PCIe {before[0]} x{before[1]}",
                    state.rank,
                )
        return None


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def stalls_drift(engines: Sequence[tuple[WorkerState, EngineState]], drift: float) -> Trigger | None:
    """What compute waits for copies leaves its prediction, by the share ``drift`` of a step."""
    for state, one in engines:
        told = one.predicted
        assert told is not None
        if one.stall_seconds > told.stall_seconds + drift * told.step_seconds:
            return Trigger(
                "drift",
                f"worker {state.rank} waits {one.stall_seconds * 1e3:.1f} ms a step for copies, predicted were "
                f"{told.stall_seconds * 1e3:.1f} ms",
                state.rank,
            )
        if one.stall_seconds + drift * one.step_seconds < told.stall_seconds:
            return Trigger(
                "drift",
                f"worker {state.rank} waits {one.stall_seconds * 1e3:.1f} ms a step for copies, less than the "
                f"predicted {told.stall_seconds * 1e3:.1f} ms",
                state.rank,
            )
    return None


def steps_drift(
    engines: Sequence[tuple[WorkerState, EngineState]], drift: float, waits_for_others: Callable[[int], bool]
) -> Trigger | None:
    """The measured step leaves its prediction by the share ``drift``.

    A host that is busy now and then makes some steps slow, and never any quick: so it is slower only when a quick step
    is, and quicker only when a slow one is. What is quicker because it stalls less is left to ``stalls_drift``: a
    model that is called with pauses always does. waits_for_others: a rank whose predicted steps have the wait for its
    lockstep group in them, which may be between steps: that it is quicker says nothing.
    """
    for state, one in engines:
        told, pace = one.predicted, one.pace
        if told is None or pace is None:
            continue
        without_stalls = max(pace.predicted - told.stall_seconds, 0.0)
        slower = pace.quick > pace.predicted * (1 + drift)
        quicker = pace.slow * (1 + drift) < without_stalls and not waits_for_others(state.rank)
        if slower or quicker:
            took = pace.quick if slower else pace.slow
            return Trigger(
                "drift",
                f"worker {state.rank}'s steps take {took * 1e3:.1f} ms, {'more' if slower else 'less'} than the "
                f"predicted {pace.predicted * 1e3:.1f} ms",
                state.rank,
            )
    return None


def link_changed(engines: Sequence[tuple[WorkerState, EngineState]], share: float) -> Trigger | None:
    """The copies of a step take longer, or less long, than on the link that the plan was made for.

    A plan that copies nothing says nothing about the link.
    """
    for state, one in engines:
        told = one.predicted
        assert told is not None
        if told.transfer_seconds <= 0 or one.transfer_seconds <= 0 or one.streamed_bytes <= 0:
            continue
        slower = one.transfer_seconds / told.transfer_seconds
        if not 1 / (1 + share) <= slower <= 1 + share:
            return Trigger(
                "link",
                f"worker {state.rank}'s link gives {one.streamed_bytes / one.transfer_seconds / 1e9:.3g} GB/s, "
                f"the plan was made for {one.streamed_bytes / told.transfer_seconds / 1e9:.3g}",
                state.rank,
            )
    return None


def gpu_throttles(engines: Sequence[tuple[WorkerState, EngineState]], drift: float) -> Trigger | None:
    """The GPU says that its clocks are held down, and its steps are slower by the share ``drift`` than predicted."""
    for state, one in engines:
        told = one.predicted
        assert told is not None
        if state.gpu is not None and state.gpu.throttle and one.step_seconds > told.step_seconds * (1 + drift):
            return Trigger(
                "throttle", f"worker {state.rank}'s GPU throttles ({', '.join(state.gpu.throttle)})", state.rank
            )
    return None


def memory_is_tight(states: Sequence[WorkerState], device: float, host: float) -> Trigger | None:
    """Less than the share ``device`` of a device, or ``host`` of a node, is free.

    On a device weights give way, those of each manager by the same share (a budget is for each); on a node nothing can,
    but its link is measured anew: a machine that reclaims memory copies slowly.
    """
    for state in states:
        keep = int(device * state.device_total_bytes)
        if state.device_free_bytes < keep and state.weight_bytes:
            lacking = 2 * keep - state.device_free_bytes  # so that it is not tight again at once
            return Trigger(
                "memory",
                f"worker {state.rank}'s device has {state.device_free_bytes} bytes free, fewer than {keep}",
                state.rank,
                _less(state, lacking),
            )
    for state in states:
        if state.host is not None and state.host.available_bytes < host * state.host.total_bytes:
            return Trigger(
                "memory",
                f"node {state.node} has {state.host.available_bytes} bytes of memory available, fewer than "
                f"{int(host * state.host.total_bytes)}",
                state.rank,
            )
    return None


def _less(state: WorkerState, lacking: int) -> int:
    """The budget of the worker's own manager with which all its managers together hold so many bytes less."""
    own = state.engines[0].weight_bytes
    return max(own - lacking * own // state.weight_bytes, 1)
