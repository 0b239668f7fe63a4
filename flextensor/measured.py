"""What is measured of an offloaded model while it runs, and profiles saved and loaded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flextensor import measure
from flextensor.config import OffloadConfig
from flextensor.execution import Execution
from flextensor.hosting import Hosting
from flextensor.live import Expectation, LiveTiming, expect, live_timing
from flextensor.planner.plan import Plan
from flextensor.profile import RECENT_SAMPLES, Profile, TransferCurve
from flextensor.runtime.device import Device
from flextensor.runtime.timing import Recorder, StepTimes, VisitSummary, format_offload_timing_table, summarise
from flextensor.saved_profiles import Subject
from flextensor.units import OffloadError, Unit, Weight
from flextensor.warmup import Warmup


class Measured:
    """The part of a manager that says what steps take, on this device and this link, now."""

    name: str
    config: OffloadConfig
    device: Device
    hosting: Hosting
    phase: str
    plan: Plan | None
    profile: Profile | None
    _execution: Execution
    _recorder: Recorder
    _warmup: Warmup | None
    _weights: Sequence[Weight]
    _pieces: list[Unit]
    _reads: list[list[int]]
    _kind_counts: Counter[str]
    _step: int

    def live(self) -> LiveTiming:
        """Recent steps, medians. Any thread may ask, and waits for nobody."""
        return live_timing(
            list(self._recorder.steps)[-16:],
            list(self._recorder.step_seconds)[-32:],
            count=self._step,
            unforeseen=self._execution.unforeseen,
            copied=self._execution.copied_bytes,
        )

    def expectation(self) -> Expectation | None:
        """What is expected of a step under the plan in force: the plan's own prediction at first, and after
        ``live.SETTLED_SAMPLES`` timed steps (32 steps by default) one from live compute, gaps and copies. None before
        there is a plan. Any thread may ask."""
        if self.profile is None or self.plan is None:
            return None
        return expect(self.plan, self.profile, list(self._recorder.steps), self._kind_counts)

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
        # What is planned for is compute as it is now: it may have become slower a moment ago.
        kinds = measure.kinds_from_live(
            list(self._recorder.steps), self._kind_counts, self.profile.kinds, recent=RECENT_SAMPLES
        )
        return replace(self.profile, kinds=kinds, transfer=transfer or self.profile.transfer)

    def timing_rows(self) -> list[VisitSummary]:
        """Transfer, compute and wait of each visit over the sampled steps."""
        visits = self._execution.loader.plan.visits
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

    def format_offload_timing_table(self, rows: Sequence[VisitSummary] | None = None) -> str:
        """``rows``, or what ``collect_offload_timing`` gives now, as a table for people; times in milliseconds."""
        return format_offload_timing_table(self.collect_offload_timing() if rows is None else rows)

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

    def _host_run(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` of host weights in one piece where there are so many, else the longest piece."""
        streamable = [i for i, weight in enumerate(self._weights) if not weight.resident_reason]
        at = max(streamable, key=lambda i: self._weights[i].nbytes)
        return self._execution.table.source(at)[:nbytes]

    # ---- saved profiles

    def save_profile(self, path: str | Path) -> None:
        """Write the profile as JSON. Raises OffloadError before there is one."""
        self.current_profile().save(path)

    def storage_path(self) -> Path | None:
        """Where ``profile_storage_dir`` keeps this model's profile on this device."""
        if self.config.profile_storage_dir is None:
            return None
        return self._subject().storage_path(self.config.profile_storage_dir, self.name)

    def _save_to_storage(self) -> None:
        path = self.storage_path()
        if path is not None and not self.config.profile_read_only:
            self.save_profile(path)

    def _subject(self) -> Subject:
        """Whose profile is made, saved and loaded."""
        return Subject(
            self._weights, self._pieces, self._reads, self.hosting.store, self.device.name, self.hosting.other_bytes
        )
