"""The checksum: the same however it is cut, different after any change of one word."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor.store.checksum import ROW_BYTES, Checksum, checksum


def by_definition(data: bytes) -> Checksum:
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    columns = sum((2 * (index % 2048) + 1) * word for index, word in enumerate(words))
    rows = sum((2 * (index // 2048) + 1) * word for index, word in enumerate(words))
    return Checksum(sum(words) % 2**64, columns % 2**64, rows % 2**64)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_equals_its_definition(data: bytes) -> None:
    assert checksum(as_tensor(data)) == by_definition(data)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 10), st.integers(0, 7))
def test_large_ones_equal_the_sum_of_their_pieces(seed: int, cut: int, tail: int) -> None:
    raw = torch.randint(0, 256, (ROW_BYTES * 10 + 8 * 100 + tail,), generator=torch.Generator().manual_seed(seed))
    raw = raw.to(torch.uint8)
    at = cut * ROW_BYTES
    parts = checksum(raw[:at].contiguous()) + checksum(raw[at:].contiguous()).at(at)
    assert parts == checksum(raw) == by_definition(bytes(raw.tolist()))


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_change_of_one_byte_is_seen(data: bytes, choose: st.DataObject) -> None:
    at = choose.draw(st.integers(0, len(data) - 1))
    value = choose.draw(st.integers(0, 255).filter(lambda v: v != data[at]))
    changed = data[:at] + bytes([value]) + data[at + 1 :]
    assert checksum(as_tensor(data)) != checksum(as_tensor(changed))


def test_rows_that_change_places_are_seen() -> None:
    raw = torch.arange(ROW_BYTES * 3, dtype=torch.int64).to(torch.uint8)
    raw[:ROW_BYTES] = 7
    swapped = torch.cat([raw[ROW_BYTES : 2 * ROW_BYTES], raw[:ROW_BYTES], raw[2 * ROW_BYTES :]])
    assert checksum(raw) != checksum(swapped)
