"""OffloadManager: the life cycle of one offloaded model, and what a user asks of it.

discovery -> profiling -> inference. Until the first plan, units are fetched on demand into one arena; the outputs are
right from the first call. A step is one call of the root; plans change only at a step's start.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from flextensor import measure, registry
from flextensor.compile import graphs
from flextensor.compile.census import CompileCensus
from flextensor.compile.detect import first_compiled
from flextensor.compile.tail import ReplanTail
from flextensor.compiling import CompiledReplans
from flextensor.config import OffloadConfig
from flextensor.diagnostics import Diagnostics
from flextensor.edits import Editing, WeightEdits
from flextensor.execution import Execution
from flextensor.gradients import refuse_gradients
from flextensor.hosting import Hosting
from flextensor.live import LiveTiming
from flextensor.modules import UnitHandle, guard_inside, is_offloaded, offload_module, restore_module
from flextensor.phases import DISCOVERY, INFERENCE, PROFILING, RELEASED
from flextensor.planner.plan import Plan
from flextensor.planning import PROVISIONAL_EFFORT
from flextensor.profile import Profile, TransferCurve
from flextensor.regions import Regions
from flextensor.reporting import Reported
from flextensor.runtime import ops
from flextensor.runtime.device import Device
from flextensor.runtime.timing import Recorder
from flextensor.runtime.turns import turn
from flextensor.units import OffloadError, Selection, Unit, pieces_of, refuse_kept_views
from flextensor.warmup import Warmup

logger = logging.getLogger(__name__)

SAMPLE_EVERY = 8
"""One step in so many is timed while ``offload_timing`` is off: enough for live figures, nothing on the hot path."""


class OffloadManager(CompiledReplans, Regions, Editing, Reported):
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
        self.refused_epoch: int | None = None
        """The epoch that plan was staged for."""
        self.own_changes = 0
        """Plans that nobody asked for, made where memory did not suffice; the last one's reason, and itself:"""
        self.own_reason = ""
        self.own_plan: Plan | None = None
        self._selection = selection
        self._compile_fn = compile_fn
        self._weights = hosting.managed
        self._index = {id(weight.tensor): at for at, weight in enumerate(self._weights)}
        position = {id(weight): at for at, weight in enumerate(self._weights)}
        self._pieces = pieces_of(self.units) if config.stream_granularity == "piece" else list(self.units)
        """What is entered and left: the units or their leaf modules, and manual regions."""
        self._blocks: dict[str, int] = {}
        self._reads: list[list[int]] = [[position[id(w)] for w in piece.weights] for piece in self._pieces]
        self._diagnostics = Diagnostics() if config.enable_diagnostics else None
        self._sampling = 1 if config.offload_timing == "eager" or config.enable_diagnostics else SAMPLE_EVERY
        self._recorder = Recorder(device, every=self._sampling)
        self._recorder.capture_events = config.offload_timing == "cuda_graph"
        self._execution = Execution(
            name,
            self._weights,
            self._reads,
            hosting.store,
            device,
            self._recorder,
            other_bytes=hosting.other_bytes,
            streams=hosting.streams,
        )
        self._edits = WeightEdits(self._weights, self._pieces, hosting.store, device.torch_device, self._index)
        self._unloaded: set[int] = set()
        self._open_units: list[int] = []
        self._warmup: Warmup | None = Warmup(
            device,
            config,
            self._weights,
            self._reads,
            index_of=self._index,
            open_units=self._open_units,
            resident=lambda weight: weight in self._execution.loader.plan.resident,
            fetch=self._fetch,
        )
        self._lock = threading.RLock()
        self._staging = threading.Lock()
        """Of what is staged alone: it is never held while somebody else's code runs."""
        self._staged: tuple[Plan, int | None] | None = None
        self._callbacks: list[Callable[[int], None]] = []
        self._step = 0
        self._in_root = False
        self._root_thread = 0
        self._fresh_step = False
        self._from_saved_profile = False
        self._measured_kinds: set[str] = set()
        self._measuring_kind = False
        self._settled_activations = 0
        """Bytes beside weights that steps take which keep nothing; 0: as the profile's did."""
        self._last_activations = 0
        """Bytes beside weights when that was last looked at; 0: not yet."""
        self._kind_counts: Counter[str] = Counter()
        self._tail = ReplanTail()
        self._census = CompileCensus(lambda: self._open_units[-1] if self._open_units else None)
        self._traced: set[int] = set()
        self._install()

    # ---- set-up and end

    def _fetch(self, weight: int) -> torch.Tensor:
        """A copy of a weight on the device."""
        table = self._execution.table
        return table.view(weight, table.source(weight).to(self.device.torch_device))

    def _install(self) -> None:
        self._handles: list[UnitHandle] = []
        for at, unit in enumerate(self._pieces):
            handle = UnitHandle(
                unit.name,
                unit.module,
                partial(self._enter, at),
                partial(self._leave, at),
                partial(self._abort, at),
                traced=partial(self._enter_traced, at),
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

    def release(self, *, keep_weights: bool = True) -> None:
        """Make the model a plain one, its weights in host memory, and give all memory back. Again is free.

        keep_weights: False leaves the model's streamed weights empty, for a process that is done with it: from a shared
        store each process would otherwise make a copy of its own.
        """
        with self._lock:
            if self.phase == RELEASED:
                return
            try:
                self._take_up_edits()
            except OffloadError as error:
                logger.warning("released all the same: %s", error)
            self._execution.quiesce()
            self.phase = RELEASED
            for unit in (*self._pieces, *self.units):
                restore_module(unit.module)
                unit.module.__dict__.pop("_compiled_call_impl", None)
            restore_module(self.model)
            self._edits.save_state()
            for remove in self._remove_hooks:
                remove()
            self._execution.clear()
            self.hosting.give_back(self.device, keep_weights=keep_weights)
            self._callbacks.clear()
            self._census.stop()
            registry.discard(self.name)
            self.device.close()

    # ---- the boundaries of units and steps

    def _enter(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_root and not self._open_units and self._execution.loader.at_boundary:
            self._begin_step()
        if self._fresh_step:
            self._fresh_step = False
            kind = measure.kind_of(args, kwargs)
            self._kind_counts[kind] += 1
            self._execution.loader.name_step(kind)
            if self.phase == INFERENCE and kind not in self._measured_kinds:
                self._measured_kinds.add(kind)
                self._measuring_kind = True
                self.device.reset_peak()
            if self._warmup is not None:
                self._warmup.recorder.name_step(kind)
        if torch.is_grad_enabled():
            refuse_gradients(self._pieces[unit], args, kwargs)
        if self.phase == DISCOVERY and first_compiled(self._pieces[unit].module) is not None:
            self._refuse_compiled_in_discovery(unit)
        warmup = self._warmup
        if warmup is not None:
            warmup.recorder.arrive(unit)
        self._execution.loader.enter(unit)
        self._open_units.append(unit)
        self._census.called.add(unit)
        if warmup is not None:
            warmup.recorder.start()

    def _leave(self, unit: int) -> None:
        if self._warmup is not None:
            self._warmup.recorder.end()
            self._edits.keep_what_forward_changed(unit)
        self._open_units.pop()
        self._execution.loader.exit(unit)

    def _abort(self, unit: int) -> None:
        if self._open_units and self._open_units[-1] == unit:
            self._open_units.pop()
        self._execution.loader.abort(unit)

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

    def run_root(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step: a call of the model."""
        if self._in_root:
            if threading.get_ident() != self._root_thread:
                raise OffloadError(
                    f"the offloaded model {self.name!r} was called by two threads at once, but its weights take turns "
                    "in the same memory: call it from one thread, or hold a lock around each call"
                )
            return call(*args, **kwargs)
        try:
            try:
                self._in_root, self._root_thread = True, threading.get_ident()
                result = self._run_step(call, args, kwargs)
            finally:
                self._in_root = False
        finally:
            self._in_root = False  # a Ctrl-C may have come just before it was said above
        self._recorder.close_step(self.device.compute_stream())
        if self._warmup is not None:
            self._finish_warmup_step(self._warmup)
        elif self._tail.state == "in_progress" and not self._tail.manual and not self.device.is_capturing():
            self._advance_tail()  # what is captured does not run: it measures nothing, and nothing may be waited for
        if self._measuring_kind:
            self._measuring_kind = False
            self._make_room()
        elif self._share_is_limited and self._step % SAMPLE_EVERY == 0 and not self.device.is_capturing():
            self._make_room_for_growth()
        if self._diagnostics is not None and not self.device.is_capturing():
            self._diagnostics.step_done(self)
        return result

    def _run_step(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._begin_step()
            with (self._warmup.trap if self._warmup is not None else None) or contextlib.nullcontext():
                return call(*args, **kwargs)
        except BaseException as error:
            self._open_units.clear()
            if isinstance(error, torch.OutOfMemoryError) and self.phase == INFERENCE:
                self._give_way()
            if self._warmup is not None:
                self._warmup.drop_step()
            if not isinstance(error, Exception):
                self._execution.loader.distrust()
            raise

    def _begin_step(self) -> None:
        index, self._step = self._step, self._step + 1
        for callback in list(self._callbacks):
            callback(index)
        if self.device.is_capturing():
            if self._execution.homeless:
                raise OffloadError("no plan is in force for want of memory: call the model once, then capture")
            self._refuse_edits_in_a_capture()
            graphs.note_capture(self._execution)
        else:
            self._apply_staged()
            if self._execution.homeless:
                self._now_in_force(self._execution.take_place())
            self._take_up_edits()
        self._fresh_step = True
        self._open_units.clear()
        self._notice_compilation()
        if self._census.active and self.device.torch_device.type == "cuda":  # the import alone takes a second
            # Inductor's CUDA graphs, one a unit, learn here that outputs of the step before may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if self._warmup is not None:
            self._warmup.begin_step()
        self._execution.loader.begin_step("")

    def on_step_boundary(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call ``callback(step index)`` at the start of every step, in the model's thread; returns its remover."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    # ---- discovery and profiling

    def _finish_warmup_step(self, warmup: Warmup) -> None:
        milestone = warmup.finish_step(self._execution.memory.nbytes + self.hosting.other_bytes)
        if not milestone:
            return
        refuse_kept_views(self.model, self._weights, self._execution.memory.spans())
        if milestone == "discovered":
            warmup.end_discovery(self._pieces, list(self._blocks.values()), self._selection.loose)
            self.phase = PROFILING
            self._execution.quiesce()
            self._execution.fetch_on_demand()
            self._compile_before_profiling()
            return
        self.device.synchronize()
        if warmup.end_profiling():
            curve = self._measure_curve()
            self.profile = self._subject().profile(warmup.visits, warmup.kinds, curve, warmup.activation_bytes)
            self._save_to_storage()
            self._start_inference()

    def _measure_curve(self) -> TransferCurve:
        streamable = [w for w in self._weights if not w.resident_reason]
        if not streamable:
            return TransferCurve.from_bandwidth(1e10)
        arena = self._execution.memory.slot(0, self._execution.loader.plan.arena_bytes)
        self._execution.loader.distrust()  # the copies below overwrite what lies in the slots
        with turn(self.device.shared_link):
            return measure.measure_curve(self.device, self._execution.copy_stream, self._host_run, arena)

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
        self._switch_to_what_fits(self.solve_configured(effort=self._first_effort()))
        self._execution.unforeseen_before = 0  # until now every visit was, by design

    def _first_effort(self) -> float:
        """How hard to look for the first plan: one of eager times lasts until the replan with compiled ones."""
        return PROVISIONAL_EFFORT if self.replan_expected and not self._from_saved_profile else 1.0

    # ---- saved profiles

    def load_profile(self, path: str | Path) -> None:
        """Take a saved profile and go to inference at once.

        Raises ProfileMismatch when it is of another model, dtype or device.
        """
        saved = Profile.load(path)
        self._subject().check(saved, path)
        for weight, info in zip(self._weights, saved.tensors, strict=True):
            if info.keep_resident:
                weight.resident_reason = weight.resident_reason or info.reason
        self._reads[:] = [list(unit.tensors) for unit in saved.units]
        self.profile = replace(saved, other_bytes=self.hosting.other_bytes)
        self._from_saved_profile = True
        self._recorder.clear()  # samples of another profile's visits
        self._start_inference()


class _RootHandle:
    """The root's way to its manager."""

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            ops.refuse_whole_model()
        return self._manager.run_root(call, args, kwargs)


__all__ = ["LiveTiming", "OffloadManager", "is_offloaded"]
