"""The CUDA runtime library that torch uses, for what torch does not export."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import NoReturn

HOST_TO_DEVICE = 1
"""cudaMemcpyKind."""

_USERS = ("libc10_cuda.so", "libtorch_cuda.so", "libcudart")
"""Looked up through torch's own libraries first: a process may have several runtimes (a wheel of another package
brings one), and a pending error is known only to the one whose call has failed."""


@functools.cache
def cuda_runtime() -> ctypes.CDLL | None:
    """The library, its calls typed; None where none is loaded (no CUDA build, or no context yet)."""
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for user in _USERS:
        for path in sorted(path for path in paths if Path(path).name.startswith(user)):
            with contextlib.suppress(OSError, AttributeError):
                return _typed(ctypes.CDLL(path))
    return None


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.cudaMemcpyAsync.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.cudaMemcpyAsync.restype = ctypes.c_int
    library.cudaEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cudaStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaGetLastError.restype = ctypes.c_int
    return library


def raise_error(what: str, code: int) -> NoReturn:
    """Raise RuntimeError for a call that has failed, its error taken off the thread: the next kernel launch would
    report it as its own."""
    library = cuda_runtime()
    assert library is not None
    library.cudaGetLastError()
    raise RuntimeError(f"{what} failed with {code}: {library.cudaGetErrorString(code).decode()}")
