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
        with torch.inference_mode(False):  # of the same form, for who asks for that meanwhile
            forms = self._forms
            self._nothing = [torch.empty((), dtype=dtype, device="cpu").expand(shape) for dtype, shape, _ in forms]

    def source(self, index: int) -> torch.Tensor:
        """The host bytes of a weight."""
        return self.store.source(self.weights[index].name)

    def view(self, index: int, data: torch.Tensor) -> torch.Tensor:
        """``data`` (uint8, the weight's size) in the weight's dtype, shape and stride."""
        dtype, shape, stride = self._forms[index]
        return data.view(dtype).as_strided(shape, stride)

    def bind(self, index: int, data: torch.Tensor, *, in_slot: bool) -> None:
        """Point the weight at device bytes. Not in inference mode: its tensors cannot be trained."""
        weight = self.weights[index]
        weight.tensor.data = self.view(index, data)
        weight.in_slot = in_slot

    def let_go(self, index: int) -> None:
        """Give device memory back where the weight is bound again before anyone reads it: cheaper than ``unbind``. Its
        value is in the host store meanwhile."""
        weight = self.weights[index]
        weight.in_slot = True
        weight.tensor.data = self._nothing[index]

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
        self._to_bind: list[int] = []
        self.unfinished = False
        """A layout was begun and its weights are not all bound, nor on the host: nothing may be computed."""
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

    def apply(self, plan: Plan) -> None:
        """``lay_out``, ``bind``; and later compute waits for what is newly resident."""
        self.lay_out(plan)
        self.bind()
        self._await_copies()

    def lay_out(self, plan: Plan) -> None:
        """Take the memory that ``plan`` says, and queue the copies of what is newly resident. Weights are not to be
        used before ``bind``, nor before the copies are done.

        The caller has made the device idle. Old memory is given up before new is taken, so that no peak exceeds the
        larger plan. Raises torch.OutOfMemoryError, all weights being on the host then.
        """
        if self.unfinished:  # a Ctrl-C came in the midst of the one before
            self.clear()
        self.unfinished = True
        before = self.nbytes
        stay = self._arena is not None and self._arena.numel() == plan.arena_bytes
        self._let_go((index for index in self._streamed if not (stay and index in plan.offsets)), plan)
        moved = [i for i, at in plan.offsets.items() if not stay or self._streamed.get(i) != at]
        self._streamed = {}
        if not stay:
            self._arena = None
        try:
            fresh, homeless = self._keep_residents(plan, max(before, plan.weight_bytes))
            if homeless or self.nbytes < before:
                self.device.release_cached()  # or new memory would be cut from blocks that activations come back for
            with torch.inference_mode(False):
                self._residents.grow(homeless)
                if self._arena is None and plan.arena_bytes:
                    self._arena = self.device.allocate(plan.arena_bytes)
        except torch.OutOfMemoryError:
            self.clear()
            raise
        self._streamed = dict(plan.offsets)
        self._to_bind = [*fresh, *moved]
        self._fill(fresh)

    def bind(self) -> None:
        """Point weights at their place in the layout, where they do not yet: behind the copies, which go on."""
        self._bind_home(self._to_bind)
        self._to_bind, self.unfinished = [], False

    def _keep_residents(self, plan: Plan, most: int) -> tuple[list[int], list[int]]:
        """Let go of what is no longer resident and close the holes; returns whose bytes are to come from the host, and
        which of those have no place yet. ``most``: bytes that may be taken meanwhile."""
        residents, wanted = self._residents, plan.resident
        gone = [index for index in residents if index not in wanted]
        added = [index for index in wanted if index not in residents]
        fresh = {*added, *(index for index in residents if self._moved_out(index))}
        self._let_go(gone, plan)
        residents.remove(gone)
        with torch.inference_mode(False):
            moves, homeless = residents.refill(added)
            self._carry(moves, fresh)
            while moves := residents.repack(most - self.nbytes):
                self._carry(moves, fresh)
        broken = residents.dissolve()
        self._let_go((index for index in broken if index not in fresh), plan)
        homeless += broken
        return sorted(fresh.intersection(wanted).union(homeless)), homeless

    def _moved_out(self, index: int) -> bool:
        """Something (a forward that replaces its buffer) has pointed a resident weight at other memory."""
        return self.table.weights[index].tensor.data_ptr() != self._residents.data(index).data_ptr()

    def _carry(self, moves: list[Move], fresh: Set[int]) -> None:
        """Copy and bind what has moved within the device, which is no matter of the link, then let go of its old place.
        ``fresh``: no bytes yet."""
        stream = self.device.compute_stream()
        for move in moves:
            if move.index not in fresh:
                stream.copy(move.destination, move.source)
                self._bind(move.index, move.destination, in_slot=False)
        if moves:
            stream.synchronize()
            del move  # its old chunk, before cached blocks go back
        moves.clear()
        self.device.release_cached()

    def _let_go(self, indexes: Iterable[int], plan: Plan) -> None:
        """These give their device memory back; most are bound again, for ``plan``."""
        for index in indexes:
            if index in plan.resident or index in plan.offsets:
                self.table.let_go(index)
            else:
                self.table.unbind(index)

    def _unbind(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self.table.unbind(index)

    def _bind(self, index: int, data: torch.Tensor, *, in_slot: bool) -> None:
        """Point a weight at device bytes, through a storage of its own that keeps the allocation alive: two weights in
        one storage would look to a compiler like views of each other."""
        self.table.bind(index, from_dlpack(to_dlpack(data)), in_slot=in_slot)

    def _bind_home(self, indexes: Iterable[int]) -> None:
        """Point weights at their resident memory, or else at their slot."""
        weights, residents = self.table.weights, self._residents
        with torch.inference_mode(False):
            for index in indexes:
                if index in residents:
                    self._bind(index, residents.data(index), in_slot=False)
                else:
                    self._bind(index, self.slot(self._streamed[index], weights[index].nbytes), in_slot=True)

    def _fill(self, indexes: Sequence[int]) -> None:
        """Queue the copies of resident weights from the host."""
        self._go_behind_compute()
        pairs = [(self._residents.data(index), self.table.source(index)) for index in indexes]
        self._copy.copier(pairs)()
        self.copied_bytes += sum(source.numel() for _, source in pairs)

    def _await_copies(self) -> None:
        done: Event = self.device.new_event(timed=False)
        self._copy.record(done)
        self.device.compute_stream().wait(done)

    def _go_behind_compute(self) -> None:
        """Memory that was just taken may have been freed by another thread whose kernels are still queued."""
        queued: Event = self.device.new_event(timed=False)
        self.device.compute_stream().record(queued)
        self._copy.wait(queued)

    def rebind(self, indexes: Sequence[int]) -> None:
        """These weights' host bytes or tensor objects have changed: point and, where resident, copy again. The caller
        has made the device idle."""
        self._bind_home(indexes)
        self._fill([index for index in indexes if index in self._residents])
        self._await_copies()

    def clear(self) -> None:
        """All weights back to the host; no device memory kept. The caller has made the device idle."""
        self.unfinished = True
        self._unbind(range(len(self.table.weights)))
        self._streamed, self._to_bind = {}, []
        self._residents.clear()
        self._arena = None
        self.unfinished = False
        self.device.release_cached()
