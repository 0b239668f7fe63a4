"""The CUDA device: streams, events and memory of one GPU through torch.cuda.

[Note: streams of our own] torch hands out the same 32 streams of a GPU in turn, also to a CUDA graph's capture: a copy
stream among them may be somebody else's compute stream, and a capture on it fails. Ours are made apart from them, and
used again when nobody holds them any more; they are never destroyed, since work may still be queued on one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flextensor.cudart import HOST_TO_DEVICE, batch_of_copies, copies_in_batches, cuda_runtime, raise_error
from flextensor.runtime.device import copy_each

NON_BLOCKING = 1
"""cudaStreamNonBlocking: does not wait for the default stream."""

_idle_streams: dict[int, list[torch.cuda.Stream]] = {}
"""By GPU."""


class CudaEvent:
    """A torch.cuda.Event with seconds; ``external`` events can be recorded inside a CUDA graph and read after it.

    handle: the event itself, where streams may use it without torch (see ``CudaDevice.new_event``).
    """

    __slots__ = ("handle", "raw")

    def __init__(self, *, timed: bool, external: bool = False, ordering: torch.cuda.Stream | None = None) -> None:
        options: dict[str, Any] = {"external": True} if external else {}
        self.raw = torch.cuda.Event(enable_timing=timed, **options)
        self.handle: int | None = None
        if ordering is not None:
            self.raw.record(ordering)  # torch makes the event at its first record
            self.handle = self.raw.cuda_event

    def query(self) -> bool:
        return bool(self.raw.query())

    def synchronize(self) -> None:
        self.raw.synchronize()

    def elapsed_seconds(self, end: CudaEvent) -> float:
        return float(self.raw.elapsed_time(end.raw)) * 1e-3


class CudaStream:
    """A CUDA stream: the caller's current one, or one of our own for copies. ``key`` tells two streams apart."""

    __slots__ = ("__weakref__", "_runtime", "key", "raw")

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw
        self.key = raw.cuda_stream
        self._runtime = cuda_runtime()

    def record(self, event: CudaEvent) -> None:
        if event.handle is None:
            event.raw.record(self.raw)
        elif code := self._runtime.cudaEventRecord(event.handle, self.key):  # type: ignore[union-attr]
            raise_error("cudaEventRecord", code)

    def wait(self, event: CudaEvent) -> None:
        if event.handle is None:
            event.raw.wait(self.raw)
        elif code := self._runtime.cudaStreamWaitEvent(self.key, event.handle, 0):  # type: ignore[union-attr]
            raise_error("cudaStreamWaitEvent", code)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.raw):
            destination.copy_(source, non_blocking=True)

    def copier(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, together: bool = False
    ) -> Callable[[], None]:
        if cuda_runtime() is None or any(source.is_cuda for _, source in pairs):
            return copy_each(self, pairs)
        at_once = together and len(pairs) > 1 and copies_in_batches() and all(s.is_pinned() for _, s in pairs)
        queue = self._one_call(pairs) if at_once else self._calls(pairs)
        index = self.raw.device.index
        if torch.cuda.current_device() == index:
            return queue

        def queue_there() -> None:
            # The runtime makes a context (hundreds of MB) on whichever GPU is the calling thread's current one.
            with torch.cuda.device(index):
                queue()

        return queue_there

    def _calls(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """One runtime call a pair: a tenth of the host time of Tensor.copy_ under a stream context."""
        call, stream = self._runtime.cudaMemcpyAsync, self.key  # type: ignore[union-attr]
        addresses = _addresses(pairs)
        kept = tuple(pairs)  # the memory behind the addresses

        def queue() -> None:
            for destination, source, nbytes in addresses:
                if code := call(destination, source, nbytes, HOST_TO_DEVICE, stream):
                    raise_error(f"cudaMemcpyAsync of {nbytes} bytes ({len(kept)} runs)", code)

        return queue

    def _one_call(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """One runtime call for all pairs."""
        batch = batch_of_copies(_addresses(pairs), self.key)
        kept = tuple(pairs)

        def queue() -> None:
            if code := batch():
                raise_error(f"cudaMemcpyBatchAsync of {len(kept)} runs", code)

        return queue

    def synchronize(self) -> None:
        self.raw.synchronize()


def _addresses(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int, int]]:
    return [(destination.data_ptr(), source.data_ptr(), source.numel()) for destination, source in pairs]


class CudaDevice:
    """One GPU. Raises RuntimeError where there is none of that index."""

    def __init__(self, index: int | None = None, *, external_events: bool = False) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device is available; use gpu_device='host' (or 'auto')")
        self.index = torch.cuda.current_device() if index is None else index
        if self.index >= torch.cuda.device_count():
            raise RuntimeError(
                f"cuda:{self.index} does not exist; this process sees {torch.cuda.device_count()} GPU(s)"
            )
        self.torch_device = torch.device("cuda", self.index)
        self.name = torch.cuda.get_device_name(self.index)
        properties = torch.cuda.get_device_properties(self.index)
        self.shared_link: str | None = str(getattr(properties, "uuid", self.torch_device))
        self.external_events = external_events
        self._streams: dict[int, CudaStream] = {}
        self._several = torch.cuda.device_count() > 1
        self._first_records = self.new_stream()

    def allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def compute_stream(self) -> CudaStream:
        key = torch._C._cuda_getCurrentRawStream(self.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = CudaStream(torch.cuda.current_stream(self.index))
        return stream

    def new_stream(self) -> CudaStream:
        """See [Note: streams of our own]."""
        idle = _idle_streams.setdefault(self.index, [])
        try:
            raw = idle.pop()
        except IndexError:
            raw = self._made_apart()
        stream = CudaStream(raw)
        weakref.finalize(stream, idle.append, raw).atexit = False
        return stream

    def _made_apart(self) -> torch.cuda.Stream:
        torch.cuda.current_stream(self.index)  # the context, and with it the runtime
        runtime = cuda_runtime()
        if runtime is None:
            return torch.cuda.Stream(device=self.index)
        handle = ctypes.c_void_p()
        with torch.cuda.device(self.index):
            if code := runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), NON_BLOCKING):
                raise_error("cudaStreamCreateWithFlags", code)
        return torch.cuda.ExternalStream(handle.value, device=self.index)

    def new_event(self, *, timed: bool) -> CudaEvent:
        """One without time is recorded and waited for without torch, which takes less of the host's time; the runtime
        looks at the thread's current GPU then, so only where there is no other. A capture cannot make one so."""
        if timed or self._several or cuda_runtime() is None or self.is_capturing():
            return CudaEvent(timed=timed, external=timed and self.external_events)
        return CudaEvent(timed=False, ordering=self._first_records.raw)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.index).total_memory)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.index)
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return int(free + cached)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.index))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.index))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        pass
