"""Checking all the time, a little at a time."""

from __future__ import annotations

import logging
import time

import pytest

from flextensor.store import StoreCorruptError, StoreError, private_store
from flextensor.store.scrub import Scrubber
from tests.store.small_models import small_weights, units_of


def _until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_wrong_byte_is_found_while_the_store_is_used(caplog: pytest.LogCaptureFixture) -> None:
    tensors = small_weights()
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        scrubber = Scrubber(store, share=0.5)
        scrubber.start()
        _until(lambda: scrubber.report().rounds >= 2)
        scrubber.check()
        assert scrubber.report().checked_bytes >= 2 * sum(t.nbytes for t in tensors.values())
        with caplog.at_level(logging.ERROR):
            store.source("layers.2.down")[4000] ^= 1
            _until(lambda: scrubber.report().corrupt)
        assert scrubber.report().corrupt == ("layers.2.down",)
        assert "layers.2.down" in caplog.text
        with pytest.raises(StoreCorruptError, match=r"layers\.2\.down"):
            scrubber.check()
        scrubber.stop()


def test_it_works_no_more_than_its_share() -> None:
    """By the processor time that this process takes while nothing else runs in it."""
    share, tensors = 0.1, small_weights(units=10, rows=8000)
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        started = time.process_time()
        store.verify("layers.0", threads=1)
        one = time.process_time() - started  # the wait for the one that is checked last is still to come
        scrubber = Scrubber(store, share=share)
        worked, began = time.process_time(), time.perf_counter()
        scrubber.start()
        time.sleep(0.8)
        worked, took = time.process_time() - worked, time.perf_counter() - began
        assert scrubber.report().checked_bytes > store.layout.weight_bytes / 10
    assert worked <= 1.25 * share * took + 2 * one


def test_it_checks_the_weights_that_it_is_told_to_and_no_others() -> None:
    tensors = small_weights(rows=50)
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        scrubber = Scrubber(store, share=0.5)
        scrubber.follow(["layers.2.down", "layers.0.up"])
        store.source("layers.1.up")[40] ^= 1
        store.source("layers.2.up")[40] ^= 1
        scrubber.start()
        _until(lambda: scrubber.report().rounds >= 3)
        assert scrubber.report().corrupt == ()
        assert scrubber.report().checked_bytes % (tensors["layers.2.down"].nbytes + tensors["layers.0.up"].nbytes) in (
            0,
            tensors["layers.0.up"].nbytes,  # of a round that has just begun
        )
        scrubber.follow(["layers.1.up", "layers.0.up"])
        _until(lambda: scrubber.report().corrupt)
        assert scrubber.report().corrupt == ("layers.1.up",)
        scrubber.follow([])
        time.sleep(0.05)
        before = scrubber.report()
        time.sleep(0.1)
        assert scrubber.report() == before, "nothing is streamed"
        scrubber.follow(["layers.2.up"])
        _until(lambda: len(scrubber.report().corrupt) == 2)


def test_each_unit_has_its_turn_however_often_the_weights_change() -> None:
    tensors = small_weights(units=8, rows=50)
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        scrubber = Scrubber(store, share=0.02)  # a pass takes longer than it takes to change the weights
        store.source("layers.7.up")[40] ^= 1
        scrubber.start()
        deadline = time.monotonic() + 10
        while not scrubber.report().corrupt:
            assert time.monotonic() < deadline
            for left_out in ("layers.0.norm", "layers.1.norm"):
                now = scrubber.report().checked_bytes
                scrubber.follow(name for name in tensors if name != left_out)
                _until(lambda now=now: scrubber.report().checked_bytes > now or scrubber.report().corrupt)


def test_it_ends_with_the_store_and_needs_checksums() -> None:
    tensors = small_weights()
    store = private_store(units_of(tensors), tensors, checksums=True)
    scrubber = Scrubber(store, share=1.0)
    scrubber.start()
    store.close()
    scrubber.stop()
    with private_store(units_of(tensors), tensors) as bare, pytest.raises(StoreError, match="no checksums"):
        Scrubber(bare)
    with pytest.raises(ValueError, match="share 0"):
        Scrubber(store, share=0)
