"""Step time back to back, peak memory, and the link, on a GPU or on the host device."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flextensor.runtime.device import Device

LINK_BYTES = 256 << 20
LINK_COPIES = 4


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def back_to_back(
    step: Callable[[], object], steps: int, device: torch.device, *, queued: Callable[[], object] | None = None
) -> float:
    """Seconds of one of ``steps`` steps that follow each other without a pause, as a denoising loop runs them.

    queued: called when the last step is queued, a few steps before the device is done.
    """
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if queued is not None:
        queued()
    synchronize(device)
    return (time.perf_counter() - start) / steps


def sustain(step: Callable[[], object], seconds: float, device: torch.device) -> None:
    """Steps for about so long, untimed. A GPU that has waited for copies, or for nothing, has higher clocks for a while
    than one that computes without a pause: what is compared must come after the same."""
    once = back_to_back(step, 1, device)
    for _ in range(math.ceil(seconds / max(once, 1e-6))):
        step()


def steps_for(seconds: float, step_seconds: float, *, least: int = 3, most: int = 40) -> int:
    """How many steps make about ``seconds``."""
    return min(max(math.ceil(seconds / max(step_seconds, 1e-6)), least), most)


def peak_of(step: Callable[[], object], device: torch.device, steps: int = 2) -> int | None:
    """The most GPU memory that tensors took in ``steps`` steps, bytes; None where there is no GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


def warm_up_gpu(device: torch.device) -> None:
    """Context, cuBLAS and the allocator: what a process pays once is no contender's set-up."""
    if device.type == "cuda":
        x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
        (x @ x).sum().item()


def link_bandwidth(device: Device, *, nbytes: int = LINK_BYTES, repeats: int = 5) -> float:
    """Bytes a second from pinned host memory to the device: a few copies of ``nbytes`` in a row, the median."""
    cuda = device.torch_device.type == "cuda"
    source = torch.zeros(nbytes, dtype=torch.uint8)
    with _registered(source) if cuda else contextlib.nullcontext():
        destination = device.allocate(nbytes)
        stream = device.new_stream()
        rates = []
        for _ in range(repeats):
            start, end = device.new_event(timed=True), device.new_event(timed=True)
            stream.record(start)
            for _ in range(LINK_COPIES):
                stream.copy(destination, source)
            stream.record(end)
            stream.synchronize()
            rates.append(LINK_COPIES * nbytes / start.elapsed_seconds(end))
        del destination
    return float(statistics.median(rates))


@contextlib.contextmanager
def _registered(memory: torch.Tensor):  # type: ignore[no-untyped-def]
    """Page-locked in place: torch's pinned allocator would keep a block of it for the rest of the process."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes failed with code {int(code)}")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(memory.data_ptr())
