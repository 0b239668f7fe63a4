"""The plan in force on one device: its memory, its loader, and the way from one plan to the next.

Everything here happens between two steps. A switch stops the loader, lays memory out anew and goes on; whatever
interrupts it, a plan that works is in force afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from flextensor.planner.plan import BudgetError, Plan, align
from flextensor.runtime.device import Device
from flextensor.runtime.loader import Loader
from flextensor.runtime.memory import DeviceWeights, WeightSource, WeightTable
from flextensor.runtime.timing import Recorder
from flextensor.units import Weight

logger = logging.getLogger(__name__)


class Execution:
    """``reads``: the weights that each unit reads, by index; the caller's own list, which discovery completes.
    ``other_bytes``: device memory of weights of no unit, for messages. ``streams`` is told, whenever a plan comes in
    force, the weights that it streams."""

    def __init__(
        self,
        name: str,
        weights: Sequence[Weight],
        reads: list[list[int]],
        store: WeightSource,
        device: Device,
        recorder: Recorder,
        *,
        other_bytes: int,
        streams: Callable[[Iterable[str]], None] = lambda weights: None,
    ) -> None:
        self.name = name
        self.device = device
        self.recorder = recorder
        self.table = WeightTable(weights, store)
        self.reads = reads
        self.layout_serial = 0
        """Changes whenever weights lie elsewhere than before: what a CUDA graph was captured under."""
        self.copied_before = 0
        self.unforeseen_before = 0
        self._weights = weights
        self._other_bytes = other_bytes
        self._streams = streams
        self.copy_stream = device.new_stream()
        self.memory = DeviceWeights(self.table, device, self.copy_stream)
        self._homeless = False
        device.synchronize()  # the allocator may give memory that kernels of before still use
        self.loader = self.fetch_on_demand()

    @property
    def plan(self) -> Plan:
        """What the loader executes."""
        return self.loader.plan

    @property
    def homeless(self) -> bool:
        """No plan is in force, so that no unit can run: not even the smallest has room, and all weights are on the
        host; or a change of plans was interrupted twice."""
        return self._homeless or self.memory.unfinished

    @property
    def unforeseen(self) -> int:
        """Visits that fetched on demand, so far."""
        return self.unforeseen_before + self.loader.counters.unforeseen

    @property
    def copied_bytes(self) -> int:
        """Bytes over the link, so far."""
        return self.copied_before + self.loader.counters.copied_bytes + self.memory.copied_bytes

    def on_demand_plan(self, *, keep_unread: bool = False) -> Plan:
        """Every unit's weights, one unit at a time, each visit unforeseen: the least memory that works.

        keep_unread: weights that no unit reads are resident, as in any plan; before discovery has ended it is not
        known which they are, and they are fetched when they are read.
        """
        offsets: dict[int, int] = {}
        arena = 0
        for reads in self.reads:
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
        resident = frozenset(
            i for i, weight in enumerate(self._weights) if weight.resident_reason or (keep_unread and i not in offsets)
        )
        resident_bytes = sum(align(self._weights[i].nbytes) for i in resident)
        return Plan((), resident, offsets, arena, (), resident_bytes, resident_bytes + arena, 0)

    def fetch_on_demand(self) -> Loader:
        """Put ``on_demand_plan`` in force. Raises BudgetError where even that has no room."""
        plan = self.on_demand_plan()
        try:
            self.memory.apply(plan)
        except torch.OutOfMemoryError as error:
            raise self._no_room(plan, error) from None
        self.loader = self._new_loader(plan)
        self.loader.start()
        return self.loader

    def _no_room(self, plan: Plan, error: object) -> BudgetError:
        needed = plan.weight_bytes + self._other_bytes
        return BudgetError(
            f"{self.device.name} has no room for the largest unit and what must stay resident, {needed} bytes in "
            f"all: make units smaller (match their children with include_patterns), or free memory ({error})",
            needed,
        )

    def _new_loader(self, plan: Plan) -> Loader:
        self._streams(self._weights[tensor].name for tensor in plan.offsets)
        return Loader(plan, self.reads, self.memory, self.copy_stream, self.recorder)

    def rebuild(self, plan: Plan) -> None:
        """A new loader for ``plan``, as memory is laid out for it now."""
        self.layout_serial += 1
        self.loader = self._new_loader(plan)
        self.loader.start()

    def quiesce(self) -> None:
        """The device is idle, nothing is prefetched, and all samples are in."""
        self.loader.close()
        self.device.synchronize()
        self.recorder.harvest(wait=True)
        self.recorder.break_sequence()
        self.recorder.forget_capture()
        self.copied_before += self.loader.counters.copied_bytes
        self.unforeseen_before += self.loader.counters.unforeseen
        self.loader.counters.copied_bytes = self.loader.counters.unforeseen = 0

    # ---- from one plan to the next

    def switch(self, plan: Plan) -> None:
        """Lay memory out for ``plan`` and go on under it; ``quiesce`` comes before. On failure (out of memory, a
        Ctrl-C) ``restore`` comes after."""
        self.layout_serial += 1
        self.memory.lay_out(plan)
        self.loader = self._new_loader(plan)
        self.memory.bind()  # while copies go over the link
        self.loader.start()

    def restore(self, plan: Plan) -> Plan | None:
        """Put ``plan`` in force again after a switch that failed, or fetching on demand where there is no room for it
        any more (another process has taken it); returns what is in force, None where nothing has room.

        What was half laid out is laid out anew. With nothing in force all weights are on the host; ``take_place`` tries
        again.
        """
        self.layout_serial += 1
        self.device.synchronize()  # copies into the new layout may be under way
        for wanted in (plan, self.on_demand_plan(keep_unread=bool(plan.visits))):
            try:
                self.memory.clear()
                self.memory.apply(wanted)
            except torch.OutOfMemoryError as error:
                logger.warning("no room for the plan before (%d bytes of weights): %s", wanted.weight_bytes, error)
                continue
            self.rebuild(wanted)
            self._homeless = False
            return wanted
        self._homeless = True
        return None

    def take_place(self) -> Plan:
        """Before a step, when nothing is in force: the plan that was, or fetching on demand.

        Raises BudgetError while there is still no room; nothing has changed then.
        """
        found = self.restore(self.loader.plan)
        if found is None:
            raise self._no_room(self.on_demand_plan(keep_unread=True), "all weights are on the host for now")
        return found

    def reload(self, indexes: Sequence[int]) -> None:
        """Host bytes or tensor objects of these weights have changed: bind anew, copy resident ones again."""
        if self.homeless:
            return  # bound when there is room again
        try:
            self.quiesce()
            self.memory.rebind(indexes)
        finally:
            self.rebuild(self.loader.plan)

    def clear(self) -> None:
        """All weights to the host, no device memory kept."""
        self.layout_serial += 1
        self.memory.clear()
