"""Every engine test runs on the host device, and on CUDA where there is one."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import flextensor as ft
from flextensor.runtime import host
from flextensor.runtime.cuda import CudaStream
from tests.engine.harness import Inputs, Pair
from tests.engine.models import delay_compute

MakePair = Callable[..., Pair]
PaceLink = Callable[[float], None]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """``host`` or ``cuda``."""
    return str(request.param)


@pytest.fixture(autouse=True)
def device_memory_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it never is; what is read before it is written is no number then."""
    monkeypatch.setattr(host, "UNWRITTEN", 0xFF)


@pytest.fixture(autouse=True)
def quiet_numbers() -> Iterator[None]:
    """One seed, no gradients, one thread; no manager and no copy thread is left behind by a test."""
    torch.manual_seed(0)
    threads, before = torch.get_num_threads(), set(ft.registry.names())
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
    left = set(ft.registry.names()) - before
    for name in left:
        ft.release(name)
    assert not left, f"managers left behind: {left}"
    if copy_threads():
        gc.collect()
    assert not copy_threads(at_most=0)


def copy_threads(*, at_most: int | None = None) -> list[threading.Thread]:
    """The host devices' copy streams that are running. ``at_most``: a forgotten one ends when it comes to it; those
    that are too many have two minutes."""
    until = time.monotonic() + 120
    while True:
        running = [thread for thread in threading.enumerate() if thread.name == "offload-copy"]
        if at_most is None or len(running) <= at_most or time.monotonic() > until:
            return running
        time.sleep(1e-3)


@pytest.fixture
def pace_link(device: str, monkeypatch: pytest.MonkeyPatch) -> PaceLink:
    """Makes the GPU's link as slow as the host device's is by its setting: so many bytes a second, or its own speed if
    that is more than 1 GB/s. The copy stream is busy before each copy, so that data are late and still overwritten
    late. To be called before the model is offloaded."""

    def pace(bytes_per_second: float) -> None:
        if device == "host" or bytes_per_second > 1e9:
            return
        copy, copier = CudaStream.copy, CudaStream.copier
        nested = [False]

        def busy(stream: CudaStream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            with torch.cuda.stream(stream.raw):
                for destination, source in pairs:
                    if not source.is_cuda:
                        delay_compute(destination, source.numel() / bytes_per_second)

        def late_copy(stream: CudaStream, destination: torch.Tensor, source: torch.Tensor) -> None:
            if not nested[0]:
                busy(stream, [(destination, source)])
            copy(stream, destination, source)

        def late_copier(
            stream: CudaStream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, together: bool = False
        ) -> Callable[[], None]:
            queue = copier(stream, pairs, together=together)

            def late_queue() -> None:
                busy(stream, pairs)
                nested[0] = True
                try:
                    queue()
                finally:
                    nested[0] = False

            return late_queue

        monkeypatch.setattr(CudaStream, "copy", late_copy)
        monkeypatch.setattr(CudaStream, "copier", late_copier)

    return pace


@pytest.fixture
def pair(device: str) -> Iterator[MakePair]:
    """Makes Pairs on the test's device; each is released, and its state compared, at the end."""
    made: list[Pair] = []

    def make(model: nn.Module, inputs: Inputs, **settings: Any) -> Pair:
        made.append(Pair(model, inputs, device=device, **settings))
        return made[-1]

    yield make
    for one in made:
        try:
            one.release()
        except BaseException:
            if one.name in ft.registry.names():
                one.manager.release()
            raise
