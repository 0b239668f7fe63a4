"""Resident weights on the device, carved from a few chunks.

One allocation a weight would cost what the allocator rounds each of them up by (up to 1 MiB on CUDA), beyond the plan's
count and so beyond the budget. Chunks hold their weights side by side, each at a multiple of ALIGNMENT, and have no
holes while a plan is in force: the chunks' bytes are the plan's ``resident_bytes``.

[Note: a replan] Weights that stay resident stay where they are, as far as no hole is left. What leaves makes holes;
what comes goes into them; the emptiest chunks are emptied into the holes of others, within the device, and given back.
A chunk that still has a hole then is packed anew into a smaller one, as far as the larger of the two plans leaves room
for both, else given back, and its weights come again from the host. So what is moved over the link is at most what was
resident, and no more than a plan's memory is ever taken.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from flextensor.planner.plan import align
from flextensor.runtime.device import Device

CHUNK_BYTES = 256 << 20
"""A chunk is closed when it has so many bytes: few enough for a replan to pack it anew in the old arena's room."""

SMALL_BYTES = 1 << 20
"""Weights below this have chunks of their own, so that the sizes of the others' stay round."""


@dataclass(eq=False)
class _Chunk:
    """``places``: weight index -> offset."""

    data: torch.Tensor
    places: dict[int, int] = field(default_factory=dict)


_Hole = tuple[int, int, int]
"""Bytes, the chunk's number, the offset: sorted, the tightest hole for a size is found by bisection."""


@dataclass(frozen=True)
class Move:
    """Bytes of a weight that went from one chunk to another."""

    index: int
    source: torch.Tensor
    destination: torch.Tensor


class Residents:
    """``nbytes``: of each weight, by index."""

    def __init__(self, device: Device, nbytes: Sequence[int]) -> None:
        self._device = device
        self._nbytes = nbytes
        self._chunks: list[_Chunk] = []
        self._home: dict[int, _Chunk] = {}

    def __contains__(self, index: object) -> bool:
        return index in self._home

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._home))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory taken."""
        return sum(chunk.data.numel() for chunk in list(self._chunks))  # other threads ask, too

    def chunks(self) -> list[torch.Tensor]:
        """The allocations."""
        return [chunk.data for chunk in self._chunks]

    def data(self, index: int) -> torch.Tensor:
        """The weight's bytes on the device."""
        chunk = self._home[index]
        at = chunk.places[index]
        return chunk.data[at : at + self._nbytes[index]]

    # ---- a replan

    def remove(self, indexes: Iterable[int]) -> None:
        """These are resident no more. Nothing points at their bytes."""
        for index in indexes:
            del self._home.pop(index).places[index]

    def refill(self, added: Iterable[int]) -> tuple[list[Move], list[int]]:
        """Close the holes, with ``added`` and then with each other's weights ([Note: a replan]).

        Returns what has to be copied within the device before the memory that was given back is used anew (bytes of
        ``added`` are not there yet, and need not be), and which of ``added`` have no place yet.
        """
        holes = sorted(hole for number in range(len(self._chunks)) for hole in self._holes(number))
        homeless = [index for index in self._largest_first(added) if not self._settle(index, holes)]
        moves: list[Move] = []
        live = [self._live(chunk) for chunk in self._chunks]
        for number in sorted(range(len(live)), key=live.__getitem__):
            if any(hole[1] == number for hole in holes):
                moves += self._empty(number, holes)
        self._chunks = [chunk for chunk in self._chunks if chunk.places]
        return moves, homeless

    def repack(self, room: int) -> list[Move]:
        """Make a chunk that has holes a smaller one of at most ``room`` bytes, its memory being there beside; returns
        what has to be copied, empty when no chunk is left to be made smaller. The old chunk lives as long as its moves.
        """
        for number, chunk in enumerate(self._chunks):
            live = self._live(chunk)
            if live == chunk.data.numel() or live > room:
                continue
            try:
                packed = _Chunk(self._device.allocate(live))
            except torch.OutOfMemoryError:
                return []
            sources = {index: self.data(index) for index in chunk.places}
            end = 0
            for index in sorted(chunk.places, key=chunk.places.__getitem__):
                packed.places[index] = end
                end += align(self._nbytes[index])
                self._home[index] = packed
            self._chunks[number] = packed
            return [Move(index, source, self.data(index)) for index, source in sources.items()]
        return []

    def dissolve(self) -> list[int]:
        """Give back the chunks that still have holes; returns the weights that were in them, to be unbound."""
        whole: list[_Chunk] = []
        homeless: list[int] = []
        for chunk in self._chunks:
            if self._live(chunk) == chunk.data.numel():
                whole.append(chunk)
            else:
                homeless += chunk.places
        self._chunks = whole
        for index in homeless:
            del self._home[index]
        return homeless

    def _live(self, chunk: _Chunk) -> int:
        return sum(align(self._nbytes[index]) for index in chunk.places)

    def grow(self, indexes: Sequence[int]) -> None:
        """New chunks for these. Raises torch.OutOfMemoryError."""
        for places, nbytes in self._groups(indexes):
            # No name for it here: an error's traceback would keep it, and with it memory for the plan before.
            self._chunks.append(_Chunk(self._device.allocate(nbytes), places))
            self._home.update(dict.fromkeys(places, self._chunks[-1]))

    def clear(self) -> None:
        """Nothing is resident; the memory is given back."""
        self._chunks, self._home = [], {}

    def _groups(self, indexes: Sequence[int]) -> Iterator[tuple[dict[int, int], int]]:
        """(places, bytes) of each new chunk."""
        for small in (True, False):
            places: dict[int, int] = {}
            end = 0
            for index in sorted(index for index in indexes if (self._nbytes[index] < SMALL_BYTES) is small):
                places[index] = end
                end += align(self._nbytes[index])
                if end >= CHUNK_BYTES:
                    yield places, end
                    places, end = {}, 0
            if places:
                yield places, end

    def _largest_first(self, indexes: Iterable[int]) -> list[int]:
        return sorted(indexes, key=lambda index: (-self._nbytes[index], index))

    def _holes(self, number: int) -> list[_Hole]:
        chunk = self._chunks[number]
        found, end = [], 0
        for index, at in sorted(chunk.places.items(), key=lambda place: place[1]):
            if at > end:
                found.append((at - end, number, end))
            end = at + align(self._nbytes[index])
        if end < chunk.data.numel():
            found.append((chunk.data.numel() - end, number, end))
        return found

    def _settle(self, index: int, holes: list[_Hole]) -> bool:
        """Put a weight into the tightest hole that holds it; False when none does."""
        need = align(self._nbytes[index])
        at = bisect.bisect_left(holes, (need, -1, -1))
        if at == len(holes):
            return False
        nbytes, number, start = holes.pop(at)
        if nbytes > need:
            bisect.insort(holes, (nbytes - need, number, start + need))
        self._chunks[number].places[index] = start
        self._home[index] = self._chunks[number]
        return True

    def _empty(self, number: int, holes: list[_Hole]) -> list[Move]:
        """Move all of a chunk's weights into holes of others; changes nothing when they do not fit."""
        chunk = self._chunks[number]
        others = [hole for hole in holes if hole[1] != number]
        inside = self._largest_first(chunk.places)
        sources = {index: self.data(index) for index in inside}
        for done, index in enumerate(inside):
            if not self._settle(index, others):
                for back in inside[:done]:
                    del self._home[back].places[back]
                    self._home[back] = chunk
                return []
        chunk.places.clear()
        holes[:] = others
        return [Move(index, sources[index], self.data(index)) for index in inside]
