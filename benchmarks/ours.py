"""Our engine over a sweep of budgets, in one process: set up once, a new plan a budget, the resident twin in between.

Peaks are measured before the twin exists. Then each budget's steps run between two blocks of the twin's, all of it
``repeats`` times, so that a clock that moves moves both; what is predicted of them comes from the steps before.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flextensor
from benchmarks.gpu_clock import sm_clock
from benchmarks.model import Shape, build, make_input, weight_bytes
from benchmarks.rows import GIB, Row, median, target_words
from benchmarks.stopwatch import back_to_back, link_bandwidth, steps_for, sustain, synchronize, warm_up_gpu
from flextensor.config import parse_budget
from flextensor.live import SETTLED_SAMPLES
from flextensor.planner.plan import BudgetError, Plan
from flextensor.planner.simulate import predict
from flextensor.runtime.device import Device
from flextensor.runtime.loader import Loader

logger = logging.getLogger(__name__)

PEAK_MARGIN = 1 << 20
"""Left free under a peak target: the allocator rounds each tensor up."""
BLOCK_SECONDS = 0.5
SETTLE_SECONDS = 3.0
"""Of steps before a latency plan is asked for."""
BOUND_BY_LINK = 1.03
"""A plan whose copies take so many times the resident model's step is timed as it is; clocks matter to all others."""
CLOCK_REPEATS = 5
"""Timed blocks at least of each plan that clocks matter to, in turns with the twin's and the other such plans': at its
power limit a GPU's clocks move by 1% and more within seconds."""
HEATING_SECONDS = 10.0
"""Of the twin's steps before the first timed block: a GPU that was idle has higher clocks for about so long."""
SUSTAINED_SECONDS = 0.3
"""Of steps before another plan is asked for: one comes in the midst of a job's work, not after a pause."""
HOST_STEPS = 5
SAMPLED_STEPS = SETTLED_SAMPLES
"""Timed visit by visit after each block, to say where its time goes."""


@dataclass(frozen=True)
class Settings:
    """How one process measures. ``seconds``: of one timed block."""

    shape: Shape
    device: str
    repeats: int = 2
    seconds: float = BLOCK_SECONDS
    sustained: float = 2 * BLOCK_SECONDS
    """Seconds of the same work before each timed block."""
    trace_directory: Path | None = None
    trace_target: str = "6"
    resident_below_bytes: int = 1 << 20
    host_link_bytes_per_second: float = 4e9


def parse_target(target: str, total: int, activations: int) -> int | None:
    """Bytes of weights on the device that ``target`` (see ``rows.Row``) allows; None: latency mode."""
    if target == "latency":
        return None
    if target.startswith("peak:"):
        return max(int(float(target.removeprefix("peak:")) * GIB) - activations - PEAK_MARGIN, 0)
    try:
        return int(float(target) * GIB)
    except ValueError:
        budget = parse_budget(target)
        return int(budget * total) if isinstance(budget, float) else budget


class TimedLoader:
    """A loader, and the host ``seconds`` in its ``enter`` and ``exit`` so far."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def enter(self, unit: int) -> None:
        """The loader's."""
        start = time.perf_counter()
        self._loader.enter(unit)
        self.seconds += time.perf_counter() - start

    def exit(self, unit: int) -> None:
        """The loader's."""
        start = time.perf_counter()
        self._loader.exit(unit)
        self.seconds += time.perf_counter() - start


class Sweep:
    """One offloaded model, one token count, many plans."""

    def __init__(self, name: str, tokens: int, settings: Settings) -> None:
        self.name, self.tokens, self.settings = name, tokens, settings
        self.compiled = name.endswith("-compiled")
        granularity = "piece" if "piece" in name else "unit"
        config = flextensor.OffloadConfig(
            include_patterns=("layers.*",),
            gpu_device=settings.device,
            stream_granularity=granularity,
            resident_below_bytes=settings.resident_below_bytes,
            host_link_bytes_per_second=settings.host_link_bytes_per_second,
        )
        # What the device is, before there is a model: its context is no part of the set-up.
        self.torch_device = torch.device("cpu" if settings.device == "host" else "cuda")
        warm_up_gpu(self.torch_device)
        self.x = make_input(settings.shape, tokens, self.torch_device)
        model = build(settings.shape)
        self.total = weight_bytes(model)
        synchronize(self.torch_device)
        start = time.perf_counter()
        self.model = flextensor.offload(model, config, compile_block if self.compiled else None, name=name)
        self.manager = flextensor.get_offload_manager(name)
        offloaded = time.perf_counter()
        for _ in range(self.manager.iters_before_inference + 1):
            self.model(self.x)
        synchronize(self.torch_device)
        self.setup_seconds = time.perf_counter() - start
        self._log_setup(offloaded - start)
        if self.manager.phase != "inference":
            raise RuntimeError(f"no plan after the set-up's steps; the engine is still in {self.manager.phase}")
        self._prepare_to_time()

    def _prepare_to_time(self) -> None:
        """The model is planned: what the measurements need of it, and what they will find."""
        self.device: Device = self.manager.device
        self.activations = self._activations()
        self._twin: nn.Module | None = None
        self._expected: torch.Tensor | None = None
        self._clock = sm_clock(self.torch_device)
        self._last_clock: float | None = None
        self.link = 0.0

    def _log_setup(self, offload_seconds: float) -> None:
        store = self.manager.hosting.store.report()
        logger.info(
            "%s: set-up %.2f s: host store filled in %.2f s, pinned %.2f s after that, all of offload() %.2f s, first "
            "steps and plan %.2f s",
            self.name,
            self.setup_seconds,
            store.fill_seconds,
            store.pin.waited_seconds if store.pin is not None else 0.0,
            offload_seconds,
            self.setup_seconds - offload_seconds,
        )

    def step(self) -> torch.Tensor:
        """One forward."""
        y: torch.Tensor = self.model(self.x)
        return y

    def resident_step(self) -> torch.Tensor:
        """One forward of the twin."""
        assert self._twin is not None
        y: torch.Tensor = self._twin(self.x)
        return y

    # ---- one plan a target

    def _activations(self) -> int:
        """Bytes of the whole forward's peak that are no weights."""
        peak, weights = self._peak()
        return max(peak - weights, 0)

    def _peak(self) -> tuple[int, int]:
        self.step()
        synchronize(self.torch_device)
        self.device.reset_peak()
        self.step()
        self.step()
        synchronize(self.torch_device)
        usage = self.manager.get_gpu_memory_usage()
        return self.device.peak_bytes(), usage["weights"] + usage["other_weights"]

    def plan_for(self, target: str) -> tuple[Plan, int | None, float]:
        """The plan, its budget in bytes and the seconds it took to find it. Raises BudgetError."""
        budget = parse_target(target, self.total, self.activations)
        if budget is None:
            self._settle_clocks()
        else:
            self._load(SUSTAINED_SECONDS)
        start = time.perf_counter()
        plan = self.manager.solve(budget, self.manager.current_profile())
        return plan, budget, time.perf_counter() - start

    def _load(self, seconds: float) -> None:
        """Steps back to back under the plan in force for about so long; what is measured next is what the last of them
        took."""
        sustain(self.step, seconds if self.torch_device.type == "cuda" else seconds / 20, self.torch_device)
        with self.manager.every_step_timed():
            for _ in range(SAMPLED_STEPS):
                self.step()

    def _settle_clocks(self) -> None:
        """Steps under a plan that does not stall, so that compute is known as it is under sustained load: while the GPU
        waits for copies its clocks are higher, and a latency plan from such times keeps more resident than it must."""
        for _ in range(2):
            self.put_in_force(self.manager.solve(None, self.manager.current_profile()))
            self._load(SETTLE_SECONDS)

    def put_in_force(self, plan: Plan) -> float:
        """Seconds until the first step under ``plan`` is done."""
        synchronize(self.torch_device)
        start = time.perf_counter()
        self.manager.check(plan)
        self.manager.stage(plan)
        self.step()
        synchronize(self.torch_device)
        if self.manager.plan is not plan:
            raise RuntimeError(f"the plan was not put in force: {self.manager.refusal}")
        return time.perf_counter() - start

    def survey(self, target: str) -> tuple[Row, Plan | None]:
        """A plan, its peak, its host time: everything but the step's time."""
        row = Row(self.name, self.tokens, target, version="this tree", total_weight_bytes=self.total)
        try:
            plan, budget, solve_seconds = self.plan_for(target)
        except BudgetError as error:
            return dataclasses.replace(row, status=f"no plan: {error}"), None
        seconds = self.put_in_force(plan)
        peak, weights = self._peak()
        host, loader = self._host_seconds()
        return (
            dataclasses.replace(
                row,
                status=self._granularity_note(plan),
                budget_bytes=budget,
                peak_bytes=peak,
                device_weight_bytes=weights,
                setup_seconds=self.setup_seconds,
                replan_seconds=solve_seconds + seconds,
                host_seconds_a_unit=host,
                loader_seconds_a_unit=loader,
                copies_a_visit=len(plan.copies) / max(len(plan.visits), 1),
            ),
            plan,
        )

    def _granularity_note(self, plan: Plan) -> str:
        wanted = self.manager.config.stream_granularity
        if wanted == "piece" and len(plan.visits) <= self.settings.shape.blocks:
            return "ok; but the engine streamed whole units"
        return "ok"

    def _host_seconds(self) -> tuple[float, float]:
        """Host seconds a visit: of all that offloading adds (enter and leave, no compute), and of the loader alone, in
        steps of the model."""
        manager, execution = self.manager, self.manager._execution
        loader = execution.loader
        visits = loader.plan.visits

        def whole() -> None:
            for unit in visits:
                manager._enter(unit, (self.x,), {})
                manager._leave(unit)

        # Steps that compute nothing: were they sampled, later plans would believe it.
        recorder = manager._recorder
        every, recorder.every = recorder.every, 0
        timed = TimedLoader(loader)
        try:
            found = self._seconds_of(whole)
            execution.loader = timed  # type: ignore[assignment]
            in_steps = self._seconds_of(self.step, lambda: timed.seconds)
        finally:
            execution.loader = loader
            recorder.every = every
            manager._measuring_kind = False
            recorder.break_sequence()
        return found / len(visits), in_steps / len(visits)

    def _seconds_of(self, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds that ``clock`` counts of ``run``, the median of a few."""
        run()
        samples = []
        for _ in range(HOST_STEPS):
            self._wait_busily()
            start = clock()
            run()
            samples.append(clock() - start)
        self.device.synchronize()
        return median(samples)

    def _wait_busily(self) -> None:
        """Until the device is idle, so that its queues have room, without a pause of the host, which would be slower
        after it: as it works in a job, it has just worked."""
        for stream in (self.device.compute_stream(), self.manager._execution.copy_stream):
            event = self.device.new_event(timed=True)
            stream.record(event)
            while not event.query():
                pass

    # ---- the step's time

    def add_twin(self) -> None:
        """The un-offloaded model beside it, its output, and the link's speed."""
        self.link = link_bandwidth(self.device, nbytes=(256 << 20) if self.torch_device.type == "cuda" else 4 << 20)
        twin = build(self.settings.shape, self.torch_device)
        if self.compiled:
            for block in twin.layers:
                block.compile(fullgraph=True)
        self._twin = twin
        with torch.no_grad():
            self._expected = self.resident_step()
        self.resident_seconds()

    def resident_seconds(self) -> float:
        """The twin's step, back to back."""
        sustain(self.resident_step, self.settings.sustained, self.torch_device)
        once = back_to_back(self.resident_step, 1, self.torch_device)
        steps = steps_for(self.settings.seconds / 2, once, most=20)
        return back_to_back(self.resident_step, steps, self.torch_device, queued=self._note_clock)

    def _note_clock(self) -> None:
        self._last_clock = self._clock()

    def forecast(self, row: Row, plan: Plan) -> Row:
        """``row`` with what is predicted of ``plan`` from steps under the plan in force, run just now: the survey's
        steps came between pauses, with higher clocks than those of steps without one."""
        self._load(self.settings.sustained)
        told = predict(plan, self.manager.current_profile(self.manager.measure_transfer()))
        return dataclasses.replace(
            row,
            predicted_seconds=told.step_seconds,
            predicted_transfer_seconds=told.transfer_seconds,
            predicted_stall_seconds=told.stall_seconds,
        )

    def time_steps(self, row: Row, plan: Plan, before: float) -> tuple[Row, float]:
        """One timed block under ``plan`` and one of the twin's after it, added to ``row``; the latter's seconds.

        Where the link decides, the twin's time does not matter: ``before`` stands for it.
        """
        self.put_in_force(plan)
        bound_by_link = self._bound_by_link(plan, before)
        if not bound_by_link:
            sustain(self.step, self.settings.sustained, self.torch_device)
        once = back_to_back(self.step, 2, self.torch_device)
        count = steps_for(self.settings.seconds, once)
        then = self.manager.live()
        seconds = back_to_back(self.step, count, self.torch_device, queued=self._note_clock)
        clock = self._last_clock
        y = self._sampled_steps()
        now, expected = self.manager.live(), self.manager.expectation()
        live = expected.prediction.step_seconds if expected is not None and expected.measured == "live" else None
        assert self._expected is not None
        same = bool(torch.equal(y, self._expected)) and row.identical is not False
        difference = float((y.float() - self._expected.float()).abs().max())
        after = before if bound_by_link else self.resident_seconds()
        return (
            dataclasses.replace(
                row,
                step_samples=(*row.step_samples, seconds),
                resident_seconds=(before + after) / 2,
                streamed_bytes=round((now.copied_bytes_total - then.copied_bytes_total) / (count + SAMPLED_STEPS)),
                compute_seconds=now.compute_seconds or None,
                stall_seconds=now.stall_seconds if now.compute_seconds else None,
                transfer_seconds=now.transfer_seconds or None,
                predicted_live_seconds=live,
                sm_clock_hz=clock,
                resident_sm_clock_hz=None if bound_by_link else self._last_clock,
                identical=same,
                largest_difference=max(difference, row.largest_difference or 0.0),
                unforeseen_visits=(row.unforeseen_visits or 0) + now.unforeseen_visits - then.unforeseen_visits,
            ),
            after,
        )

    def _bound_by_link(self, plan: Plan, resident: float) -> bool:
        return plan.streamed_bytes / self.link > BOUND_BY_LINK * resident

    def _sampled_steps(self) -> torch.Tensor:
        """A few steps of which every visit and copy is timed; the last one's output."""
        recorder = self.manager._recorder
        every, recorder.every = recorder.every, 1
        try:
            for _ in range(SAMPLED_STEPS):
                y = self.step()
            self.manager.collect_offload_timing()
        finally:
            recorder.every = every
        return y

    def summarise(self, timed: Sequence[Row]) -> Row:
        """One row of a target's repeats: the block that is in the middle of them against the twin's beside it (of two,
        the worse), and the floors."""
        against = sorted(timed, key=lambda row: row.step_samples[-1] / (row.resident_seconds or 1.0))
        middle, last = against[len(against) // 2], timed[-1]
        step, resident = middle.step_samples[-1], middle.resident_seconds or 0.0
        streamed = last.streamed_bytes or 0
        floor = max(resident, streamed / self.link)
        allowed = last.budget_bytes if last.budget_bytes is not None else last.device_weight_bytes or 0
        ideal = max(resident, (self.total - allowed) / self.link)
        predicted, live = middle.predicted_seconds, middle.predicted_live_seconds
        return dataclasses.replace(
            middle,
            step_samples=last.step_samples,
            unforeseen_visits=last.unforeseen_visits,
            identical=last.identical,
            largest_difference=last.largest_difference,
            step_seconds=step,
            resident_seconds=resident,
            link_bytes_per_second=self.link,
            floor_seconds=floor,
            ratio=step / floor,
            ideal_seconds=ideal,
            ratio_to_ideal=step / ideal,
            prediction_error=None if predicted is None else predicted / step - 1,
            prediction_live_error=None if live is None else live / step - 1,
        )

    def write_trace(self, row: Row) -> None:
        """The newest sampled step as a picture, where this row is the one asked for."""
        directory = self.settings.trace_directory
        steps = self.manager.sampled_steps()
        if directory is None or row.target != self.settings.trace_target or not steps:
            return
        from launch.trace import write_step

        write_step(
            self.manager,
            directory / f"trace-{self.name}-{self.tokens}",
            title=f"{self.tokens} tokens, {target_words(row.target)} of weights on the device",
            period=row.step_samples[-1] if row.step_samples else None,
        )

    def rows(self, targets: Sequence[str]) -> Iterator[Row]:
        """The rows of all targets; those without a plan at once."""
        surveyed = [self.survey(target) for target in targets]
        yield from (row for row, plan in surveyed if plan is None)
        going = [(row, plan) for row, plan in surveyed if plan is not None]
        self.add_twin()
        self.put_in_force(self.manager.solve(None, self.manager.current_profile()))  # the plan before the first
        self._heat()
        before = self.resident_seconds()
        by_link = [(row, plan) for row, plan in going if self._bound_by_link(plan, before)]
        by_clock = [(row, plan) for row, plan in going if not self._bound_by_link(plan, before)]
        yield from self._in_turns(by_link, self.settings.repeats, before)
        if by_link and by_clock:
            self._heat()  # while it waited for copies it cooled, and has higher clocks than under sustained work
            before = self.resident_seconds()
        repeats = max(self.settings.repeats, CLOCK_REPEATS if self.torch_device.type == "cuda" else 1)
        yield from self._in_turns(by_clock, repeats, before)

    def _heat(self) -> None:
        if self.torch_device.type == "cuda":
            sustain(self.resident_step, HEATING_SECONDS, self.torch_device)

    def _in_turns(self, going: Sequence[tuple[Row, Plan]], repeats: int, before: float) -> Iterator[Row]:
        """The rows of these plans: one timed block of each after the other, ``repeats`` times. before: the twin's
        seconds just now."""
        blocks = [[row] for row, _ in going]
        for repeat in range(repeats):
            for rows, (_, plan) in zip(blocks, going, strict=True):
                # Of this block, not of the first: a GPU at its power limit is slower or faster a few seconds later.
                row, before = self.time_steps(self.forecast(rows[-1], plan), plan, before)
                rows.append(row)
                logger.info(
                    "%s, %d tokens, %s: %.2f ms (resident %.2f ms)",
                    self.name,
                    self.tokens,
                    row.target,
                    row.step_samples[-1] * 1e3,
                    before * 1e3,
                )
                if repeat == repeats - 1:
                    self.write_trace(row)
                    yield self.summarise(rows[1:])

    def close(self) -> None:
        """A plain model again, and nothing on the device."""
        self._twin = self._expected = None
        self.manager.release()


def compile_block(module: nn.Module) -> nn.Module:
    """``compile_fn`` of the compiled contenders."""
    compiled: Any = torch.compile(module, fullgraph=True)
    return compiled


def run(name: str, tokens: Sequence[int], targets: Callable[[int], Sequence[str]], settings: Settings) -> Iterator[Row]:
    """The rows of our engine at each token count, each with a set-up of its own."""
    for count in tokens:
        wanted = targets(count)
        if not wanted:
            continue
        sweep = Sweep(name, count, settings)
        try:
            yield from sweep.rows(wanted)
        finally:
            sweep.close()
