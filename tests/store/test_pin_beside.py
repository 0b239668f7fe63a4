"""Pinning beside the filling, with a registrar that keeps a list where CUDA's asks the driver."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from flextensor.store import HostStore, StoreError, TensorSource, private_store, shared_store
from flextensor.store.filling import Reader
from flextensor.store.host_store import MappedStore
from flextensor.store.layout import StoredTensor, make_layout, pin_chunks
from flextensor.store.pin_beside import PinBesideFilling
from flextensor.store.registrar import CudaRegistrar
from tests.store.small_models import same, small_weights, units_of

KINDS = ("private", "shared")
UNITS = 5


@dataclass(frozen=True)
class Asked:
    """One region as it was when it was to be registered."""

    address: int
    content: bytes
    read_only: bool
    thread: str


class ListOfRegions:
    """A registrar without a driver. refuse, fail: the number of the call that is refused, or raises."""

    def __init__(self, *, refuse: int | None = None, fail: int | None = None) -> None:
        self.asked: list[Asked] = []
        self.registered: dict[int, int] = {}
        self._refuse, self._fail = refuse, fail
        self._changed = threading.Condition()

    def refusal(self) -> str:
        return ""

    def register(self, address: int, nbytes: int, read_only: bool) -> str:
        with self._changed:
            number = len(self.asked)
            content = ctypes.string_at(address, nbytes)
            self.asked.append(Asked(address, content, read_only, threading.current_thread().name))
            self._changed.notify_all()
            if number == self._fail:
                raise RuntimeError("no context")
            if number == self._refuse:
                return "no more"
            assert address not in self.registered
            self.registered[address] = nbytes
            return ""

    def unregister(self, address: int) -> None:
        with self._changed:
            del self.registered[address]

    def pageable_speed(self) -> float | None:
        return None

    def wait_for(self, count: int) -> None:
        """Until so many regions were asked for."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= count, 120), f"{len(self.asked)} of {count}"


class Watched(TensorSource):
    """Does something in the thread that reads the weight called ``where``."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: str, what: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._where, self._what = where, what

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        reader, divisible = super().open(tensor)

        def read(target: torch.Tensor, start: int) -> None:
            self._what()
            reader(target, start)

        return (read if tensor.name == self._where else reader), divisible


@pytest.fixture(autouse=True)
def a_chunk_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as small as the units of these tests."""
    monkeypatch.setattr("flextensor.store.layout.PIN_CHUNK", 1 << 16)


def _weights() -> dict[str, torch.Tensor]:
    return small_weights(units=UNITS)


def _get(
    kind: str, directory: str, registrar: ListOfRegions | None, in_the_last_unit: Callable[[], None] = lambda: None
) -> HostStore:
    """A store of these weights; the function is called when all units but the last are in, or on their way."""
    tensors = _weights()
    units = units_of(tensors)
    where = make_layout(units).by_unit[f"layers.{UNITS - 1}"][0].name
    if kind == "shared":
        source = Watched(tensors, where, in_the_last_unit)
        return shared_store(units, source, namespace="t", directory=directory, registrar=registrar)

    def consume(name: str, view: torch.Tensor) -> None:
        if name == where:
            in_the_last_unit()

    return private_store(units, tensors, consume=consume, registrar=registrar)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("store-")]


def _right(store: HostStore) -> bool:
    return all(same(store.tensor(name), tensor) for name, tensor in _weights().items())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_full_is_registered_while_the_rest_is_filled(kind: str, shm_dir: str) -> None:
    ledger = ListOfRegions()
    before: list[int] = []

    def last_unit() -> None:
        ledger.wait_for(UNITS - 1)  # would never come if it were registered when all is full
        before.append(len(ledger.asked))

    with _get(kind, shm_dir, ledger, last_unit) as store:
        assert before == [UNITS - 1]
        assert isinstance(store, MappedStore)
        base = store.memory.data_ptr()
        chunks = pin_chunks(store.layout)
        assert [asked.address for asked in ledger.asked] == [base + start for start, _ in chunks]
        assert ledger.registered == {base + start: end - start for start, end in chunks}
        for asked, (start, end) in zip(ledger.asked, chunks, strict=True):
            assert asked.content == store.bytes(start, end - start).numpy().tobytes(), "it was not full yet"
        assert {asked.thread for asked in ledger.asked} == {"store-pin_0"}
        assert {asked.read_only for asked in ledger.asked} == {kind == "shared"}
        assert _threads() == []
        report = store.report().pin
        assert report is not None and report.complete and report.reason == ""
        assert (report.wanted, report.chunks) == (store.layout.nbytes, UNITS)
        assert report.seconds > 0 and report.waited_seconds >= 0
        edited = store.make_private("layers.0.up")
        assert ledger.registered[edited.data_ptr()] == edited.nbytes
        assert _right(store)
    assert ledger.registered == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [ValueError("no such shard"), KeyboardInterrupt()])
def test_a_filling_that_fails_leaves_nothing_registered_and_no_thread(
    kind: str, shm_dir: str, error: BaseException
) -> None:
    ledger = ListOfRegions()

    def last_unit() -> None:
        ledger.wait_for(1)
        raise error

    with pytest.raises(type(error)):
        _get(kind, shm_dir, ledger, last_unit)
    assert ledger.asked and ledger.registered == {}
    assert _threads() == []
    assert os.listdir(shm_dir) == []
    with _get(kind, shm_dir, ledger) as store:
        assert len(ledger.registered) == UNITS and _right(store)


def test_a_store_that_is_full_and_yet_not_good_is_unregistered(shm_dir: str) -> None:
    class Changed(TensorSource):
        def check_unchanged(self) -> None:
            ledger.wait_for(UNITS)
            raise StoreError("it changed")

    ledger, tensors = ListOfRegions(), _weights()
    with pytest.raises(StoreError, match="it changed"):
        shared_store(units_of(tensors), Changed(tensors), namespace="t", directory=shm_dir, registrar=ledger)
    assert ledger.registered == {} and _threads() == [] and os.listdir(shm_dir) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_ends_the_pinning_and_not_the_filling(
    kind: str, shm_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = ListOfRegions(refuse=1)
    with caplog.at_level(logging.INFO), _get(kind, shm_dir, ledger, lambda: ledger.wait_for(2)) as store:
        assert len(ledger.asked) == 2
        report = store.report().pin
        start, end = pin_chunks(store.layout)[0]
        assert report is not None and not report.complete
        assert (report.wanted, report.pinned, report.reason) == (store.layout.nbytes, end - start, "no more")
        assert (report.chunks, store.report().pageable_reason) == (UNITS, "no more")
        assert _right(store) and _threads() == []
    said = [record.getMessage() for record in caplog.records if "stays pageable" in record.getMessage()]
    assert len(said) == 1 and f"{report.pinned} of {report.wanted} bytes" in said[0] and "no more" in said[0]
    assert ledger.registered == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, UNITS - 1])
def test_what_registering_raises_reaches_the_caller_and_nothing_is_left(kind: str, shm_dir: str, number: int) -> None:
    ledger = ListOfRegions(fail=number)
    with pytest.raises(RuntimeError, match="no context"):
        _get(kind, shm_dir, ledger)
    assert ledger.registered == {} and _threads() == [] and os.listdir(shm_dir) == []


def test_a_store_of_nothing_is_pinned_too() -> None:
    ledger = ListOfRegions()
    with private_store([], {}, registrar=ledger) as store:
        report = store.report().pin
        assert report is not None and report.complete and report.wanted == 0 and ledger.asked == []


def test_who_attaches_to_a_full_store_registers_it_at_once(shm_dir: str) -> None:
    ledger = ListOfRegions()
    with _get("shared", shm_dir, None) as first, _get("shared", shm_dir, ledger) as second:
        assert first.report().pin is None and not second.report().created_by_us
        assert {asked.thread for asked in ledger.asked} == {threading.current_thread().name}
        report = second.report().pin
        assert report is not None and report.complete and report.chunks == UNITS
        assert report.waited_seconds == report.seconds > 0
        second.close()
        assert ledger.registered == {} and _right(first)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gpu_there_is_no_thread_and_the_report_of_a_later_pin(
    kind: str, shm_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    threads: list[str] = []
    tensors = _weights()
    units = units_of(tensors)
    store: HostStore
    with caplog.at_level(logging.INFO, "flextensor.store.pinning"):
        if kind == "shared":
            source = Watched(tensors, f"layers.{UNITS - 1}.up", lambda: threads.extend(_threads()))
            store = shared_store(units, source, namespace="t", directory=shm_dir, registrar=CudaRegistrar(0))
        else:
            store = private_store(
                units, tensors, consume=lambda name, view: threads.extend(_threads()), registrar=CudaRegistrar(0)
            )
    with store:
        assert threads and not [name for name in threads if name.startswith("store-pin")]
        (record,) = caplog.records
        assert record.levelno == logging.INFO and record.getMessage().endswith("no CUDA device")
        found, later = store.report().pin, store.pin()
        assert found is not None and found.seconds == later.seconds == 0.0
        assert (found.wanted, found.pinned, found.chunks, found.reason) == (
            later.wanted,
            later.pinned,
            later.chunks,
            "no CUDA device",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_just_before_the_last_chunks_are_waited_for_leaves_nothing_registered(
    kind: str, shm_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(ListOfRegions):
        def register(self, address: int, nbytes: int, read_only: bool) -> str:
            time.sleep(0.1)
            return super().register(address, nbytes, read_only)

    def interrupted(self: PinBesideFilling) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PinBesideFilling, "finish", interrupted)
    registrar = Slow()
    with pytest.raises(KeyboardInterrupt):
        _get(kind, shm_dir, registrar)
    assert _threads() == [] and registrar.registered == {}
