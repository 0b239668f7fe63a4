"""OffloadManager: the life cycle of one offloaded model, and what a user asks of it.

discovery -> profiling -> inference. Until the first plan, units are fetched on demand into one arena; the outputs are
right from the first call. A step is one call of the root; plans change only at a step's start.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from flextensor import measure, planning, registry
from flextensor.compile import graphs
from flextensor.compile.census import CompileCensus, CompileReport
from flextensor.compile.correction import apply_correction
from flextensor.compile.detect import first_compiled, is_compiled
from flextensor.compile.limits import bump_dynamo_limits_for_compiled_offload
from flextensor.compile.tail import ReplanTail, StrategyReplanStatus
from flextensor.config import OffloadConfig, parse_budget
from flextensor.edits import WeightEdits
from flextensor.hosting import Hosting
from flextensor.live import Expectation, LiveTiming, expect, live_profile, live_timing
from flextensor.modules import UnitHandle, guard_inside, is_offloaded, offload_module, plain_twin, restore_module
from flextensor.planner.plan import BudgetError, Plan, align
from flextensor.profile import Profile, TransferCurve
from flextensor.reporting import build_report
from flextensor.runtime import ops
from flextensor.runtime.device import Device
from flextensor.runtime.loader import Loader
from flextensor.runtime.memory import DeviceWeights, WeightTable
from flextensor.runtime.timing import Recorder, StepTimes, VisitSummary, summarise
from flextensor.saved_profiles import Subject
from flextensor.units import OffloadError, Selection, Unit, pieces_of, refuse_kept_views
from flextensor.warmup import Warmup

logger = logging.getLogger(__name__)

DISCOVERY, PROFILING, INFERENCE, RELEASED = "discovery", "profiling", "inference", "released"

SAMPLE_EVERY = 8
"""One step in so many is timed while ``offload_timing`` is off: enough for live figures, nothing on the hot path."""


class OffloadManager:
    """One offloaded model on one device. Made by ``flextensor.offload``."""

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        hosting: Hosting,
        device: Device,
        config: OffloadConfig,
        *,
        name: str,
        compile_fn: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.config = config
        self.device = device
        self.hosting = hosting
        self.units: list[Unit] = selection.units
        self.phase = PROFILING if config.skip_discovery else DISCOVERY
        self.epoch = 0
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.refusal = ""
        """Why the last staged plan was not put in force; empty when it was."""
        self._selection = selection
        self._compile_fn = compile_fn
        self._weights = hosting.managed
        self._index = {id(weight.tensor): at for at, weight in enumerate(self._weights)}
        position = {id(weight): at for at, weight in enumerate(self._weights)}
        self._pieces = pieces_of(self.units) if config.stream_granularity == "piece" else list(self.units)
        """What is entered and left: the units or their leaf modules, and manual regions."""
        self._blocks: dict[str, int] = {}
        self._reads: list[list[int]] = [[position[id(w)] for w in piece.weights] for piece in self._pieces]
        self._table = WeightTable(self._weights, hosting.store)
        self._edits = WeightEdits(self._weights, self._pieces, hosting.store, device.torch_device, self._index)
        self._copy_stream = device.new_stream()
        self._memory = DeviceWeights(self._table, device, self._copy_stream)
        self._sampling = 1 if config.offload_timing == "eager" else SAMPLE_EVERY
        self._recorder = Recorder(device, every=self._sampling)
        self._recorder.capture_events = config.offload_timing == "cuda_graph"
        self._open_units: list[int] = []
        self._warmup: Warmup | None = Warmup(
            device,
            config,
            self._weights,
            self._reads,
            index_of=self._index,
            open_units=self._open_units,
            resident=lambda weight: weight in self._loader.plan.resident,
            fetch=lambda weight: self._table.view(weight, self._table.source(weight).to(device.torch_device)),
        )
        self._lock = threading.RLock()
        self._staged: tuple[Plan, int | None] | None = None
        self._callbacks: list[Callable[[int], None]] = []
        self._step = 0
        self._in_root = False
        self._root_thread = 0
        self._fresh_step = False
        self._from_saved_profile = False
        self._measured_kinds: set[str] = set()
        self._measuring_kind = False
        self._kind_counts: Counter[str] = Counter()
        self._copied_before = 0
        self._unforeseen_before = 0
        self._tail = ReplanTail()
        self._census = CompileCensus(lambda: self._open_units[-1] if self._open_units else None)
        self._traced: set[int] = set()
        self.layout_serial = 0
        """Changes whenever weights lie elsewhere than before: what a CUDA graph was captured under."""
        device.synchronize()  # the allocator may give memory that kernels of before still use
        self._loader = self._on_demand_loader()
        self._install()

    # ---- set-up and end

    def _on_demand_loader(self) -> Loader:
        """Every unit's weights, one unit at a time, each visit unforeseen."""
        offsets: dict[int, int] = {}
        arena = 0
        for reads in self._reads:
            end = 0
            for tensor in sorted(reads, key=lambda t: (t not in offsets, t)):
                if self._weights[tensor].resident_reason:
                    continue
                if tensor in offsets:
                    end = max(end, offsets[tensor] + align(self._weights[tensor].nbytes))
                else:
                    offsets[tensor] = end
                    end += align(self._weights[tensor].nbytes)
            arena = max(arena, end)
        resident = frozenset(i for i, weight in enumerate(self._weights) if weight.resident_reason)
        resident_bytes = sum(align(self._weights[i].nbytes) for i in resident)
        plan = Plan((), resident, offsets, arena, (), resident_bytes, resident_bytes + arena, 0)
        try:
            self._memory.apply(plan)
        except torch.OutOfMemoryError as error:
            needed = plan.weight_bytes + self.hosting.other_bytes
            raise BudgetError(
                f"{self.device.name} has no room for the largest unit and what must stay resident, {needed} bytes in "
                f"all: make units smaller (match their children with include_patterns), or free memory ({error})",
                needed,
            ) from None
        return Loader(plan, self._reads, self._memory, self._copy_stream, self._recorder)

    def _install(self) -> None:
        self._handles: list[UnitHandle] = []
        for at, unit in enumerate(self._pieces):
            handle = UnitHandle(
                unit.name,
                unit.module,
                _bind(self._enter, at),
                _bind(self._leave, at),
                _bind(self._abort, at),
                traced=_bind(self._enter_traced, at),
            )
            self._handles.append(handle)
            offload_module(unit.module, handle)
        for unit in self.units:
            guard_inside(unit.module)
        self._root = _RootHandle(self)
        offload_module(self.model, self._root)
        if self.phase == PROFILING:
            try:
                self._compile_before_profiling()
            except BaseException:
                self._census.stop()  # it would keep this manager, and its device memory, alive
                raise
        self._remove_hooks = self.hosting.install_state_dict_hooks()

    def release(self) -> None:
        """Make the model a plain one, its weights in host memory, and give all memory back. Again is free."""
        with self._lock:
            if self.phase == RELEASED:
                return
            try:
                self._take_up_edits()
            except OffloadError as error:
                logger.warning("released all the same: %s", error)
            self._quiesce()
            self.phase = RELEASED
            self.layout_serial += 1
            for unit in (*self._pieces, *self.units):
                restore_module(unit.module)
                unit.module.__dict__.pop("_compiled_call_impl", None)
            restore_module(self.model)
            self._edits.save_state()
            for remove in self._remove_hooks:
                remove()
            self._memory.clear()
            self.hosting.give_back(self.device)
            self._callbacks.clear()
            self._census.stop()
            registry.discard(self.name)
            self.device.close()

    # ---- the boundaries of units and steps

    def _enter(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_root and not self._open_units and self._loader.at_boundary:
            self._begin_step()
        if self._fresh_step:
            self._fresh_step = False
            kind = measure.kind_of(args, kwargs)
            self._kind_counts[kind] += 1
            self._loader.name_step(kind)
            if self.phase == INFERENCE and kind not in self._measured_kinds:
                self._measured_kinds.add(kind)
                self._measuring_kind = True
                self.device.reset_peak()
            if self._warmup is not None:
                self._warmup.recorder.name_step(kind)
        if torch.is_grad_enabled():
            self._refuse_gradients(unit, args, kwargs)
        if self.phase == DISCOVERY and first_compiled(self._pieces[unit].module) is not None:
            self._refuse_compiled_in_discovery(unit)
        warmup = self._warmup
        if warmup is not None:
            warmup.recorder.arrive(unit)
        self._loader.enter(unit)
        self._open_units.append(unit)
        self._census.called.add(unit)
        if warmup is not None:
            warmup.recorder.start()

    def _leave(self, unit: int) -> None:
        if self._warmup is not None:
            self._warmup.recorder.end()
            self._edits.keep_what_forward_changed(unit)
        self._open_units.pop()
        self._loader.exit(unit)

    def _abort(self, unit: int) -> None:
        if self._open_units and self._open_units[-1] == unit:
            self._open_units.pop()
        self._loader.abort(unit)

    def _enter_traced(self, unit: int) -> None:
        """The unit is about to run inside somebody's graph."""
        if self.phase == DISCOVERY:
            self._refuse_compiled_in_discovery(unit)
        self._traced.add(unit)

    def _refuse_compiled_in_discovery(self, unit: int) -> NoReturn:
        raise OffloadError(
            f"unit {self._pieces[unit].name!r}, or a module in it, was compiled during discovery, which must run "
            f"eagerly; compile after {self.iters_before_inference} calls of the model, when the phase is 'inference'"
        )

    def _refuse_gradients(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracked = [w.name for w in self._pieces[unit].weights if w.tensor.requires_grad]
        inputs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in tree_leaves((args, kwargs)))
        if tracked or inputs:
            what = f"weight {tracked[0]!r}" if tracked else "an input"
            raise OffloadError(
                f"unit {self._pieces[unit].name!r} was called with gradients enabled and {what} requires one; "
                "weights are gone from the device by the time of a backward pass: use torch.no_grad(), or "
                "model.requires_grad_(False)"
            )

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A manual region of the forward; see ``flextensor.offload_block``."""
        unit = self._blocks.get(name)
        if unit is None:
            unit = self._new_block(name)
        try:
            self._enter(unit, (), {})
            yield
            self._leave(unit)
        except BaseException:
            self._abort(unit)
            raise

    def _new_block(self, name: str) -> int:
        if self.phase != DISCOVERY or not self._selection.loose:
            known = ", ".join(repr(block) for block in self._blocks) or "none"
            why = (
                f"it was not entered during discovery (known regions: {known})"
                if self._selection.loose or self._blocks
                else "the model was offloaded by include_patterns, which leave no weights to regions"
            )
            raise OffloadError(f"offload_block({name!r}): {why}")
        unit = self._blocks[name] = len(self._pieces)
        region = Unit(name, nn.Module(), [])
        self._pieces.append(region)
        self.units.append(region)
        self._reads.append([])
        self._loader.add_unit()
        return unit

    def run_root(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step: a call of the model."""
        if self._in_root:
            if threading.get_ident() != self._root_thread:
                raise OffloadError(
                    f"the offloaded model {self.name!r} was called by two threads at once, but its weights take turns "
                    "in the same memory: call it from one thread, or hold a lock around each call"
                )
            return call(*args, **kwargs)
        self._in_root, self._root_thread = True, threading.get_ident()
        try:
            self._begin_step()
            with (self._warmup.trap if self._warmup is not None else None) or contextlib.nullcontext():
                result = call(*args, **kwargs)
        except BaseException as error:
            self._open_units.clear()
            if isinstance(error, torch.OutOfMemoryError) and self.phase == INFERENCE:
                self._give_way()
            if self._warmup is not None:
                self._warmup.drop_step()
            if not isinstance(error, Exception):
                self._loader.distrust()
            raise
        finally:
            self._in_root = False
        self._recorder.close_step(self.device.compute_stream())
        if self._warmup is not None:
            self._finish_warmup_step(self._warmup)
        elif self._tail.state == "in_progress" and not self._tail.manual:
            self._advance_tail()
        if self._measuring_kind:
            self._measuring_kind = False
            self._make_room()
        return result

    def _make_room(self) -> None:
        """A kind of step ran for the first time since the profile: when it needs more than the profile's steps did, and
        the configuration's share of the device is exceeded by it, weights give way at the next step."""
        assert self.profile is not None
        beyond = self.device.peak_bytes() - self._memory.nbytes - self.hosting.other_bytes
        if beyond <= self.profile.activation_bytes or self.plan is None:
            return
        self.profile = replace(self.profile, activation_bytes=beyond)
        if planning.fits(self.plan, self.profile, self._room(), self.config):
            return
        try:
            self.stage(self.solve_configured())
            logger.info("a new kind of step takes %d bytes beside weights; planning anew", beyond)
        except BudgetError as error:
            logger.warning("a new kind of step takes %d bytes beside weights, which cannot give way: %s", beyond, error)

    def _give_way(self) -> None:
        """A step ran out of memory: the next one has fewer weights on the device."""
        try:
            plan = planning.after_out_of_memory(self.current_profile(), self._room(), self.config)
        except (BudgetError, OffloadError):
            plan = None
        if plan is None:
            logger.warning("out of memory in a step, and no plan has fewer weights on the device")
            return
        logger.warning("out of memory in a step; weights take %d bytes from the next one on", plan.weight_bytes)
        self.stage(plan)

    def _begin_step(self) -> None:
        index, self._step = self._step, self._step + 1
        for callback in list(self._callbacks):
            callback(index)
        if self.device.is_capturing():
            graphs.note_capture(self)
        else:
            self._apply_staged()
        self._take_up_edits()
        self._fresh_step = True
        self._open_units.clear()
        if self._census.active and self.device.torch_device.type == "cuda":  # the import alone takes a second
            # Inductor's CUDA graphs, one a unit, learn here that outputs of the step before may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if self._warmup is not None:
            self._warmup.begin_step()
        self._loader.begin_step("")

    def on_step_boundary(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback(step index)`` at the start of every step, in the model's thread; returns its remover."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    # ---- discovery and profiling

    @property
    def iters_before_inference(self) -> int:
        """Calls of the model until the phase is ``inference``, counted from ``offload``."""
        if self._from_saved_profile:
            return 0
        discovery = 0 if self.config.skip_discovery else self.config.discovery_iters
        return discovery + self.config.profiling_iters

    def _finish_warmup_step(self, warmup: Warmup) -> None:
        milestone = warmup.finish_step(self._memory.nbytes + self.hosting.other_bytes)
        if not milestone:
            return
        refuse_kept_views(self.model, self._weights, self._memory.spans())
        if milestone == "discovered":
            warmup.end_discovery(self._pieces, list(self._blocks.values()), self._selection.loose)
            self.phase = PROFILING
            self._quiesce()
            self._loader = self._on_demand_loader()
            self._compile_before_profiling()
            return
        self.device.synchronize()
        if warmup.end_profiling():
            curve = self._measure_curve()
            self.profile = self._subject().profile(warmup.visits, warmup.kinds, curve, warmup.activation_bytes)
            self._save_to_storage()
            self._start_inference()

    def _subject(self) -> Subject:
        """Whose profile is made, saved and loaded."""
        return Subject(
            self._weights, self._pieces, self._reads, self.hosting.store, self.device.name, self.hosting.other_bytes
        )

    def _measure_curve(self) -> TransferCurve:
        streamable = [w for w in self._weights if not w.resident_reason]
        if not streamable:
            return TransferCurve.from_bandwidth(1e10)
        arena = self._memory.slot(0, self._loader.plan.arena_bytes)
        self._loader.distrust()  # the copies below overwrite what lies in the slots
        return measure.measure_curve(self.device, self._copy_stream, self._host_run, arena)

    def _host_run(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` of host weights in one piece where there are so many, else the longest piece."""
        streamable = [i for i, weight in enumerate(self._weights) if not weight.resident_reason]
        at = max(streamable, key=lambda i: self._weights[i].nbytes)
        return self._table.source(at)[:nbytes]

    def _start_inference(self) -> None:
        """Compile, and put the configured plan in force. When the budget has none, BudgetError is raised, units are
        still fetched on demand, and a replan can give another budget."""
        if self._compile_fn is not None:
            self._compile_units()
        elif self.config.external_compile:
            self._expect_compilation()
        self.phase, self._warmup = INFERENCE, None  # not before: units that fail to compile do so at each call
        assert self.profile is not None
        self._measured_kinds.update(kind.name for kind in self.profile.kinds)
        self._switch(self.solve_configured(), None)
        self._unforeseen_before = 0  # until now every visit was, by design

    def _expect_compilation(self) -> None:
        apply_correction()
        self._census.start()

    def _compile_before_profiling(self) -> None:
        if self._compile_fn is None and self.config.external_compile:
            self._expect_compilation()  # the caller may compile during profiling, too
        elif self._compile_fn is not None and self.config.profile_mode == "view":
            self._compile_units()

    def _compile_units(self) -> None:
        assert self._compile_fn is not None
        self._expect_compilation()
        bump_dynamo_limits_for_compiled_offload(len(self.units))
        for unit, handle in zip(self._pieces, self._handles, strict=False):  # regions have no handle
            if handle.compiled is None:
                handle.compiled = self._compile_fn(plain_twin(unit.module))

    # ---- planning

    def solve(self, budget: int | float | None, profile: Profile | None = None) -> Plan:
        """The best plan for a budget of weights on the device: bytes (int), a share of the model's weights (float), or
        None for the least memory that costs no time. Pure; any thread may call it.

        Raises BudgetError with the least bytes that work, OffloadError before there is a profile.
        """
        profile = profile or self.profile
        if profile is None:
            raise OffloadError(
                f"the model is still in {self.phase}; a plan needs a profile: run the model "
                f"{self.iters_before_inference} times first"
            )
        return planning.solve(profile, budget, self.config)

    def solve_configured(self) -> Plan:
        """The plan that the configuration asks for, within what is really free."""
        assert self.profile is not None
        return planning.solve_configured(self.profile, self._room(), self.config)

    def _room(self) -> planning.Room:
        return planning.Room(
            self._memory.nbytes, self.hosting.other_bytes, self.device.free_bytes(), self.device.total_bytes()
        )

    def check(self, plan: Plan) -> None:
        """Raise BudgetError when ``plan`` does not fit the device as it is now."""
        if self.profile is not None:
            planning.check(plan, self.profile, self._room(), self.device.name)

    def stage(self, plan: Plan, epoch: int | None = None) -> None:
        """Put ``plan`` in force at the start of the next step (at once after the callbacks, inside one of them)."""
        with self._lock:
            self._staged = (plan, epoch)

    def replan(self, budget: int | float | str | None = None, *, profile: Profile | None = None) -> Plan:
        """Solve for ``budget`` with what is measured now, and stage the plan; returns it.

        budget: as ``solve`` takes it, or as people write it: ``"6GiB"``, ``"40%"``, ``"latency"`` (None). Compute times
        are those of recent steps, the profile's where there are none; a GPU computes faster while it waits for copies,
        so after a plan that stalls, a latency plan is at its least memory when it is asked for a second time.
        profile: measurements to use instead.
        """
        if isinstance(budget, str):
            budget = None if budget.strip().lower() == "latency" else parse_budget(budget)
        if profile is None and self.profile is not None:
            profile = live_profile(self.profile, list(self._recorder.steps), self._kind_counts)
        plan = self.solve(budget, profile)
        self.check(plan)
        self.stage(plan)
        return plan

    def _apply_staged(self) -> None:
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is None:
            return
        if self.phase != INFERENCE:
            self.refusal = f"still in {self.phase}"
            logger.warning("plan not put in force: %s", self.refusal)
            return
        try:
            self._switch(*staged)
            self.refusal = ""
        except torch.OutOfMemoryError as error:
            self.refusal = f"out of memory: {error}"
            logger.warning("plan not put in force, back to the one before: %s", error)
        except BaseException:
            with self._lock:
                self._staged = self._staged or staged
            raise

    def _switch(self, plan: Plan, epoch: int | None) -> None:
        """Stop, lay memory out anew, go on. On failure the plan before is in force again."""
        before = self._loader.plan
        try:
            self._quiesce()
            self._edits.save_state()
            if self._recorder.steps:
                self.profile = self.current_profile()
                self._recorder.clear()
            self._memory.apply(plan)
            self._rebuild_loader(plan)
        except BaseException:  # also a Ctrl-C: what it left half laid out is laid out anew
            self.device.synchronize()  # copies into the new layout may be under way
            self._memory.clear()
            self._memory.apply(before)
            self._rebuild_loader(before)
            raise
        self.plan = plan
        self.epoch = self.epoch + 1 if epoch is None else epoch

    def _rebuild_loader(self, plan: Plan) -> None:
        self.layout_serial += 1
        self._loader = Loader(plan, self._reads, self._memory, self._copy_stream, self._recorder)

    def _quiesce(self) -> None:
        self._loader.close()
        self.device.synchronize()
        self._recorder.harvest(wait=True)
        self._recorder.break_sequence()
        self._recorder.forget_capture()
        self._copied_before += self._loader.counters.copied_bytes
        self._unforeseen_before += self._loader.counters.unforeseen

    # ---- compiled offload: the replan tail

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

    def _why_no_tail(self) -> str:
        armed = self.external_compile_active or (self._compile_fn is not None and self.config.profile_mode == "getter")
        if not armed:
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

    # ---- weights that change

    def _take_up_edits(self) -> None:
        edited: list[int] = []
        try:
            self._edits.look(edited, self._loader.plan.resident, self._traced)
        finally:  # what was taken up before an error is in force all the same
            if edited:
                self._reload(edited)

    def _reload(self, indexes: Sequence[int]) -> None:
        """Sources have changed: bind anew, copy resident ones again."""
        try:
            self._quiesce()
            self._memory.rebind(indexes)
        finally:
            self._rebuild_loader(self._loader.plan)
        logger.info("took up %d edited weights", len(indexes))

    @contextlib.contextmanager
    def edit_weights(self, *names: str) -> Iterator[dict[str, torch.Tensor]]:
        """Change weights: ``with manager.edit_weights("layers.0.up.weight") as tensors:`` and write to
        ``tensors[name]`` (host memory, private to this process) in place. In force from the next call on; what was
        written before an exception inside the block is, too.

        Raises OffloadError for a name that is not managed, and inside a forward.
        """
        with self._lock:
            indexes = self._editable(names)
            try:
                yield {
                    name: self.hosting.store.make_private(self._weights[at].name)
                    for name, at in zip(names, indexes, strict=True)
                }
            finally:
                self._reload(indexes)

    def restore_weights(self, *names: str) -> None:
        """Undo all edits of these weights: the store's values are in force from the next call on."""
        with self._lock:
            indexes = self._editable(names)
            for at in indexes:
                self.hosting.store.discard_private(self._weights[at].name)
            self._reload(indexes)

    def _editable(self, names: Sequence[str]) -> list[int]:
        """Indexes of the weights of these names, with everything done to them so far in the host store."""
        if self._in_root or self._open_units:
            raise OffloadError("weights cannot be edited inside a forward: edit them between two calls of the model")
        indexes = [self._edits.index_of(name) for name in names]
        self._take_up_edits()
        self.device.synchronize()
        self._edits.save_state()
        return indexes

    # ---- what is measured

    def live(self) -> LiveTiming:
        """Recent steps, medians. Any thread may ask, and waits for nobody."""
        return live_timing(
            list(self._recorder.steps)[-16:],
            list(self._recorder.step_seconds)[-32:],
            count=self._step,
            unforeseen=self._unforeseen_before + self._loader.counters.unforeseen,
            copied=self._copied_before + self._loader.counters.copied_bytes + self._memory.copied_bytes,
        )

    def expectation(self) -> Expectation | None:
        """What is expected of a step under the plan in force: the plan's own prediction at first, and after
        ``live.SETTLED_SAMPLES`` timed steps (32 steps by default) one from live compute, gaps and copies. None before
        there is a plan. Any thread may ask."""
        if self.profile is None or self.plan is None:
            return None
        return expect(self.plan, self.profile, list(self._recorder.steps), self._kind_counts)

    def sampled_steps(self) -> list[StepTimes]:
        """The timed steps under the plan in force and before, oldest first."""
        return list(self._recorder.steps)

    def measure_transfer(self, repeats: int = 3) -> TransferCurve:
        """The link now: the profile's curve scaled by what recent copies took, or, when the plan in force copies
        nothing, measured with a scratch of at most 16 MiB. Any thread may call it."""
        assert self.profile is not None
        factor = measure.live_factor(list(self._recorder.steps)[-16:], self.profile.transfer)
        if factor is None:
            scratch = self.device.allocate(min(16 << 20, max(w.nbytes for w in self._weights)))
            stream = self.device.new_stream()
            # The scratch may be memory that the model's thread has freed while kernels that read it are still queued.
            queued = self.device.new_event(timed=False)
            self.device.compute_stream().record(queued)
            stream.wait(queued)
            now = measure.measure_curve(self.device, stream, self._host_run, scratch, repeats=repeats)
            size, seconds = now.points[-1]
            factor = seconds / self.profile.transfer.seconds(size)
        return self.profile.transfer.scaled(factor)

    def current_profile(self, transfer: TransferCurve | None = None) -> Profile:
        """The profile with live compute times and step mix, and with ``transfer`` in place of its curve."""
        if self.profile is None:
            raise OffloadError(f"no profile yet: the model is still in {self.phase}")
        kinds = measure.kinds_from_live(list(self._recorder.steps), self._kind_counts, self.profile.kinds)
        return replace(self.profile, kinds=kinds, transfer=transfer or self.profile.transfer)

    @contextlib.contextmanager
    def every_step_timed(self) -> Iterator[None]:
        """Within the block every step is timed, and ``sampled_steps`` has those of the block alone."""
        self._recorder.clear()
        before, self._recorder.every = self._recorder.every, 1
        try:
            yield
            self._recorder.harvest(wait=True)
        finally:
            self._recorder.every = before

    def timing_rows(self) -> list[VisitSummary]:
        """Transfer, compute and wait of each visit over the sampled steps."""
        visits = self._loader.plan.visits
        steps = [step for step in self._recorder.steps if len(step.end) == len(visits)]
        return summarise(steps, [self._pieces[unit].name for unit in visits])

    def reset_offload_timing(self) -> None:
        """Forget the samples."""
        self._recorder.clear()

    def update_offload_timing(self) -> bool:
        """After a CUDA graph's replay: take its times (waits for it). True when there were any."""
        return self._recorder.read_replay()

    def collect_offload_timing(self) -> list[VisitSummary]:
        """The samples since ``reset_offload_timing``, one row a visit; waits for the steps under way."""
        self._recorder.harvest(wait=True)
        return self.timing_rows()

    def suspend_profiling(self) -> None:
        """Steps until ``resume_profiling`` are no samples and do not advance the life cycle."""
        if self._warmup is not None:
            self._warmup.paused = True

    pause_profiling = suspend_profiling

    def resume_profiling(self) -> None:
        """Undo ``suspend_profiling``."""
        if self._warmup is not None:
            self._warmup.paused = False

    def clear_profiling_durations(self) -> None:
        """Forget what was profiled so far; the iterations count anew."""
        if self._warmup is not None:
            self._warmup.clear()
        self._recorder.clear()

    # ---- saved profiles

    def save_profile(self, path: str | Path) -> None:
        """Write the profile as JSON. Raises OffloadError before there is one."""
        self.current_profile().save(path)

    def load_profile(self, path: str | Path) -> None:
        """Take a saved profile and go to inference at once.

        Raises ProfileMismatch when it is of another model, dtype or device.
        """
        saved = Profile.load(path)
        self._subject().check(saved, path)
        for weight, info in zip(self._weights, saved.tensors, strict=True):
            if info.keep_resident:
                weight.resident_reason = weight.resident_reason or info.reason
        self._reads = [list(unit.tensors) for unit in saved.units]
        self.profile = replace(saved, other_bytes=self.hosting.other_bytes)
        self._from_saved_profile = True
        self._recorder.clear()  # samples of another profile's visits
        self._start_inference()

    def storage_path(self) -> Path | None:
        """Where ``profile_storage_dir`` keeps this model's profile on this device."""
        if self.config.profile_storage_dir is None:
            return None
        return self._subject().storage_path(self.config.profile_storage_dir, self.name)

    def _save_to_storage(self) -> None:
        path = self.storage_path()
        if path is not None and not self.config.profile_read_only:
            self.save_profile(path)

    # ---- what a user looks at

    @property
    def plan_in_force(self) -> Plan:
        """The plan that the loader executes: ``plan``, or before there is one, that of fetching on demand."""
        return self._loader.plan

    @property
    def step_kinds(self) -> dict[str, int]:
        """Steps so far, by kind."""
        return dict(self._kind_counts)

    def offload_units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the units that stream: what to compile, one graph each."""
        streamed = {id(self._weights[tensor]) for tensor in self._loader.plan.offsets}
        reads = {id(self._weights[t]) for row in self._reads for t in row}
        return [
            (unit.name, unit.module)
            for unit in self.units
            if any(id(weight) in streamed and id(weight) in reads for weight in unit.weights)
        ]

    def resident_units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the units whose weights all stay on the device."""
        streaming = {name for name, _ in self.offload_units()}
        return [(unit.name, unit.module) for unit in self.units if unit.name not in streaming]

    def compile_report(self) -> CompileReport:
        """How many units made a graph, share one, run eagerly."""
        return self._census.report([self._is_compiled(at) for at in range(len(self._handles))])

    def _is_compiled(self, unit: int) -> bool:
        in_place = self._handles[unit].compiled is not None or is_compiled(self._pieces[unit].module)
        return in_place or unit in self._traced

    def get_gpu_memory_usage(self) -> dict[str, int]:
        """Bytes on the device: weights of the plan, other weights, all tensors now and at their peak, free, total."""
        return {
            "weights": self._memory.nbytes,
            "other_weights": self.hosting.other_bytes,
            "allocated": self.device.allocated_bytes(),
            "peak": self.device.peak_bytes(),
            "free": self.device.free_bytes(),
            "total": self.device.total_bytes(),
        }

    def report(self) -> dict[str, Any]:
        """Everything about the offload, JSON-able."""
        return build_report(self)


class _RootHandle:
    """The root's way to its manager."""

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            ops.refuse_whole_model()
        return self._manager.run_root(call, args, kwargs)


def _bind(method: Callable[..., None], unit: int) -> Callable[..., None]:
    return lambda *given: method(unit, *given)


__all__ = ["LiveTiming", "OffloadManager", "is_offloaded"]
