"""The CUDA runtime library that torch has loaded, for what torch does not export."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

HOST_TO_DEVICE = 1
"""cudaMemcpyKind."""


@functools.cache
def cuda_runtime() -> ctypes.CDLL | None:
    """The library, its calls typed; None where none is loaded (no CUDA build, or no context yet)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libcudart" in path and ".so" in path:
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(path)
                library.cudaMemcpyAsync.argtypes = [
                    ctypes.c_void_p,
                    ctypes.c_void_p,
                    ctypes.c_size_t,
                    ctypes.c_int,
                    ctypes.c_void_p,
                ]
                library.cudaMemcpyAsync.restype = ctypes.c_int
                library.cudaGetErrorString.restype = ctypes.c_char_p
                return library
    return None
