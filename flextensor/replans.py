"""Another plan: asked for, staged, put in force at a step's start; and what makes weights give way by itself."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flextensor import planning
from flextensor.config import OffloadConfig, parse_budget
from flextensor.edits import WeightEdits
from flextensor.hosting import Hosting
from flextensor.live import live_profile
from flextensor.measured import Measured
from flextensor.phases import INFERENCE
from flextensor.planner.plan import BudgetError, Plan
from flextensor.profile import Profile
from flextensor.units import OffloadError

logger = logging.getLogger(__name__)


class Replans(Measured):
    """The part of a manager that solves for plans and changes over to them."""

    config: OffloadConfig
    hosting: Hosting
    epoch: int
    refusal: str
    refused_epoch: int | None
    own_changes: int
    own_reason: str
    own_plan: Plan | None
    _edits: WeightEdits
    _staging: threading.Lock
    _settled_activations: int
    _last_activations: int
    _from_saved_profile: bool
    _staged: tuple[Plan, int | None] | None

    if TYPE_CHECKING:

        def _take_up_edits(self) -> None: ...

    @property
    def iters_before_inference(self) -> int:
        """Calls of the model until the phase is ``inference``, counted from ``offload``."""
        if self._from_saved_profile:
            return 0
        discovery = 0 if self.config.skip_discovery else self.config.discovery_iters
        return discovery + self.config.profiling_iters

    def solve(self, budget: int | float | None, profile: Profile | None = None, *, apart: bool = False) -> Plan:
        """The best plan for a budget of weights on the device: bytes (int), a share of the model's weights (float), or
        None for the least memory that costs no time. Pure; any thread may call it.

        apart: in a process of its own, so that steps that run meanwhile in another thread are not slower.

        Raises BudgetError with the least bytes that work, OffloadError before there is a profile.
        """
        return planning.solve(self._known(profile), budget, self.config, apart=apart)

    def _known(self, profile: Profile | None) -> Profile:
        profile = profile or self.profile
        if profile is None:
            raise OffloadError(
                f"the model is still in {self.phase}; a plan needs a profile: run the model "
                f"{self.iters_before_inference} times first"
            )
        return profile

    def solve_configured(self, profile: Profile | None = None, *, effort: float = 1.0) -> Plan:
        """The plan that the configuration asks for, within what is really free. profile: None: the manager's.
        effort: the share of the search's closer looks."""
        return planning.solve_configured(self._known(profile), self._room(), self.config, effort=effort)

    def solve_in_room(self, budget: int | float | None, profile: Profile | None = None, *, apart: bool = False) -> Plan:
        """``solve``; without a budget, weights take at most what is free and the configured share of the device."""
        return planning.solve_in_room(self._known(profile), budget, self._room(), self.config, apart=apart)

    def _room(self) -> planning.Room:
        return planning.Room(
            self._execution.memory.nbytes, self.hosting.other_bytes, self.device.free_bytes(), self.device.total_bytes()
        )

    def check(self, plan: Plan) -> None:
        """Raise BudgetError when ``plan`` does not fit the device as it is now."""
        if self.profile is not None:
            planning.check(plan, self.profile, self._room(), self.device.name)

    def stage(self, plan: Plan, epoch: int | None = None) -> None:
        """Put ``plan`` in force at the start of the next step (at once after the callbacks, inside one of them). Any
        thread may call it, and waits for nobody."""
        with self._staging:
            self._staged = (plan, epoch)

    def _stage_own(self, plan: Plan, reason: str) -> None:
        """``stage`` a plan that nobody asked for."""
        self.own_changes += 1
        self.own_reason, self.own_plan = reason, plan
        self.stage(plan)

    @property
    def plan_to_be(self) -> Plan | None:
        """What is staged for the next step, else the plan in force."""
        with self._staging:
            return self.plan if self._staged is None else self._staged[0]

    def replan(self, budget: int | float | str | None = None, *, profile: Profile | None = None) -> Plan:
        """Solve for ``budget`` with what is measured now, and stage the plan; returns it.

        budget: as ``solve_in_room`` takes it, or as people write it: ``"6GiB"``, ``"40%"``, ``"latency"`` (None).
        Compute times are those of recent steps, the profile's where there are none; a GPU computes faster while it
        waits for copies, so after a plan that stalls, a latency plan is at its least memory when it is asked for a
        second time.
        profile: measurements to use instead.
        """
        if isinstance(budget, str):
            budget = None if budget.strip().lower() == "latency" else parse_budget(budget)
        if profile is None and self.profile is not None:
            profile = live_profile(self.profile, list(self._recorder.steps), self._kind_counts)
        plan = self.solve_in_room(budget, profile)
        self.check(plan)
        self.stage(plan)
        return plan

    def _apply_staged(self) -> None:
        with self._staging:
            staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            if not self._execution.homeless:
                self._take_up_edits()  # a switch may fetch again from the host what was written on the device
            if self.phase != INFERENCE:
                self._refuse(staged, f"still in {self.phase}")
                return
            try:
                self._switch(*staged)
                self.refusal = ""
            except torch.OutOfMemoryError as error:
                self._refuse(staged, f"out of memory: {error}")
        except BaseException:
            with self._staging:
                self._staged = self._staged or staged
            raise

    def _refuse(self, staged: tuple[Plan, int | None], reason: str) -> None:
        # In this order: whoever reads the reason finds the epoch that it is of, or of a later one.
        self.refused_epoch = staged[1]
        self.refusal = reason
        logger.warning("plan not put in force: %s", reason)

    def _switch(self, plan: Plan, epoch: int | None) -> None:
        """Stop, lay memory out anew, go on. On failure the plan before is in force again, or where there is no room for
        that any more, units are fetched on demand."""
        execution = self._execution
        before = execution.plan
        saved = False
        try:
            execution.quiesce()
            self._edits.save_state()
            saved = True
            if self._recorder.steps:
                self.profile = self.current_profile()
                self._recorder.clear()
            execution.switch(plan)
        except BaseException:  # also a Ctrl-C: what it left half laid out is laid out anew
            if not saved:  # nothing has moved yet; what the forward has made of its state is on the device alone
                self.device.synchronize()
                self._edits.save_state()
            self._now_in_force(execution.restore(before))
            raise
        if self.config.max_gpu_mem_fraction is not None:
            self.device.reset_peak()  # what lay there before counts no more
        self.plan = plan
        self.epoch = self.epoch + 1 if epoch is None else epoch

    def _switch_to_what_fits(self, plan: Plan) -> None:
        """``_switch``, and to fewer and fewer weights while the device has less room than it says (its free memory may
        be in pieces)."""
        assert self.profile is not None
        while True:
            try:
                self._switch(plan, None)
                return
            except torch.OutOfMemoryError as error:
                less = planning.fewer_weights(self.profile, plan.weight_bytes, self.config)
                if less is None:
                    raise
                logger.warning(
                    "%d bytes of weights find no room (%s); planning for %d",
                    plan.weight_bytes,
                    error,
                    less.weight_bytes,
                )
                plan = less

    def _now_in_force(self, plan: Plan | None) -> None:
        if self.plan is not None and plan is not None:
            self.plan = plan

    def _make_room(self) -> None:
        """A kind of step ran for the first time since the profile: when it needs more than the profile's steps did, and
        the plan in force, or staged, leaves too little for that, weights give way at the next step, as few as must."""
        assert self.profile is not None
        beyond = self._bytes_beside_weights()
        self._settled_activations = max(beyond, self._settled_activations or self.profile.activation_bytes)
        if beyond > self.profile.activation_bytes:
            self.profile = replace(self.profile, activation_bytes=beyond)
            self._leave_room(f"a new kind of step takes {beyond} bytes beside weights")

    def _bytes_beside_weights(self) -> int:
        """The most since the peak was last reset."""
        return self.device.peak_bytes() - self._execution.memory.nbytes - self.hosting.other_bytes

    @property
    def _share_is_limited(self) -> bool:
        return self.config.max_gpu_mem_fraction is not None and self.phase == INFERENCE

    def _make_room_for_growth(self) -> None:
        """What steps keep on the device (a cache of keys and values) grows: weights give way before it exceeds the
        configured share. Planned for is as much growth again as was seen, so that not every few tokens bring a plan."""
        assert self.profile is not None
        beyond = self._bytes_beside_weights()
        self._settled_activations = self._settled_activations or self.profile.activation_bytes
        since, self._last_activations = beyond - (self._last_activations or beyond), beyond
        grown = beyond - self._settled_activations
        ahead = beyond + max(since, 0) * 5 // 4  # at the next look, and when a plan made then is in force
        if ahead <= self.profile.activation_bytes or grown <= 0:
            return
        seen = self.profile
        self.profile = replace(seen, activation_bytes=beyond + grown)
        if not self._leave_room(f"steps take {beyond} bytes beside weights, {grown} more than at first"):
            self.profile = replace(seen, activation_bytes=max(beyond, seen.activation_bytes))

    def _leave_room(self, reason: str) -> bool:
        """Stage a plan with fewer weights where the one in force, or staged, leaves too little room. False where it
        leaves enough."""
        assert self.profile is not None
        coming = self.plan_to_be
        most = planning.most_weights(self.profile, self._room(), self.config)
        if coming is None or coming.weight_bytes + self.hosting.other_bytes <= most:
            return False
        try:
            plan = self.solve(most)
        except BudgetError as error:
            if error.needed >= coming.weight_bytes + self.hosting.other_bytes:
                logger.warning("%s, and weights cannot give way: %s", reason, error)
                return True
            plan = self.solve(error.needed)  # as few as can be
        self._stage_own(plan, reason)
        logger.info("%s; planning anew", reason)
        return True

    def _give_way(self) -> None:
        """A step ran out of memory: the next one has fewer weights on the device."""
        coming = self.plan_to_be
        if self.plan is not None and coming is not None and coming.weight_bytes < self.plan.weight_bytes:
            logger.warning("out of memory in a step; the next one has fewer weights, as it was asked for meanwhile")
            return
        try:
            plan = planning.fewer_weights(self.current_profile(), self._execution.memory.nbytes, self.config)
        except (BudgetError, OffloadError):
            plan = None
        if plan is None:
            logger.warning("out of memory in a step, and no plan has fewer weights on the device")
            return
        logger.warning("out of memory in a step; weights take %d bytes from the next one on", plan.weight_bytes)
        self._stage_own(plan, "out of memory in a step")
