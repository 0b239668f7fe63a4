"""Pinning a store beside its filling: a chunk is registered while later ones are still read."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flextensor.store.layout import Layout, StoredTensor, pin_chunks
from flextensor.store.pinning import PinnedRegions, Pinning, Region
from flextensor.store.registrar import Registrar
from flextensor.store.report import PinReport


class PinBesideFilling:
    """Registers each chunk of ``memory`` in one thread as soon as its tensors are in: their pages are there by then.

    memory: the mapping to register (uint8, ``layout.nbytes``), which need not be the one that is written to.
    read_only: the process may only read it.

    After ``filled`` for each tensor comes ``finish``; or else ``abandon``, at any time. No thread outlives either.
    Where registering is refused, so that no thread is needed, the filling goes on and ``finish`` says why.
    """

    def __init__(self, layout: Layout, memory: torch.Tensor, registrar: Registrar, *, read_only: bool) -> None:
        self.pins = PinnedRegions()
        base = memory.data_ptr()
        by_end: dict[int, Region] = {end: (base + start, end - start) for start, end in pin_chunks(layout)}
        self._pinning = Pinning(self.pins, by_end.values(), registrar, read_only=read_only)
        following = [*(tensor.offset for tensor in layout.tensors[1:]), layout.nbytes]
        self._last_of = {
            tensor.name: by_end[end] for tensor, end in zip(layout.tensors, following, strict=False) if end in by_end
        }
        # One thread: it registers faster than all cores read.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store-pin")
        self._begun: list[Future[None]] = []

    def filled(self, tensor: StoredTensor) -> None:
        """This tensor, and each before it in the layout, is in."""
        chunk = self._last_of.get(tensor.name)
        if chunk is not None and not self._pinning.reason:
            self._begun.append(self._pool.submit(self._pinning.add, chunk))

    def finish(self) -> PinReport:
        """Wait until the last chunk is registered; what became of all.

        Raises what registering raised, with nothing left registered; a refusal is in the report.
        """
        started = time.perf_counter()
        try:
            for chunk in self._begun:
                chunk.result()
            self._pool.shutdown()
        except BaseException:
            self.abandon()
            raise
        return self._pinning.report(waited=time.perf_counter() - started)

    def abandon(self) -> None:
        """Register no more and unregister what is; again is free. Waits for the chunk in hand."""
        try:
            self._pool.shutdown(cancel_futures=True)
        finally:
            self.pins.release()
