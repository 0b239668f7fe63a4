"""Checking all the time, a little at a time."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import pytest

from flextensor.store import StoreCorruptError, StoreError, private_store
from flextensor.store.scrub import Scrubber
from tests.store.holder import in_a_process_of_its_own
from tests.store.small_models import small_weights, units_of


def _until(condition: object, seconds: float = 120.0) -> None:
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
    share = 0.1
    worked, took, one = in_a_process_of_its_own(_processor_seconds, share)
    assert worked <= 1.25 * share * took + 2 * one  # the wait for the one that is checked last is still to come


def _processor_seconds(share: float) -> tuple[float, float, float]:
    """What a process in which nothing else runs works while a tenth of the weights is checked, and a second at least;
    how long that takes; and what one unit takes."""
    tensors = small_weights(units=10, rows=8000)
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        started = time.process_time()
        store.verify("layers.0", threads=1)
        one = time.process_time() - started
        scrubber = Scrubber(store, share=share)
        worked, began = time.process_time(), time.perf_counter()
        scrubber.start()
        while time.perf_counter() - began < 1.0 or scrubber.report().checked_bytes <= store.layout.weight_bytes / 10:
            time.sleep(0.05)
        return time.process_time() - worked, time.perf_counter() - began, one


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
        before = scrubber.report().checked_bytes
        time.sleep(0.1)
        more = scrubber.report().checked_bytes - before
        assert more <= tensors["layers.0.up"].nbytes, "nothing is streamed; one weight was perhaps in hand"
        scrubber.follow(["layers.2.up"])
        _until(lambda: len(scrubber.report().corrupt) == 2)


def test_each_unit_has_its_turn_however_often_the_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = small_weights(units=8, rows=50)
    with private_store(units_of(tensors), tensors, checksums=True) as store:
        scrubber = Scrubber(store, share=1.0)
        verify, left_out = store.verify, itertools.cycle(("layers.0.norm", "layers.1.norm"))

        def after_a_change(unit: str, **options: Any) -> int:
            but = next(left_out)
            scrubber.follow(name for name in tensors if name != but)
            return verify(unit, **options)

        monkeypatch.setattr(store, "verify", after_a_change)
        store.source("layers.7.up")[40] ^= 1
        scrubber.start()
        _until(lambda: scrubber.report().corrupt)
        scrubber.stop()
        assert scrubber.report().corrupt == ("layers.7.up",)
        assert scrubber.report().rounds == 0, "no pass was whole"


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
