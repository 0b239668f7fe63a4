"""Layout: where each weight lies in the host store. Pure: no memory is touched.

A unit starts on a page, a tensor at a multiple of 256 bytes. Within a unit tensors ascend by size, so that what a
plan streams of a unit (its large tensors) is one contiguous run and what it keeps resident lies before it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from flextensor.units import is_dense

PAGE = 4096
TENSOR_ALIGNMENT = 256
PIN_CHUNK = 256 << 20
"""Bytes that are pinned at a time, where a unit is not larger: 8 ms. Not more, since that is left when the filling
ends, and what maps memory meanwhile may wait for it; not less, since 60 GB are some hundred regions already."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight. Shape and stride are in elements, as in ``torch.Tensor``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of its storage, given that it is dense."""
        return self.numel * self.dtype.itemsize

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> WeightSpec:
        """The spec of a tensor (of any device, ``meta`` too)."""
        return WeightSpec(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True)
class UnitSpec:
    """A unit and its weights. A weight that several units read is listed in each, stored with the first."""

    name: str
    weights: tuple[WeightSpec, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A weight and its place: ``offset`` and ``nbytes`` in bytes. ``unit`` is the first unit that lists it."""

    name: str
    unit: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """All weights by ascending offset; ``nbytes`` is the size of the mapping that holds them."""

    tensors: tuple[StoredTensor, ...]
    nbytes: int

    @cached_property
    def by_name(self) -> dict[str, StoredTensor]:
        """Name -> tensor."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def by_unit(self) -> dict[str, tuple[StoredTensor, ...]]:
        """Unit -> its tensors by ascending offset; units in the order in which they lie."""
        units: dict[str, list[StoredTensor]] = {}
        for tensor in self.tensors:
            units.setdefault(tensor.unit, []).append(tensor)
        return {unit: tuple(tensors) for unit, tensors in units.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone, without alignment."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of names, units, dtypes, shapes, strides and places."""
        rows = [[t.name, t.unit, str(t.dtype), t.shape, t.stride, t.offset, t.nbytes] for t in self.tensors]
        return hashlib.blake2b(json.dumps([self.nbytes, rows]).encode(), digest_size=16).hexdigest()


def round_up(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


def storage_shape(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the order in which a dense tensor's elements lie: slowest dimension first."""
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    return tuple(shape[dim] for dim in order)


def collect_weights(units: Iterable[UnitSpec]) -> list[tuple[str, tuple[WeightSpec, ...]]]:
    """Units and the weights that each stores: checked, each weight once, with the first unit that lists it.

    Raises ValueError for an empty or not dense weight, one name with two meanings, and two units of one name.
    """
    seen: dict[str, WeightSpec] = {}
    names: set[str] = set()
    collected: list[tuple[str, tuple[WeightSpec, ...]]] = []
    for unit in units:
        if unit.name in names:
            raise ValueError(f"unit {unit.name!r} is listed twice")
        names.add(unit.name)
        fresh: list[WeightSpec] = []
        for weight in unit.weights:
            known = seen.get(weight.name)
            if known is None:
                _check(weight, unit.name)
                seen[weight.name] = weight
                fresh.append(weight)
            elif known != weight:
                raise ValueError(f"weight {weight.name!r} is listed as {known} and, in unit {unit.name!r}, as {weight}")
        collected.append((unit.name, tuple(fresh)))
    return collected


def make_layout(units: Iterable[UnitSpec]) -> Layout:
    """The layout of these units, in their order; the same input always gives the same layout.

    Raises ValueError as ``collect_weights`` does.
    """
    tensors: list[StoredTensor] = []
    end = 0
    for unit, weights in collect_weights(units):
        # Never flush with the unit before: no run of bytes may lead from one into the other (pinning cuts there).
        end = round_up(end + TENSOR_ALIGNMENT, PAGE) if end and weights else end
        for weight in sorted(weights, key=lambda w: (w.nbytes, w.name)):
            end = round_up(end, TENSOR_ALIGNMENT)
            tensors.append(_stored(weight, unit, end))
            end += weight.nbytes
    return Layout(tuple(tensors), round_up(end, PAGE))


def make_scattered_layout(units: Iterable[UnitSpec]) -> Layout:
    """A layout of virtual offsets for tensors that stay where they are: no two follow each other."""
    tensors: list[StoredTensor] = []
    end = 0
    for unit, weights in collect_weights(units):
        for weight in weights:
            tensors.append(_stored(weight, unit, end))
            end = round_up(end + weight.nbytes, TENSOR_ALIGNMENT) + TENSOR_ALIGNMENT
    return Layout(tuple(tensors), end)


def pin_chunks(layout: Layout, most: int | None = None) -> list[tuple[int, int]]:
    """(start, end) of chunks that cover the layout, cut between units, each as large as possible up to ``most`` bytes
    (None: ``PIN_CHUNK``).

    A copy that spans two registrations fails, and a copy never leaves its unit; a unit above ``most`` is one chunk.
    """
    most = PIN_CHUNK if most is None else most
    cuts = [tensors[0].offset for tensors in layout.by_unit.values()] + [layout.nbytes]
    chunks: list[tuple[int, int]] = []
    start = 0
    for here, following in itertools.pairwise(cuts):
        if following - start > most and here > start:
            chunks.append((start, here))
            start = here
    if layout.nbytes > start:
        chunks.append((start, layout.nbytes))
    return chunks


def _stored(weight: WeightSpec, unit: str, offset: int) -> StoredTensor:
    return StoredTensor(weight.name, unit, weight.dtype, weight.shape, weight.stride, offset, weight.nbytes)


def _check(weight: WeightSpec, unit: str) -> None:
    where = f"weight {weight.name!r} of unit {unit!r}, shape {weight.shape}, stride {weight.stride}"
    if len(weight.shape) != len(weight.stride):
        raise ValueError(f"{where}: shape and stride have different lengths")
    if weight.numel == 0:
        raise ValueError(f"{where}: has no elements; keep it resident, there is nothing to store")
    if not is_dense(weight.shape, weight.stride):
        raise ValueError(
            f"{where}: its elements do not fill one stretch of memory (expanded, overlapping or a slice with holes); "
            "keep it resident or make it contiguous"
        )
