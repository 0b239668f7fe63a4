"""What the loader works out of a Plan once, before the first visit: copies ready to be queued, slots that overlap, and
what lies in the slots at any point of a regular step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flextensor.planner.plan import Plan
from flextensor.runtime.device import Stream
from flextensor.runtime.memory import DeviceWeights
from flextensor.units import Weight


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies for one visit that are issued together. The visit's ready event is recorded behind the ``last``."""

    visit: int
    queue: Callable[[], None]
    moves: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    tensors: tuple[int, ...]
    nbytes: int
    last: bool


def batches_of(plan: Plan, memory: DeviceWeights, copy_stream: Stream) -> list[tuple[Batch, ...]]:
    """For each visit, what is issued after its exit, in the plan's order (this step's needs first)."""
    last_for = {copy.visit: at for at, copy in enumerate(plan.copies)}
    after: list[list[Batch]] = [[] for _ in plan.visits]
    for at, copy in sorted(enumerate(plan.copies), key=lambda pair: (pair[1].lag, pair[0])):
        moves = tuple(moves_of(copy.tensors, plan, memory))
        last = last_for[copy.visit] == at
        after[copy.after].append(Batch(copy.visit, copy_stream.copier(moves), moves, copy.tensors, copy.nbytes, last))
    return [tuple(batches) for batches in after]


def queues_of(batches: Sequence[Batch], copy_stream: Stream) -> tuple[tuple[Callable[[], None], int | None], ...]:
    """What queues ``batches`` in the steady state, outside any capture: functions, each with the visit whose ready
    event is recorded behind it (None: no event). Between two events copies are queued together."""
    queues: list[tuple[Callable[[], None], int | None]] = []
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for at, batch in enumerate(batches):
        moves.extend(batch.moves)
        if batch.last or at == len(batches) - 1:
            queue = batch.queue if len(moves) == 1 else copy_stream.copier(moves, together=True)
            queues.append((queue, batch.visit if batch.last else None))
            moves = []
    return tuple(queues)


def moves_of(tensors: Sequence[int], plan: Plan, memory: DeviceWeights) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) byte views; tensors that are contiguous on both sides go as one."""
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = 0
    table, offsets = memory.table, plan.offsets
    while start < len(tensors):
        stop = start + 1
        first = table.source(tensors[start])
        base = first.data_ptr() - offsets[tensors[start]]
        while stop < len(tensors):
            following = table.source(tensors[stop])
            same_memory = following.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not same_memory or following.data_ptr() - offsets[tensors[stop]] != base:
                break
            stop += 1
        last = table.source(tensors[stop - 1])
        length = last.data_ptr() + last.numel() - first.data_ptr()
        with torch.inference_mode(False):
            source = first.as_strided((length,), (1,)) if stop - start > 1 else first
        moves.append((memory.slot(offsets[tensors[start]], length), source))
        start = stop
    return moves


def overlapping(plan: Plan, weights: Sequence[Weight]) -> Mapping[int, tuple[int, ...]]:
    """For each streamed tensor, the others whose slots share bytes with its own."""
    spans = sorted((offset, offset + weights[tensor].nbytes, tensor) for tensor, offset in plan.offsets.items())
    found: dict[int, list[int]] = {tensor: [] for tensor in plan.offsets}
    for at, (_, end, tensor) in enumerate(spans):
        for start, _, other in spans[at + 1 :]:
            if start >= end:
                break
            found[tensor].append(other)
            found[other].append(tensor)
    return {tensor: tuple(others) for tensor, others in found.items()}


def content_before(
    position: int,
    plan: Plan,
    after: Sequence[Sequence[Batch]],
    overlaps: Mapping[int, tuple[int, ...]],
    *,
    settled: bool,
) -> tuple[dict[int, int], set[int]]:
    """Before visit ``position`` of a step, all steps so far having been regular: tensor -> the visit it was fetched
    for, of what lies in its slot; and the visits of whose copies only some have been issued, so that their ready
    events are still those of the step before. ``settled``: a whole step has run."""
    primed = [*plan.initial, *(copy for copy in plan.copies if copy.lag)]
    content = {tensor: copy.visit for copy in primed for tensor in copy.tensors}
    begun: set[int] = set()
    whole_steps = 2 if settled else 0
    for at in [*list(range(len(plan.visits))) * whole_steps, *range(position)]:
        for batch in after[at]:
            for tensor in batch.tensors:
                for other in overlaps[tensor]:
                    content.pop(other, None)
            for tensor in batch.tensors:
                content.pop(tensor, None)
                content[tensor] = batch.visit
            (begun.discard if batch.last else begun.add)(batch.visit)
    return content, begun
