"""The offload managers of one worker: its own, and those that its task has made beside it for further models.

A further manager's name begins with the worker's and a dash (``worker-0-2``). A replan reaches all of them: those whose
configured budget is the run's get the new one each, those with a budget of their own keep it and get the new link.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.messages import Budget, EngineState, Plans
from cluster.pace import pace_of
from flextensor.planner.plan import BudgetError, Plan
from flextensor.profile import Profile, TransferCurve

if TYPE_CHECKING:
    from flextensor.manager import OffloadManager

logger = logging.getLogger(__name__)

INFERENCE, RELEASED = "inference", "released"


class Engines:
    """``boundary``: called before each step of any of the managers, in the model's thread."""

    def __init__(self, name: str, budget: Budget, boundary: Callable[[int], None]) -> None:
        self._name = name
        self._boundary = boundary
        self._managers: dict[str, OffloadManager] = {}
        self._stepped = name
        self._agreed: Plans = {}
        self._own_changes: dict[str, int] = {}
        self._staging = threading.Lock()
        """Between the model's thread, which takes up what managers did by themselves, and a round's commit."""
        self._epoch: int | None = None
        self.budget: Budget = budget

    def find(self) -> None:
        """Take up the managers that exist by now; each is watched from its next step on."""
        from flextensor import registry

        for name in [name for name, manager in self._managers.items() if manager.phase == RELEASED]:
            del self._managers[name]
        for name in registry.names():
            if name in self._managers or not (name == self._name or name.startswith(f"{self._name}-")):
                continue
            manager = registry.get_offload_manager(name)
            self._managers[name] = manager
            manager.on_step_boundary(lambda step, manager=manager: self._at_boundary(manager, step))  # type: ignore[misc]

    @property
    def main(self) -> OffloadManager:
        """The worker's own manager."""
        return self._managers[self._name]

    def _planned(self) -> dict[str, OffloadManager]:
        """The managers that execute a plan, the worker's own first."""
        names = sorted(self._managers, key=lambda name: (name != self._name, name))
        return {name: self._managers[name] for name in names if self._managers[name].phase == INFERENCE}

    def _at_boundary(self, manager: OffloadManager, step: int) -> None:
        self._boundary(step)
        self._take_up_own(manager)
        self._stepped = manager.name
        if self._epoch is not None and manager.phase == INFERENCE and manager.name not in self._agreed:
            self._follow(manager, self._epoch)

    def _follow(self, manager: OffloadManager, epoch: int) -> None:
        """A model that had no plan yet when the run agreed on one: it takes the same budget now, unless the run agrees
        on something else meanwhile: then it follows at its next step."""
        plan: Plan | None
        try:
            plan = self._solve_one(manager, self.budget, manager.current_profile(), apart=False)
            self.check({manager.name: plan})
        except BudgetError as error:
            logger.warning("%s keeps its first plan: %s", manager.name, error)
            plan = None
        with self._staging:
            if self._epoch != epoch or manager.name in self._agreed:
                return
            if plan is not None:
                manager.stage(plan, epoch=epoch)
            kept = plan or manager.plan
            if kept is not None:  # else its own budget has no plan either
                self._agreed = {**self._agreed, manager.name: kept}

    def take_up_own(self) -> None:
        """Where memory did not suffice, a manager has a plan of its own from its next step on: it counts from now on,
        in the epoch that the run is in, and so does what it takes, as the budget. Any thread may call it."""
        for manager in self._planned().values():
            self._take_up_own(manager)

    def _take_up_own(self, manager: OffloadManager) -> None:
        if manager.own_changes == self._own_changes.get(manager.name, 0):
            return
        with self._staging:
            if manager.own_changes == self._own_changes.get(manager.name, 0):
                return
            self._own_changes[manager.name] = manager.own_changes
            plan = manager.own_plan
            if plan is None or plan is not manager.plan_to_be:  # a round came in between
                return
            assert manager.profile is not None
            self._agreed = {**self._agreed, manager.name: plan}
            if self._epoch is not None:
                manager.stage(plan, epoch=self._epoch)
            if len(self._planned()) == 1:  # else it would be the others' too
                self.budget = plan.weight_bytes + manager.profile.other_bytes

    # ---- plans

    @property
    def plans(self) -> Plans:
        """The plans that are in force, or staged to be at each manager's next step."""
        found: Plans = {}
        for name, manager in self._planned().items():
            plan = self._agreed.get(name, manager.plan)
            if plan is not None:
                found[name] = plan
        return found

    @property
    def agreed_epoch(self) -> int:
        """The epoch that the run has agreed on, as the worker was told; 0 where it was not told yet."""
        return self._epoch or 0

    @property
    def other_bytes(self) -> int:
        """Weights on the device that no plan manages."""
        return sum(m.profile.other_bytes for m in self._planned().values() if m.profile is not None)

    def measure(self) -> TransferCurve:
        """The link now, as the worker's own manager would see it, from the copies of the one that ran last."""
        latest, main = self._managers.get(self._stepped, self.main), self.main
        if latest.phase != INFERENCE:  # it warms up, or was released
            latest = main
        now = latest.measure_transfer()
        if latest is main:
            return now
        assert latest.profile is not None and main.profile is not None
        return main.profile.transfer.scaled(latest.profile.transfer.bandwidth / now.bandwidth)

    def solve(self, budget: Budget, transfer: TransferCurve | None, wait: float = 0.0) -> Plans:
        """A plan for each manager. transfer: the link as the worker's own one sees it (None: as at set-up). wait:
        seconds that a step of the worker's own one waits for others of its group.

        Raises BudgetError with the least bytes that work.
        """
        main = self.main
        assert main.profile is not None
        slower = 1.0 if transfer is None else main.profile.transfer.bandwidth / transfer.bandwidth
        plans: Plans = {}
        for name, manager in self._planned().items():
            assert manager.profile is not None
            curve = transfer if manager is main or transfer is None else manager.profile.transfer.scaled(slower)
            profile = manager.current_profile(curve)
            plans[name] = self._solve_one(manager, budget, with_wait(profile, wait) if manager is main else profile)
        return plans

    def _solve_one(self, manager: OffloadManager, budget: Budget, profile: Profile, *, apart: bool = True) -> Plan:
        own = manager.config
        if _budget_of(own) != _budget_of(self.main.config):
            budget = own.budget_bytes if own.budget_bytes is not None else own.budget_fraction
        return manager.solve_in_room(budget, profile, apart=apart)

    def check(self, plans: Plans) -> None:
        """Raise BudgetError where ``plans`` do not fit the device as it is now, at every moment until each manager has
        taken its own at its own next step."""
        planned = self._planned()
        for name, plan in plans.items():
            if name in planned:
                planned[name].check(plan)
        if len(planned) < 2:
            return
        usage = {name: manager.get_gpu_memory_usage() for name, manager in planned.items()}
        now = sum(one["weights"] for one in usage.values())
        most = sum(
            max(usage[name]["weights"], plans[name].weight_bytes) if name in plans else usage[name]["weights"]
            for name in planned
        )
        activations = max(m.profile.activation_bytes for m in planned.values() if m.profile is not None)
        free = max(min(one["free"] for one in usage.values()) - activations, 0)
        if most > now + free:
            raise BudgetError(
                f"the plans of {', '.join(planned)} take {most} bytes for weights while they change over; "
                f"{now + free} are available beside activations of {activations} bytes",
                most,
            )

    def moved_bytes(self, plans: Plans) -> int:
        """Bytes over the link that going over to ``plans`` takes, all managers together."""
        return sum(
            moved_bytes(manager.plan_in_force, plans[name], manager.profile)
            for name, manager in self._planned().items()
            if name in plans and manager.profile is not None
        )

    def stage(self, plans: Plans, budget: Budget, epoch: int) -> None:
        """Put ``plans`` in force, each at its manager's next step. Any thread may call it, also beside a step."""
        with self._staging:
            planned = {name: manager for name, manager in self._planned().items() if name in plans}
            for name, manager in planned.items():
                manager.refusal = ""
                manager.stage(plans[name], epoch=epoch)
            # A model that still warms up has not agreed: it follows when it has its first plan.
            self._agreed, self._epoch, self.budget = {name: plans[name] for name in planned}, epoch, budget

    def took(self, plan: Plan) -> None:
        """The worker's own manager was given this plan outside of a round."""
        with self._staging:
            self._agreed = {**self._agreed, self._name: plan}

    @property
    def own_changes(self) -> int:
        """Plans that the managers have made by themselves so far."""
        return sum(manager.own_changes for manager in list(self._managers.values()))

    # ---- what is told

    def states(self) -> tuple[EngineState, ...]:
        """Each manager now, the worker's own first."""
        names = sorted(self._managers, key=lambda name: (name != self._name, name))
        return tuple(_state_of(self._managers[name], self._own_changes.get(name, 0)) for name in names)

    def close(self) -> None:
        """Forget the managers."""
        self._managers.clear()


def moved_bytes(old: Plan, new: Plan, profile: Profile) -> int:
    """What becomes resident, and what the first step under ``new`` finds in its slots."""
    fresh = sum(profile.tensors[tensor].nbytes for tensor in new.resident - old.resident)
    return fresh + sum(copy.nbytes for copy in (*new.initial, *(copy for copy in new.copies if copy.lag)))


def with_wait(profile: Profile, wait: float) -> Profile:
    """The profile of a worker that waits so many seconds for others before each step."""
    if wait <= 0:
        return profile
    return profile.with_kinds(
        replace(kind, gap=(kind.gap[0] + wait, *kind.gap[1:])) if kind.gap else kind for kind in profile.kinds
    )


def _budget_of(config: Any) -> tuple[Any, ...]:
    return config.budget_bytes, config.budget_fraction, config.max_gpu_mem_fraction


def _state_of(manager: OffloadManager, own_changes: int) -> EngineState:
    plan, live = manager.plan, manager.live()
    steps = manager.sampled_steps()  # not before the plan is known: a switch forgets those under the plan before
    state = EngineState(
        name=manager.name,
        phase=manager.phase,
        epoch=manager.epoch,
        refusal=manager.refusal,
        refused_epoch=manager.refused_epoch,
        own_changes=own_changes,
        own_reason=manager.own_reason if own_changes else "",
        steps=live.steps,
        copied_bytes_total=live.copied_bytes_total,
        step_seconds=live.step_seconds,
        stall_seconds=live.stall_seconds,
        compute_seconds=live.compute_seconds,
        transfer_seconds=live.transfer_seconds,
        link_bytes_per_second=live.link_bytes_per_second,
    )
    if manager.profile is None or plan is None:
        return state
    other = manager.profile.other_bytes
    return replace(
        state,
        total_bytes=manager.profile.total_bytes + other,
        weight_bytes=plan.weight_bytes + other,
        resident_bytes=plan.resident_bytes + other,
        streamed_bytes=plan.streamed_bytes,
        predicted=plan.prediction,
        pace=None if plan.prediction is None else pace_of(steps, plan.prediction),
    )
