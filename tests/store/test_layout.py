"""The layout: where weights lie, whatever they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor.store import UnitSpec, WeightSpec, is_dense, make_layout
from flextensor.store.layout import make_scattered_layout, pin_chunks, storage_shape

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool]


@st.composite
def dense_weights(draw: st.DrawFn, name: str) -> WeightSpec:
    shape = tuple(draw(st.lists(st.integers(1, 40), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    stride = [0] * len(shape)
    step = 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    return WeightSpec(name, draw(st.sampled_from(DTYPES)), shape, tuple(stride))


@st.composite
def models(draw: st.DrawFn) -> tuple[UnitSpec, ...]:
    units = []
    for index in range(draw(st.integers(1, 6))):
        count = draw(st.integers(0, 6))
        units.append(UnitSpec(f"u{index}", tuple(draw(dense_weights(f"u{index}.w{k}")) for k in range(count))))
    return tuple(units)


@settings(deadline=None)
@given(models())
def test_weights_are_aligned_ordered_and_never_overlap(units: tuple[UnitSpec, ...]) -> None:
    layout = make_layout(units)
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset % 256 == 0
        assert tensor.offset >= end
        first_of_unit = layout.by_unit[tensor.unit][0] is tensor
        assert not first_of_unit or tensor.offset == 0 or tensor.offset > -(-end // 256) * 256
        end = tensor.offset + tensor.nbytes
    assert layout.nbytes % 4096 == 0
    assert end <= layout.nbytes <= end + 4096
    assert {t.name for t in layout.tensors} == {w.name for unit in units for w in unit.weights}
    for tensors in layout.by_unit.values():
        assert tensors[0].offset % 4096 == 0
        assert [t.nbytes for t in tensors] == sorted(t.nbytes for t in tensors)
        for before, after in itertools.pairwise(tensors):
            assert after.offset == -(-(before.offset + before.nbytes) // 256) * 256


@settings(deadline=None)
@given(models())
def test_the_same_units_give_the_same_layout_and_fingerprint(units: tuple[UnitSpec, ...]) -> None:
    shuffled = tuple(UnitSpec(unit.name, tuple(reversed(unit.weights))) for unit in units)
    assert make_layout(units) == make_layout(shuffled)
    assert make_layout(units).fingerprint == make_layout(shuffled).fingerprint


@settings(deadline=None)
@given(models())
def test_weights_of_an_adopted_layout_do_not_touch(units: tuple[UnitSpec, ...]) -> None:
    tensors = make_scattered_layout(units).tensors
    for before, after in itertools.pairwise(tensors):
        assert after.offset > -(-(before.offset + before.nbytes) // 256) * 256


@settings(deadline=None)
@given(models(), st.integers(4096, 1 << 16))
def test_pin_chunks_cover_the_store_and_cut_between_units(units: tuple[UnitSpec, ...], most: int) -> None:
    layout = make_layout(units)
    chunks = pin_chunks(layout, most)
    ends = [0, *(end for _, end in chunks)]
    assert [start for start, _ in chunks] == ends[:-1] and ends[-1] == layout.nbytes
    starts = {tensors[0].offset for tensors in layout.by_unit.values()} | {layout.nbytes}
    assert all(end in starts for _, end in chunks)
    for start, end in chunks:
        inside = [s for s in starts if start < s < end]
        assert end - start <= most or not inside


@settings(deadline=None)
@given(st.data())
def test_dense_is_what_torch_can_read_back_as_a_permutation(data: st.DataObject) -> None:
    weight = data.draw(dense_weights("w"))
    assert is_dense(weight.shape, weight.stride)
    flat = torch.arange(weight.numel)
    strided = flat.as_strided(weight.shape, weight.stride)
    order = sorted(range(len(weight.shape)), key=lambda dim: (-weight.stride[dim], dim))
    assert tuple(strided.permute(order).shape) == storage_shape(weight.shape, weight.stride)
    assert torch.equal(strided.permute(order).reshape(-1), flat)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.empty(0, 4), "no elements"),
        (torch.zeros(3, 1).expand(3, 4), "fill one stretch"),
        (torch.zeros(8, 8)[:, :4], "fill one stretch"),
        (torch.zeros(9).as_strided((3, 3), (1, 1)), "fill one stretch"),
        (torch.zeros(8)[::2], "fill one stretch"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"'u\.w' of unit 'u'.*{complaint}"):
        make_layout([UnitSpec("u", (WeightSpec.of("u.w", tensor),))])


def test_a_weight_of_two_units_is_stored_once_with_the_first() -> None:
    tied = WeightSpec.of("embed.weight", torch.zeros(10, 4))
    other = WeightSpec.of("head.bias", torch.zeros(10))
    layout = make_layout([UnitSpec("embed", (tied,)), UnitSpec("head", (tied, other))])
    assert [(t.name, t.unit) for t in layout.tensors] == [("embed.weight", "embed"), ("head.bias", "head")]


def test_one_name_with_two_meanings_is_refused() -> None:
    units = [UnitSpec(unit, (WeightSpec.of("w", torch.zeros(size)),)) for unit, size in (("a", 3), ("b", 4))]
    with pytest.raises(ValueError, match="'w' is listed as"):
        make_layout(units)
    with pytest.raises(ValueError, match="'a' is listed twice"):
        make_layout([units[0], units[0]])
