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
    tensors = small_weights(rows=20_000)
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        started = time.perf_counter()
        store.verify(threads=1)
        full = time.perf_counter() - started
        scrubber = Scrubber(store, share=0.02)
        scrubber.start()
        time.sleep(5 * full)
        scrubber.stop()
        assert scrubber.report().checked_bytes <= sum(t.nbytes for t in tensors.values())


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
