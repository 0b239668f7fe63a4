"""OffloadManager: the life cycle of one offloaded model, and what a user asks of it.

discovery -> profiling -> inference. Until the first plan, units are fetched on demand into one arena; the outputs are
right from the first call. A step is one call of the root; plans change only at a step's start.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from flextensor import measure, registry
from flextensor.compile import graphs
from flextensor.compile.census import CompileCensus, CompileReport
from flextensor.compile.correction import apply_correction
from flextensor.compile.limits import bump_dynamo_limits_for_compiled_offload
from flextensor.compile.tail import ReplanTail, StrategyReplanStatus
from flextensor.config import OffloadConfig
from flextensor.discovery import WarmupTrap
from flextensor.edits import REMEDY, WatchedWeight, WeightWatch
from flextensor.hosting import Hosting
from flextensor.modules import UnitHandle, guard_inside, is_offloaded, offload_module, plain_twin, restore_module
from flextensor.planner.plan import BudgetError, Plan
from flextensor.planner.search import search
from flextensor.profile import Profile, ProfileMismatch, StepKind, TensorInfo, TransferCurve, UnitInfo
from flextensor.runtime import ops
from flextensor.runtime.device import Device
from flextensor.runtime.loader import Loader
from flextensor.runtime.memory import DeviceWeights, WeightTable
from flextensor.runtime.timing import Recorder, StepTimes, VisitSummary, summarise
from flextensor.units import CHANGED_BY_FORWARD, OffloadError, Selection, Unit, Weight, pieces_of, refuse_kept_views

logger = logging.getLogger(__name__)

DISCOVERY, PROFILING, INFERENCE, RELEASED = "discovery", "profiling", "inference", "released"

SAMPLE_EVERY = 8
"""One step in so many is timed while ``offload_timing`` is off: enough for live figures, nothing on the hot path."""


@dataclass(frozen=True)
class LiveTiming:
    """Recent steps, medians. Seconds and bytes; zeros where nothing was sampled yet."""

    step_seconds: float
    compute_seconds: float
    stall_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    link_bytes_per_second: float
    steps: int
    unforeseen_visits: int
    copied_bytes_total: int


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
        self.phase = DISCOVERY
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
        self._watch = WeightWatch(self._weights)
        self._copy_stream = device.new_stream()
        self._memory = DeviceWeights(self._table, device, self._copy_stream)
        self._sampling = 1 if config.offload_timing == "eager" else SAMPLE_EVERY
        self._recorder = Recorder(device, every=self._sampling)
        self._recorder.capture_events = config.offload_timing == "cuda_graph"
        self._warmup: measure.WarmupRecorder | None = measure.WarmupRecorder(device)
        self._trap: WarmupTrap | None = None
        self._open_units: list[int] = []
        self._lock = threading.RLock()
        self._staged: tuple[Plan, int | None] | None = None
        self._callbacks: list[Callable[[int], None]] = []
        self._step = 0
        self._in_root = False
        self._fresh_step = False
        self._kind_counts: Counter[str] = Counter()
        self._warmup_steps = 0
        self._warmup_paused = False
        self._activation_bytes = 0
        self._copied_before = 0
        self._unforeseen_before = 0
        self._tail = ReplanTail()
        self._census = CompileCensus(lambda: self._open_units[-1] if self._open_units else None)
        self._traced: set[int] = set()
        self.layout_serial = 0
        """Changes whenever weights lie elsewhere than before: what a CUDA graph was captured under."""
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
                    end = max(end, offsets[tensor] + _aligned(self._weights[tensor].nbytes))
                else:
                    offsets[tensor] = end
                    end += _aligned(self._weights[tensor].nbytes)
            arena = max(arena, end)
        resident = frozenset(i for i, weight in enumerate(self._weights) if weight.resident_reason)
        resident_bytes = sum(_aligned(self._weights[i].nbytes) for i in resident)
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
                traced=_bind(self._traced.add, at),
            )
            self._handles.append(handle)
            offload_module(unit.module, handle)
        for unit in self.units:
            guard_inside(unit.module)
        self._root = _RootHandle(self)
        offload_module(self.model, self._root)
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
            self._save_state()
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
            if self._warmup is not None:
                self._warmup.name_step(kind)
        if torch.is_grad_enabled():
            self._refuse_gradients(unit, args, kwargs)
        if self._trap is not None and self._pieces[unit].module._compiled_call_impl is not None:
            raise OffloadError(
                f"unit {self._pieces[unit].name!r} was compiled during discovery, which must run eagerly; compile "
                f"after {self.iters_before_inference} calls of the model, when the phase is 'inference'"
            )
        warmup = self._warmup
        if warmup is not None:
            warmup.arrive(unit)
        self._loader.enter(unit)
        self._open_units.append(unit)
        self._census.called.add(unit)
        if warmup is not None:
            warmup.start()

    def _leave(self, unit: int) -> None:
        if self._warmup is not None:
            self._warmup.end()
            self._keep_what_forward_changed(unit)
        self._open_units.pop()
        self._loader.exit(unit)

    def _abort(self, unit: int) -> None:
        if self._open_units and self._open_units[-1] == unit:
            self._open_units.pop()
        self._loader.abort(unit)

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
            return call(*args, **kwargs)
        self._in_root = True
        try:
            self._begin_step()
            with self._trap or contextlib.nullcontext():
                result = call(*args, **kwargs)
        except BaseException as error:
            self._open_units.clear()
            if self._warmup is not None:
                self._warmup.finish_step(keep=False)
            if not isinstance(error, Exception):
                self._loader.distrust()
            raise
        finally:
            self._in_root = False
        if self._warmup is not None and not self._warmup_paused:
            self._finish_warmup_step()
        elif self._tail.state == "in_progress" and not self._tail.manual:
            self._advance_tail()
        return result

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
        if self._census.active:
            # Inductor's CUDA graphs, one a unit, learn here that outputs of the step before may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if self._warmup is not None:
            self._warmup.begin_step()
            if self.phase == DISCOVERY:
                self._set_trap()
            self.device.reset_peak()
        self._loader.begin_step("")

    def on_step_boundary(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback(step index)`` at the start of every step, in the model's thread; returns its remover."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    # ---- discovery and profiling

    @property
    def iters_before_inference(self) -> int:
        """Calls of the model until the phase is ``inference``, counted from ``offload``."""
        if self.phase == INFERENCE and self._warmup_steps == 0:
            return 0
        return self._discovery_iters + self.config.profiling_iters

    @property
    def _discovery_iters(self) -> int:
        return 0 if self.config.skip_discovery else self.config.discovery_iters

    def _set_trap(self) -> None:
        if self._trap is None and not self.config.skip_discovery:
            self._trap = WarmupTrap(
                self._index,
                lambda: self._open_units[-1] if self._open_units else None,
                lambda tensor, unit: (
                    tensor in self._loader.plan.resident or (unit is not None and tensor in self._reads[unit])
                ),
                lambda tensor: self._table.view(tensor, self._table.source(tensor).to(self.device.torch_device)),
            )

    def _keep_what_forward_changed(self, unit: int) -> None:
        """A weight that the unit's forward writes to or replaces is state: it stays on the device from now on."""
        for entry in self._watch.changed():
            weight = entry.weight
            if weight not in self._pieces[unit].weights:
                continue
            new = self._watch.replacement(entry)
            if new is not None:
                self._adopt(entry, new)
            self.hosting.store.make_private(weight.name).copy_(weight.tensor.detach())
            weight.resident_reason = weight.resident_reason or CHANGED_BY_FORWARD
            self._watch.accept(weight)

    def _adopt(self, entry: WatchedWeight, new: torch.Tensor) -> None:
        """The weight's tensor object is ``new`` from now on."""
        index = self._index.pop(id(entry.weight.tensor), None)
        self._watch.adopt(entry, new)
        if index is not None:
            self._index[id(new)] = index

    def _finish_warmup_step(self) -> None:
        assert self._warmup is not None
        self._warmup_steps += 1
        profiling = self._warmup_steps > self._discovery_iters
        self._warmup.finish_step(keep=profiling)
        beyond = self.device.peak_bytes() - self._memory.nbytes - self.hosting.other_bytes
        self._activation_bytes = max(self._activation_bytes, beyond)
        if self.phase == DISCOVERY and self._warmup_steps >= self._discovery_iters:
            self._end_discovery()
        if profiling and self._warmup_steps >= self._discovery_iters + self.config.profiling_iters:
            self._end_profiling()

    def _end_discovery(self) -> None:
        refuse_kept_views(self.model, self._weights, self._memory.spans())
        trap, self._trap = self._trap, None
        if trap is not None:
            for unit, tensors in trap.reads.items():
                if unit is None:
                    for tensor in tensors:
                        weight = self._weights[tensor]
                        weight.resident_reason = weight.resident_reason or "read outside every unit"
                else:
                    self._reads[unit] = list(dict.fromkeys([*self._reads[unit], *tensors]))
        self._settle_blocks()
        self.phase = PROFILING
        self._quiesce()
        self._loader = self._on_demand_loader()
        if self._compile_fn is not None and self.config.profile_mode == "view":
            self._compile_units()

    def _settle_blocks(self) -> None:
        """Manual regions own what they were seen to read; loose weights of no region stay resident."""
        if not self._selection.loose:
            return
        if not self._blocks:
            raise OffloadError(
                "include_patterns is empty and the forward entered no offload_block() region: nothing is offloaded"
            )
        for unit in self._blocks.values():
            self._pieces[unit].weights = [self._weights[tensor] for tensor in self._reads[unit]]
        read = {tensor for row in self._reads for tensor in row}
        for at, weight in enumerate(self._weights):
            if at not in read:
                weight.resident_reason = weight.resident_reason or "read in no region"

    def _end_profiling(self) -> None:
        assert self._warmup is not None
        refuse_kept_views(self.model, self._weights, self._memory.spans())
        self.device.synchronize()
        steps = [step for step in self._warmup.steps if step.visits]
        if not steps:
            logger.warning("no unit ran during profiling; still fetching on demand")
            return
        for step in steps:
            for visit in step.visits:
                if visit.nested:
                    for tensor in self._reads[visit.unit]:
                        weight = self._weights[tensor]
                        weight.resident_reason = weight.resident_reason or "its visit lies inside another unit's"
        visits = Counter(step.units() for step in steps).most_common(1)[0][0]
        kinds = measure.kinds_from_warmup(steps, visits)
        self.profile = self._make_profile(visits, kinds, self._measure_curve())
        self._warmup = None
        self._save_to_storage()
        self._start_inference()

    def _make_profile(self, visits: tuple[int, ...], kinds: tuple[StepKind, ...], curve: TransferCurve) -> Profile:
        stored = self.hosting.store.layout.by_name
        return Profile(
            tensors=tuple(
                TensorInfo(
                    weight.name,
                    weight.nbytes,
                    stored[weight.name].offset,
                    keep_resident=bool(weight.resident_reason),
                    reason=weight.resident_reason,
                )
                for weight in self._weights
            ),
            units=tuple(UnitInfo(u.name, tuple(r)) for u, r in zip(self._pieces, self._reads, strict=True)),
            visits=visits,
            kinds=kinds,
            transfer=curve,
            other_bytes=self.hosting.other_bytes,
            activation_bytes=max(self._activation_bytes, 0),
            device=self.device.name,
            meta={"dtypes": sorted({str(weight.tensor.dtype) for weight in self._weights})},
        )

    def _measure_curve(self) -> TransferCurve:
        streamable = [w for w in self._weights if not w.resident_reason]
        if not streamable:
            return TransferCurve.from_bandwidth(1e10)
        arena = self._memory.slot(0, self._loader.plan.arena_bytes)
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
            apply_correction()
            self._census.start()
        self.phase = INFERENCE
        self._switch(self.solve_configured(), None)
        self._unforeseen_before = 0  # until now every visit was, by design

    def _compile_units(self) -> None:
        assert self._compile_fn is not None
        apply_correction()
        bump_dynamo_limits_for_compiled_offload(len(self.units))
        self._census.start()
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
        other = profile.other_bytes
        nbytes: int | None = None
        if budget is not None:
            whole = sum(_aligned(tensor.nbytes) for tensor in profile.tensors) + other
            nbytes = int(budget * whole) if isinstance(budget, float) else budget
        try:
            return search(
                profile,
                budget_bytes=None if nbytes is None else nbytes - other,
                num_blocks=self.config.num_blocks,
                min_blocks=self.config.min_blocks,
                transfer_budget_scale=self.config.transfer_budget_scale,
            )
        except BudgetError as error:
            needed = error.needed + other
            raise BudgetError(
                f"a budget of {nbytes} bytes for weights does not work: at least {needed} bytes are needed "
                f"({other} of them for weights of no unit)",
                needed,
            ) from None

    def solve_configured(self) -> Plan:
        """The plan that the configuration asks for, within what is really free."""
        assert self.profile is not None
        limit = self._limit()
        config = self.config
        if config.budget_bytes is not None:
            return self.solve(min(config.budget_bytes, limit))
        if config.max_gpu_mem_fraction is not None:
            asked = int(config.max_gpu_mem_fraction * self.device.total_bytes()) - self.profile.activation_bytes
            return self.solve(max(min(asked, limit), 0))
        plan = self.solve(None)
        if plan.weight_bytes + self.profile.other_bytes > limit:
            plan = self.solve(limit)
        return plan

    def _limit(self) -> int:
        """Bytes that weights may take: what they take now, and what is free beyond the activations' peak."""
        assert self.profile is not None
        now = self._memory.nbytes + self.hosting.other_bytes
        spare = self.device.free_bytes() - self.profile.activation_bytes
        return now + max(spare, 0)

    def check(self, plan: Plan) -> None:
        """Raise BudgetError when ``plan`` does not fit the device as it is now."""
        other = self.hosting.other_bytes
        if self.profile is not None and plan.weight_bytes + other > self._limit():
            raise BudgetError(
                f"the plan takes {plan.weight_bytes + other} bytes for weights; {self._limit()} are available on "
                f"{self.device.name} beside activations of {self.profile.activation_bytes} bytes",
                plan.weight_bytes + other,
            )

    def stage(self, plan: Plan, epoch: int | None = None) -> None:
        """Put ``plan`` in force at the start of the next step (at once after the callbacks, inside one of them)."""
        with self._lock:
            self._staged = (plan, epoch)

    def replan(self, budget: int | float | None = None, *, profile: Profile | None = None) -> Plan:
        """Solve for ``budget`` with what is measured now, and stage the plan; returns it."""
        plan = self.solve(budget, profile or self.current_profile())
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
            self._save_state()
            if self._recorder.steps:
                self.profile = self.current_profile()
                self._recorder.clear()
            self._memory.apply(plan)
            self._rebuild_loader(plan)
        except BaseException:  # also a Ctrl-C: what it left half laid out is laid out anew
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
            self.profile = self.current_profile()
            self._switch(self.solve_configured(), None)
        except BaseException as error:
            self._tail.broken(f"{type(error).__name__}: {error}")
            raise
        self._tail.applied_plan()

    # ---- weights that change

    def _take_up_edits(self) -> None:
        edited: list[int] = []
        try:
            self._look_at_changes(edited)
        finally:  # what was taken up before an error is in force all the same
            if edited:
                self._reload(iter(edited))

    def _look_at_changes(self, edited: list[int]) -> None:
        for entry in self._watch.changed():
            weight = entry.weight
            new = self._watch.replacement(entry)
            if new is not None:
                self._adopt(entry, new)
                if weight.resident_reason == CHANGED_BY_FORWARD and new.device == self.device.torch_device:
                    continue
                self.hosting.store.make_private(weight.name).copy_(new.detach())
            elif weight.resident_reason == CHANGED_BY_FORWARD or self._was_traced(weight):
                self._watch.accept(weight)
                continue
            elif self._weight_index(weight.name) in self._loader.plan.resident:
                self.hosting.store.make_private(weight.name).copy_(weight.tensor.detach())
                self._watch.accept(weight)
            else:
                self._watch.accept(weight)
                edited.append(self._weight_index(weight.name))  # the slot it went to may hold another weight's bytes
                raise OffloadError(
                    f"weight {weight.name!r} is streamed and was written in place; the change went to a slot and is "
                    f"lost: {REMEDY}"
                )
            edited.append(self._weight_index(weight.name))

    def _was_traced(self, weight: Weight) -> bool:
        """The boundary ops say that they write to the weights of a traced unit; they do not."""
        return any(weight in self._pieces[unit].weights for unit in self._traced)

    def _reload(self, indexes: Iterator[int]) -> None:
        """Sources have changed: bind anew, copy resident ones again."""
        which = list(indexes)
        try:
            self._quiesce()
            self._memory.rebind(which)
        finally:
            self._rebuild_loader(self._loader.plan)
        logger.info("took up %d edited weights", len(which))

    def _weight_index(self, name: str) -> int:
        for at, weight in enumerate(self._weights):
            if name in weight.names:
                return at
        raise OffloadError(f"no managed weight named {name!r}")

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
                self._reload(iter(indexes))

    def _editable(self, names: Sequence[str]) -> list[int]:
        """Indexes of the weights of these names, with everything done to them so far in the host store."""
        if self._in_root or self._open_units:
            raise OffloadError("weights cannot be edited inside a forward: edit them between two calls of the model")
        indexes = [self._weight_index(name) for name in names]
        self._take_up_edits()
        self.device.synchronize()
        self._save_state()
        return indexes

    def _save_state(self) -> None:
        """What the forward itself changes has its truth on the device; the host copy follows."""
        for weight in self._weights:
            if weight.resident_reason == CHANGED_BY_FORWARD:
                self.hosting.store.make_private(weight.name).copy_(weight.tensor.detach())

    def restore_weights(self, *names: str) -> None:
        """Undo all edits of these weights: the store's values are in force from the next call on."""
        with self._lock:
            indexes = self._editable(names)
            for at in indexes:
                self.hosting.store.discard_private(self._weights[at].name)
            self._reload(iter(indexes))

    # ---- what is measured

    def live(self) -> LiveTiming:
        """Recent steps, medians."""
        with self._lock:
            steps = list(self._recorder.steps)[-16:]
            durations = list(self._recorder.step_seconds)[-32:]
        spans = [[span for span in step.copies] for step in steps]
        seconds = [sum(s.end - s.start for s in some) for some in spans]
        nbytes = [sum(s.nbytes for s in some) for some in spans]
        total = sum(seconds)
        return LiveTiming(
            step_seconds=statistics.median(durations) if durations else 0.0,
            compute_seconds=_median([sum(step.compute) for step in steps]),
            stall_seconds=_median([sum(step.wait) for step in steps]),
            transfer_seconds=_median(seconds),
            transfer_bytes=int(_median([float(n) for n in nbytes])),
            link_bytes_per_second=sum(nbytes) / total if total > 0 else 0.0,
            steps=self._step,
            unforeseen_visits=self._unforeseen_before + self._loader.counters.unforeseen,
            copied_bytes_total=self._copied_before + self._loader.counters.copied_bytes + self._memory.copied_bytes,
        )

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
        self._warmup_paused = True

    pause_profiling = suspend_profiling

    def resume_profiling(self) -> None:
        """Undo ``suspend_profiling``."""
        self._warmup_paused = False

    def clear_profiling_durations(self) -> None:
        """Forget what was profiled so far; the iterations count anew."""
        if self._warmup is not None:
            self._warmup.steps.clear()
            self._warmup_steps = min(self._warmup_steps, self._discovery_iters)
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
        mine = self._make_profile(saved.visits, saved.kinds, saved.transfer)
        if saved.layout_fingerprint != mine.layout_fingerprint:
            raise ProfileMismatch(f"{path}: its units and weights are not this model's; profile again")
        for what, theirs, ours in (
            ("device", saved.device, self.device.name),
            ("dtypes", saved.meta.get("dtypes"), mine.meta["dtypes"]),
        ):
            if theirs != ours:
                raise ProfileMismatch(f"{path}: profiled with {what} {theirs}, this model has {ours}; profile again")
        for weight, info in zip(self._weights, saved.tensors, strict=True):
            if info.keep_resident:
                weight.resident_reason = weight.resident_reason or info.reason
        self._reads = [list(unit.tensors) for unit in saved.units]
        self.profile = replace(saved, other_bytes=self.hosting.other_bytes)
        self._warmup, self._trap = None, None
        self._start_inference()

    def storage_path(self) -> Path | None:
        """Where ``profile_storage_dir`` keeps this model's profile on this device."""
        if self.config.profile_storage_dir is None:
            return None
        mine = self._make_profile((), (), TransferCurve(()))
        device = "".join(c if c.isalnum() else "-" for c in self.device.name)
        return Path(self.config.profile_storage_dir) / f"{self.name}-{device}-{mine.layout_fingerprint}.json"

    def _save_to_storage(self) -> None:
        path = self.storage_path()
        if path is not None and not self.config.profile_read_only:
            self.save_profile(path)

    # ---- what a user looks at

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
        return self._handles[unit].compiled is not None or self._pieces[unit].module._compiled_call_impl is not None

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
        plan = self._loader.plan
        resident = [(w, w.resident_reason) for w in (*self._weights, *self.hosting.unstored) if w.resident_reason]
        return {
            "name": self.name,
            "phase": self.phase,
            "epoch": self.epoch,
            "device": self.device.name,
            "units": len(self.units),
            "offload_units": len(self.offload_units()),
            "visits": len(plan.visits),
            "weights_bytes": sum(w.nbytes for w in self._weights) + self.hosting.other_bytes,
            "resident_bytes": plan.resident_bytes + self.hosting.other_bytes,
            "arena_bytes": plan.arena_bytes,
            "device_weight_bytes": self._memory.nbytes + self.hosting.other_bytes,
            "streamed_bytes_a_step": plan.streamed_bytes,
            "budget_bytes": None if plan.budget_bytes is None else plan.budget_bytes + self.hosting.other_bytes,
            "unmatched": {w.name: w.nbytes for w in self._selection.unmatched},
            "kept_resident": {w.name: reason for w, reason in resident if w.nbytes >= self.config.resident_below_bytes},
            "prediction": None if plan.prediction is None else _plain(asdict(plan.prediction)),
            "live": asdict(self.live()),
            "step_kinds": dict(self._kind_counts),
            "memory": self.get_gpu_memory_usage(),
            "store": _plain(asdict(self.hosting.store.report())),
            "compile": asdict(self.compile_report()),
            "refusal": self.refusal,
        }


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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _plain(value: Any) -> Any:
    """``value`` with what JSON does not know made text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


__all__ = ["LiveTiming", "OffloadManager", "is_offloaded"]
