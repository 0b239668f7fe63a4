"""The loader executes one Plan: ``enter`` a unit, ``exit`` a unit, and between them nothing.

[Note: order and waits] There is one copy stream, first in first out. At the exit of visit w the loader records an event
on the stream that ran it, makes the copy stream wait for it, and queues the copies that the plan has after w; each
visit that is copied for has a ``ready`` event, recorded after its last copy and waited for at its enter. Both waits are
on the device; the calling thread never waits. The plan has chosen ``after`` so that the bytes overwritten are no
longer read, which is all that makes a slot safe.

[Note: foreseen and unforeseen] Steps that run the visits in the plan's order are *regular*: no bookkeeping. Whatever
else happens (a unit out of order, twice, skipped, aborted by an exception) makes the loader *irregular*: it then knows
for each tensor whether its bytes lie in its slot, fetches what is missing on demand, counts that, and turns regular
again after a whole step in order.

[Note: graphs] A captured forward holds its own copies. What a step would issue after its last visit goes to the
start of the next one instead (of every later step of the plan), and the copy stream is joined at the end: a replay then
starts from the state in which the one before has left off, and the link is busy from its first moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flextensor.planner.plan import Plan
from flextensor.runtime.batches import batches_of, content_before, moves_of, overlapping, queues_of
from flextensor.runtime.device import Device, Event, Stream
from flextensor.runtime.memory import DeviceWeights
from flextensor.runtime.timing import Recorder, StepTrace

UNFORESEEN_IN_GRAPH = (
    "an offloaded forward can be captured in a CUDA graph only while it runs its units in the plan's order: call the "
    "model a few times as it will be captured, then capture"
)

SKIP_AHEAD = 2
"""So many visits may be left out in a row while prefetching goes on as planned."""


@dataclass
class LoaderCounters:
    """unforeseen: visits that fetched on demand. copied_bytes: over the link, by this loader. steps: begun."""

    unforeseen: int = 0
    copied_bytes: int = 0
    steps: int = 0


class Loader:
    """See the module's text. ``units``: the tensors that each unit reads, by index."""

    # Reading one of 30 and more attributes in a dictionary is slower.
    # fmt: off
    __slots__ = (
        "_after", "_began", "_captured", "_capturing", "_closed", "_copy", "_count", "_demand", "_device",
        "_fetched", "_in_order", "_irregular", "_issued_bytes", "_left", "_memory", "_next", "_occurrences",
        "_open", "_overlaps", "_queues", "_reads", "_ready", "_recorder", "_stream", "_tail_first", "_trace",
        "_valid", "_visits", "_whole_step_done", "counters", "plan",
    )
    # fmt: on

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Sequence[int]],
        memory: DeviceWeights,
        copy_stream: Stream,
        recorder: Recorder,
    ) -> None:
        self.plan = plan
        self.counters = LoaderCounters()
        self._device: Device = memory.device
        self._memory = memory
        self._copy = copy_stream
        self._recorder = recorder
        self._visits = plan.visits
        self._count = len(plan.visits)
        self._reads = [tuple(t for t in reads if t in plan.offsets) for reads in units]
        self._occurrences: dict[int, list[int]] = {}
        for visit, unit in enumerate(plan.visits):
            self._occurrences.setdefault(unit, []).append(visit)
        self._fill_slots()
        new_event = self._device.new_event
        fetched = {copy.visit for copy in plan.copies}
        self._ready: list[Event | None] = [
            new_event(timed=False) if visit in fetched else None for visit in range(self._count)
        ]
        self._after = batches_of(plan, memory, copy_stream)
        self._queues = [queues_of(batches, copy_stream) for batches in self._after]
        self._issued_bytes = [sum(batch.nbytes for batch in batches) for batches in self._after]
        self._left: list[Event | None] = [new_event(timed=False) if batches else None for batches in self._after]
        self._demand = new_event(timed=False)
        self._fetched = new_event(timed=False)
        self._next = 0
        self._open: list[tuple[int | None, int, Stream]] = []
        self._stream: Stream = self._device.compute_stream()
        self._trace: StepTrace | None = None
        self._began = False
        self._irregular = False
        self._closed = False
        self._in_order = 0
        self._whole_step_done = False
        self._valid: dict[int, Event] = {}
        self._overlaps = overlapping(plan, memory.table.weights)
        self._tail_first = False
        self._capturing = False
        self._captured: set[int] = set()

    # ---- set-up

    def _fill_slots(self) -> None:
        """Queue copies that fill the slots as they are in the steady state before the first visit. The device is idle;
        what else is to be done before the first step takes its time while the copies go over the link."""
        for copy in [*self.plan.initial, *(copy for copy in self.plan.copies if copy.lag)]:
            self._copy.copier(moves_of(copy.tensors, self.plan, self._memory))()
            self.counters.copied_bytes += copy.nbytes

    def start(self) -> None:
        """Weights are bound and may be used: later compute waits for the copies that filled resident memory and slots.
        Called once, before the first step."""
        for event in self._ready:
            if event is not None:
                self._copy.record(event)
        # A tensor that survives the whole cycle has no copy and no ready event of its own: all compute waits once.
        self._copy.record(self._fetched)
        self._device.compute_stream().wait(self._fetched)

    # ---- the hot path

    def enter(self, unit: int) -> None:
        """Later work on the current stream finds the unit's weights in their place."""
        stream = self._device.compute_stream()
        if stream.key != self._stream.key:
            self._change_stream(stream)
        at: int | None = self._next
        regular = not (self._irregular or self._open) and self._count > 0 and self._visits[self._next] == unit
        if not regular:
            at = self._place_in_plan(unit, stream)
        trace = self._trace
        if trace is not None and at is not None:
            trace.arrive(at, stream)
        if not regular:
            self._require(unit, stream)
        elif at is not None:
            ready = self._ready[at]
            if ready is not None and (not self._capturing or at in self._captured):
                stream.wait(ready)
        if trace is not None and at is not None:
            trace.start(at, stream)
        self._open.append((at, unit, stream))

    def exit(self, unit: int) -> None:
        """The unit's work is queued; what the plan has after it is fetched."""
        at, _, stream = self._open.pop()
        self._stream = stream
        if at is None:
            self._exit_nested(stream)
            return
        if self._trace is not None:
            self._trace.end(at, stream)
        if self._after[at] and not (self._tail_first and at == self._count - 1):
            self._issue(at, stream)
        if self._open:
            self._exit_nested(stream)
            return
        self._next = at + 1
        if self._irregular:
            self._count_in_order()
        if self._next == self._count:
            self._next = 0
            self._end_step(stream)

    def abort(self, unit: int) -> None:
        """The unit's call did not end: it raised, or a Ctrl-C came, perhaps in the midst of ``enter`` or ``exit``.

        What the slots hold is unknown then; bytes may be overwritten only after the stream that ran the unit.
        """
        stream: Stream = self._device.compute_stream()
        if self._open and self._open[-1][1] == unit:
            at, _, stream = self._open.pop()
            if at is not None and not self._open:
                self._next = (at + 1) % self._count
        self.distrust()  # first: in a capture that has failed, an event cannot be recorded either
        self._order_copies_after(stream)
        self._exit_nested(stream)

    def distrust(self) -> None:
        """Take nothing for granted that lies in the slots: it is fetched again where it is needed."""
        self._irregular = True
        self._valid = {}
        self._in_order = 0
        self._trace = None

    def _issue(self, at: int, stream: Stream) -> None:
        """Queue what the plan has after visit ``at``, behind the work queued on ``stream``."""
        left = self._left[at]
        assert left is not None
        stream.record(left)
        copy = self._copy
        copy.wait(left)
        trace = self._trace
        if trace is None and not self._irregular and not self._capturing:
            ready_events = self._ready
            for queue, visit in self._queues[at]:
                queue()
                if visit is not None:
                    copy.record(ready_events[visit])
            self.counters.copied_bytes += self._issued_bytes[at]
            return
        for batch in self._after[at]:
            begin = trace.copy_begin(copy) if trace is not None else None
            batch.queue()
            ready = self._ready[batch.visit]
            if ready is not None and (batch.last or self._irregular):
                copy.record(ready)
            if trace is not None and begin is not None:
                trace.copy_end(batch.visit, batch.nbytes, begin, copy)
            self.counters.copied_bytes += batch.nbytes
            if self._capturing:
                self._captured.add(batch.visit)
            if self._irregular:
                self._note(batch.tensors, self._ready[batch.visit])

    # ---- steps

    def add_unit(self) -> None:
        """One more unit, of which nothing is known yet: it reads no streamed tensor."""
        self._reads.append(())

    @property
    def at_boundary(self) -> bool:
        """True between two steps: no visit of this step has been entered, and none is open."""
        return not self._began and self._next == 0 and not self._open

    def begin_step(self, kind: str) -> None:
        """A step starts on the current stream. What the last one left out (an exception, a short forward) is over."""
        stream = self._device.compute_stream()
        if self._capturing:  # a capture was broken off: none of the copies in it was made
            self._capturing = False
            self._forget_captured_events()
            self.distrust()
        if self._open or self._next:
            self._become_irregular()
            for _, _, aborted in self._open:
                self._order_copies_after(aborted)
            self._open.clear()
            self._next = 0
        self._began = True
        self.counters.steps += 1
        capturing = self._device.is_capturing()
        if self._stream.key != stream.key:
            self._change_stream(stream, into_capture=capturing)
        if capturing:
            if self._irregular:
                raise RuntimeError(UNFORESEEN_IN_GRAPH)
            self._captured.clear()
            self._tail_first = True
        self._capturing = capturing
        self._trace = self._recorder.begin_step(self._count, kind, stream, capturing=capturing)
        if self._tail_first and self._count and self._after[-1]:
            self._issue(self._count - 1, stream)

    def name_step(self, kind: str) -> None:
        """Say of which kind the step under way is."""
        if self._trace is not None:
            self._trace.kind = kind

    def _end_step(self, stream: Stream) -> None:
        self._began = False
        self._whole_step_done = self._whole_step_done or not self._irregular
        if self._trace is not None:
            self._recorder.end_step(self._trace)
            self._trace = None
        if self._tail_first and (self._captured or not self._capturing):  # no copy stream in a capture without copies
            self._copy.record(self._fetched)
            stream.wait(self._fetched)
        if self._capturing:
            self._forget_captured_events()
        self._capturing = False

    def _forget_captured_events(self) -> None:
        """Nobody may wait outside a graph for an event that was recorded inside one. Nor need anybody: a replay ends
        with the copy stream joined."""
        for visit in self._captured:
            self._ready[visit] = self._device.new_event(timed=False)
        self._fetched = self._device.new_event(timed=False)

    def _order_copies_after(self, stream: Stream) -> None:
        stream.record(self._demand)
        self._copy.wait(self._demand)

    def _change_stream(self, stream: Stream, *, into_capture: bool = False) -> None:
        """The caller has gone over to another stream, between two steps or within one.

        What the old one still reads is overwritten after it only. And the new one goes behind it: resident tensors, and
        bytes that an earlier visit has fetched, have no event that a later visit waits for.
        """
        self._order_copies_after(self._stream)
        if not into_capture:  # a capture begins with the device idle, and may not wait for what lies outside
            stream.wait(self._demand)
        self._stream = stream

    # ---- what the plan did not foresee

    def _become_irregular(self) -> None:
        if self._capturing:
            raise RuntimeError(UNFORESEEN_IN_GRAPH)
        if not self._irregular:
            self._irregular = True
            content, begun = content_before(
                self._next, self.plan, self._after, self._overlaps, settled=self._whole_step_done
            )
            for visit in begun:
                if (ready := self._ready[visit]) is not None:
                    self._copy.record(ready)
            self._valid = {tensor: self._ready[visit] or self._fetched for tensor, visit in content.items()}
        self._in_order = 0

    def _place_in_plan(self, unit: int, stream: Stream) -> int | None:
        """The visit that this one counts as: the next of its unit; None inside another visit or when it has none."""
        self._trace = None
        if self._open or unit not in self._occurrences:
            self._become_irregular()
            return None
        at = min(self._occurrences[unit], key=lambda visit: (visit - self._next) % self._count)
        skipped = (at - self._next) % self._count
        if skipped or not self._irregular:
            self._become_irregular()
        if 0 < skipped <= SKIP_AHEAD:
            for visit in range(self._next, self._next + skipped):
                if self._after[visit % self._count]:
                    self._issue(visit % self._count, stream)
        self._next = at
        return at

    def _require(self, unit: int, stream: Stream) -> None:
        """Make the unit's streamed tensors be there, whatever lies in their slots now."""
        missing = [tensor for tensor in self._reads[unit] if tensor not in self._valid]
        if missing:
            self.counters.unforeseen += 1
            self._in_order = 0
            self._order_copies_after(stream)
            self._issue_tensors(missing)
            self._copy.record(self._fetched)
            self._note(missing, self._fetched)
        for event in {id(e): e for t in self._reads[unit] if (e := self._valid.get(t))}.values():
            stream.wait(event)

    def _issue_tensors(self, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            source = self._memory.table.source(tensor)
            self._copy.copy(self._memory.slot(self.plan.offsets[tensor], source.numel()), source)
            self.counters.copied_bytes += source.numel()

    def _note(self, tensors: Sequence[int], event: Event | None) -> None:
        """These bytes lie in their slots once ``event`` is done; what they overwrote does not."""
        for tensor in tensors:
            for other in self._overlaps[tensor]:
                self._valid.pop(other, None)
        for tensor in tensors:
            self._valid[tensor] = event or self._fetched

    def _exit_nested(self, stream: Stream) -> None:
        """Back in the visit around: what the inner one overwrote is fetched again."""
        if self._open:
            _, around, outer = self._open[-1]
            if outer.key != stream.key:
                self._change_stream(outer)
            self._require(around, outer)

    def _count_in_order(self) -> None:
        self._in_order += 1
        if not self._closed and self._in_order > 2 * self._count and self._next == self._count:
            self._irregular = False
            self._valid = {}

    # ---- the end

    def close(self) -> None:
        """Wait for the copies under way and let go of the arena, so that the next plan's can take its place.

        A visit afterwards (an interrupted replan) fetches on demand.
        """
        self._closed = True
        self.distrust()
        self._copy.synchronize()
        self._after = [()] * self._count
        self._queues = [()] * self._count
