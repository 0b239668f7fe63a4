"""The weights' bytes: where each one's host copy is, and where it lies on the device under a plan.

A weight's tensor object never changes; its ``data`` points at device memory (a resident tensor, or its slot in the
arena) while a plan is in force, and at the host store otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from flextensor.planner.plan import Plan, align
from flextensor.runtime.device import Device, Event, Stream
from flextensor.units import Weight


class WeightSource(Protocol):
    """What is asked of the host store here."""

    def source(self, name: str) -> torch.Tensor:
        """A uint8 view of the bytes of a weight as they are now."""

    def tensor(self, name: str) -> torch.Tensor:
        """The weight itself, in host memory."""


class WeightTable:
    """The weights of a profile, by index: each one's tensor object, store name, shape and stride."""

    def __init__(self, weights: Sequence[Weight], store: WeightSource) -> None:
        self.weights = list(weights)
        self.store = store
        self._forms = [(w.tensor.dtype, tuple(w.tensor.shape), tuple(w.tensor.stride())) for w in weights]

    def source(self, index: int) -> torch.Tensor:
        """The host bytes of a weight."""
        return self.store.source(self.weights[index].name)

    def view(self, index: int, data: torch.Tensor) -> torch.Tensor:
        """``data`` (uint8, the weight's size) in the weight's dtype, shape and stride."""
        dtype, shape, stride = self._forms[index]
        with torch.inference_mode(False):
            return data.view(dtype).as_strided(shape, stride)

    def bind(self, index: int, data: torch.Tensor) -> None:
        """Point the weight at device bytes."""
        self.weights[index].tensor.data = self.view(index, data)

    def unbind(self, index: int) -> None:
        """Point the weight at its host bytes."""
        weight = self.weights[index]
        weight.tensor.data = self.store.tensor(weight.name)


class DeviceWeights:
    """The device memory that a plan takes for weights, and the way from one plan's to the next's."""

    def __init__(self, table: WeightTable, device: Device, copy_stream: Stream) -> None:
        self.table = table
        self.device = device
        self._copy = copy_stream
        self._resident: dict[int, torch.Tensor] = {}
        self._arena: torch.Tensor | None = None
        self._streamed: dict[int, int] = {}
        self.copied_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory taken now, alignment included."""
        arena = 0 if self._arena is None else self._arena.numel()
        return arena + sum(align(t.numel()) for t in list(self._resident.values()))  # other threads ask, too

    def spans(self) -> list[tuple[int, int]]:
        """The addresses (from, to) of the allocations that weights lie in."""
        taken = [*self._resident.values(), *([] if self._arena is None else [self._arena])]
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in taken]

    def slot(self, offset: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` of the arena at ``offset``."""
        assert self._arena is not None, "this plan streams nothing"
        return self._arena[offset : offset + nbytes]

    def apply(self, plan: Plan) -> int:
        """Lay memory out as ``plan`` says and fill what is newly resident; returns the bytes moved.

        The caller has made the device idle. Old memory is given up before new is taken, so that no peak exceeds the
        larger plan. Raises torch.OutOfMemoryError, all weights being on the host then.
        """
        for index in self._streamed:
            self.table.unbind(index)
        for index in [i for i in self._resident if i not in plan.resident]:
            self.table.unbind(index)
            del self._resident[index]
        self._streamed, old_arena = {}, self._arena
        if old_arena is None or old_arena.numel() != plan.arena_bytes:
            self._arena = None
            del old_arena
            self.device.release_cached()
        try:
            self._take(plan)
        except torch.OutOfMemoryError:
            self.clear()
            raise
        return self._fill([i for i in sorted(plan.resident) if i not in self._filled])

    def _take(self, plan: Plan) -> None:
        self._filled = set(self._resident)
        with torch.inference_mode(False):
            if self._arena is None and plan.arena_bytes:
                self._arena = self.device.allocate(plan.arena_bytes)
            for index in sorted(plan.resident):
                if index not in self._resident:
                    self._resident[index] = self.device.allocate(self.table.weights[index].nbytes)
        for index, data in self._resident.items():
            if index not in self._filled:
                self.table.bind(index, data)
        for index in plan.offsets:
            self._bind_slot(index, plan.offsets[index])
        self._streamed = dict(plan.offsets)

    def _bind_slot(self, index: int, offset: int) -> None:
        """Point a weight at its slot, through a storage of its own that keeps the arena alive: two weights in one
        storage would look to a compiler like views of each other."""
        slot = self.slot(offset, self.table.weights[index].nbytes)
        with torch.inference_mode(False):
            self.table.bind(index, from_dlpack(to_dlpack(slot)))

    def _fill(self, indexes: Sequence[int]) -> int:
        """Copy resident weights in from the host, and make later compute wait for it."""
        for index in indexes:
            self._copy.copy(self._resident[index], self.table.source(index))
        done: Event = self.device.new_event(timed=False)
        self._copy.record(done)
        self.device.compute_stream().wait(done)
        moved = sum(self._resident[index].numel() for index in indexes)
        self.copied_bytes += moved
        return moved

    def rebind(self, indexes: Sequence[int]) -> None:
        """These weights' host bytes or tensor objects have changed: point and, where resident, copy again. The caller
        has made the device idle."""
        for index in indexes:
            if index in self._resident:
                self.table.bind(index, self._resident[index])
            else:
                self._bind_slot(index, self._streamed[index])
        self._fill([index for index in indexes if index in self._resident])

    def clear(self) -> None:
        """All weights back to the host; no device memory kept. The caller has made the device idle."""
        for index in [*self._streamed, *self._resident]:
            self.table.unbind(index)
        self._streamed.clear()
        self._resident.clear()
        self._arena = None
        self.device.release_cached()
