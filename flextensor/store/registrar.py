"""What makes host memory fit for copies at the link's full speed: CUDA registers it where it lies."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Protocol

import torch

from flextensor.cudart import cuda_runtime

log = logging.getLogger(__name__)

_PORTABLE = 1
_READ_ONLY = 8
_PROBE_BYTES = 32 << 20


class Registrar(Protocol):
    """Registers regions of host memory, given by address and length in bytes. Called from any thread."""

    def refusal(self) -> str:
        """Why nothing can be registered here; empty when it can be tried."""

    def register(self, address: int, nbytes: int, read_only: bool) -> str:
        """Register one region; the reason when it is refused, else an empty text.

        read_only: the process may only read the memory.
        """

    def unregister(self, address: int) -> None:
        """Undo it for the region that begins there. A failure is logged."""

    def pageable_speed(self) -> float | None:
        """Measured bytes a second of a copy from memory that is not registered; None where none can be made."""


class CudaRegistrar:
    """``cudaHostRegister`` for a CUDA device (None: the calling thread's current one). Leaves no CUDA error behind."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        self._device = device

    def refusal(self) -> str:
        return "" if torch.cuda.is_available() else "no CUDA device"

    def register(self, address: int, nbytes: int, read_only: bool) -> str:
        # On this device: the call would make a context on the current one.
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0))
            if int(code) == 0:
                return ""
            text = runtime.cudaGetErrorString(code)
            _clear_error()
            return f"cudaHostRegister of {nbytes} bytes at {address:#x} failed with {int(code)} ({text})"

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostUnregister(address)
            if int(code) != 0:
                log.warning("cudaHostUnregister at %#x failed with %d", address, int(code))
                _clear_error()

    def pageable_speed(self) -> float | None:
        if not torch.cuda.is_available():
            return None
        try:
            with torch.cuda.device(self._device):
                source = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device="cpu")
                target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
                best = float("inf")
                for _ in range(3):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    target.copy_(source)
                    torch.cuda.synchronize()
                    best = min(best, time.perf_counter() - started)
        except RuntimeError:
            return None
        return _PROBE_BYTES / best


def _clear_error() -> None:
    """Take the failed call's error off this thread, or the next kernel launch would report it as its own."""
    library = cuda_runtime()
    if library is not None:
        library.cudaGetLastError()
        return
    with contextlib.suppress(RuntimeError):
        torch.empty(1, dtype=torch.uint8, device="cuda").fill_(0)
