"""The CUDA runtime library that torch uses, for what torch does not export."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

HOST_TO_DEVICE = 1
"""cudaMemcpyKind."""
IN_STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrder."""
BESIDE_COMPUTE = 1
"""cudaMemcpyFlags: prefer to overlap with compute."""
BATCHES_SINCE = 13000
"""cudaMemcpyBatchAsync has had its present arguments since CUDA 13.0."""


class _Location(ctypes.Structure):
    """cudaMemLocation; zeros: no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("source_access", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


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
    library.cudaStreamCreateWithFlags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.cudaStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaGetLastError.restype = ctypes.c_int
    return library


@functools.cache
def copies_in_batches() -> bool:
    """True where the runtime and the driver can queue several copies with one call."""
    library = cuda_runtime()
    if library is None or not hasattr(library, "cudaMemcpyBatchAsync"):
        return False
    found = ctypes.c_int(0)
    for ask in (library.cudaRuntimeGetVersion, library.cudaDriverGetVersion):
        if ask(ctypes.byref(found)) or found.value < BATCHES_SINCE:
            return False
    return True


def batch_of_copies(copies: Sequence[tuple[int, int, int]], stream: int) -> Callable[[], int]:
    """A call that queues (destination, source, bytes) copies on ``stream``, in any order among themselves; it returns
    the runtime's code, and cannot be captured in a graph. Only where ``copies_in_batches``.

    For three copies it takes the host a third of the time of as many calls.
    """
    library = cuda_runtime()
    assert library is not None
    call, count = library.cudaMemcpyBatchAsync, len(copies)
    destinations, sources, sizes = zip(*copies, strict=True)
    attributes = _CopyAttributes(source_access=IN_STREAM_ORDER, flags=BESIDE_COMPUTE)
    arguments = (
        (ctypes.c_void_p * count)(*destinations),
        (ctypes.c_void_p * count)(*sources),
        (ctypes.c_size_t * count)(*sizes),
        ctypes.c_size_t(count),
        ctypes.byref(attributes),
        (ctypes.c_size_t * 1)(0),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream),
    )
    return lambda: call(*arguments)  # type: ignore[no-any-return]


def raise_error(what: str, code: int) -> NoReturn:
    """Raise RuntimeError for a call that has failed, its error taken off the thread: the next kernel launch would
    report it as its own."""
    library = cuda_runtime()
    assert library is not None
    library.cudaGetLastError()
    raise RuntimeError(f"{what} failed with {code}: {library.cudaGetErrorString(code).decode()}")
