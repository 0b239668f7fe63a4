"""Stores of one process: packed and adopted."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from flextensor.store import (
    MissingWeightError,
    StoreClosedError,
    StoreCorruptError,
    StoreError,
    UnitSpec,
    WeightSpec,
    adopt_store,
    private_store,
)
from flextensor.store.memory import weights_pss
from tests.store.holder import in_a_process_of_its_own
from tests.store.small_models import same, small_weights, units_of


def test_a_packed_store_keeps_bits_and_strides() -> None:
    tensors = small_weights()
    with private_store(units_of(tensors), tensors) as store:
        for name, tensor in tensors.items():
            assert same(store.tensor(name), tensor)
            assert store.tensor(name).data_ptr() % 256 == 0
            place = store.layout.by_name[name]
            assert torch.equal(store.bytes(place.offset, place.nbytes), store.source(name))
        assert store.report().weight_bytes == sum(t.nbytes for t in tensors.values())
        assert not store.shared


def test_originals_can_go_while_the_store_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each thread keeps the one that it filled last until it takes the next.
    monkeypatch.setattr("flextensor.store.filling.thread_count", lambda: 2)
    size = 24 << 20
    tensors = {f"u.{index:02}": torch.full((size // 8,), index, dtype=torch.int64) for index in range(30)}
    units = units_of(tensors)
    originals = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in tensors.items()}
    seen: list[str] = []
    kept_too_long: list[int] = []

    def consume(name: str, view: torch.Tensor) -> None:
        tensors[name] = view
        seen.append(name)
        kept_too_long.append(sum(originals[name]() is not None for name in seen))

    with private_store(units, tensors, consume=consume) as store:
        assert seen == [tensor.name for tensor in store.layout.tensors]
        assert all(tensors[name].data_ptr() == store.tensor(name).data_ptr() for name in seen)
        assert all(bool((tensors[name] == int(name[-2:])).all()) for name in seen)
    gc.collect()
    assert max(kept_too_long) <= 2
    assert not any(reference() is not None for reference in originals.values())


def test_memory_is_the_sum_of_the_weights_and_at_most_a_page_each_and_goes_at_the_end() -> None:
    nbytes, weights, pss, more, left = in_a_process_of_its_own(_memory_of_a_store)
    assert weights <= nbytes <= weights + 16 * 4096
    assert 0.99 * nbytes <= pss <= nbytes + (4 << 20)
    assert more >= 0.99 * nbytes
    assert left < 8 << 20


def _memory_of_a_store() -> tuple[int, int, int, int, int]:
    """Of 16 weights: the layout's bytes, theirs, the store's memory, and by how much this process has grown while it
    was open and afterwards. The kernel counts what lies beside a mapping to it: nothing else is to be there."""
    tensors = {f"u{index}.w": torch.ones((1 << 22) + 4096, dtype=torch.uint8) for index in range(16)}
    before = _resident_bytes()
    with private_store(units_of(tensors), tensors) as store:
        nbytes, pss, more = store.layout.nbytes, weights_pss([], store), _resident_bytes() - before
    return nbytes, sum(t.nbytes for t in tensors.values()), pss, more, _resident_bytes() - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_edits_are_private_copies_that_can_be_undone() -> None:
    tensors = small_weights()
    name = "layers.0.down"
    with private_store(units_of(tensors), tensors) as store:
        original = store.bytes(store.layout.by_name[name].offset, tensors[name].nbytes).clone()
        edited = store.make_private(name)
        edited.mul_(2)
        assert same(store.tensor(name), tensors[name] * 2)
        assert torch.equal(store.source(name).view(torch.float32), (tensors[name] * 2).t().reshape(-1))
        assert torch.equal(store.bytes(store.layout.by_name[name].offset, tensors[name].nbytes), original)
        assert store.make_private(name).data_ptr() == edited.data_ptr()
        assert store.report().edited == (name,)
        assert store.report().private_bytes == tensors[name].nbytes
        store.discard_private(name)
        assert same(store.tensor(name), tensors[name])
        assert store.report().private_bytes == 0
        assert float(edited.flatten()[0]) == 2 * float(tensors[name].flatten()[0])


def test_tensors_outlive_a_closed_store() -> None:
    tensors = small_weights()
    store = private_store(units_of(tensors), tensors)
    view = store.tensor("layers.2.up")
    store.close()
    store.close()
    gc.collect()
    assert same(view, tensors["layers.2.up"])
    with pytest.raises(StoreClosedError):
        store.tensor("layers.2.up")


def test_views_made_in_inference_mode_can_be_used_outside() -> None:
    tensors = small_weights()
    with private_store(units_of(tensors), tensors) as store:
        with torch.inference_mode():
            view = store.tensor("layers.0.norm")
            edited = store.make_private("layers.1.norm")
        assert not view.is_inference()
        edited.add_(1)
        assert same(edited, tensors["layers.1.norm"] + 1)


def test_what_is_missing_or_different_is_named() -> None:
    tensors = small_weights()
    units = units_of(tensors)
    without = {name: tensor for name, tensor in tensors.items() if name != "layers.1.up"}
    with pytest.raises(MissingWeightError, match=r"layers\.1\.up.*layers\.1"):
        private_store(units, without)
    with pytest.raises(MissingWeightError, match=r"layers\.1\.up.*float16"):
        private_store(units, {**tensors, "layers.1.up": tensors["layers.1.up"].half()})


def test_a_run_outside_the_store_is_refused() -> None:
    tensors = small_weights()
    with private_store(units_of(tensors), tensors) as store, pytest.raises(ValueError, match="outside the store"):
        store.bytes(store.layout.nbytes - 1, 2)


def test_checksums_find_and_name_a_wrong_byte() -> None:
    tensors = small_weights()
    units = units_of(tensors)
    with private_store(units, tensors, checksums=True) as store:
        assert store.verify() == sum(t.nbytes for t in tensors.values())
        store.source("layers.1.up")[12345] ^= 64
        assert store.verify("layers.0") > 0
        with pytest.raises(StoreCorruptError, match=r"layers\.1\.up") as caught:
            store.verify("layers.1")
        assert caught.value.tensors == ("layers.1.up",)
        with pytest.raises(KeyError, match=r"no unit 'layers\.9'"):
            store.verify("layers.9")
    with private_store(units, tensors) as store, pytest.raises(StoreError, match="no checksums"):
        store.verify()


def test_an_adopted_store_copies_nothing() -> None:
    tensors = small_weights()
    with adopt_store(units_of(tensors), tensors) as store:
        for name, tensor in tensors.items():
            assert same(store.tensor(name), tensor)
            assert store.tensor(name).data_ptr() == tensor.data_ptr()
            place = store.layout.by_name[name]
            assert torch.equal(store.bytes(place.offset, place.nbytes), store.source(name))
        first = store.layout.tensors[0]
        with pytest.raises(ValueError, match="a run is within one"):
            store.bytes(first.offset, first.nbytes + 256)
        store.make_private("layers.0.up").zero_()
        assert bool(tensors["layers.0.up"].any())


def test_without_a_gpu_a_store_says_why_it_is_pageable() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    tensors = small_weights()
    with private_store(units_of(tensors), tensors) as store:
        report = store.pin()
        assert (report.pinned, report.complete, report.reason) == (0, False, "no CUDA device")
        assert store.report().pageable_reason == "no CUDA device"


def test_an_adopted_weight_must_be_on_the_host() -> None:
    weight = torch.empty(4, device="meta")
    with pytest.raises(ValueError, match="is on meta"):
        adopt_store([UnitSpec("u", (WeightSpec.of("w", weight),))], {"w": weight})
