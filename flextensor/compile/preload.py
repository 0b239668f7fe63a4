"""torch.compile's own modules, imported while the host store is filled.

They take two to eight seconds to import, which nothing has to wait for while threads copy weights. The importing thread
is joined before anything else of torch may be imported, so that two threads never import parts of it in each other's
way.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

MODULES = ("torch._dynamo", "torch._inductor.compile_fx")
GPU_MODULES = ("triton", "torch._inductor.codegen.cuda_combined_scheduling")

_SWITCH_INTERVAL = 0.0005
"""Seconds after which the importing thread gives up the interpreter lock that a filling one waits for, meanwhile.

With the usual 5 ms, which each of sixteen threads waits several times a piece, filling takes 1.7 times as long.
"""
_alone = threading.Lock()


@contextlib.contextmanager
def compiler_imported(*, gpu: bool) -> Iterator[None]:
    """Import what a compilation needs beside the body; at its end it is there. What cannot be imported is left for the
    compilation to complain about."""
    names = [name for name in (*MODULES, *(GPU_MODULES if gpu else ())) if name not in sys.modules]
    if not names or not _alone.acquire(blocking=False):
        yield
        with _alone:  # another thread's import is over
            return
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=_import, args=(names,), name="import-compiler", daemon=True)
    try:
        sys.setswitchinterval(min(interval, _SWITCH_INTERVAL))
        thread.start()
        try:
            yield
        finally:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        _alone.release()


def _import(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            logger.debug("%s is not imported ahead: %s", name, error)
