"""The weights' bytes: where each one's host copy is, and where it lies on the device under a plan.

A weight's tensor object never changes; its ``data`` points at device memory (a resident tensor, or its slot in the
arena) while a plan is in force, and at the host store otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from flextensor.planner.plan import Plan
from flextensor.runtime.device import Device, Event, Stream
from flextensor.runtime.residents import Move, Residents
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

    def bind(self, index: int, data: torch.Tensor, *, in_slot: bool) -> None:
        """Point the weight at device bytes."""
        weight = self.weights[index]
        weight.tensor.data = self.view(index, data)
        weight.in_slot = in_slot

    def unbind(self, index: int) -> None:
        """Point the weight at its host bytes."""
        weight = self.weights[index]
        weight.tensor.data = self.store.tensor(weight.name)
        weight.in_slot = False


class DeviceWeights:
    """The device memory that a plan takes for weights, and the way from one plan's to the next's."""

    def __init__(self, table: WeightTable, device: Device, copy_stream: Stream) -> None:
        self.table = table
        self.device = device
        self._copy = copy_stream
        self._residents = Residents(device, [weight.nbytes for weight in table.weights])
        self._arena: torch.Tensor | None = None
        self._streamed: dict[int, int] = {}
        self.copied_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory taken now, alignment included."""
        arena = self._arena
        return self._residents.nbytes + (0 if arena is None else arena.numel())

    def spans(self) -> list[tuple[int, int]]:
        """The addresses (from, to) of the allocations that weights lie in."""
        taken = [*self._residents.chunks(), *([] if self._arena is None else [self._arena])]
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in taken]

    def slot(self, offset: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` of the arena at ``offset``."""
        assert self._arena is not None, "this plan streams nothing"
        return self._arena[offset : offset + nbytes]

    def apply(self, plan: Plan) -> int:
        """Lay memory out as ``plan`` says and fill what is newly resident; returns the bytes moved over the link.

        The caller has made the device idle. Old memory is given up before new is taken, so that no peak exceeds the
        larger plan. Raises torch.OutOfMemoryError, all weights being on the host then.
        """
        before = self.nbytes
        self._unbind(self._streamed)
        self._streamed = {}
        if self._arena is not None and self._arena.numel() != plan.arena_bytes:
            self._arena = None
        try:
            fresh, homeless = self._keep_residents(plan.resident, max(before, plan.weight_bytes))
            if homeless or self.nbytes < before:
                self.device.release_cached()  # or new memory would be cut from blocks that activations come back for
            with torch.inference_mode(False):
                self._residents.grow(homeless)
                if self._arena is None and plan.arena_bytes:
                    self._arena = self.device.allocate(plan.arena_bytes)
        except torch.OutOfMemoryError:
            self.clear()
            raise
        for index in fresh:
            self._bind(index, self._residents.data(index), in_slot=False)
        for index, offset in plan.offsets.items():
            self._bind_slot(index, offset)
        self._streamed = dict(plan.offsets)
        return self._fill(fresh)

    def _keep_residents(self, wanted: frozenset[int], most: int) -> tuple[list[int], list[int]]:
        """Let go of what is not ``wanted`` and close the holes; returns whose bytes are to come from the host, and
        which of those have no place yet. ``most``: bytes that may be taken meanwhile."""
        residents = self._residents
        gone = [index for index in residents if index not in wanted]
        added = [index for index in wanted if index not in residents]
        fresh = {*added, *(index for index in residents if self._moved_out(index))}
        self._unbind(gone)
        residents.remove(gone)
        with torch.inference_mode(False):
            moves, homeless = residents.refill(added)
            self._carry(moves, fresh)
            while moves := residents.repack(most - self.nbytes):
                self._carry(moves, fresh)
        broken = residents.dissolve()
        self._unbind(index for index in broken if index not in fresh)
        homeless += broken
        return sorted(fresh.intersection(wanted).union(homeless)), homeless

    def _moved_out(self, index: int) -> bool:
        """Something (a forward that replaces its buffer) has pointed a resident weight at other memory."""
        return self.table.weights[index].tensor.data_ptr() != self._residents.data(index).data_ptr()

    def _carry(self, moves: list[Move], fresh: Set[int]) -> None:
        """Copy and bind what has moved within the device, then let go of its old place. ``fresh``: no bytes yet."""
        self._go_behind_compute()
        for move in moves:
            if move.index not in fresh:
                self._copy.copy(move.destination, move.source)
                self._bind(move.index, move.destination, in_slot=False)
        if moves:
            self._copy.synchronize()
            del move  # its old chunk, before cached blocks go back
        moves.clear()
        self.device.release_cached()

    def _unbind(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self.table.unbind(index)

    def _bind(self, index: int, data: torch.Tensor, *, in_slot: bool) -> None:
        """Point a weight at device bytes, through a storage of its own that keeps the allocation alive: two weights in
        one storage would look to a compiler like views of each other."""
        with torch.inference_mode(False):
            self.table.bind(index, from_dlpack(to_dlpack(data)), in_slot=in_slot)

    def _bind_slot(self, index: int, offset: int) -> None:
        self._bind(index, self.slot(offset, self.table.weights[index].nbytes), in_slot=True)

    def _fill(self, indexes: Sequence[int]) -> int:
        """Copy resident weights in from the host, and make later compute wait for it."""
        moved = 0
        self._go_behind_compute()
        for index in indexes:
            source = self.table.source(index)
            self._copy.copy(self._residents.data(index), source)
            moved += source.numel()
        done: Event = self.device.new_event(timed=False)
        self._copy.record(done)
        self.device.compute_stream().wait(done)
        self.copied_bytes += moved
        return moved

    def _go_behind_compute(self) -> None:
        """Memory that was just taken may have been freed by another thread whose kernels are still queued."""
        queued: Event = self.device.new_event(timed=False)
        self.device.compute_stream().record(queued)
        self._copy.wait(queued)

    def rebind(self, indexes: Sequence[int]) -> None:
        """These weights' host bytes or tensor objects have changed: point and, where resident, copy again. The caller
        has made the device idle."""
        for index in indexes:
            if index in self._residents:
                self._bind(index, self._residents.data(index), in_slot=False)
            else:
                self._bind_slot(index, self._streamed[index])
        self._fill([index for index in indexes if index in self._residents])

    def clear(self) -> None:
        """All weights back to the host; no device memory kept. The caller has made the device idle."""
        self._unbind(range(len(self.table.weights)))
        self._streamed = {}
        self._residents.clear()
        self._arena = None
        self.device.release_cached()
