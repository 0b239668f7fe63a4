"""Compiled offload: units compiled, and the replan tail that takes compute times anew once they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import nn

from flextensor import measure
from flextensor.compile.census import CompileCensus
from flextensor.compile.correction import apply_correction
from flextensor.compile.detect import any_compiled
from flextensor.compile.limits import bump_dynamo_limits_for_compiled_offload
from flextensor.compile.tail import ReplanTail, StrategyReplanStatus
from flextensor.modules import UnitHandle, plain_twin
from flextensor.phases import DISCOVERY, INFERENCE
from flextensor.replans import Replans
from flextensor.units import Unit

logger = logging.getLogger(__name__)


class CompiledReplans(Replans):
    """The part of a manager that compiles units and runs the replan tail."""

    units: list[Unit]
    _compile_fn: Callable[[nn.Module], nn.Module] | None
    _census: CompileCensus
    _handles: list[UnitHandle]
    _tail: ReplanTail
    _sampling: int

    def _expect_compilation(self) -> None:
        apply_correction()
        bump_dynamo_limits_for_compiled_offload(len(self.units))  # also where the caller compiles and forgets to
        self._census.start()
        for at, (unit, handle) in enumerate(zip(self._pieces, self._handles, strict=False)):  # regions have no handle
            handle.around = partial(self._census.call, at, unit.name, unit.module)

    def _notice_compilation(self) -> None:
        """Before a step: the caller may have compiled units and said so nowhere."""
        if self._census.active:
            self._census.start()
            return
        if self.phase == DISCOVERY or not any_compiled(unit.module for unit in self._pieces):
            return
        self._expect_compilation()
        logger.warning(
            "units of the offloaded model %r are compiled, but neither compile_fn nor external_compile=True was given: "
            "its plans hold eager compute times, and no strategy replan can be requested",
            self.name,
        )

    def _compile_before_profiling(self) -> None:
        if self._compile_fn is None and self.config.external_compile:
            self._expect_compilation()  # the caller may compile during profiling, too
        elif self._compile_fn is not None and self.config.profile_mode == "view":
            self._compile_units()

    def _compile_units(self) -> None:
        assert self._compile_fn is not None
        self._expect_compilation()
        for unit, handle in zip(self._pieces, self._handles, strict=False):
            if handle.compiled is None:
                handle.compiled = self._compile_fn(plain_twin(unit.module))

    @property
    def external_compile_active(self) -> bool:
        """True when the caller compiles the units himself (``external_compile=True`` and no ``compile_fn``)."""
        return self.config.external_compile and self._compile_fn is None

    @property
    def strategy_replan_status(self) -> StrategyReplanStatus:
        """Where the replan tail stands; reading it changes nothing."""
        reason = self._why_no_tail()
        tail = self._tail
        return StrategyReplanStatus(tail.state, not reason, tail.applied, reason or tail.reason)

    @property
    def replan_expected(self) -> bool:
        """True when the profile is of eager times and the units are compiled after it."""
        return self.external_compile_active or (self._compile_fn is not None and self.config.profile_mode == "getter")

    def _why_no_tail(self) -> str:
        if not self.replan_expected:
            return (
                "only compiled offload with an eager profile needs one (external_compile=True or profile_mode='getter')"
            )
        if self.phase != INFERENCE:
            return f"the phase is {self.phase}, not inference"
        if self._tail.state == "in_progress":
            return "a replan is in progress"
        if self._tail.state == "failed":
            return f"the last replan failed ({self._tail.reason}); restart the process"
        return ""

    def request_strategy_replan(self, manual_update_state: bool = False) -> int:
        """Ask for a plan from compute times as they are now that units are compiled.

        Returns how many calls of the model (or, with ``manual_update_state``, replays each followed by
        ``update_state()``) it takes; the last one puts the plan in force. Returns 0 after a warning, and disturbs
        nothing, when it cannot be: ``strategy_replan_status`` says why.
        """
        reason = self._why_no_tail()
        if not reason and manual_update_state and self.config.offload_timing != "cuda_graph":
            reason = "manual_update_state needs offload_timing='cuda_graph'"
        if not reason and manual_update_state and not self.config.external_compile:
            reason = "manual_update_state needs external_compile=True"
        if reason:
            logger.warning("no strategy replan: %s", reason)
            return 0
        self._recorder.clear()
        return self._tail.arm(manual=manual_update_state)

    def update_state(self) -> None:
        """After each replay of a captured forward: take its times and, in a replan that was asked for with
        ``manual_update_state``, count it. The last one puts the new plan in force; capture again then."""
        self._recorder.read_replay()
        if self._tail.state == "in_progress" and self._tail.manual:
            self._advance_tail()

    def _advance_tail(self) -> None:
        last = self._tail.step_done()
        if self._tail.measuring_begins:
            self._recorder.clear()  # of the warm-up: a sampled step may hold a compilation
        self._recorder.every = 1 if self._tail.measures_next else self._sampling
        if not last:
            return
        self._recorder.every = self._sampling
        self._recorder.harvest(wait=True)
        if not self._recorder.steps:
            self._tail.refused(
                "no step of the model was timed: call it through its root, or update_state() after replays"
            )
            logger.warning("strategy replan refused: %s", self._tail.reason)
            return
        try:
            assert self.profile is not None
            slower = measure.live_factor(self._recorder.steps, self.profile.transfer)
            self.profile = self.current_profile(None if slower is None else self.profile.transfer.scaled(slower))
            self._switch(self.solve_configured(), None)
        except BaseException as error:
            self._tail.broken(f"{type(error).__name__}: {error}")
            raise
        self._tail.applied_plan()
