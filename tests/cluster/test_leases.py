"""The lease queue: under any order of failures each item ends exactly once, done or set aside."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.leases import LeaseQueue, make_batches
from cluster.messages import Item


def items_of(count: int) -> list[Item]:
    return [{"id": f"i{k}", "prompt": "x" * (k * 7 % 5)} for k in range(count)]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 7))
def test_batches_hold_every_item_once_sorted_by_length(count: int, size: int) -> None:
    batches = make_batches(items_of(count), size, lambda item: len(item["prompt"]))
    flat = [item for batch in batches for item in batch]
    assert sorted(item["id"] for item in flat) == sorted(item["id"] for item in items_of(count))
    lengths = [len(item["prompt"]) for item in flat]
    assert lengths == sorted(lengths, reverse=True)
    assert all(1 <= len(batch) <= size for batch in batches)


def test_a_batch_of_no_items_is_refused() -> None:
    with pytest.raises(ValueError, match="0 items"):
        make_batches(items_of(3), 0, len)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4), st.data())
def test_every_item_ends_once_and_a_bad_one_after_its_attempts(
    count: int, size: int, attempts: int, data: st.DataObject
) -> None:
    items = items_of(count)
    bad = data.draw(st.sets(st.sampled_from([item["id"] for item in items])))
    queue = LeaseQueue(make_batches(items, size, lambda item: 0), attempts=attempts)
    done: list[str] = []
    aside: list[str] = []
    alone: dict[str, int] = {}
    innocent = 0
    while not queue.finished:
        out = []
        while len(out) < data.draw(st.integers(1, 3)) and (lease := queue.take()) is not None:
            out.append(lease)
        for lease in data.draw(st.permutations(out)):
            ids = [item["id"] for item in lease.items]
            if innocent < 5 and data.draw(st.booleans()):
                innocent += 1
                assert queue.give_back(lease.number, error="worker died", blame=False) == []
            elif bad & set(ids):
                if len(ids) == 1:
                    alone[ids[0]] = alone.get(ids[0], 0) + 1
                aside += [one.item["id"] for one in queue.give_back(lease.number, error="bad", blame=True)]
            else:
                assert queue.finish(lease.number)
                assert not queue.finish(lease.number)
                done += ids
    assert sorted(done + aside) == sorted(item["id"] for item in items)
    assert set(aside) == bad
    assert all(alone[key] == attempts for key in bad)


def test_a_lease_given_back_without_blame_goes_out_next_as_it_was() -> None:
    queue = LeaseQueue(make_batches(items_of(6), 2, lambda item: 0))
    first = queue.take()
    assert first is not None
    queue.give_back(first.number, error="", blame=False)
    again = queue.take()
    assert again is not None and again.items == first.items and again.attempt == first.attempt
    assert again.number != first.number, "a late answer to the old lease must not count for the new one"
